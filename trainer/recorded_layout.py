"""How a rank's ring file is laid out: offsets, records and their types. Torch-free.

    header | phases | groups | operations | steps | events | strings

All numbers are little-endian. A record carries its serial number (from 1) twice, first and last; it is whole when both are equal. Serial s
lies in slot (s - 1) % slots. Texts lie in the strings' own ring and are named by the offset at which they were ever written; one that was
overwritten since is known by the number that stands before it. What may never be lost (phases, groups, the note) has places of its own.
"""

import struct
from dataclasses import dataclass

import numpy as np

MAGIC = b"SEARING1"
PHASES = (
    "data",
    "forward",
    "backward",
    "collective",
    "optimizer",
    "checkpoint",
    "evaluate",
    "other",
)  # of a step's row; "other" = the rest

FACTS = struct.Struct(
    "<8siii4xqqIIIII"
)  # MAGIC, format, rank, world size, pid, start of the process in ticks, slots of each ring, bytes of texts
MARKER_AT, MARKER = 256, struct.Struct("<QiiHHIqQ")  # serial, step, micro, phase, 0, 0, since_ns, serial
BEAT_AT, BEAT = 320, struct.Struct("<qq")  # wall clock ns, monotonic ns, read side by side
STRINGS_HEAD_AT, GROUPS_USED_AT, COUNT = 336, 344, struct.Struct("<Q")
SIGNAL_AT, SIGNAL = 352, struct.Struct("<i")  # the signal that has a stack written; 0 = none
ADDRESS_AT, ADDRESS_BYTES = 512, 256  # of the server that tells torch's own records; empty = none
NOTE_AT, NOTE_BYTES = 1024, 2048
PHASES_AT, PHASE_BYTES, PHASE_SLOTS = 4096, 32, 64
GROUPS_AT, GROUPS_BYTES = PHASES_AT + PHASE_BYTES * PHASE_SLOTS, 1 << 16

OPERATION = struct.Struct("<QqqqQQQiiHHIQ")
OPERATION_TYPE = np.dtype([
    ("head", "<u8"), ("created_ns", "<i8"), ("left_ns", "<i8"), ("seq", "<i8"), ("group", "<u8"), ("signature", "<u8"), ("place", "<u8"),
    ("step", "<i4"), ("micro", "<i4"), ("phase", "<u2"), ("flags", "<u2"), ("thread", "<u4"), ("tail", "<u8"),
])  # fmt: skip
LEFT_AT, FLAGS_AT, LEFT, FLAGS = 16, 66, struct.Struct("<q"), struct.Struct("<H")  # inside an operation's record
P2P_FLAG, FAILED_FLAG, FUTURE_FLAG = 1, 2, 4

STEP = struct.Struct("<Qqqqq8q8qqQ")
STEP_TYPE = np.dtype([
    ("head", "<u8"), ("step", "<i8"), ("start_ns", "<i8"), ("arrival_ns", "<i8"), ("end_ns", "<i8"), ("phase_ns", "<i8", (8,)),
    ("inside_ns", "<i8", (8,)), ("gc_ns", "<i8"), ("tail", "<u8"),
])  # fmt: skip

EVENT = struct.Struct("<QqqiHHQ")
EVENT_TYPE = np.dtype([
    ("head", "<u8"), ("began_ns", "<i8"), ("lasted_ns", "<i8"), ("step", "<i4"), ("phase", "<u2"), ("kind", "<u2"), ("tail", "<u8"),
])  # fmt: skip
EVENT_KINDS = ("gc", "silent")

TEXT = struct.Struct("<QI")  # where it was written, its length
TEXT_BYTES = 1 << 13  # of the longest text that is kept whole


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Sizes of one file, in slots and bytes."""

    entries: int = 2048
    steps: int = 1024
    events: int = 256
    strings: int = 1 << 18

    @property
    def operations_at(self) -> int:
        return GROUPS_AT + GROUPS_BYTES

    @property
    def steps_at(self) -> int:
        return self.operations_at + self.entries * OPERATION.size

    @property
    def events_at(self) -> int:
        return self.steps_at + self.steps * STEP.size

    @property
    def strings_at(self) -> int:
        return self.events_at + self.events * EVENT.size

    @property
    def size(self) -> int:
        return self.strings_at + self.strings
