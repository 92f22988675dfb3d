"""Where a rank stands, as a plain value that any test can build."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

# emit(event, **fields): tells the group's leader what happened; the leader stamps nothing, `t_ns` is taken here, in the rank.
Emit = Callable[..., None]


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """One rank of one attempt."""

    rank: int
    world_size: int
    attempt: int = 0  # 0-based; grows with each restart of the group, and goes on where an earlier run of the folder ended
    first_attempt: int = 0  # of this call of run_group: planned faults and world sizes count their attempts from it
    one_machine: bool = False  # one leader forked all ranks: they share a clock
    place: int | None = None  # where it sits: its device, where there are several; None: its rank. Ranks left out keep theirs free

    @property
    def is_back(self) -> bool:
        """True after a death: what was checked before the first step of this call need not be checked again."""
        return self.attempt > self.first_attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happened in a rank, on this machine's monotonic clock.

    Names: "imported" (the recipe's code is there), "joined" (process group formed), "loaded" (state ready; fields: step, steps, refused),
    "step" (an optimizer update done; fields: step, loss, samples, since the last one told; of rank 0 its attempt's first, the run's last
    and some between, of the others the attempt's first), "sealed" (a checkpoint stands; rank 0; fields: step, bytes, seconds), "unsaved"
    (a checkpoint could not be written, training goes on; rank 0; fields: step, reason), "fault" (about to fire; fields: fault), "finished".
    """

    name: str
    rank: int
    attempt: int
    t_ns: int
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a run is, for people."""

    step: int  # updates done
    steps: int  # updates in all
    throughput_sps: float
    loss: float
    attempt: int
