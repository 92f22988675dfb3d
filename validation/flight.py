"""What ranks leave of a job that hangs, crashes or is slow: the evidence that diagnosis judges, as values.

N = operations of one rank in a dump. Wall clocks are CLOCK_REALTIME nanoseconds, as torch's flight recorder writes them; clocks of other
machines may be off, so nothing is concluded from times of different ranks alone without saying so.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

DEFAULT_GROUP = "0"  # torch's name of the group of all ranks
P2P = frozenset({"send", "recv"})  # operations with a peer; all others are collectives


class Signature(NamedTuple):
    """What all ranks of a group have to agree on in one collective, and what a point-to-point operation needs of its peer."""

    op: str  # torch's name without the backend's: "all_reduce", "broadcast", "barrier", "send", "recv"
    sizes: tuple[tuple[int, ...], ...] = ()  # of the inputs
    dtypes: tuple[str, ...] = ()  # of the inputs, as torch writes them: "Float"
    output_sizes: tuple[tuple[int, ...], ...] = ()
    output_dtypes: tuple[str, ...] = ()
    reduce_op: str = ""  # "sum"; "" = not recorded
    root: int = -1  # global rank; -1 = none or not recorded
    peer: int = -1  # global rank
    tag: int = 0


class Group(NamedTuple):
    """A process group as one rank knows it."""

    name: str  # DEFAULT_GROUP, "1", ...
    ranks: tuple[int, ...]  # global ranks, sorted; () = not recorded
    description: str = ""


class Marker(NamedTuple):
    """Where a rank's program stood; -1, "" and 0 = not recorded."""

    step: int = -1  # 0-based optimizer update under way
    phase: str = ""  # "data", "forward", "backward", "collective", "optimizer", "checkpoint", "evaluate", "gc", "setup", "done"
    micro: int = -1  # 0-based micro-batch of the step
    since_ns: int = 0  # when the phase began
    beat_ns: int = 0  # last heartbeat of the rank's background thread: old while the process lives = the interpreter lock is held
    note: str = ""  # what the program said of itself: "data exhausted", a pending exception


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Dump:
    """One rank's recorded operations at one moment, in the order in which they were issued, columns of N."""

    rank: int
    taken_ns: int = 0  # when; 0 = not recorded
    wrapped: bool = False  # the ring was full: older operations are gone, which says nothing about them
    groups: tuple[Group, ...]
    signatures: tuple[Signature, ...]
    places: tuple[str, ...] = ()  # call sites "file.py:12 function"
    group: npt.NDArray[np.int32]  # (N,) into groups
    seq: npt.NDArray[np.int64]  # (N,) number in its group on this rank, from 1; point-to-point operations count apart
    signature: npt.NDArray[np.int32]  # (N,) into signatures
    created_ns: npt.NDArray[np.int64]  # (N,) when issued
    finished: npt.NDArray[np.bool_]  # (N,) known to be over
    step: npt.NDArray[np.int32] | None = None  # (N,) of the marker when issued, -1 = none; None: nothing recorded
    micro: npt.NDArray[np.int32] | None = None  # (N,) 0-based micro-batch of the marker when issued, -1 = none; None: nothing recorded
    place: npt.NDArray[np.int32] | None = None  # (N,) into places
    marker: Marker | None = None


class StackFrame(NamedTuple):
    """A line of a Python stack."""

    path: str
    line: int
    function: str


class ThreadStack(NamedTuple):
    """One thread, innermost frame first."""

    name: str  # "" = not recorded
    is_main: bool
    frames: tuple[StackFrame, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEvidence:
    """All that is known of one rank."""

    rank: int
    dumps: tuple[Dump, ...] = ()  # oldest first; taken while the trouble was on
    late_dumps: tuple[Dump, ...] = ()  # taken after a time-out or the end: entries are retired by then, so "finished" says nothing
    stacks: tuple[tuple[ThreadStack, ...], ...] = ()  # of each moment, oldest first
    exit_code: int | None = None  # negative = signal; None = not ended, or not known
    result: str = ""  # "ok", or what was raised, as the rank saw it; "" = not known
    state: str = ""  # of the process, as /proc says: "R", "S", "T" stopped, "Z", "X" gone; "" = not known
    host: str = ""  # a label of the machine; "" = not known


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """All that is known of one job at the time of the trouble."""

    world_size: int  # 0 = not known: the ranks that are there
    ranks: Mapping[int, RankEvidence]
    timeline: pd.DataFrame | None = None  # validation.records.TIMELINE_COLUMNS
    problems: tuple[str, ...] = ()  # what could not be read or trusted, in words
