"""Which collectives a rank's training made, of which types, out of torch's flight recorder. Nothing here is collective.

What ranks exchange through shared memory stands beside them. The recorder's names are private to torch; they are used here only. It is on
by default with 2,000 entries (TORCH_FR_BUFFER_SIZE), and is read before they would be overwritten. It writes no operator and calls gloo's
reduce_scatter an all_reduce.
"""

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from trainer import rows

SHARED = "shared_memory"
ENTRIES = 2000  # of the recorder's ring by default
_TYPES = {
    "Half": "float16", "BFloat16": "bfloat16", "Float": "float32", "Double": "float64", "Byte": "uint8", "Char": "int8", "Short": "int16",
    "Int": "int32", "Long": "int64", "Bool": "bool",
}  # fmt: skip


def record_collectives() -> None:
    """Have torch write down the collectives of this process, whatever the environment says. Call it before the process group is formed."""
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(ENTRIES)


class Collectives:
    """Counts the collectives that were started inside `counted`."""

    def __init__(self) -> None:
        self._spans: list[tuple[int, int]] = []  # wall clock ns: from, to
        self._open_ns = 0
        self._before: tuple[Counter[str], Counter[str]] = (Counter(), Counter())  # what was exchanged in memory when it opened
        self._last = -1  # number of the newest entry that was looked at
        self._most = 1  # entries that one step made
        self._steps = 0  # since the recorder was read
        self._seen: Counter[tuple[str, str]] = Counter()
        self._elements: Counter[tuple[str, str]] = Counter()

    def start(self) -> None:
        """Count from here on."""
        if not self._open_ns:
            self._open_ns, self._before = time.time_ns(), (rows.calls.copy(), rows.elements.copy())

    def stop(self) -> None:
        """Count no further."""
        if self._open_ns:
            self._spans.append((self._open_ns, time.time_ns()))
            for now, before, sums in zip((rows.calls, rows.elements), self._before, (self._seen, self._elements), strict=True):
                sums.update({(SHARED, dtype): count for dtype, count in (now - before).items()})
        self._open_ns = 0

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is done inside: the audit's own gathering."""
        was_open = bool(self._open_ns)
        self.stop()
        try:
            yield
        finally:
            if was_open:
                self.start()

    def step_done(self) -> None:
        """Read the recorder when another few steps could overwrite what was not read yet."""
        self._steps += 1
        if self._last < 0 or (self._steps + 1) * self._most > ENTRIES // 2:
            self.read()

    def read(self) -> None:
        """Take in the entries since the last time."""
        fresh = [entry for entry in _entries() if entry["record_id"] > self._last]
        for entry in fresh:
            if any(first <= entry["time_created_ns"] <= last for first, last in self._spans):
                kind = (entry["profiling_name"].rpartition(":")[2], _dtype(entry))
                self._seen[kind] += 1
                self._elements[kind] += _elements(entry)
        self._most = max(self._most, math.ceil(len(fresh) / max(1, self._steps)))
        self._last = max([self._last, *(entry["record_id"] for entry in fresh)])
        self._spans, self._steps = [], 0

    def rows(self) -> list[dict[str, Any]]:
        """One row an operation and type, COLLECTIVE_COLUMNS without the rank."""
        return [
            {"operation": operation, "dtype": dtype, "calls": calls, "elements": self._elements[operation, dtype]}
            for (operation, dtype), calls in sorted(self._seen.items())
        ]


def _entries() -> list[dict[str, Any]]:
    """What the recorder holds; nothing where there is no process group or no recorder."""
    if not (dist.is_available() and dist.is_initialized()):
        return []
    dump = _dump()
    entries = json.loads(dump(True, False)).get("entries", []) if dump is not None else []  # collectives too, and not only active ones
    return [entry for entry in entries if {"record_id", "time_created_ns", "profiling_name"} <= entry.keys()]


def _dump() -> Callable[[bool, bool], str] | None:
    """nccl's own recorder where it is in use, else the one of all backends."""
    own = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None) if dist.get_backend() == "nccl" else None
    return own or getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)


def _dtype(entry: dict[str, Any]) -> str:
    """The type of what this rank gave, or took where it gave nothing; "" for a barrier."""
    types: list[str] = [*entry.get("input_dtypes", ()), *entry.get("output_dtypes", ()), ""]
    return _TYPES.get(types[0], types[0].lower())


def _elements(entry: dict[str, Any]) -> int:
    sizes = entry.get("input_sizes") or entry.get("output_sizes") or []
    return sum(math.prod(size) for size in sizes)
