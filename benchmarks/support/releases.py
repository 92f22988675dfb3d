"""Real releases in a home of their own: the command, its wall clock, and what its journal says of where the time went."""

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows.cost_records import Story, between, read_story
from infra.settings import load_settings
from infra.store import open_store

EXAMPLE = Path(__file__).parents[2] / "examples" / "digits"
# digits is small: the floors of a real policy would judge the machine's noise
QUICK_POLICY = """
world_sizes: [1, 2]
scaling: {efficiency_floor: 0.01, oversubscribed_floor: 0.01, confidence: 0.5, repeats: 4, steps: 8, warmup_steps: 2, idle_share_max: 0.9}
kill_and_resume: {steps: 20}
slice_quality: {min_n: 60, min_coverage: 0.7, latency_p95_ms: 500}
"""
ELSEWHERE = ("SEATRIAL_STORE", "SEATRIAL_CACHE", "PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI")


@dataclass(frozen=True, slots=True)
class Yard:
    """A home, and the command in it."""

    home: Path
    quick: bool

    def release(self) -> tuple[dict[str, Any], float]:
        """One release's document, and the command's wall clock in seconds."""
        if not self.quick:
            return self.seatrial("release", "flights")
        policy = self.home.parent / "policy.yaml"
        policy.write_text(QUICK_POLICY)
        return self.seatrial("release", "digits:recipe", "--policy", str(policy))

    def seatrial(self, *arguments: str) -> tuple[dict[str, Any], float]:
        """A command's document and wall clock; promoted or refused, but with a decision."""
        environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE} | {"SEATRIAL_HOME": str(self.home)}
        began = time.perf_counter()
        command = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
        done = subprocess.run(command, cwd=EXAMPLE, env=environment, capture_output=True, text=True, check=False)
        seconds = time.perf_counter() - began
        if done.returncode not in (0, 3):
            raise SystemExit(f"seatrial {' '.join(arguments)} ended with {done.returncode}:\n{done.stderr[-2000:]}")
        document: dict[str, Any] = json.loads(done.stdout)
        return document, seconds

    def story(self, release_id: str) -> Story:
        """Its journal, verified."""
        found = read_story(open_store(load_settings(home=self.home), writable=False), release_id)
        assert found is not None
        return found

    def training_s(self, story: Story) -> float:
        """Wall clock of the candidate's training alone, from the run's own record."""
        candidate = story.candidate
        if candidate is None:
            return 0.0
        record = json.loads((Path(candidate["folder"]) / "run.json").read_text())
        return float(record["seconds"])


def journal_s(story: Story) -> float:
    """From the first record to the last."""
    return between(story.entries[0].time_utc, story.entries[-1].time_utc)
