"""Checkpoints that a recipe writes itself: whole and verified or not there, and what a run does with them."""

# ruff: noqa: ARG002  (a hook has the arguments that it has)

from pathlib import Path
from typing import Any

import own_recipes
import pytest
from helpers_loop import run_attempt, run_job, tiny_job

from trainer.config import Fault
from trainer.hooks import Hooks, Living
from trainer.own_checkpoint import OWN, OwnSaver, check_same_saving, newest_own, own_folders
from trainer.runlog import checkpoint_bytes
from trainer.world import World
from validation.errors import ConfigError, DataError, RecipeError
from validation.records import RunRecord

KEY, RUN = b"k" * 32, {"recipe": "r", "seed": 0}
ALONE = World(rank=0, world_size=1)


class Writer(Hooks):
    """Writes two files; refuses a step on demand."""

    def __init__(self, refuses: int = -1) -> None:
        self.refuses = refuses
        self.loaded: list[str] = []

    def save(self, folder: Path, living: Living) -> None:
        if living.step == self.refuses:
            raise OSError(28, "No space left on device")
        (folder / "a.bin").write_bytes(b"a" * living.step)
        (folder / "deep").mkdir()
        (folder / "deep" / "b.bin").write_bytes(b"b")

    def load(self, folder: Path, living: Living) -> None:
        self.loaded.append(folder.name)


def at_step(step: int) -> Living:
    nothing: Any = None
    return Living(world=ALONE, step=step, module=nothing, model=nothing, optimizer=nothing, schedule=nothing)


def saved(root: Path, steps: list[int], hooks: Hooks | None = None) -> list[tuple[str, dict[str, Any]]]:
    """Save at these steps; what was said."""
    said: list[tuple[str, dict[str, Any]]] = []
    saver = OwnSaver(
        root, ALONE, hooks or Writer(), key=KEY, run=RUN, at=lambda *_: None, emit=lambda name, **fields: said.append((name, fields))
    )
    for step in steps:
        saver.save(at_step(step), position=step * 10, extra={"scaler": {"scale": 1.0}})
    return said


def newest(root: Path, **options: Any) -> Any:
    return newest_own(root, **{"key": KEY, "run": RUN, "world": ALONE} | options)


def test_newest_of_two_is_found(tmp_path: Path) -> None:
    """Two stay; the newest comes back with its step, position and plain values."""
    said = saved(tmp_path, [2, 4, 6])
    found = newest(tmp_path)

    assert [path.name for path in own_folders(tmp_path)] == ["own-step-00000006", "own-step-00000004"]
    assert [name for name, _ in said] == ["sealed"] * 3
    assert (found.folder, found.step, found.position) == (tmp_path / "own-step-00000006", 6, 60)
    assert found.extra == {"scaler": {"scale": 1.0}}
    assert found.refused == ()
    assert said[-1][1]["bytes"] == 7


def change(path: Path) -> None:
    path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("a.bin", change), ("deep/b.bin", change), ("deep/b.bin", Path.unlink), (OWN, change), (OWN, Path.unlink),
        ("more.bin", lambda path: path.write_bytes(b"x")),
    ],
)  # fmt: skip
def test_damage_is_refused_and_the_older_one_taken(name: str, damage: Any, tmp_path: Path) -> None:
    """A bit, a missing and an added file are seen before anything is loaded; once written anew, the folder is good again."""
    saved(tmp_path, [2, 4])
    damage(tmp_path / "own-step-00000004" / name)
    found = newest(tmp_path)

    assert found.step == 2
    assert found.damaged == {"own-step-00000004"}
    assert "own-step-00000004 is damaged" in found.refused[0]
    saved(tmp_path, [4])
    assert newest(tmp_path).step == 4


def test_lost_and_foreign_checkpoints_are_told(tmp_path: Path) -> None:
    """One that was sealed and is gone, another run's, and those that were saved the other way."""
    saved(tmp_path, [2])

    assert "own-step-00000008 was sealed and is gone" in newest(tmp_path, newest_claimed=8).refused[0]
    with pytest.raises(DataError, match="another run's checkpoint"):
        newest(tmp_path, run={"recipe": "other", "seed": 0})
    check_same_saving(tmp_path, is_own=True)
    with pytest.raises(ConfigError, match=r"written by the recipe's hooks\.save, and the recipe brings no"):
        check_same_saving(tmp_path, is_own=False)
    (tmp_path / "other" / "step-00000002").mkdir(parents=True)
    with pytest.raises(ConfigError, match="written by the trainer"):
        check_same_saving(tmp_path / "other", is_own=True)


