"""A home of a test's own, and the command `seatrial` run in it as a user runs it: in a process of its own, on the example recipe."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from mlflow import MlflowClient

from flows.admissions import pointer_problem
from infra.attestations import open_reader
from infra.journal import Journal, list_releases
from infra.pointer import Pointer, read_pointer
from infra.settings import load_settings
from infra.store import open_store

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "digits"
# Small and honest: every gate really runs. The floor is low because a step of this model takes a millisecond.
POLICY = """
world_sizes: [1, 2]
scaling: {efficiency_floor: 0.01, oversubscribed_floor: 0.01, confidence: 0.5, repeats: 4, steps: 8, warmup_steps: 2, idle_share_max: 0.7}
kill_and_resume: {steps: 20}
slice_quality: {min_n: 60, min_coverage: 0.7, latency_p95_ms: 500}
"""
# Two ranks on a model that steps in a millisecond cannot be 99% efficient: scaling fails. And a person has to say yes.
STRICT = POLICY.replace("efficiency_floor: 0.01, oversubscribed_floor: 0.01", "efficiency_floor: 0.99, oversubscribed_floor: 0.99")
STRICT += "decision: {approval: true}\n"
COMMAND_S = 600  # an overloaded machine's


@dataclass
class Yard:
    """A home with a space in its path, and the command run in it."""

    home: Path
    settings: dict[str, str] = field(default_factory=dict)  # SEATRIAL_* and credentials beside the home

    def seatrial(self, *arguments: str) -> tuple[int, Any, str]:
        """Exit code, JSON document and stderr of one command."""
        command = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
        run = subprocess.run(command, cwd=EXAMPLE, env=self.environment(), capture_output=True, text=True, timeout=COMMAND_S)
        return run.returncode, json.loads(run.stdout) if run.stdout.strip() else None, run.stderr

    def start(self, *arguments: str, log: Path) -> subprocess.Popen[str]:
        """Start a command in a session of its own; what it says goes to `log`, and to <log>.json what it prints."""
        command = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
        with log.open("w") as err, log.with_suffix(".json").open("w") as out:
            return subprocess.Popen(command, cwd=EXAMPLE, env=self.environment(), stdout=out, stderr=err, text=True, start_new_session=True)

    def environment(self) -> dict[str, str]:
        """This process's, without what would lead the command elsewhere."""
        path = os.pathsep.join((str(REPOSITORY), str(Path(__file__).parent)))
        environment = {**os.environ, "SEATRIAL_HOME": str(self.home), "PYTHONPATH": path}
        for name in ("SEATRIAL_STORE", "SEATRIAL_CACHE", "PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"):
            environment.pop(name, None)
        return environment | self.settings

    def release(self, *options: str, recipe: str = "digits:recipe", policy: str = "policy.yaml") -> tuple[int, Any, str]:
        """One release of the example recipe."""
        return self.seatrial("release", recipe, "--policy", str(self.home / policy), *options)

    def kinds(self, release_id: str) -> list[str]:
        """The release's journal: each record's kind, and of which gate or effect it is."""
        entries = Journal(self.store(), release_id).records()
        return [" ".join((entry.kind, entry.payload.get("effect") or entry.payload.get("gate", ""))).strip() for entry in entries]

    def store(self) -> Any:
        """The object store that the command wrote."""
        return open_store(load_settings(home=self.home))

    def client(self) -> MlflowClient:
        """The registry that the command wrote."""
        return MlflowClient(tracking_uri=load_settings(home=self.home).mlflow_tracking_uri)

    def pointer(self) -> Pointer | None:
        """What serves; it always verifies."""
        store, settings = self.store(), load_settings(home=self.home)
        pointer, _ = read_pointer(store, "digits")
        assert pointer is None or not pointer_problem(open_reader(store, settings), store, pointer)
        return pointer

    def releases(self) -> tuple[str, ...]:
        """Every release of this home, oldest first."""
        return list_releases(self.store())

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started with this home, whoever started it."""
        return [process for process in psutil.process_iter() if _home_of(process) == str(self.home)]


def stopped_when(process: subprocess.Popen[str], condition: Callable[[], Any], log: Path) -> None:
    """Stop a process as soon as something is so. Fails when the process ends before."""
    until = time.monotonic() + COMMAND_S
    while not condition():
        assert process.poll() is None, f"{log.read_text()[-3000:]} ended with {process.returncode}"
        assert time.monotonic() < until, log.read_text()[-3000:]
        time.sleep(0.003)
    os.kill(process.pid, signal.SIGSTOP)


def _home_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return str(process.environ().get("SEATRIAL_HOME", "")) if process.status() != psutil.STATUS_ZOMBIE else ""
    return ""
