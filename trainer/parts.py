"""What each rank of each attempt leaves while it runs: append-only parts, safe to read after a SIGKILL. Torch-free.

    <run>/parts/attempt-0/rank-0/  start.json  timeline.bin  ids.bin  spans.bin  curve.jsonl  end.json
    of an audited run also  digests.jsonl  consumed.jsonl  streams.jsonl  collectives.jsonl  updates.jsonl  states.jsonl

Rows are fixed-width or one line each, so a torn tail is recognised by its length and left out. A timeline row may be written twice for
one step (before and after that step's checkpoint): the later one counts. Fixed-width rows are read back block by block: a run of a
million steps does not have to fit into memory. The ledger is two files, since all but the sample ids is arithmetic: ids.bin has the ids,
one after the other, spans.bin says which step, lane and positions they belong to; a span counts when its ids are all there.
"""

import bisect
import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from validation.canonical import canonical_json
from validation.records import LEDGER_COLUMNS

# One row per step of one rank; `arrival_ns` is when it reached the step's first collective, `collective_ms` the time from then on.
TIMELINE_PART = np.dtype([
    ("step", "<i8"), ("start_ns", "<i8"), ("arrival_ns", "<i8"), ("samples", "<i8"), ("data_ms", "<f8"), ("forward_ms", "<f8"),
    ("backward_ms", "<f8"), ("collective_ms", "<f8"), ("optimizer_ms", "<f8"), ("checkpoint_ms", "<f8"), ("step_ms", "<f8"),
])  # fmt: skip
LEDGER_PART = np.dtype([(name, "<i8") for name in LEDGER_COLUMNS])  # as read back
# Samples at consecutive positions of one lane in one step; `position` is the first one's, `end` counts the file's ids up to the last one's.
SPAN_PART = np.dtype([("step", "<i8"), ("lane", "<i8"), ("position", "<i8"), ("end", "<i8")])
ID_PART = np.dtype([("sample_id", "<i8")])
IDS, SPANS = "ids.bin", "spans.bin"
LEDGER_BYTES = 4 << 20  # kept in memory at most, and one step's rows: batches may be large and flushes far between


class Ledger(NamedTuple):
    """Samples that one rank consumed in a step."""

    spans: npt.NDArray[np.int64]  # (n, 4): step, lane, first position, samples
    ids: npt.NDArray[np.int64]  # of the spans' samples, one span after the other


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
    _samples: int = 0  # ids that were ever added

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        found = LedgerRows(self.folder)
        self._samples = len(found)
        for rows, count in ((found.ids, len(found)), (found.spans, found.whole_spans)):
            if rows.path.exists():  # a second run into one folder: its ids have to come right behind the last span's
                self._written[rows.path.name] = count * rows.dtype.itemsize
                os.truncate(rows.path, self._written[rows.path.name])

    def add_ledger(self, rows: Ledger) -> None:
        """Remember samples consumed."""
        spans, ids = np.array(rows.spans, dtype="<i8"), np.ascontiguousarray(rows.ids, dtype="<i8")
        spans[:, 3] = self._samples + np.cumsum(spans[:, 3])
        self._samples += len(ids)
        self._add(IDS, ids.data)
        self._add(SPANS, spans.data)
        self._ledger_bytes += ids.nbytes + spans.nbytes
        if self._ledger_bytes > LEDGER_BYTES:
            self._ledger_bytes = 0
            with contextlib.suppress(OSError):  # kept: a disk that is full now may have room at the next checkpoint
                self._append(IDS)
                self._append(SPANS)

    def add_line(self, table: str, row: Mapping[str, Any]) -> None:
        """Remember one row of "curve", or of an audit's table (trainer/audit_tables.py)."""
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

    def flush(self) -> None:
        """Append everything remembered.

        Raises: OSError when the disk refuses; what it did not take is still remembered, and no half row stands.
        """
        for name in list(self._pending):
            self._append(name)

    def sync(self) -> None:
        """Wait until the disk has all that was flushed before: what a seal vouches for must be there. Safe beside further writes.

        Raises: OSError when the disk refuses.
        """
        for name in list(self._written):
            with (self.folder / name).open("rb") as file:
                os.fsync(file.fileno())

    def _append(self, name: str) -> None:
        path, size = self.folder / name, self._written.get(name, 0)
        pieces = self._pending.get(name, [])
        try:
            with path.open("ab") as file:
                file.writelines(pieces)
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

    def find(self, value: int, start: int, stop: int, name: str = "step") -> int:
        """First row of [start, stop) whose field is `value` or more, `stop` when there is none; these rows have to be in its order."""
        if start >= stop:
            return stop
        offset = int(self.dtype.fields[name][1])  # type: ignore[index]  # every part's type has fields
        with self.path.open("rb") as file:

            def value_at(row: int) -> int:
                return int.from_bytes(os.pread(file.fileno(), 8, row * self.dtype.itemsize + offset), "little", signed=True)

            return bisect.bisect_left(range(stop), value, start, stop, key=value_at)


