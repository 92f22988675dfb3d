"""Sealed checkpoints: whole or not there, verified before anything is parsed, and the older one when the newest is damaged."""

import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_checkpoint import KEY, RUN, empty, load, names, save, state_after, trained, wide_state
from helpers_loop import run_ranks, tiny_job
from torch import nn

from trainer.checkpoint import CLAIM, METADATA, PLAIN, load_newest, sealed_folders
from trainer.state import restore, snapshot, state_digest
from trainer.world import World
from validation.canonical import sha256_hex
from validation.errors import ConfigError, DataError
from validation.manifest import MANIFEST, FileSeal, Manifest, build_manifest, parse_manifest

FILES = ("__0_0.distcp", "__1_0.distcp", METADATA, PLAIN, MANIFEST)
OLDER, NEWER = "step-00000002", "step-00000004"


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 2 and 4, each written by two ranks."""
    folder = tmp_path_factory.mktemp("sealed")
    run_ranks(tiny_job(folder, world_size=2), lambda world: save(folder / "root", wide_state(2), wide_state(4), world=world))
    return folder / "root"


@pytest.fixture
def root(sealed: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(sealed, tmp_path / "root")


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def drop(path: Path) -> None:
    path.unlink()


def wipe(path: Path) -> None:
    path.write_bytes(b"")


def take_the_older(path: Path) -> None:
    shutil.copy(path.parent.parent / OLDER / path.name, path)


def swap_with_next(path: Path) -> None:
    other = path.with_name(FILES[(FILES.index(path.name) + 1) % len(FILES)])
    body = path.read_bytes()
    path.write_bytes(other.read_bytes())
    other.write_bytes(body)


def make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_away(path: Path) -> None:
    path.rename(path.parent.parent / "elsewhere")
    path.symlink_to(path.parent.parent / "elsewhere")


def test_a_checkpoint_has_these_files(sealed: Path) -> None:
    """One file for each rank, and three that say what they are."""
    assert names(sealed) == [CLAIM, OLDER, NEWER]
    assert names(sealed / NEWER) == sorted(FILES)
    assert load(sealed).refused == ()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    "damage", [flip, shorten, lengthen, drop, wipe, take_the_older, swap_with_next, make_folder, link_away], ids=lambda item: item.__name__
)
def test_damaged_checkpoint_is_refused_and_the_older_one_used(damage: Callable[[Path], None], name: str, root: Path) -> None:
    """Whatever happens to whichever file, the newest is refused by name and the one before it is loaded."""
    damage(root / NEWER / name)

    found = load(root)
    assert found.state is not None
    assert state_digest(found.state) == state_digest(wide_state(2))
    assert found.damaged == {NEWER}
    assert f"checkpoint {NEWER} is damaged: " in found.refused[0]
    assert "Nothing of it was used" in found.refused[0]


def forge(root: Path, **changes: object) -> None:
    """Sign a newest checkpoint anew, as whoever has the key could."""
    path = root / NEWER / MANIFEST
    manifest = parse_manifest(path.read_bytes(), KEY)
    facts = {"step": manifest.step, "run": manifest.run, "files": manifest.files, "key": KEY, **changes}
    key = facts.pop("key")
    path.write_bytes(build_manifest(Manifest(**facts), key))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        pytest.param(lambda root: (root / NEWER / "more").write_text(""), "more is extra: nobody signed for it", id="extra-file"),
        pytest.param(lambda root: (root / NEWER / "more").mkdir(), "more is no plain file", id="extra-folder"),
        pytest.param(lambda root: forge(root, key=b"x" * 32), "MANIFEST.json was altered, or sealed with another key", id="another-key"),
        pytest.param(lambda root: forge(root, step=2), "MANIFEST.json belongs to step 2, not to step 4", id="another-step"),
        pytest.param(lambda root: forge(root, run={**RUN, "seed": 8}), "belongs to another run: seed is 8, not 7", id="another-run"),
        pytest.param(lambda root: forge(root, files={}), "is extra: nobody signed for it", id="no-files"),
    ],
)
def test_other_checkpoints_are_refused(damage: Callable[[Path], None], said: str, root: Path) -> None:
    """A folder with more in it, or signed for something else, is not this run's checkpoint."""
    damage(root)

    found = load(root)
    assert found.state is not None
    assert found.state.step == 2
    assert said in found.refused[0]


def test_renamed_checkpoint_is_refused(root: Path) -> None:
    """An old checkpoint under a newer name is not taken for a newer one; that name is then passed over."""
    shutil.copytree(root / OLDER, root / "step-00000009")

    found = load(root)
    assert found.state is not None
    assert (found.state.step, found.damaged) == (4, {"step-00000009"})
    assert "belongs to step 2, not to step 9" in found.refused[0]


