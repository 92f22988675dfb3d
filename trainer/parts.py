"""What each rank of each attempt leaves while it runs: append-only parts, safe to read after a SIGKILL. Torch-free.

    <run>/parts/attempt-0/rank-0/  start.json  timeline.bin  ledger.bin  curve.jsonl  digests.jsonl  end.json

Rows are fixed-width or one line each, so a torn tail is recognised by its length and left out. A timeline row may be written twice for
one step (before and after that step's checkpoint): the later one counts. Fixed-width rows are read back block by block: a run of a
million steps does not have to fit into memory.
"""

import bisect
import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from validation.canonical import canonical_json
from validation.records import LEDGER_COLUMNS

# One row per step of one rank; `arrival_ns` is when it reached the step's first collective, `collective_ms` the time from then on.
TIMELINE_PART = np.dtype([
    ("step", "<i8"), ("start_ns", "<i8"), ("arrival_ns", "<i8"), ("samples", "<i8"), ("data_ms", "<f8"), ("forward_ms", "<f8"),
    ("backward_ms", "<f8"), ("collective_ms", "<f8"), ("optimizer_ms", "<f8"), ("checkpoint_ms", "<f8"), ("step_ms", "<f8"),
])  # fmt: skip
LEDGER_PART = np.dtype([(name, "<i8") for name in LEDGER_COLUMNS])
LEDGER_BYTES = 4 << 20  # kept in memory at most, and one step's rows: batches may be large and flushes far between

Ledger = npt.NDArray[np.int64]  # (n, 4)


def part_folder(run: Path, attempt: int, rank: int) -> Path:
    """Where one rank of one attempt writes."""
    return run / "parts" / f"attempt-{attempt}" / f"rank-{rank}"


@dataclass(slots=True)
class PartWriter:
    """Keeps rows in memory and appends them to the rank's files when flushed; a ledger that grows large is appended at once."""

    folder: Path
    _pending: dict[str, list[bytes | memoryview]] = field(default_factory=dict)  # by file
    _written: dict[str, int] = field(default_factory=dict)  # bytes by file that are whole rows
    _ledger_bytes: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)

    def add_ledger(self, rows: Ledger) -> None:
        """Remember (n, 4) rows of samples consumed."""
        body = np.ascontiguousarray(rows, dtype="<i8").data
        self._add("ledger.bin", body)
        self._ledger_bytes += body.nbytes
        if self._ledger_bytes > LEDGER_BYTES:
            self._ledger_bytes = 0
            with contextlib.suppress(OSError):  # kept: a disk that is full now may have room at the next checkpoint
                self._append("ledger.bin", durable=False)

    def add_line(self, table: str, row: Mapping[str, Any]) -> None:
        """Remember one row of "curve" or "digests"."""
        self._add(f"{table}.jsonl", canonical_json(row) + b"\n")

    def add_timeline(self, rows: npt.NDArray[np.void]) -> None:
        """Remember TIMELINE_PART rows."""
        self._add("timeline.bin", rows.tobytes())

    def _add(self, name: str, body: bytes | memoryview) -> None:
        self._pending.setdefault(name, []).append(body)

    def write(self, name: str, facts: Mapping[str, Any]) -> None:
        """Leave start.json or end.json, whole or not at all."""
        partial = self.folder / f"{name}.json.partial"
        partial.write_bytes(canonical_json(facts))
        partial.rename(self.folder / f"{name}.json")

    def flush(self, *, durable: bool = False) -> None:
        """Append everything remembered. `durable` also waits for the disk: what a seal vouches for must be there.

        Raises: OSError when the disk refuses; what it did not take is still remembered, and no half row stands.
        """
        for name in list(self._pending):
            self._append(name, durable=durable)

    def _append(self, name: str, *, durable: bool) -> None:
        path, size = self.folder / name, self._written.get(name, 0)
        pieces = self._pending.get(name, [])
        try:
            with path.open("ab") as file:
                file.writelines(pieces)
                file.flush()
                if durable:
                    os.fsync(file.fileno())
        except OSError:
            with contextlib.suppress(OSError):
                os.truncate(path, size)
            raise
        self._written[name] = size + sum(memoryview(piece).nbytes for piece in pieces)
        self._pending[name] = []


@dataclass(frozen=True, slots=True)
class PartRows:
    """Fixed-width rows of one file, read where they are asked for; their first field is the step."""

    path: Path
    dtype: np.dtype[np.void]

    def __len__(self) -> int:
        return self.path.stat().st_size // self.dtype.itemsize if self.path.exists() else 0  # a torn tail is no row

    def read(self, start: int, stop: int) -> npt.NDArray[np.void]:
        """Rows [start, stop)."""
        if start >= stop:
            return np.empty(0, dtype=self.dtype)
        return np.fromfile(self.path, dtype=self.dtype, count=stop - start, offset=start * self.dtype.itemsize)

    def find(self, step: int, start: int, stop: int) -> int:
        """First row of [start, stop) at or after a step, `stop` when there is none; these rows have to be in step order."""
        if start >= stop:
            return stop
        with self.path.open("rb") as file:

            def step_at(row: int) -> int:
                return int.from_bytes(os.pread(file.fileno(), 8, row * self.dtype.itemsize), "little", signed=True)

            return bisect.bisect_left(range(stop), step, start, stop, key=step_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank of one attempt, as read back; rows still include steps that were lost with the attempt."""

    attempt: int
    rank: int
    start: Mapping[str, Any]  # resumed_from_step, world_size, t_ns, device, devices, clock_offset_ns, clock_uncertainty_ns
    end: Mapping[str, Any]  # empty when the rank did not finish
    timeline: PartRows
    ledger: PartRows
    curve: tuple[Mapping[str, Any], ...]
    digests: tuple[Mapping[str, Any], ...]

    @property
    def clock_offset_ns(self) -> int:
        """Added to this part's times it gives rank 0's clock; 0 where it was not measured."""
        return int(self.start.get("clock_offset_ns", 0))


def read_parts(run: Path) -> list[Part]:
    """Every part of a run that got as far as loading its state, by (attempt, rank)."""
    folders = [path.parent for path in run.glob("parts/attempt-*/rank-*/start.json")]
    numbered = [(int(path.parent.name.split("-")[1]), int(path.name.split("-")[1]), path) for path in folders]
    return [_read_part(path, attempt, rank) for attempt, rank, path in sorted(numbered)]


def _read_part(folder: Path, attempt: int, rank: int) -> Part:
    end = folder / "end.json"
    return Part(
        attempt=attempt,
        rank=rank,
        start=json.loads((folder / "start.json").read_bytes()),
        end=json.loads(end.read_bytes()) if end.exists() else {},
        timeline=PartRows(folder / "timeline.bin", TIMELINE_PART),
        ledger=PartRows(folder / "ledger.bin", LEDGER_PART),
        curve=tuple(_whole_lines(folder / "curve.jsonl")),
        digests=tuple(_whole_lines(folder / "digests.jsonl")),
    )


def _whole_lines(path: Path) -> Iterable[Mapping[str, Any]]:
    body = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in body.splitlines(keepends=True) if line.endswith(b"\n")]
