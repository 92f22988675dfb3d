"""A training's state by name: its digest covers everything, and JSON keeps what optimizers and schedules keep."""

import json

import pytest
import torch
from helpers_checkpoint import state_after, trained

from trainer.state import State, from_plain, snapshot, state_digest, to_plain
from validation.errors import RecipeError


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
