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
    "recording_overhead",
    "straggler_report",
    "what_if",
    "store_operations",
    "monitor_replays",
)

RELEASING = ("orchestration", "rerun")  # whole releases of a small recipe, one process after the other


def run(name: str, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(FOLDER / f"{name}.py"), *options], capture_output=True, text=True, timeout=280, check=True)


@pytest.mark.parametrize("name", [*NAMES, *(pytest.param(name, marks=pytest.mark.slow) for name in RELEASING)])
def test_quick_run_prints_one_document(name):
    """With --json, stdout holds one JSON document with the agreed keys and at least one sample."""
    document = json.loads(run(name, "--quick", "--json").stdout)

    assert set(document) == {"name", "peer", "ratio", "goal", "met", "unit", "samples"}
    assert (document["name"], type(document["met"])) == (name, bool)
    assert document["ratio"] > 0
    assert document["samples"]


@pytest.mark.parametrize("name", [*NAMES, *RELEASING])
def test_help_says_what_is_compared(name):
    """--help shows the benchmark's own words and its limits."""
    assert "Limits:" in run(name, "--help").stdout
