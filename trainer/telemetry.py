"""Where a step's time goes on one rank: laps between marks, kept in preallocated rows. All times in ms, `*_ns` in ns.

A mark is a moment in the work issued so far. On CPUs it is the host's monotonic clock. On a GPU, where kernels run behind the Python
code, it is a CUDA event as well: the phases are what the device took, and nobody waits for it in a step. A row is written once its
last event has passed, a few steps later, or when the rows are taken.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from trainer.parts import TIMELINE_PART
from trainer.recording import Recording

PHASES = ("data", "forward", "backward", "collective", "optimizer", "checkpoint")
ROWS = 256  # rows kept before they have to be flushed
ANCHOR_ROUNDS = 3  # readings of host and device clock side by side; the tightest counts
_PLACES = {phase: place for place, phase in enumerate(PHASES)}
_NEXT = {"data": "forward", "forward": "backward", "backward": "collective", "collective": "optimizer"}  # what follows a lap, else nothing


class TimedEvent(Protocol):
    """What `torch.cuda.Event(enable_timing=True)` does."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end_event: Any, /) -> float:
        """ms on the device until another event; both have passed."""


class Mark(NamedTuple):
    """A moment of one rank."""

    host_ns: int  # when the host came by
    event: TimedEvent | None  # passes when the device comes by


class Marks(Protocol):
    """Reads one timeline: `HostMarks` on CPUs, `DeviceMarks` on GPUs."""

    def mark(self) -> Mark:
        """Now, behind all work issued so far."""

    def is_past(self, mark: Mark) -> bool:
        """True when the moment has come and can be measured; asking costs no wait."""

    def wait(self, mark: Mark) -> None:
        """Wait until the moment has come."""

    def ms_between(self, first: Mark, then: Mark) -> float:
        """Time from one past mark to another."""

    def ns_of(self, mark: Mark) -> int:
        """A past mark on the host's monotonic clock."""

    def anchor(self) -> None:
        """Lay the timeline and the host's clock side by side again, when no mark is open; it may wait for the device."""


class HostMarks:
    """The host's monotonic clock."""

    def mark(self) -> Mark:
        return Mark(time.monotonic_ns(), None)

    def is_past(self, mark: Mark) -> bool:  # noqa: ARG002 - the host is always where it is
        return True

    def wait(self, mark: Mark) -> None: ...

    def ms_between(self, first: Mark, then: Mark) -> float:
        return (then.host_ns - first.host_ns) / 1e6

    def ns_of(self, mark: Mark) -> int:
        return mark.host_ns

    def anchor(self) -> None: ...


def cuda_event() -> TimedEvent:
    """An event on the current stream of the current device."""
    event: TimedEvent = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    return event


