"""Faults planned as values, and planted wrong lines: how a gate is seen failing. Torch-free."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable

from trainer.config import SAVE_PHASES, Fault
from trainer.world import Emit, World
from validation.errors import ConfigError

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
        here = (world.rank, world.attempt - world.first_attempt)
        self._pending = [fault for fault in faults if (fault.rank, fault.attempt) == here]
        self._slept: dict[Fault, int] = {}  # delay -> the last step it slept in
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

    def _strike(self, fault: Fault) -> None:
        self._tell(fault)
        if fault.kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            return  # somebody continued it in time
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if fault.kind == "launcher":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(END_S)
        raise RuntimeError(f"planned fault {fault} fired: this rank raises as it was told to.")

    def _tell(self, fault: Fault) -> None:
        self._emit("fault", fault=str(fault))
