"""Run every benchmark of this folder, one after the other, and write docs/benchmarks.md.

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


def page(documents: list[dict[str, Any]]) -> str:
    """The table, with date and machine."""
    here = machine()
    lines = [
        "# Benchmarks",
        "",
        f"Written by `make bench` on {datetime.now(UTC):%Y-%m-%d}: {here.system}, {here.devices} cores, {here.memory_gib:.0f} GiB, "
        f"Python {here.python}, torch {here.torch}. Ratios of medians, both sides in one run.",
        "",
        "| benchmark | against | ratio | goal | met | unit |",
        "|---|---|---|---|---|---|",
    ]
    for item in documents:
        met = "yes" if item["met"] else "no"
        lines.append(f"| {item['name']} | {item['peer']} | {item['ratio']:.3g} | {item['goal']} | {met} | {item['unit']} |")
    return "\n".join(lines) + "\n"


def main(names: list[str]) -> int:
    """Run the named benchmarks, or all; fail if one of them could not run."""
    scripts = [script for script in sorted(FOLDER.glob("*.py")) if script != Path(__file__)]
    chosen = [script for script in scripts if not names or script.stem in names]
    documents = [run(script) for script in chosen]
    PAGE.write_text(page(documents))
    print(PAGE, file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
