"""The step's stopwatch: phases add up, rows wait for the device and not the other way round, arrivals lie on the host's clock."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch

from trainer.telemetry import PHASES, ROWS, DeviceMarks, HostMarks, Mark, StepClock

MS = 1_000_000  # ns
CPU = torch.device("cpu")


@dataclass
class Device:
    """A device in virtual time: events pass in the order in which they were recorded, each behind the work issued before it."""

    host_ns: int = 0
    done_ns: int = 0  # when all work issued so far is done
    lead_ns: int = 7 * 3600 * 10**9  # of its clock before the host's: only differences of events may be used
    waits: list[int] = field(default_factory=list)  # host times at which somebody waited

    def work(self, ms: float) -> None:
        """Issue a kernel; it begins when the work before it is done."""
        self.done_ns = max(self.done_ns, self.host_ns) + int(ms * MS)

    def pass_time(self, ms: float) -> None:
        self.host_ns += int(ms * MS)

    def event(self) -> "Event":
        return Event(self)


class Event:
    """torch.cuda.Event as documented: querying costs nothing, an unrecorded or pending one cannot be measured."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at_ns: int | None = None

    def record(self) -> None:
        self.at_ns = max(self.device.done_ns, self.device.host_ns)

    def query(self) -> bool:
        return self.at_ns is None or self.at_ns <= self.device.host_ns

    def synchronize(self) -> None:
        self.device.waits.append(self.device.host_ns)
        self.device.host_ns = max(self.device.host_ns, self.at_ns or 0)

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.at_ns is not None
        assert end_event.at_ns is not None
        assert self.query()
        assert end_event.query(), "a real event raises here"
        return (end_event.at_ns + self.device.lead_ns - (self.at_ns + self.device.lead_ns)) / MS


def device_clock() -> tuple[Device, StepClock]:
    """A clock on a virtual device whose construction has been paid for."""
    device = Device()
    clock = StepClock(CPU, DeviceMarks(device.event, lambda: device.host_ns))
    device.waits.clear()
    return device, clock


def issue_step(device: Device, clock: StepClock, step: int) -> None:
    """A step that the host issues in 1 ms and the device works on for 20."""
    clock.start(step, 4)
    device.pass_time(1)
    for phase, ms in (("data", 1), ("forward", 6)):
        device.work(ms)
        clock.lap(phase)
    device.work(10)
    clock.arrive()
    for phase, ms in (("collective", 2), ("optimizer", 1)):
        device.work(ms)
        clock.lap(phase)
    clock.keep()


@pytest.mark.parametrize("make", [lambda: StepClock(CPU), lambda: device_clock()[1]], ids=["host", "device"])
def test_phases_add_up_to_the_step(make: Callable[[], StepClock]) -> None:
    """Every moment of a step is in exactly one phase."""
    clock = make()
    clock.start(3, 8)
    for phase in PHASES:
        clock.lap(phase)
    clock.keep()
    [row] = clock.take()

    assert (row["step"], row["samples"]) == (3, 8)
    assert row["step_ms"] == sum(float(row[f"{phase}_ms"]) for phase in PHASES)


def test_host_times_are_those_of_the_calls() -> None:
    """On a CPU laps are host time: sleep is in its phase, what `resume` leaves out is in none, arrival is on the same clock."""
    clock, before_ns = StepClock(CPU), time.monotonic_ns()
    clock.start(0, 1)
    time.sleep(0.02)
    clock.arrive()
    time.sleep(0.03)
    clock.resume()
    clock.lap("collective")
    clock.keep()
    [row] = clock.take()

    assert before_ns <= row["start_ns"] <= row["arrival_ns"] - 20 * MS
    assert row["backward_ms"] >= 20 > row["collective_ms"]