class LedgerRows:
    """LEDGER_PART rows, one a sample, made out of ids and spans where they are asked for."""

    dtype = LEDGER_PART

    def __init__(self, folder: Path) -> None:
        self.ids = PartRows(folder / IDS, ID_PART)
        self.spans = PartRows(folder / SPANS, SPAN_PART)

    @property
    def whole_spans(self) -> int:
        """Spans whose ids are all there."""
        return self.spans.find(len(self.ids) + 1, 0, len(self.spans), "end")

    def __len__(self) -> int:
        return self._first_row(self.whole_spans)

    def read(self, start: int, stop: int) -> npt.NDArray[np.void]:
        """Rows [start, stop)."""
        rows = np.empty(max(0, stop - start), dtype=self.dtype)
        if start < stop:
            first, last = self._span_of(start), self._span_of(stop - 1)
            spans = self.spans.read(first, last + 1)
            begins = np.concatenate(([self._first_row(first)], spans["end"][:-1]))
            counts = np.minimum(spans["end"], stop) - np.maximum(begins, start)
            for name in ("step", "lane"):
                rows[name] = np.repeat(spans[name], counts)
            rows["position"] = np.repeat(spans["position"] - begins, counts) + np.arange(start, stop)
            rows["sample_id"] = self.ids.read(start, stop)["sample_id"]
        return rows

    def find(self, step: int, start: int, stop: int) -> int:
        """First row of [start, stop) at or after a step, `stop` when there is none; these rows have to be in step order."""
        if start >= stop:
            return stop
        span = self.spans.find(step, self._span_of(start), self._span_of(stop - 1) + 1)
        return min(max(start, self._first_row(span)), stop)

    def _span_of(self, row: int) -> int:
        return self.spans.find(row + 1, 0, len(self.spans), "end")

    def _first_row(self, span: int) -> int:
        """Rows of all spans before this one."""
        return int(self.spans.read(span - 1, span)["end"][0]) if span else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One rank of one attempt, as read back; rows still include steps that were lost with the attempt."""

    attempt: int
    rank: int
    start: Mapping[str, Any]  # resumed_from_step, world_size, t_ns, device, devices, clock_offset_ns, clock_uncertainty_ns
    end: Mapping[str, Any]  # empty when the rank did not finish
    timeline: PartRows
    ledger: LedgerRows
    folder: Path

    def lines(self, table: str) -> Sequence[Mapping[str, Any]]:
        """Whole lines of one of the rank's other tables: "curve", or one of an audit (trainer/audit_tables.py)."""
        return _whole_lines(self.folder / f"{table}.jsonl")

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
        ledger=LedgerRows(folder),
        folder=folder,
    )


def _whole_lines(path: Path) -> Sequence[Mapping[str, Any]]:
    body = path.read_bytes() if path.exists() else b""
    return [json.loads(line) for line in body.splitlines(keepends=True) if line.endswith(b"\n")]
