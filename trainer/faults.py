"""Faults planned as values, and planted wrong lines: how a gate is seen failing. Torch-free."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

from trainer.config import SAVE_PHASES, Fault
from trainer.fault_kinds import collect_slowly, disk_is_full, hold_lock, reduce_once_more, swallow, wait_for_data
from trainer.world import Emit, World
from validation.errors import ConfigError

SHARED_KINDS = ("argument", "dtype")  # every rank takes part in the planned all-reduce, one with other arguments
END_S = 60.0  # a rank whose leader is dead is killed by the kernel at once; longer means that it had no leader
# Planted defects for positive controls: name -> the wrong line, in words.
DEFECTS = {
    "divide_twice": "the reduced gradient is divided by the world size once more",
    "drop_lane": "the last lane's samples are left out of the gradient on the last rank, though the ledger claims them",
    "repeat_batch_on_resume": "after a resume the data starts one batch too early while the steps count on",
    "stale_moments_on_resume": "after a resume the optimizer starts with empty moments",
}


def check_defect(name: str) -> None:
    """Refuse a defect that nobody wrote; "" is none. Raises ConfigError."""
    if name and name not in DEFECTS:
        raise ConfigError(f"planted defect '{name}' is unknown: the control would plant nothing. Use one of: {', '.join(DEFECTS)}.")


class FaultPlan:
    """The faults of one rank in one attempt, fired at their step and phase after the leader has been told; asked from any thread.

    A fault's attempt counts from the first one of this call of run_group. A fault of a SAVE_PHASE fires at the first checkpoint at or
    after its step, since not every step has one; a fault of phase "load" fires whatever its step. Before one of a step's phases strikes,
    a save under way comes to its end: where the next attempt resumes follows from the plan, not from the speed of a disk.
    """

    def __init__(self, faults: Iterable[Fault], world: World, emit: Emit) -> None:
        self._emit = emit
        self._world = world
        attempt = world.attempt - world.first_attempt
        ours = [fault for fault in faults if fault.attempt == attempt]
        self._pending = [fault for fault in ours if fault.rank == world.rank or self._is_shared(fault)]
        self._slept: dict[Fault, int] = {}  # delay -> the last step it slept in
        self._swallowed: int | None = None  # the step whose error was caught: its collectives are left out
        self._lock = threading.Lock()  # the loop asks, and so does the thread that saves
        self.settle: Callable[[], None] = lambda: None  # waits for a save under way

    def at(self, phase: str, step: int) -> None:
        """Fire what is planned for this moment: dies, stops, raises or sleeps; may be asked several times in one step."""
        if not self._pending:  # asked five times a step of every run
            return
        for fault in self._take(phase, step):
            if fault.kind == "delay":
                time.sleep(fault.ms / 1000)
            else:
                if phase not in SAVE_PHASES:
                    self.settle()
                self._strike(fault)

    def skips(self, step: int) -> bool:
        """True when this rank is to leave out the step's collectives."""
        if self._swallowed == step:
            return True
        if not self._pending:
            return False
        with self._lock:
            due = [fault for fault in self._pending if fault.kind == "skip" and fault.step == step]
            self._pending = [fault for fault in self._pending if fault not in due]
        for fault in due:
            self._tell(fault)
        return bool(due)

    def _take(self, phase: str, step: int) -> list[Fault]:
        """The faults that are due now: none of them is given out twice for the same moment."""
        with self._lock:
            due = [fault for fault in self._pending if fault.phase == phase and fault.kind != "skip" and self._is_due(fault, step)]
            for fault in due:
                if fault.kind != "delay":
                    self._pending.remove(fault)
                elif fault not in self._slept:  # a straggler is slow at every step; one word about it is enough
                    self._tell(fault)
                self._slept[fault] = step
        return due

    def _is_due(self, fault: Fault, step: int) -> bool:
        if fault.kind == "delay":
            return self._slept.get(fault) != step and (fault.step <= step or fault.phase == "load")
        return fault.step == step or fault.phase == "load" or (fault.phase in SAVE_PHASES and fault.step < step)

    def _is_shared(self, fault: Fault) -> bool:
        return fault.kind in SHARED_KINDS and fault.rank < self._world.world_size

    def _strike(self, fault: Fault) -> None:
        if fault.rank == self._world.rank:
            self._tell(fault)
        text = f"planned fault {fault} fired: this rank raises as it was told to."
        match fault.kind:
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)  # somebody may continue it in time
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "launcher":
                os.kill(os.getppid(), signal.SIGKILL)
                time.sleep(END_S)
            case "hold":
                hold_lock(fault.ms)
            case "pause":
                collect_slowly(fault.ms)
            case "starve":
                wait_for_data()
            case "swallow":
                self._swallowed = fault.step
                swallow(text)
            case "full":
                disk_is_full()
            case "extra" | "argument" | "dtype":
                self._reduce(fault)
            case _:
                raise RuntimeError(text)

    def _reduce(self, fault: Fault) -> None:
        """Make the planned all-reduce, where there are ranks to meet."""
        if self._world.world_size > 1:
            kind = fault.kind if self._is_shared(fault) else ""
            reduce_once_more(kind, is_wrong=fault.rank == self._world.rank and bool(kind))

    def _tell(self, fault: Fault) -> None:
        self._emit("fault", fault=str(fault))
