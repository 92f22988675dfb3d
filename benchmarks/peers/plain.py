"""A plain training loop's update, as one writes it by hand: torch's DDP around the recipe's model, nothing else."""

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_update(recipe: Any, world_size: int, steps: int) -> Callable[[Any], None]:
    """Build model and optimizer; the function makes one optimizer update out of this rank's batch."""
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer, steps)
    module = DistributedDataParallel(model, gradient_as_bucket_view=True) if world_size > 1 else model

    def update(batch: Any) -> None:
        loss, weight = recipe.loss(module, batch)
        (loss / weight).backward()
        nn.utils.clip_grad_norm_(model.parameters(), recipe.training.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return update
