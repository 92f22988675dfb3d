"""States, savers and loads for tests of checkpoints."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainer.checkpoint import Resumed, load_newest
from trainer.saver import Saver
from trainer.state import State, snapshot
from trainer.world import World

KEY = bytes(range(32))
RUN = {"recipe": "tiny", "seed": 7}
ALONE = World(rank=0, world_size=1)


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
    """A whole small state."""
    return snapshot(*trained(steps), step=steps, position=10 * steps, seed=7)


def wide_state(step: int) -> State:
    """Enough bytes for a file of each of two ranks; other ones at each step, of the same sizes."""
    tensors = {f"weight/{i}": torch.full((200_000 + i, 2), float(step + 10 * i)) for i in range(3)}
    return State(step=step, position=10 * step, seed=7, tensors=tensors, plain={"step": step})


def quiet(*_: object, **__: object) -> None:
    """Hears of faults and events and does nothing."""


def saver(root: Path, world: World = ALONE, **changes: Any) -> Saver:
    """A saver of these tests' run."""
    return Saver(root, world, **{"key": KEY, "run": RUN, "at": quiet, "emit": quiet, "timeout_s": 20.0, **changes})


def save(root: Path, *states: State, world: World = ALONE, **changes: Any) -> list[tuple[str, dict[str, Any]]]:
    """Save states one after the other; what was emitted."""
    said: list[tuple[str, dict[str, Any]]] = []
    made = saver(root, world, **{"emit": lambda name, **fields: said.append((name, fields)), **changes})
    for state in states:
        made.save(state)
    made.close()
    return said


def empty(_: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """An unsharded tensor to be filled."""
    return torch.full(shape, 99, dtype=dtype)


def load(
    root: Path, *, key: bytes = KEY, run: Mapping[str, Any] = RUN, world: World = ALONE, like: Callable[..., Tensor] = empty
) -> Resumed:
    """Load the newest as a rank would."""
    return load_newest(root, key=key, run=run, world=world, like=like)


def names(root: Path) -> Sequence[str]:
    """What stands beside each other under `root`, sorted."""
    return sorted(path.name for path in root.iterdir())