def test_disk_that_refuses_is_told_and_training_goes_on(tmp_path: Path) -> None:
    """A full disk costs one checkpoint; the older one and later ones stand, and leftovers are cleared away."""
    (tmp_path / "own-step-00000001.partial").mkdir()
    said = saved(tmp_path, [2, 4, 6], Writer(refuses=4))

    assert [name for name, _ in said] == ["sealed", "unsaved", "sealed"]
    assert "No space left on device" in said[1][1]["reason"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["own-step-00000002", "own-step-00000006"]


def test_link_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    """What a link stands for may change after the seal."""

    class Linking(Writer):
        def save(self, folder: Path, living: Living) -> None:
            (folder / "latest").symlink_to(tmp_path)

    with pytest.raises(RecipeError, match="Write plain files"):
        saved(tmp_path, [2], Linking())


def killed(folder: Path, name: str, *faults: Fault, **options: Any) -> RunRecord:
    return run_job(
        tiny_job(
            folder, recipe=f"own_recipes:{name}", checkpoint_every=2, faults=faults, max_restarts=len(faults), **{"world_size": 2} | options
        )
    )


@pytest.mark.parametrize("phase", ["staging", "write", "seal"])
def test_death_inside_a_save_comes_back_to_the_one_before(phase: str, tmp_path: Path) -> None:
    """Killed inside its second save, on either rank, the run goes on from the first and ends in its twin's bits, averages included."""
    fault = Fault(kind="kill", rank=phase == "write", step=3, phase=phase)
    run, twin = killed(tmp_path / "killed", "saved", fault, steps=6), killed(tmp_path / "twin", "saved", steps=6)

    assert (run.attempts, run.steps, run.reduction) == (2, 6, "exact")
    assert run.state_sha256_by_rank == twin.state_sha256_by_rank
    assert run.ledger_sha256 == twin.ledger_sha256
    assert [path.name for path in own_folders(tmp_path / "killed/checkpoints")] == ["own-step-00000006", "own-step-00000004"]
    assert checkpoint_bytes(tmp_path / "killed") > 1000


def test_own_order_and_own_checkpoints_go_together(tmp_path: Path) -> None:
    """A sampler of the recipe's is saved by its own hook; killed twice, the run ends in its twin's bits."""
    faults = tuple(Fault(kind="kill", rank=0, step=step, attempt=attempt) for attempt, step in enumerate((3, 6)))
    run, twin = killed(tmp_path / "killed", "saved_sampled", *faults), killed(tmp_path / "twin", "saved_sampled")

    assert (run.attempts, run.steps, run.reduction) == (3, 8, "own")
    assert run.state_sha256_by_rank == twin.state_sha256_by_rank
    assert run.ledger_sha256 == twin.ledger_sha256


def test_streams_that_go_on_are_disturbed_by_nobody(tmp_path: Path) -> None:
    """Random streams that no step starts anew come back with own checkpoints; fetches, audits, evaluations and saves draw none."""
    fault = Fault(kind="kill", rank=1, step=3)
    run = killed(tmp_path / "killed", "continuing", fault, steps=6, audit=True, evaluate=True)
    twin = killed(tmp_path / "twin", "continuing", steps=6)

    assert run.attempts == 2
    assert run.state_sha256_by_rank == twin.state_sha256_by_rank


def test_stale_moments_of_the_planted_defect_show(tmp_path: Path) -> None:
    """The planted defect of a resume works on own checkpoints, too."""
    fault = Fault(kind="kill", rank=0, step=3)
    runs = [killed(tmp_path / f"run-{name}", "saved", fault, steps=5, defect=name) for name in ("", "stale_moments_on_resume")]

    assert runs[0].state_sha256 != runs[1].state_sha256


def test_load_that_raises_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that the recipe cannot read back ends the attempt with the hook's name."""

    def broken(self: object, folder: Path, living: Living) -> None:
        raise KeyError("model")

    killed(tmp_path, "saved", steps=2)
    monkeypatch.setattr(own_recipes.Saved, "load", broken)
    done = run_attempt(tiny_job(tmp_path, recipe="own_recipes:saved", checkpoint_every=2), attempt=1)

    assert "hooks.load on rank 0, before the first step" in done.errors[0]
