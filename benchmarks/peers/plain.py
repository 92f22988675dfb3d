"""A plain training loop's update, as one writes it by hand: torch's DDP around the recipe's model, on one rank too, nothing else."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

Loop = tuple[Callable[[Any], None], Callable[[Path], None] | None]  # update(batch of this rank), save(path) or None


def make_loop(recipe: Any, world_size: int, steps: int) -> Loop:  # noqa: ARG001 - the process group knows it
    """Build model and optimizer; the function makes one optimizer update out of this rank's batch. Nothing is saved."""
    return loop_of(recipe, steps, lambda model: DistributedDataParallel(model, gradient_as_bucket_view=True))


def loop_of(recipe: Any, steps: int, wrap: Callable[[nn.Module], nn.Module]) -> Loop:
    """The loop with any wrapping of the model."""
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer, steps)
    module = wrap(model)

    def update(batch: Any) -> None:
        loss, weight = recipe.loss(module, batch)
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.training.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return update, None
