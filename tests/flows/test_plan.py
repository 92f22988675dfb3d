"""A request that is checked before anything is written: what it leaves on the disk."""

import os
import time
from pathlib import Path

from flows.plan import LEFT_S, _sweep


def test_frames_that_a_killed_process_left_are_removed_after_a_day(tmp_path: Path) -> None:
    """Those of a process that may still prepare stay, and so does everything else."""
    for name, age_s in (("planning-old", LEFT_S + 60), ("planning-new", 60), ("boat-20260101-000000-0001", 2 * LEFT_S)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.parquet").write_bytes(b"frames")
        os.utime(tmp_path / name, times=(time.time() - age_s,) * 2)
    _sweep(tmp_path)

    assert sorted(folder.name for folder in tmp_path.iterdir()) == ["boat-20260101-000000-0001", "planning-new"]
