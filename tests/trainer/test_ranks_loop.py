"""The real loop and the real tables through the leader: what a release calls."""

import pytest

from trainer import ranks, runlog
from trainer.config import Fault, TrainJob
from validation.errors import RecipeError


def tiny_job(folder, **changes) -> TrainJob:
    """Six updates of the tiny recipe on two ranks, sealed every second one."""
    folder.mkdir()
    usual = {"recipe": "tiny_recipe:recipe", "folder": str(folder), "world_size": 2, "steps": 6, "checkpoint_every": 2, "deadline_s": 60.0}
    return TrainJob(**(usual | changes))


def test_killed_run_ends_with_the_bits_of_its_twin(tmp_path):
    """A run whose rank was killed, and that went on with another world size, has its twin's weights and ledger."""
    twin = ranks.run_group(tiny_job(tmp_path / "twin"))
    fault = Fault(kind="kill", rank=1, step=3)
    killed = ranks.run_group(tiny_job(tmp_path / "killed", faults=(fault,), max_restarts=1, resume_world_sizes=(3,)))

    assert (killed.state_sha256, killed.ledger_sha256) == (twin.state_sha256, twin.ledger_sha256)
    assert (killed.attempts, killed.faults_fired) == (2, (str(fault),))
    assert killed.recoveries[0].resumed_from_step == 2
    assert runlog.load_run(tmp_path / "killed") == killed


def test_recipe_error_comes_out_as_itself(tmp_path):
    """A recipe that cannot be found is a mistake of the input, in this process as in the ranks."""
    with pytest.raises(RecipeError, match="tiny_recipe has no 'absent'"):
        ranks.run_group(tiny_job(tmp_path / "run", recipe="tiny_recipe:absent"))
