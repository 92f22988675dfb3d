"""A state moves between world sizes and layouts, and the training goes on with the same bits."""

from dataclasses import replace
from pathlib import Path

import pytest
from helpers_loop import run_attempt, run_job, tiny_job

from trainer import runlog
from trainer.config import Fault
from validation.records import RunRecord

Layout = tuple[str, int]
STEPS = 10


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """One rank that nobody disturbs."""
    return run_job(tiny_job(tmp_path_factory.mktemp("twin") / "run", recipe="hard_recipes:everything", steps=STEPS))


@pytest.mark.parametrize(
    "layouts",
    [
        (("ddp", 3), ("fsdp2", 4), ("ddp", 1)), (("fsdp2", 8), ("fsdp2", 2), ("ddp", 5)), (("ddp", 1), ("fsdp2", 2), ("fsdp2", 8)),
        (("fsdp2", 2), ("ddp", 7), ("fsdp2", 4)),
    ],
    ids=lambda layouts: " to ".join(f"{parallel} {world_size}" for parallel, world_size in layouts),
)  # fmt: skip
def test_state_moves_between_layouts(layouts: tuple[Layout, ...], twin: RunRecord, tmp_path: Path) -> None:
    """Killed twice and resumed each time in another layout, a run with everything on ends with the bytes and ledger of one rank."""
    faults = tuple(Fault(kind="kill", rank=0, step=step, phase="forward", attempt=attempt) for attempt, step in enumerate((4, 8)))
    job = tiny_job(tmp_path, recipe="hard_recipes:everything", steps=STEPS, checkpoint_every=2, faults=faults)
    for attempt, (parallel, world_size) in enumerate(layouts):
        last = run_attempt(replace(job, parallel=parallel, world_size=world_size), attempt)
    sizes = tuple(world_size for _, world_size in layouts)
    run = runlog.collect(job, attempts=3, recoveries=(), faults_fired=(), seconds=1.0, world_sizes=sizes)

    assert last.exitcodes == [0] * sizes[-1], last.errors
    assert [said["step"] for said in last.said("loaded")] == [last.said("loaded")[0]["step"]] * sizes[-1]
    assert last.said("loaded")[0]["step"] > 0
    assert set(run.state_sha256_by_rank) == {twin.state_sha256}
    assert run.ledger_sha256 == twin.ledger_sha256