class DeviceMarks:
    """CUDA events. Their place on the host's clock is that of an anchor event plus the time that passed on the device since.

    `elapsed_time` is a float32 of ms (1 us fine after 16 s, 30 us after 8 min) and the two clocks drift apart, so the anchor is set again
    whenever rows are taken, when the device has been waited for anyway. It is off by at most half the time that an empty event takes.
    """

    def __init__(self, make_event: Callable[[], TimedEvent] = cuda_event, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._make_event = make_event
        self._now_ns = now_ns
        self._anchor_ns, self._anchor = 0, make_event()
        self.anchor()

    def mark(self) -> Mark:
        event = self._make_event()
        event.record()
        return Mark(self._now_ns(), event)

    def is_past(self, mark: Mark) -> bool:
        return _event(mark).query()

    def wait(self, mark: Mark) -> None:
        _event(mark).synchronize()

    def ms_between(self, first: Mark, then: Mark) -> float:
        return _event(first).elapsed_time(_event(then))

    def ns_of(self, mark: Mark) -> int:
        return self._anchor_ns + round(self._anchor.elapsed_time(_event(mark)) * 1e6)

    def anchor(self) -> None:
        self.wait(self.mark())  # an idle device passes the next events at once
        _, self._anchor_ns, self._anchor = min((self._read() for _ in range(ANCHOR_ROUNDS)), key=lambda reading: reading[0])

    def _read(self) -> tuple[int, int, TimedEvent]:
        event, before_ns = self._make_event(), self._now_ns()
        event.record()
        event.synchronize()
        after_ns = self._now_ns()
        return after_ns - before_ns, (before_ns + after_ns) // 2, event


def _event(mark: Mark) -> TimedEvent:
    assert mark.event is not None  # DeviceMarks makes no mark without one
    return mark.event


@dataclass(slots=True)
class _Row:
    """A step's times: measured sums, and laps whose ends may not have passed yet."""

    step: int
    samples: int
    start_ns: int
    last: Mark
    arrival: Mark | None = None
    arrival_ns: int = 0
    ms: list[float] = field(default_factory=lambda: [0.0] * len(PHASES))
    laps: list[tuple[int, Mark, Mark]] = field(default_factory=list)

    def lap(self, place: int, mark: Mark) -> None:
        self.laps.append((place, self.last, mark))
        self.last = mark

    def measure(self, marks: Marks) -> None:
        """Turn laps into sums, when the last one has passed."""
        for place, first, then in self.laps:
            self.ms[place] += marks.ms_between(first, then)
        self.laps.clear()
        if self.arrival is not None:
            self.arrival_ns, self.arrival = marks.ns_of(self.arrival), None


class StepClock:
    """One rank's stopwatch. Each lap gives the time since the last one to a phase, so phases add up to the step.

    `start_ns` is when the host began to issue the step, `arrival_ns` when the rank's own work was done (on a GPU: on the device).
    """

    def __init__(self, device: torch.device, marks: Marks | None = None, *, recording: Recording | None = None) -> None:
        self._marks: Marks = marks or (DeviceMarks() if device.type == "cuda" else HostMarks())
        self._recording = recording  # is told where the rank stands, too
        self._rows = np.zeros(ROWS, dtype=TIMELINE_PART)
        self._used = 0
        self._waiting: deque[_Row] = deque()  # kept, but their last mark had not passed; oldest first
        self._open = _Row(0, 0, 0, self._marks.mark())

    @property
    def full(self) -> bool:
        """True when the next rows need a flush first (a step may take two)."""
        return self._used + len(self._waiting) > ROWS - 2

    def start(self, step: int, samples: int) -> None:
        """Begin a step of `samples` samples on this rank."""
        mark = self._marks.mark()
        self._open = _Row(step, samples, mark.host_ns, mark)
        if self._recording is not None:
            self._recording.step(step)

    def count(self, samples: int) -> None:
        """Say how many samples the open step has on this rank, where it was not known when it began."""
        self._open.samples = samples

    def lap(self, phase: str) -> None:
        """Give the time since the last lap to a phase, one of PHASES."""
        self._open.lap(_PLACES[phase], self._marks.mark())
        if self._recording is not None:
            self._recording.phase(_NEXT.get(phase, ""))

    def enter(self, phase: str) -> None:
        """Say what is done from now on, where the last lap does not tell; no time is given to anything."""
        if self._recording is not None:
            self._recording.phase(phase)

    def micro(self, number: int) -> None:
        """Say that a micro-batch (0-based) of the step begins."""
        if self._recording is not None:
            self._recording.micro(number)

    def arrive(self) -> None:
        """Own work of the step is done and the peers are needed: what follows is waiting or transfer. The last call counts."""
        self.lap("backward")
        self._open.arrival = self._open.last
        if self._recording is not None:
            self._recording.arrive()

    def resume(self) -> None:
        """Go on with the step after something that is not part of it (an evaluation)."""
        self._open.last = self._marks.mark()

    def keep(self) -> None:
        """Note the step as far as it has come; noting it again later overrides."""
        row = self._open
        self._waiting.append(replace(row, ms=row.ms.copy(), laps=row.laps.copy()))
        while self._waiting and self._marks.is_past(self._waiting[0].last):
            self._write(self._waiting.popleft())

    def take(self) -> npt.NDArray[np.void]:
        """Hand over the kept rows and forget them; waits for the device, once."""
        self._marks.wait(self._open.last)
        while self._waiting:
            self._write(self._waiting.popleft())
        self._open.measure(self._marks)  # its arrival belongs to the old anchor
        self._marks.anchor()
        rows: npt.NDArray[np.void] = self._rows[: self._used].copy()
        self._used = 0
        return rows

    def _write(self, row: _Row) -> None:
        row.measure(self._marks)
        self._rows[self._used] = (row.step, row.start_ns, row.arrival_ns, row.samples, *row.ms, sum(row.ms))
        self._used += 1
