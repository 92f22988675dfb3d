"""The plain loop's update with Hugging Face Accelerate, after its guide on moving a loop over."""

from collections.abc import Callable
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration


def make_update(recipe: Any, world_size: int, steps: int) -> Callable[[Any], None]:  # noqa: ARG001 - asks the process group
    """Build and prepare; the function makes one optimizer update out of this rank's batch."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(split_batches=True))  # one schedule step an update
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, recipe.schedule(optimizer, steps))

    def update(batch: Any) -> None:
        loss, weight = recipe.loss(model, batch)
        accelerator.backward(loss / weight)
        accelerator.clip_grad_norm_(model.parameters(), recipe.training.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return update
