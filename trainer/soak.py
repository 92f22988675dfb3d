"""One update, made again and again from the same state: its gradient has to be the same each time.

A fault that strikes one collective in a hundred is nearly always missed by a leg of six steps, and nearly never by some hundred repeats.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Protocol

import numpy.typing as npt
import torch

from trainer.audit import Audit
from trainer.audit_streams import gpu_in_use
from trainer.config import TrainJob
from trainer.dataset import kept_streams
from trainer.parts import Ledger, PartWriter
from trainer.state import State
from trainer.telemetry import StepClock


class Soaked(Protocol):
    """What a soak needs of a run (trainer.setup.Training, or an own one)."""

    job: TrainJob
    audit: Audit
    parts: PartWriter
    clock: StepClock

    def state(self) -> State: ...

    def put_back(self, state: State) -> None: ...


def soak(run: Soaked, update: Callable[[], object]) -> None:
    """Make the next update job.soak times, each time from the state that the run is in now, and leave the run in that state.

    Call it before the run's last update, which is then made as always. Each repeat leaves the digests of the gradient that the optimizer
    was handed (stage "again", its step is the repeat's number), and nothing else: no ledger, timeline or other row. So without an audit
    none is made. What a team's hooks keep in themselves stays as a repeat left it.
    Args: update, makes one whole update out of the same samples every time, with the audit's calls inside. Collective.
    """
    if not (run.job.soak and run.job.audit):
        return
    before, parts = _copied(run.state()), run.parts
    parts.add_timeline(run.clock.take())  # what it notes from here on is no step of the run
    run.parts = _Silent(parts.folder)
    try:
        for repeat in range(run.job.soak):
            with kept_streams(), _kept_device_streams(), run.audit.again(repeat):
                update()
            run.put_back(_copied(before))  # a copy: the optimizer goes on in the tensors that it is given
    finally:
        run.clock.take()
        run.parts = parts


def _copied(state: State) -> State:
    return replace(state, tensors={name: value.clone() for name, value in state.tensors.items()})


def _kept_device_streams() -> Any:
    """Put the GPU's generator back as well, where there is one in use."""
    devices = [torch.cuda.current_device()] if gpu_in_use() else []
    return torch.random.fork_rng(devices=devices, enabled=bool(devices))


class _Silent(PartWriter):
    """Takes rows and forgets them."""

    def __post_init__(self) -> None: ...

    def add_ledger(self, rows: Ledger) -> None: ...

    def add_line(self, table: str, row: Mapping[str, Any]) -> None: ...

    def add_timeline(self, rows: npt.NDArray[Any]) -> None: ...

    def write(self, name: str, facts: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...

    def sync(self) -> None: ...
