"""What a rank's rows do on a disk that is full for a while, and what is read back of a ledger whose end is torn."""

import itertools
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers_parts import ledger_of, rows_of

from trainer.parts import Ledger, LedgerRows, PartWriter, read_parts


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """The kernel refuses to write a file beyond `size` bytes, as a full disk does."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_rows_wait_for_room(tmp_path: Path) -> None:
    """A row that the disk refuses is kept, no half row stands, and everything is there once, in order, when there is room again."""
    part = PartWriter(tmp_path / "parts/attempt-0/rank-0")
    part.write("start", {"resumed_from_step": 0, "world_size": 1})
    rows = np.arange(48).reshape(12, 4)
    part.add_ledger(ledger_of(rows[:3]))
    part.flush()
    with files_of_at_most(100):
        for piece in (rows[3:10], rows[10:11]):
            part.add_ledger(ledger_of(piece))
            with pytest.raises(OSError, match="too large"):
                part.flush()
            assert (part.folder / "spans.bin").stat().st_size == 3 * 32
            assert len(LedgerRows(part.folder)) == 3
    part.add_ledger(ledger_of(rows[11:]))
    part.flush()

    [found] = read_parts(tmp_path)
    assert rows_of(found.ledger) == [*map(tuple, rows.tolist())]


def test_a_sync_waits_for_every_file_that_was_flushed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for one that was appended early and has nothing new."""
    part = PartWriter(tmp_path)
    part.add_line("curve", {"step": 1})
    part.flush()
    part.add_ledger(ledger_of(np.arange(4).reshape(1, 4)))
    part.flush()
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(Path(f"/proc/self/fd/{handle}").readlink().name))
    part.sync()

    assert sorted(synced) == ["curve.jsonl", "ids.bin", "spans.bin"]


def test_large_ledger_waits_too(tmp_path: Path) -> None:
    """A ledger that is appended by itself when it grows large does not end the training when the disk refuses."""
    part = PartWriter(tmp_path)
    rows = Ledger(np.array([(0, 0, 0, 1 << 19)]), np.ones(1 << 19, dtype=np.int64))
    with files_of_at_most(1000):
        part.add_ledger(rows)
        part.add_ledger(rows)
        assert len(LedgerRows(tmp_path)) == 0
    part.flush()

    assert (tmp_path / "ids.bin").stat().st_size == 2 * rows.ids.nbytes
    assert len(LedgerRows(tmp_path)) == 2 << 19


def three_spans(folder: Path) -> list[tuple[int, ...]]:
    """Leave nine samples: two lanes of step 4, one of step 5. Returns: their rows."""
    part = PartWriter(folder)
    part.add_ledger(Ledger(np.array([(4, 1, 20, 3), (4, 2, 23, 2)]), np.arange(100, 105)))
    part.add_ledger(Ledger(np.array([(5, 1, 30, 4)]), np.arange(200, 204)))
    part.flush()
    lanes = [(4, 1, 20 + n, 100 + n) for n in range(3)] + [(4, 2, 23 + n, 103 + n) for n in range(2)]
    return lanes + [(5, 1, 30 + n, 200 + n) for n in range(4)]


def test_any_rows_of_spans_are_read_alike(tmp_path: Path) -> None:
    """Whatever is asked for, across spans or within one, is what stands there when all is read."""
    rows, ledger = three_spans(tmp_path), LedgerRows(tmp_path)

    for start, stop in itertools.combinations_with_replacement(range(10), 2):
        assert ledger.read(start, stop).tolist() == rows[start:stop]
        for step in range(3, 7):
            assert ledger.find(step, start, stop) == next((n for n in range(start, stop) if rows[n][0] >= step), stop)


@pytest.mark.parametrize(
    ("name", "size", "left"),
    [
        pytest.param("ids.bin", 9 * 8 - 1, 5, id="torn id"),
        pytest.param("ids.bin", 5 * 8, 5, id="ids of a span missing"),
        pytest.param("ids.bin", 4 * 8, 3, id="ids of two spans missing"),
        pytest.param("ids.bin", 0, 0, id="no ids"),
        pytest.param("spans.bin", 3 * 32 - 1, 5, id="torn span"),
        pytest.param("spans.bin", 32, 3, id="two spans missing"),
        pytest.param("spans.bin", 0, 0, id="no spans"),
    ],
)
def test_a_span_counts_with_all_its_ids(tmp_path: Path, name: str, size: int, left: int) -> None:
    """Of a torn ledger whole spans are read, and a second run into the folder goes on right behind them."""
    rows = three_spans(tmp_path)
    os.truncate(tmp_path / name, size)
    assert rows_of(LedgerRows(tmp_path)) == rows[:left]

    again = three_spans(tmp_path)
    assert rows_of(LedgerRows(tmp_path)) == rows[:left] + again
