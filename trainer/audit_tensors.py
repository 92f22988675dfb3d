"""A step's tensors by the model's names, whole where they are sharded, and their norms."""

import math
from collections.abc import Mapping

from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.parallel import whole


def whole_copy(value: Tensor) -> Tensor:
    """The whole tensor, not sharing memory with it. Collective when sharded."""
    found = whole(value)
    return found.clone() if found is value else found


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    """.grad of every parameter that has one, whole, by name. Collective when sharded."""
    return {name: whole(parameter.grad.detach()) for name, parameter in model.named_parameters() if parameter.grad is not None}


def handed_to(optimizer: Optimizer, model: nn.Module) -> dict[str, Tensor]:
    """Copies of the gradients that an optimizer is about to step with, whole, by the model's names. Collective when sharded.

    A parameter that the optimizer holds and the model does not have is named by its place: "optimizer/GROUP/NUMBER".
    """
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {
        names.get(id(parameter), f"optimizer/{number}/{place}"): whole_copy(parameter.grad.detach())
        for number, group in enumerate(optimizer.param_groups) for place, parameter in enumerate(group["params"])
        if parameter.grad is not None
    }  # fmt: skip


def rates_of(optimizer: Optimizer) -> list[float]:
    """Learning rates by group."""
    return [float(group["lr"]) for group in optimizer.param_groups]


def norm_of(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm of all of them together, added in float64."""
    return math.sqrt(sum(float(value.double().square().sum()) for value in tensors.values()))
