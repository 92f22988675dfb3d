"""The step timeline that rings hold: own time, waiting, transfer."""

import pytest

from trainer import recorded_layout as at
from trainer.recorded_timeline import recorded_timeline
from trainer.ring import RingWriter
from validation.errors import EvidenceError
from validation.records import TIMELINE_COLUMNS

MS = 1_000_000


def ring(folder, rank, *steps):
    """A ring with steps of (forward ms, backward ms, ms of backward inside of operations)."""
    path = folder / f"attempt-0-rank-{rank}.ring"
    writer = RingWriter(path, rank=rank, world_size=2)
    for step, (forward, backward, waited) in enumerate(steps):
        phases, inside = [0] * len(at.PHASES), [0] * len(at.PHASES)
        phases[at.PHASES.index("forward")], phases[at.PHASES.index("backward")] = forward * MS, backward * MS
        inside[at.PHASES.index("backward")] = waited * MS
        writer.step(step, step * 100 * MS, 0, (step * 100 + forward + backward) * MS, phases, inside, 3 * MS)
    writer.close()
    return path


def test_waiting_is_taken_out_of_the_phase_it_lies_in(tmp_path):
    """A rank that waits in backward for a slow one has no long backward of its own."""
    paths = [ring(tmp_path, 0, (10, 45, 40)), ring(tmp_path, 1, (10, 45, 4))]

    table = recorded_timeline(paths)

    assert table["backward_ms"].tolist() == [5, 41]
    assert table["wait_ms"].tolist() == [36, 0]
    assert table["transfer_ms"].tolist() == [4, 4]
    assert table["step_ms"].tolist() == [55, 55]
    assert table["gc_ms"].tolist() == [3, 3]


def test_rows_are_sorted_whatever_the_order_of_rings(tmp_path):
    """One row a step and rank, by step and then rank, with all columns of a timeline."""
    paths = [ring(tmp_path, 1, (1, 1, 0), (1, 1, 0)), ring(tmp_path, 0, (1, 1, 0), (1, 1, 0))]

    table = recorded_timeline(paths)

    assert list(zip(table["step"], table["rank"], strict=True)) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert set(TIMELINE_COLUMNS) <= set(table.columns)


def test_ring_without_steps_adds_nothing(tmp_path):
    """A rank that ended no step has no row."""
    assert recorded_timeline([ring(tmp_path, 0, (1, 1, 0)), ring(tmp_path, 1)])["rank"].tolist() == [0]


def test_other_file_is_refused(tmp_path):
    """What is not a ring is said to be none."""
    (tmp_path / "other.ring").write_bytes(b"no ring at all")

    with pytest.raises(EvidenceError, match="is not a ring"):
        recorded_timeline([tmp_path / "other.ring"])
