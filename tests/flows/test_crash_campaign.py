"""A sample of the crash campaign: releases killed at writes drawn by a seed, and the whole of it from outside."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "crash_campaign.py"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("folder", "--sample", "1", "--random", "0"), marks=pytest.mark.slow, id="folder, all stories"),
        pytest.param(("folder", "--sample", "2", "--random", "0", "--only", "refused, what served is broken"), id="folder, one story"),
        pytest.param(("s3", "--sample", "1", "--random", "1", "--only", "promoted over another"), id="s3, one story"),
    ],
)
def test_after_every_death_what_serves_verifies_and_the_release_comes_to_its_end(options: tuple[str, ...]) -> None:
    """Killed before and after writes of journal, evidence, pointer and registry; taken up by another process, once and once more."""
    command = [sys.executable, str(CAMPAIGN), "--seed", "7", "--json", "--store", *options]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    document = json.loads(run.stdout)

    assert (run.returncode, document["ratio"]) == (0, 1.0), run.stderr[-3000:]
    assert sum(row["deaths"] for row in document["samples"]) >= 2  # a death from outside may come too late
