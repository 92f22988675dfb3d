"""The plain loop's update with Lightning Fabric, after its guide on converting PyTorch code."""

from collections.abc import Callable
from typing import Any

from lightning_fabric import Fabric


def make_update(recipe: Any, world_size: int, steps: int) -> Callable[[Any], None]:
    """Build and set up; the function makes one optimizer update out of this rank's batch."""
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

    return update
