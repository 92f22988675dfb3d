"""Run every benchmark of this folder, or those that are named, one after the other, and write their rows of docs/benchmarks.md.

    python benchmarks/all.py [NAME ...]

Each benchmark prints one JSON document {name, peer, ratio, goal, met, unit, samples} with --json; ratios are taken in one run on one
machine, so they hold where absolute times do not.
"""

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer.runlog import machine
from validation.records import Machine

FOLDER = Path(__file__).parent
PAGE = FOLDER.parent / "docs" / "benchmarks.md"


def run(script: Path) -> dict[str, Any]:
    """One benchmark's document; its progress goes to stderr."""
    print(f"{script.stem} ...", file=sys.stderr)
    done = subprocess.run([sys.executable, str(script), "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if not done.stdout.strip():
        raise SystemExit(f"{script.name} ended with code {done.returncode} and no document. See what it said above, then run it alone.")
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def heading(here: Machine) -> list[str]:
    """All that stands above the rows; rows of another machine are not kept."""
    where = f"{here.system}, {here.devices} cores, {here.memory_gib:.0f} GiB, Python {here.python}, torch {here.torch}"
    return [
        "# Benchmarks",
        "",
        f"Written by `make bench`, or `python benchmarks/all.py NAME ...`: {where}. Ratios of medians, both sides in one run.",
        "",
        "| benchmark | against | ratio | goal | met | unit | date |",
        "|---|---|---|---|---|---|---|",
    ]


def page(before: str, documents: list[dict[str, Any]], head: list[str], today: str) -> str:
    """The table: a row a benchmark, each with its date; those that were not run now stay as they were."""
    lines = before.splitlines()
    rows = {line.split("|")[1].strip(): line for line in lines[len(head) :]} if lines[: len(head)] == head else {}
    for item in documents:
        met = "yes" if item["met"] else "no"
        words = f"{item['peer']} | {item['ratio']:.3g} | {item['goal']} | {met} | {item['unit']}"
        rows[item["name"]] = f"| {item['name']} | {words} | {today} |"
    return "\n".join([*head, *(rows[name] for name in sorted(rows))]) + "\n"


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; fail if one of them could not run."""
    scripts = [script for script in sorted(FOLDER.glob("*.py")) if script != Path(__file__)]
    chosen = [script for script in scripts if not names or script.stem in names]
    documents = [run(script) for script in chosen]
    before = PAGE.read_text() if PAGE.exists() else ""
    PAGE.write_text(page(before, documents, heading(machine()), f"{datetime.now(UTC):%Y-%m-%d}"))
    print(PAGE, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
