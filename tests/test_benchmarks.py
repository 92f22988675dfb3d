"""Every benchmark says what it compares and prints one document; its numbers are nobody's business here."""

import ast
import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = (
    "sampler",
    "checkpoint_stall",
    "exact_reduction",
    "telemetry",
    "step_throughput",
    "hang_cases",
    "flight_recorder",
    "recording_overhead",
    "straggler_report",
    "what_if",
    "store_operations",
    "monitor_replays",
)
# whole gates, campaigns and releases, even when quick; what they do is tested by itself
LONG = ("orchestration", "rerun", "silent_errors", "false_alarms", "gate_cost", "kill_campaign", "restart")


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *options], capture_output=True, text=True, timeout=280, check=True)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in LONG)])
def test_quick_run_prints_one_document(name):
    """With --json, stdout holds one JSON document with the agreed keys and at least one sample."""
    document = json.loads(run(name, "--quick", "--json").stdout)

    assert set(document) == {"name", "peer", "ratio", "goal", "met", "unit", "samples"}
    assert (document["name"], type(document["met"])) == (name, bool)
    assert document["ratio"] > 0
    assert document["samples"]


def test_help_says_what_is_compared():
    """--help shows the benchmark's own words."""
    assert "Limits:" in run("sampler", "--help").stdout


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_a_benchmark_names_its_limits(path):
    """What a number does not say stands beside it."""
    assert path.name == "all.py" or "Limits:" in (ast.get_docstring(ast.parse(path.read_text())) or "")


def test_the_page_keeps_rows_of_this_machine():
    """A benchmark that is run alone changes its own row; rows of another machine are dropped."""
    module = runpy.run_path(str(FOLDER / "all.py"))
    head = ["# Benchmarks", "", "this machine", "", "| benchmark | against |", "|---|---|"]
    one, two = ({"name": name, "peer": "p", "ratio": 0.5, "goal": 1.0, "met": True, "unit": "u"} for name in ("one", "two"))
    first = module["page"]("", [one, two], head, "2026-01-01")
    again = module["page"](first, [two], head, "2026-01-02")
    elsewhere = module["page"](first, [two], [*head[:2], "another", *head[3:]], "2026-01-02")

    assert [line.split(" | ")[-1] for line in again.splitlines()[6:]] == ["2026-01-01 |", "2026-01-02 |"]
    assert len(elsewhere.splitlines()) == 7
