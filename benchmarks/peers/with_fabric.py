"""The plain loop with Lightning Fabric, after its guides on converting PyTorch code and on checkpoints."""

from pathlib import Path
from typing import Any

from lightning_fabric import Fabric
from plain import Loop


def make_loop(recipe: Any, world_size: int, steps: int) -> Loop:
    """Build and set up; one function makes an optimizer update out of this rank's batch, one saves a checkpoint."""
    fabric = Fabric(accelerator="cpu", devices=world_size, strategy="ddp" if world_size > 1 else "auto")
    fabric.launch()
    model = recipe.model()
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer, steps)
    model, optimizer = fabric.setup(model, optimizer)

    def update(batch: Any) -> None:
        loss, weight = recipe.loss(model, batch)
        fabric.backward(loss / weight)
        fabric.clip_gradients(model, optimizer, max_norm=recipe.training.clip_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    def save(path: Path) -> None:
        fabric.save(path, {"model": model, "optimizer": optimizer, "schedule": schedule.state_dict()})

    return update, save
