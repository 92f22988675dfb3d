"""Faults planned as values, and planted wrong lines: how a gate is seen failing. Torch-free."""

import os
import signal
import time
from collections.abc import Iterable

from trainer.config import SAVE_PHASES, Fault
from trainer.world import Emit, World
from validation.errors import ConfigError

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
    """The faults of one rank in one attempt, fired at their step and phase after the leader has been told.

    A fault of a SAVE_PHASE fires at the first checkpoint at or after its step, since not every step has one.
    """

    def __init__(self, faults: Iterable[Fault], world: World, emit: Emit) -> None:
        self._emit = emit
        self._pending = [fault for fault in faults if (fault.rank, fault.attempt) == (world.rank, world.attempt)]
        self._slept: dict[Fault, int] = {}  # delay -> the last step it slept in

    def at(self, phase: str, step: int) -> None:
        """Fire what is planned for this moment: dies, raises or sleeps; may be asked several times in one step."""
        for fault in list(self._pending):
            if fault.phase != phase or fault.kind == "skip":
                continue
            if fault.kind == "delay":
                self._delay(fault, step)
            elif fault.step == step or (phase in SAVE_PHASES and fault.step < step):
                self._strike(fault)

    def skips(self, step: int) -> bool:
        """True when this rank is to leave out the step's collectives."""
        for fault in self._pending:
            if fault.kind == "skip" and fault.step == step:
                self._tell(fault)
                self._pending.remove(fault)
                return True
        return False

    def _delay(self, fault: Fault, step: int) -> None:
        last = self._slept.get(fault)
        if step < fault.step or last == step:
            return
        if last is None:  # a straggler is slow at every step; one word about it is enough
            self._tell(fault)
        self._slept[fault] = step
        time.sleep(fault.ms / 1000)

    def _strike(self, fault: Fault) -> None:
        self._tell(fault)
        self._pending.remove(fault)
        if fault.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise RuntimeError(f"planned fault {fault} fired: this rank raises as it was told to.")

    def _tell(self, fault: Fault) -> None:
        self._emit("fault", fault=str(fault))
