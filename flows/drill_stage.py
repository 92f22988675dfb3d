"""Where drills of rank groups are played: a run with its fault, what it left, and the twin that nothing happened to."""

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer import history, ranks
from trainer.config import TrainJob
from validation.errors import ReleaseError
from validation.records import RunRecord

READ = "infra.dumps:read_evidence"  # an incident is judged by all that its folder holds
MakeJob = Callable[..., TrainJob]  # (label, **options): a job in a fresh folder of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Ran:
    """One run and what it left."""

    folder: Path
    record: RunRecord | None  # None: it ended with `error`
    error: str
    incidents: tuple[Mapping[str, Any], ...]  # incident.json of each, in order
    lines: tuple[Mapping[str, Any], ...]  # the history of the folder
    seconds: float

    @property
    def world_sizes(self) -> list[int]:
        """Ranks by attempt."""
        return [line["world_size"] for line in self.lines if line["kind"] == "attempt"]

    @property
    def fired(self) -> set[str]:
        """The planned faults that were announced."""
        return {line["fields"]["fault"] for line in self.lines if line["kind"] == "event" and line["name"] == "fault"}

    @property
    def deaths(self) -> str:
        """How attempts ended, in the leaders' words (a lost leader wrote none: its end is in the record), and the last word of the run."""
        written = [f"{line['fault']}: {line['what']}" for line in self.lines if line["kind"] == "death"]
        lost = [] if written or not self.record else [f"recovered from {recovery.fault}" for recovery in self.record.recoveries]
        return "; ".join(word for word in (*written, *lost, self.error) if word)

    @property
    def findings(self) -> list[Mapping[str, Any]]:
        """What was diagnosed, in order."""
        return [incident["finding"] for incident in self.incidents]


class Stage:
    """Plays runs one after the other and adds up what they cost."""

    def __init__(self, make_job: MakeJob) -> None:
        self.worker_seconds = 0.0
        self.make_job = make_job
        self._twins: dict[tuple[int, int], RunRecord] = {}

    def play(self, label: str, *, is_script: bool = False, **options: Any) -> Ran:
        """Run a job to its end, whatever that is. Raises nothing that the run itself raised."""
        job = self.make_job(label, **options)
        began, record, error = time.monotonic(), None, ""
        try:
            record = _scripted(job) if is_script else ranks.run_group(job, read=READ)
        except ReleaseError as caught:
            error = str(caught).partition("\n")[0]
        seconds = time.monotonic() - began
        self.worker_seconds += job.world_size * seconds
        folder = Path(job.folder)
        lines = tuple(history.read_lines(folder))
        return Ran(folder=folder, record=record, error=error, incidents=incidents_of(folder), lines=lines, seconds=seconds)

    def twin(self, *, world_size: int, steps: int) -> RunRecord:
        """The same training, left alone; played once."""
        key = (world_size, steps)
        if key not in self._twins:
            job = self.make_job("twin", world_size=world_size, steps=steps)
            self._twins[key] = ranks.run_group(job)
            self.worker_seconds += self._twins[key].worker_seconds
        return self._twins[key]


def _scripted(job: TrainJob) -> RunRecord:
    return ranks.run_group(job, read=READ, _entry="trainer.drill_scripts:run", _collect="trainer.drill_scripts:collect")


def incidents_of(folder: Path) -> tuple[Mapping[str, Any], ...]:
    """Every incident that stands whole in a run's folder, oldest first."""
    return tuple(json.loads(path.read_text()) for path in sorted(folder.glob("incidents/*/incident.json")))
