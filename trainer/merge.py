"""Merging the parts of all attempts into the run's tables, a range of steps at a time: memory does not grow with the run. Torch-free.

Merging keeps the surviving lineage: a step that was done, lost with its attempt and done again counts once, as it was done last.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from trainer.parts import LedgerRows, Part, PartRows
from validation.records import LEDGER_COLUMNS, TIMELINE_COLUMNS

CHUNK_BYTES = 4 << 20  # of part rows merged at a time, unless a single step has more; temporaries take a few times as much
BLOCK_ROWS = 1 << 16  # rows whose step order is looked at in one go

Rows = npt.NDArray[np.void]
Chunk = Mapping[str, npt.NDArray[np.int64] | npt.NDArray[np.float64]]  # columns of one range of steps, equally long


@dataclass(slots=True)
class _Stretch:
    """Rows of one part that are in step order: nearly always all of them. The next one to be merged is `row`."""

    part: Part
    rows: PartRows | LedgerRows
    row: int
    stop: int

    def head(self) -> int:
        """Step of the next row."""
        return int(self.rows.read(self.row, self.row + 1)["step"][0])

    def take(self, stop: int) -> Rows:
        """Rows up to `stop`, which is where the next ones begin."""
        taken, self.row = self.rows.read(self.row, stop), stop
        return taken


def lineage(parts: Sequence[Part]) -> dict[int, int]:
    """attempt -> the step where its rows stop counting: where a later attempt resumed."""
    limits: dict[int, int] = {}
    limit = 2**62
    for attempt in sorted({part.attempt for part in parts}, reverse=True):
        limits[attempt] = limit
        limit = min([limit, *(int(part.start["resumed_from_step"]) for part in parts if part.attempt == attempt)])
    return limits


def timeline_chunks(parts: Sequence[Part], limits: Mapping[int, int]) -> Iterator[Chunk]:
    """TIMELINE_COLUMNS attempt by attempt, sorted by (step, rank), one row each; clocks are rank 0's."""
    for attempt, limit in sorted(limits.items()):
        stretches = [s for part in parts if part.attempt == attempt for s in _stretches(part, part.timeline, limit)]
        for taken in _ranges(stretches):
            ranks = np.concatenate([np.full(len(rows), part.rank, dtype=np.int64) for part, rows in taken])
            offsets = np.concatenate([np.full(len(rows), part.clock_offset_ns, dtype=np.int64) for part, rows in taken])
            yield _timeline(np.concatenate([rows for _, rows in taken]), ranks, offsets)


def ledger_chunks(parts: Sequence[Part], limits: Mapping[int, int]) -> Iterator[Chunk]:
    """LEDGER_COLUMNS of all attempts, sorted by (step, lane, position)."""
    stretches = [stretch for part in parts for stretch in _stretches(part, part.ledger, limits[part.attempt])]
    for taken in _ranges(stretches):
        rows = np.concatenate([rows for _, rows in taken])
        order = np.lexsort((rows["position"], rows["lane"], rows["step"]))  # stable
        yield {name: rows[name][order] for name in LEDGER_COLUMNS}


def write_chunks(path: Path, columns: Sequence[str], chunks: Iterable[Chunk], *readers: Callable[[Chunk], None]) -> None:
    """Write chunks as one Parquet file, a row group each, and show them to readers. One chunk gives the bytes of DataFrame.to_parquet."""
    kinds = {name: pd.Series(dtype="float64" if name.endswith("_ms") else "int64") for name in columns}
    schema = pa.Schema.from_pandas(pd.DataFrame(kinds), preserve_index=False)
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in chunks:
            for reader in readers:
                reader(chunk)
            writer.write_table(pa.table([chunk[name] for name in columns], schema=schema))


def _stretches(part: Part, rows: PartRows | LedgerRows, limit: int) -> list[_Stretch]:
    """Cut a part where its steps go back (a second run into one folder), and each stretch where it stops counting."""
    cuts, last = [0], -1
    for start in range(0, len(rows), BLOCK_ROWS):
        steps = np.concatenate(([last], rows.read(start, min(start + BLOCK_ROWS, len(rows)))["step"]))
        cuts += (start + np.flatnonzero(np.diff(steps) < 0)).tolist()
        last = int(steps[-1])
    bounds = zip(cuts, [*cuts[1:], len(rows)], strict=True)
    return [_Stretch(part, rows, start, rows.find(limit, start, stop)) for start, stop in bounds]


def _ranges(stretches: Sequence[_Stretch]) -> Iterator[list[tuple[Part, Rows]]]:
    """Rows of one range of steps after the other, each as many steps as fit into CHUNK_BYTES, at least one."""
    left = [stretch for stretch in stretches if stretch.row < stretch.stop]
    steps = 2**62
    while left:
        first = min(stretch.head() for stretch in left)
        stops = _stops(left, first + steps)
        while steps > 1 and sum(_bytes(s, stop) for s, stop in zip(left, stops, strict=True)) > CHUNK_BYTES:
            steps //= 2
            stops = _stops(left, first + steps)
        yield [(stretch.part, stretch.take(stop)) for stretch, stop in zip(left, stops, strict=True)]
        left = [stretch for stretch in left if stretch.row < stretch.stop]
        steps *= 2  # steps may have become smaller


def _stops(stretches: Iterable[_Stretch], step: int) -> list[int]:
    return [stretch.rows.find(step, stretch.row, stretch.stop) for stretch in stretches]


def _bytes(stretch: _Stretch, stop: int) -> int:
    return (stop - stretch.row) * stretch.rows.dtype.itemsize


def _timeline(rows: Rows, ranks: npt.NDArray[np.int64], offsets: npt.NDArray[np.int64]) -> Chunk:
    """Keep the last row of each (step, rank) and split the collectives' time: until the last rank arrived is waiting, the rest transfer."""
    order = np.lexsort((ranks, rows["step"]))  # stable: a step noted twice stays in the order in which it was noted
    steps, ranks = rows["step"][order], ranks[order]
    kept = np.append((steps[1:] != steps[:-1]) | (ranks[1:] != ranks[:-1]), True)
    order, ranks, steps = order[kept], ranks[kept], steps[kept]
    arrivals = (rows["arrival_ns"] + offsets)[order]
    starts = np.flatnonzero(np.append(True, steps[1:] != steps[:-1]))
    last = np.repeat(np.maximum.reduceat(arrivals, starts), np.diff(np.append(starts, len(steps))))
    collective_ms = rows["collective_ms"][order]
    wait_ms = np.minimum((last - arrivals) / 1e6, collective_ms)
    made = {
        "rank": ranks, "step": steps, "start_ns": (rows["start_ns"] + offsets)[order], "wait_ms": wait_ms,
        "transfer_ms": collective_ms - wait_ms,
    }  # fmt: skip
    return made | {name: rows[name][order] for name in TIMELINE_COLUMNS if name not in made}
