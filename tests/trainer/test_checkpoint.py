"""Sealed checkpoints: whole or not there, verified before use, and the older one when the newest is damaged."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from trainer.checkpoint import MANIFEST, PLAIN, TENSORS, load_newest, load_sealed, seal, sealed_folders
from trainer.state import State, from_plain, restore, snapshot, state_digest, to_plain
from validation.errors import DataError, RecipeError


def trained(steps: int, *, scheduled: bool = True) -> tuple[nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler | None]:
    """A model with a buffer, two parameter groups, moments and a schedule, some updates in."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    model.register_buffer("scale", torch.full((2,), 0.5))
    optimizer = torch.optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}])
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 3, 3]) if scheduled else None
    for step in range(steps):
        model(torch.full((2, 3), 1.0 + step)).pow(3).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if schedule is not None:
            schedule.step()
    return model, optimizer, schedule


def state_after(steps: int) -> State:
    return snapshot(*trained(steps), step=steps, position=10 * steps, seed=7)


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


def shorten(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def remove(path: Path) -> None:
    path.unlink()


def empty(path: Path) -> None:
    path.write_bytes(b"")


def swap_with_older(path: Path) -> None:
    shutil.copy(path.parent.parent / "step-00000002" / path.name, path)


@pytest.mark.parametrize("name", [TENSORS, PLAIN, MANIFEST])
@pytest.mark.parametrize("damage", [flip, shorten, remove, empty, swap_with_older])
def test_damaged_checkpoint_is_refused_and_the_older_one_used(damage: Callable[[Path], None], name: str, tmp_path: Path) -> None:
    """One flipped bit, a torn, empty, lost or exchanged file: the newest is refused by name and the one before it is loaded."""
    older, _ = seal(tmp_path, state_after(2)), seal(tmp_path, state_after(4))
    damage(tmp_path / "step-00000004" / name)

    state, refused = load_newest(tmp_path)
    assert state is not None
    assert state_digest(state) == state_digest(load_sealed(older)) == state_digest(state_after(2))
    assert len(refused) == 1
    assert "checkpoint step-00000004 is damaged: " in refused[0]
    with pytest.raises(DataError, match=r"is damaged: .*Nothing of it was used"):
        load_sealed(tmp_path / "step-00000004")


def test_renamed_checkpoint_is_refused(tmp_path: Path) -> None:
    """An old checkpoint under a newer name is not taken for the newer one."""
    seal(tmp_path, state_after(2)).rename(tmp_path / "step-00000009")

    with pytest.raises(DataError, match="belongs to step 2"):
        load_sealed(tmp_path / "step-00000009")


def test_manifest_without_digest_does_not_vouch(tmp_path: Path) -> None:
    """A manifest whose entries were changed to fit damaged files is refused by its own digest."""
    folder = seal(tmp_path, state_after(2))
    manifest = json.loads((folder / MANIFEST).read_bytes())
    manifest["files"][PLAIN]["bytes"] += 1
    (folder / MANIFEST).write_text(json.dumps(manifest))

    with pytest.raises(DataError, match="does not match its own digest"):
        load_sealed(folder)


def test_all_damaged_means_from_the_start(tmp_path: Path) -> None:
    """Without any usable checkpoint there is no state, and every refusal is told."""
    for step in (2, 4):
        flip(seal(tmp_path, state_after(step)) / TENSORS)

    assert load_newest(tmp_path).state is None
    assert len(load_newest(tmp_path).refused) == 2


def test_unsealed_folder_is_not_seen(tmp_path: Path) -> None:
    """A writer that dies before the seal leaves the last sealed checkpoint in charge; its rest is written over later."""

    def die() -> None:
        raise KeyboardInterrupt

    seal(tmp_path, state_after(2))
    with pytest.raises(KeyboardInterrupt):
        seal(tmp_path, state_after(4), before_seal=die)

    state, refused = load_newest(tmp_path)
    assert (state and state.step, refused) == (2, ())
    assert (tmp_path / "step-00000004.partial" / TENSORS).exists()
    assert load_sealed(seal(tmp_path, state_after(4))).step == 4
    assert not list(tmp_path.glob("*.partial"))


def test_newest_two_are_kept(tmp_path: Path) -> None:
    """Older ones go, and so does a newer one that had been refused."""
    for step in (1, 2, 3, 5):
        seal(tmp_path, state_after(step))
    flip(tmp_path / "step-00000005" / TENSORS)
    seal(tmp_path, state_after(4))

    assert [folder.name for folder in sealed_folders(tmp_path)] == ["step-00000004", "step-00000003"]


def test_state_comes_back_whole(tmp_path: Path) -> None:
    """Weights, buffers, moments, groups and schedule are restored to the bit, and training goes on alike."""
    model, optimizer, schedule = trained(0)
    restore(load_sealed(seal(tmp_path, state_after(2))), model, optimizer, schedule)

    assert state_digest(snapshot(model, optimizer, schedule, step=2, position=20, seed=7)) == state_digest(state_after(2))
    model(torch.full((2, 3), 3.0)).pow(3).sum().backward()
    optimizer.step()
    assert schedule is not None
    schedule.step()
    assert state_digest(snapshot(model, optimizer, schedule, step=3, position=30, seed=7)) == state_digest(state_after(3))


def test_state_of_another_model_is_refused(tmp_path: Path) -> None:
    """A checkpoint of other shapes is not poured into this model."""
    other = nn.Sequential(nn.Linear(3, 5))

    with pytest.raises(DataError, match=r"does not fit this model: .*Use the recipe that wrote it"):
        restore(load_sealed(seal(tmp_path, state_after(1))), other, torch.optim.SGD(other.parameters()), None)


@pytest.mark.parametrize("part", ["weight", "buffer", "optimizer"])
def test_digest_covers_every_tensor(part: str) -> None:
    """One changed bit in a weight, a buffer or a moment changes the digest."""
    state = state_after(2)
    name = max(name for name in state.tensors if name.startswith(part))
    changed = state.tensors[name].clone().reshape(-1)
    changed[0] = torch.nextafter(changed[0], torch.tensor(9.0))
    other = State(
        step=2, position=20, seed=7, tensors={**state.tensors, name: changed.reshape(state.tensors[name].shape)}, plain=state.plain
    )  # fmt: skip

    assert state_digest(other) != state_digest(state)


def test_digest_covers_the_schedule() -> None:
    """Two trainings that differ in nothing but how far the schedule is have two digests."""
    model, optimizer, schedule = trained(2)
    assert schedule is not None
    before = state_digest(snapshot(model, optimizer, schedule, step=2, position=0, seed=0))
    schedule.last_epoch += 1

    assert state_digest(snapshot(model, optimizer, schedule, step=2, position=0, seed=0)) != before


def test_plain_values_come_back_as_they_were() -> None:
    """JSON keeps every bit of a float, tuples, counters, integer keys and what is not a number."""
    schedule = trained(1)[2]
    assert schedule is not None
    value = {"a": (1, 2.5, None), 3: [True, "x", 0.1], "inf": float("inf"), "schedule": schedule.state_dict(), "lr": torch.tensor(0.1)}

    again = from_plain(json.loads(json.dumps(to_plain(value))))
    assert again == value
    assert type(again["schedule"]["milestones"]) is type(value["schedule"]["milestones"])  # type: ignore[index]
    assert again["lr"].dtype == torch.float32


def test_what_json_cannot_hold_is_refused() -> None:
    """An optimizer or schedule that keeps an object is refused when it would be lost, not on the way back."""
    with pytest.raises(RecipeError, match="Keep numbers, strings, lists"):
        to_plain({"hook": print})