class Trap:
    """A pickle that leaves a file when it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("signed", [False, True], ids=["manifest-as-it-was", "manifest-forged-without-the-key"])
def test_planted_pickle_is_never_opened(signed: bool, root: Path) -> None:
    """Code in .metadata does not run: not when it stands there alone, and not with a manifest that fits it but for the key."""
    body, sprung = pickle.dumps(Trap(root / "sprung")), root / "sprung"
    (root / NEWER / METADATA).write_bytes(body)
    if signed:
        files = dict(parse_manifest((root / NEWER / MANIFEST).read_bytes(), KEY).files)
        files[METADATA] = FileSeal(bytes=len(body), sha256=sha256_hex(body))
        forge(root, files=files, key=b"guessed" * 8)

    assert load(root).damaged == {NEWER}
    assert not sprung.exists()
    pickle.loads(body)  # noqa: S301  # the trap does work
    assert sprung.exists()


def test_all_damaged_means_from_the_start(root: Path) -> None:
    """Without any usable checkpoint there is no state, and every refusal is told."""
    for name in (OLDER, NEWER):
        flip(root / name / "__1_0.distcp")

    assert load(root).state is None
    assert "training starts at step 0" in load(root).refused[2]


def test_another_key_does_not_start_over(root: Path) -> None:
    """When nothing at all fits the key, it is the key: training from the start would write over good checkpoints."""
    with pytest.raises(ConfigError, match=r"none of the 2 checkpoints .* fits the seal key.* Set SEATRIAL_SEAL_KEY"):
        load(root, key=b"y" * 32)


def test_another_run_does_not_start_over(root: Path) -> None:
    """A folder with none but another run's checkpoints is left alone."""
    with pytest.raises(DataError, match=r"no checkpoint of this run .*recipe is 'tiny', not 'other'.* Give this run an empty folder"):
        load(root, run={**RUN, "recipe": "other"})


def test_newest_that_is_gone_is_missed(root: Path) -> None:
    """A checkpoint that was sealed and has vanished is told, whether its own file or the caller remembers it."""
    shutil.rmtree(root / NEWER)
    assert "checkpoint step-00000004 was sealed and is gone" in load(root).refused[0]
    (root / CLAIM).unlink()
    assert load(root).refused == ()

    found = load_newest(root, key=KEY, run=RUN, world=World(rank=0, world_size=1), like=empty, newest_claimed=30)
    assert "checkpoint step-00000030 was sealed and is gone" in found.refused[0]
    assert found.state is not None


def test_damaged_claim_is_told(root: Path) -> None:
    """The file that says what is newest is signed, too."""
    flip(root / CLAIM)

    found = load(root)
    assert found.state is not None
    assert (found.state.step, len(found.refused)) == (4, 1)
    assert found.refused[0].startswith("NEWEST.json ")


def test_nothing_there_is_nothing_wrong(tmp_path: Path) -> None:
    """A new run has no checkpoint, no refusal, and no folder is made by looking."""
    assert load(tmp_path / "root") == (None, (), frozenset())
    assert not (tmp_path / "root").exists()


def test_ranks_agree_about_damage(root: Path) -> None:
    """A file that only one of two ranks looks at makes both refuse the checkpoint, with the same words."""
    flip(root / NEWER / "__1_0.distcp")

    def look(world: World) -> tuple[object, ...]:
        found = load(root, world=world)
        return found.state and found.state.step, found.refused, found.damaged

    first, second = run_ranks(tiny_job(root.parent / "job", world_size=2), look)
    assert first == second
    assert first[0] == 2
    assert "__1_0.distcp was altered" in first[1][0]


def test_state_comes_back_whole(tmp_path: Path) -> None:
    """Weights, buffers, moments, groups and schedule are restored to the bit, and training goes on alike."""
    save(tmp_path, state_after(2))
    model, optimizer, schedule = trained(0)
    found = load(tmp_path).state
    assert found is not None
    restore(found, model, optimizer, schedule)

    assert state_digest(snapshot(model, optimizer, schedule, step=2, position=20, seed=7)) == state_digest(state_after(2))
    model(torch.full((2, 3), 3.0)).pow(3).sum().backward()
    optimizer.step()
    assert schedule is not None
    schedule.step()
    assert state_digest(snapshot(model, optimizer, schedule, step=3, position=30, seed=7)) == state_digest(state_after(3))


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    """A checkpoint of other shapes is not poured into this model."""
    save(tmp_path, state_after(1))
    other, found = nn.Sequential(nn.Linear(3, 5)), load(tmp_path).state

    assert found is not None
    with pytest.raises(DataError, match=r"does not fit this model: .*Use the recipe that wrote it"):
        restore(found, other, torch.optim.SGD(other.parameters()), None)


def test_only_sealed_folders_count(tmp_path: Path) -> None:
    """Partial and replaced folders, files and other names are not checkpoints; the rest come newest first."""
    for name in ("step-00000002", "step-00000010.partial", "step-00000003.replaced", "step-100000000", "step-x"):
        (tmp_path / name).mkdir()

    assert [folder.name for folder in sealed_folders(tmp_path)] == ["step-100000000", "step-00000002"]
