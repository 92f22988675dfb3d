"""What a rank's rows do on a disk that is full for a while."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from trainer.parts import PartWriter, read_parts


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
    rows = np.arange(48, dtype=np.int64).reshape(12, 4)
    part.add_ledger(rows[:3])
    part.flush(durable=True)
    with files_of_at_most(200):
        for piece in (rows[3:7], rows[7:9]):
            part.add_ledger(piece)
            with pytest.raises(OSError, match="too large"):
                part.flush(durable=True)
            assert (part.folder / "ledger.bin").stat().st_size == 3 * 32
    part.add_ledger(rows[9:])
    part.flush()

    [found] = read_parts(tmp_path)
    assert np.array_equal(np.array(found.ledger.read(0, 12).tolist()), rows)


def test_large_ledger_waits_too(tmp_path: Path) -> None:
    """A ledger that is appended by itself when it grows large does not end the training when the disk refuses."""
    part = PartWriter(tmp_path)
    rows = np.ones((1 << 17, 4), dtype=np.int64)
    with files_of_at_most(1000):
        part.add_ledger(rows)
        part.add_ledger(rows)
    part.flush()

    assert (tmp_path / "ledger.bin").stat().st_size == 2 * rows.nbytes
