"""Every benchmark says what it compares and prints one document; its numbers are nobody's business here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "benchmarks"
NAMES = (
    "sampler",
    "checkpoint_stall",
    "exact_reduction",
    "restart",
    "kill_campaign",
    "telemetry",
    "step_throughput",
    "silent_errors",
    "false_alarms",
    "gate_cost",
    "hang_cases",
    "flight_recorder",
    "straggler_report",
    "what_if",
    "monitor_replays",
)


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *options], capture_output=True, text=True, timeout=200, check=True)


@pytest.mark.parametrize("name", NAMES)
def test_quick_run_prints_one_document(name):
    """With --json, stdout holds one JSON document with the agreed keys and at least one sample."""
    document = json.loads(run(name, "--quick", "--json").stdout)

    assert set(document) == {"name", "peer", "ratio", "goal", "met", "unit", "samples"}
    assert (document["name"], type(document["met"])) == (name, bool)
    assert document["ratio"] > 0
    assert document["samples"]


@pytest.mark.parametrize("name", NAMES)
def test_help_says_what_is_compared(name):
    """--help shows the benchmark's own words and its limits."""
    assert "Limits:" in run(name, "--help").stdout
