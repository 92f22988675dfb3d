"""The plain loop with Hugging Face Accelerate, after its guides on moving a loop over and on checkpoints."""

from pathlib import Path
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration
from plain import Loop


def make_loop(recipe: Any, world_size: int, steps: int) -> Loop:  # noqa: ARG001 - asks the process group
    """Build and prepare; one function makes an optimizer update out of this rank's batch, one saves a checkpoint."""
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

    def save(path: Path) -> None:
        accelerator.save_state(str(path))

    return update, save
