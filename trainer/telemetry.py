"""Where a step's time goes on one rank: laps of a monotonic clock, kept in preallocated rows. All times in ms, `*_ns` in ns."""

import time

import numpy as np
import numpy.typing as npt
import torch

from trainer.parts import TIMELINE_PART

PHASES = ("data", "forward", "backward", "collective", "optimizer", "checkpoint")
ROWS = 256  # rows kept before they have to be flushed


class StepClock:
    """One rank's stopwatch. Each lap gives the time since the last one to a phase, so phases add up to the step.

    On a GPU every lap waits for the device: kernels run behind the Python code, and without the wait their time would be booked on
    whatever phase happens to synchronise first.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._rows = np.zeros(ROWS, dtype=TIMELINE_PART)
        self._used = 0
        self._row = np.zeros((), dtype=TIMELINE_PART)
        self._last_ns = 0

    @property
    def full(self) -> bool:
        """True when the next rows need a flush first (a step may take two)."""
        return self._used > ROWS - 2

    def start(self, step: int, samples: int) -> None:
        """Begin a step of `samples` samples on this rank."""
        self._row = np.zeros((), dtype=TIMELINE_PART)
        self._last_ns = self._now_ns()
        self._row["step"], self._row["start_ns"], self._row["samples"] = step, self._last_ns, samples

    def lap(self, phase: str) -> None:
        """Give the time since the last lap to a phase, one of PHASES."""
        now_ns = self._now_ns()
        self._row[f"{phase}_ms"] += (now_ns - self._last_ns) / 1e6
        self._last_ns = now_ns

    def arrive(self) -> None:
        """Own work of the step is done and the peers are needed: what follows is waiting or transfer. The last call counts."""
        self.lap("backward")
        self._row["arrival_ns"] = self._last_ns

    def resume(self) -> None:
        """Go on with the step after something that is not part of it (an evaluation)."""
        self._last_ns = self._now_ns()

    def keep(self) -> None:
        """Note the step as far as it has come; noting it again later overrides."""
        self._row["step_ms"] = sum(float(self._row[f"{phase}_ms"]) for phase in PHASES)
        self._rows[self._used] = self._row
        self._used += 1

    def take(self) -> npt.NDArray[np.void]:
        """Hand over the kept rows and forget them."""
        rows: npt.NDArray[np.void] = self._rows[: self._used].copy()
        self._used = 0
        return rows

    def _now_ns(self) -> int:
        if self._cuda:
            torch.cuda.synchronize()
        return time.monotonic_ns()
