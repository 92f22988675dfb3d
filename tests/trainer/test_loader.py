"""Loader workers change who fetches and nothing else: not a bit, not an error, and nobody is left behind."""

from pathlib import Path

import helpers_ranks
import pytest
from helpers_loop import run_attempt, run_job, tiny_job
from loader_recipes import BAD

from trainer import ranks, runlog, setup
from trainer.config import Fault
from validation.errors import DataError
from validation.records import RunRecord


def run(folder: Path, recipe: str, **options: object) -> RunRecord:
    return run_job(tiny_job(folder, recipe=f"loader_recipes:{recipe}", **options))


def ends(record: RunRecord) -> tuple[str, str]:
    return record.state_sha256, record.ledger_sha256


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """One rank that fetches by itself, all nine steps."""
    return run(tmp_path_factory.mktemp("plain"), "augmented0", evaluate=True)


@pytest.mark.parametrize(("workers", "world_size"), [(0, 2), (0, 3), (1, 1), (3, 1), (1, 2), (3, 3)])
def test_workers_and_ranks_do_not_show_in_the_bits(workers: int, world_size: int, plain: RunRecord, tmp_path: Path) -> None:
    """State and ledger are those of one rank without workers, with augmentation from torch, numpy and random."""
    record = run(tmp_path, f"augmented{workers}", world_size=world_size, evaluate=True)

    assert ends(record) == ends(plain)


def test_resume_within_an_epoch_ends_alike(plain: RunRecord, tmp_path: Path) -> None:
    """A run with workers that was killed in its first epoch goes on, on other ranks, with the samples' own augmentation."""
    fault = Fault(kind="kill", rank=1, step=3)
    options = {"world_size": 2, "resume_world_sizes": (3,), "checkpoint_every": 2, "max_restarts": 1, "evaluate": True}
    record = run(tmp_path, "augmented1", faults=(fault,), **options)

    assert ends(record) == ends(plain)
    assert record.attempts == 2


@pytest.mark.parametrize("name", ["jitter", "parts"])
def test_other_data_ends_alike(name: str, tmp_path: Path) -> None:
    """Draws for a whole batch, and lanes in parts without the tail, do not depend on workers or ranks either."""
    records = [run(tmp_path / str(workers), f"{name}{workers}", world_size=1 + workers) for workers in (0, 2)]

    assert ends(records[0]) == ends(records[1])
    assert records[0].steps == (8 if name == "parts" else 9)


KILLED = {
    "world_size": 2, "resume_world_sizes": (3,), "checkpoint_every": 2, "max_restarts": 1, "faults": (Fault(kind="kill", rank=1, step=3),),
}  # fmt: skip


@pytest.mark.parametrize("options", [{"world_size": 3}, {"world_size": 2, "reduction": "fast"}, KILLED], ids=["exact", "fast", "killed"])
def test_a_thread_that_fetches_ahead_does_not_show_in_the_bits(
    options: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Data that calls itself pure, with dropout on, ends as the same data that does not."""
    monkeypatch.setattr(setup, "cores", lambda: 64)  # more than ranks
    ahead, plain = (run(tmp_path / name, name, **options) for name in ("pure", "unsaid"))

    assert ends(ahead) == ends(plain)


def test_fast_reduction_has_workers_too(tmp_path: Path) -> None:
    """One micro-batch a rank, two ranks: the same bits with and without workers."""
    records = [run(tmp_path / str(workers), f"augmented{workers}", world_size=2, reduction="fast") for workers in (0, 3)]

    assert ends(records[0]) == ends(records[1])


def test_planted_defect_is_planted_with_workers(tmp_path: Path) -> None:
    """A dropped lane changes the state and not the ledger, whoever fetches."""
    right, *wrong = (
        run(tmp_path / f"{workers}{defect}", f"augmented{workers}", defect=defect, steps=2)
        for workers, defect in ((1, ""), (0, "drop_lane"), (1, "drop_lane"))
    )

    assert ends(wrong[0]) == ends(wrong[1])
    assert (wrong[0].state_sha256 != right.state_sha256, wrong[0].ledger_sha256) == (True, right.ledger_sha256)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("data", f"DataError: row {BAD} is torn"), ("value", f"ValueError: row {BAD}?"), ("odd", f"Unpicklable: row {BAD}"),
        ("shape", "RecipeError: data('train').batch(rows) returned 5, 5, 5 inputs, labels and weights for 6 rows"),
    ],
)  # fmt: skip
def test_errors_are_those_of_the_process_itself(way: str, text: str, tmp_path: Path) -> None:
    """What data code raises in a worker comes out as it does without workers, after the same updates."""
    done = [run_attempt(tiny_job(tmp_path / f"{workers}", recipe=f"loader_recipes:{way}{workers}")) for workers in (0, 2)]

    assert done[0].errors == done[1].errors
    assert done[0].errors[0].startswith(text)
    assert [len(attempt.said("step")) for attempt in done] == [3, 3]


def test_error_reaches_the_flow_with_its_rows_and_line(tmp_path: Path) -> None:
    """Through the leader a data error stays one; its trace names the rows and the recipe's line."""
    job = tiny_job(tmp_path, recipe="loader_recipes:data2", world_size=2, max_restarts=3)
    with pytest.raises(DataError, match=f"row {BAD} is torn"):
        ranks.run_group(job)

    log = "".join(path.read_text() for path in (tmp_path / "logs").glob("attempt-0-rank-*.log"))
    assert "of the train split were fetched" in log
    assert "loader_recipes.py" in log


def test_a_dead_worker_is_told(tmp_path: Path) -> None:
    """A worker that is killed ends its rank with a word about memory, and not in silence."""
    said = run_attempt(tiny_job(tmp_path, recipe="loader_recipes:kill2")).errors[0]

    assert "DataLoader worker" in said


@pytest.mark.parametrize("end", ["kill", "", "stop"])
def test_workers_die_with_their_rank(end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the real leader nobody is left after a run, a SIGKILLed rank, or a frozen one; and the end is the twin's."""
    noted = tmp_path / "noted"
    noted.mkdir()
    monkeypatch.setenv("NOTED", str(noted))
    faults = (Fault(kind=end, rank=1, step=3),) if end else ()  # type: ignore[arg-type]
    options = {"recipe": "loader_recipes:noting2", "world_size": 2, "checkpoint_every": 2, "max_restarts": 1, "stall_s": 3.0}
    record = ranks.run_group(tiny_job(tmp_path / "run", faults=faults, **options))

    assert len(helpers_ranks.noted(noted)) >= (10 if end else 6)
    assert helpers_ranks.wait_until(lambda: not helpers_ranks.alive(noted), 5)
    assert record.attempts == (2 if end else 1)
    assert len(runlog.load_ledger(tmp_path / "run")) == 406


def test_workers_need_no_leader_to_die(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A SIGKILLed rank takes its workers with it, also when nobody looks after orphans."""
    monkeypatch.setenv("NOTED", str(tmp_path))
    done = run_attempt(tiny_job(tmp_path / "run", recipe="loader_recipes:noting2", faults=(Fault(kind="kill", rank=0, step=2),)))

    assert done.exitcodes == [-9]
    assert len(helpers_ranks.noted(tmp_path)) == 3
    assert helpers_ranks.wait_until(lambda: not helpers_ranks.alive(tmp_path), 5)
