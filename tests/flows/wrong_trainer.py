"""The tiny recipe with an own reduction that is wrong: each rank's mean counts the same, whatever its samples weigh."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from tiny_recipe import recipe as right
from torch import Tensor

from trainer.hooks import Hooks
from trainer.world import World


class LocalMeans(Hooks):
    """Means over ranks of local means."""

    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        torch._foreach_div_(list(gradients), weight.item())
        if world.world_size > 1:
            for gradient in gradients:
                dist.all_reduce(gradient)
        weight.fill_(world.world_size)


class Wrong:
    hooks = LocalMeans()

    def __getattr__(self, name: str) -> Any:
        return getattr(right, name)


recipe = Wrong()