def test_no_step_waits_for_the_device() -> None:
    """Steps are issued 20 times faster than the device works; nobody waits, and rows appear as their events pass."""
    device, clock = device_clock()
    for step in range(10):
        issue_step(device, clock, step)

    assert device.waits == []
    assert device.host_ns == 10 * MS
    rows = clock.take()
    assert len(device.waits) > 0
    assert rows["step"].tolist() == list(range(10))
    assert [rows[f"{phase}_ms"][5] for phase in PHASES] == [1.0, 6.0, 10.0, 2.0, 1.0, 0.0]


def test_rows_resolve_without_a_wait_once_their_events_passed() -> None:
    """A step that keeps a row finishes all rows before it that the device is done with."""
    device, clock = device_clock()
    issue_step(device, clock, 0)
    device.pass_time(25)
    issue_step(device, clock, 1)

    assert clock._used == 1
    assert device.waits == []


def test_arrival_is_on_the_hosts_clock() -> None:
    """start_ns is when the host issued the step, arrival_ns when the device was done with the rank's own work; anchors move."""
    device, clock = device_clock()
    for step in range(3):
        issue_step(device, clock, step)
        issue_step(device, clock, step + 10)
        begun_ns = device.done_ns - 40 * MS
        first, second = clock.take()

        assert first["start_ns"] == begun_ns - MS
        assert first["arrival_ns"] == begun_ns + 17 * MS
        assert second["arrival_ns"] == first["arrival_ns"] + 20 * MS


def test_step_goes_on_after_its_rows_were_taken() -> None:
    """A checkpoint flushes the rows, then the step is noted again with all that came before and its own stall."""
    device, clock = device_clock()
    issue_step(device, clock, 0)
    device.pass_time(1000)
    clock.resume()
    [before] = clock.take()
    device.work(30)
    clock.lap("checkpoint")
    clock.keep()
    [after] = clock.take()

    assert (before["step_ms"], after["step_ms"], after["checkpoint_ms"]) == (21.0, 51.0, 30.0)  # 1 ms until the first kernel was there
    assert before["arrival_ns"] == after["arrival_ns"]


@pytest.mark.parametrize("make", [lambda: StepClock(CPU), lambda: device_clock()[1]], ids=["host", "device"])
def test_clock_says_when_it_is_full(make: Callable[[], StepClock]) -> None:
    """Rows that wait for the device count as well, and a full clock has room for the two rows of one more step."""
    clock = make()
    steps = 0
    while not clock.full:
        clock.start(steps, 1)
        clock.lap("data")
        clock.keep()
        steps += 1
    clock.keep()

    assert steps == ROWS - 1
    assert np.array_equal(clock.take()["step"], [*range(steps), steps - 1])
    assert not clock.full


def test_marks_of_the_host_are_integers_of_one_clock() -> None:
    """Host marks are past at once and measured exactly."""
    marks = HostMarks()
    first = marks.mark()
    then = Mark(first.host_ns + 1_500_000, None)

    assert marks.is_past(then)
    assert marks.ms_between(first, then) == 1.5
    assert marks.ns_of(then) == then.host_ns


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_real_device_is_timed_behind_the_host() -> None:
    """Kernels of some hundred ms are issued in a moment; their time is in their phase, and the arrival lies between issue and take."""
    device = torch.device("cuda", 0)
    clock, load = StepClock(device), torch.randn(4096, 4096, device=device)
    torch.cuda.synchronize()
    clock.start(0, 1)
    for _ in range(100):
        load = torch.tanh(load @ load)
    clock.arrive()
    clock.lap("collective")
    clock.keep()
    issued_ns = time.monotonic_ns()
    [row] = clock.take()
    taken_ns = time.monotonic_ns()

    assert row["backward_ms"] > 10 * row["collective_ms"]
    assert row["start_ns"] < issued_ns < row["arrival_ns"] + 1_000_000
    assert row["arrival_ns"] < taken_ns + 1_000_000
    assert row["backward_ms"] == pytest.approx((row["arrival_ns"] - row["start_ns"]) / 1e6, rel=0.05)
