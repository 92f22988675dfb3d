"""A rank with telemetry on or off, for benchmarks/telemetry.py: the same loop, a seam in the rank's own (forked) process."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from trainer import feed, loop, setup
from trainer.config import TrainJob
from trainer.parts import TIMELINE_PART, Ledger, PartWriter
from trainer.telemetry import StepClock
from trainer.world import Emit, World


class NoClock(StepClock):
    """Measures nothing."""

    full = False  # type: ignore[assignment]

    def start(self, step: int, samples: int) -> None: ...

    def lap(self, phase: str) -> None: ...

    def arrive(self) -> None: ...

    def resume(self) -> None: ...

    def keep(self) -> None: ...

    def take(self) -> npt.NDArray[np.void]:
        return np.empty(0, dtype=TIMELINE_PART)


class NoRows(PartWriter):
    """Leaves start and end, no rows."""

    def add_ledger(self, rows: Ledger) -> None: ...

    def add_line(self, table: str, row: Mapping[str, Any]) -> None: ...

    def add_timeline(self, rows: npt.NDArray[np.void]) -> None: ...

    def flush(self, *, durable: bool = False) -> None: ...


def _no_rows(_self: feed.Feed, _step: int, _batch: range) -> Ledger:
    return Ledger(np.empty((0, 4), dtype=np.int64), np.empty(0, dtype=np.int64))


def run_on(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """trainer.loop.run_rank, with the moments of its updates left in updates.json of the run's folder, monotonic ns."""
    moments: list[int] = []

    def noting(event: str, **fields: Any) -> None:
        if event == "step":
            moments.append(time.monotonic_ns())
        emit(event, **fields)

    loop.run_rank(job, world, rendezvous, noting)
    if world.rank == 0:  # who speaks of every update
        (Path(job.folder) / "updates.json").write_text(json.dumps(moments))


def run_off(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """The same without clock, timeline and ledger. This process ends with the run, so nothing has to be put back."""
    setup.StepClock = NoClock  # type: ignore[misc]
    setup.PartWriter = NoRows  # type: ignore[misc]
    feed.Feed.ledger = _no_rows  # type: ignore[method-assign]
    run_on(job, world, rendezvous, emit)


def collect(job: TrainJob, **_: Any) -> list[int]:
    """Moments of all updates, instead of a record: a run without rows has none."""
    moments: list[int] = json.loads((Path(job.folder) / "updates.json").read_text())
    return moments
