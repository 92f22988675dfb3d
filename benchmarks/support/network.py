"""The model, data, loss and optimizer that both sides of a comparison train: plain torch, nothing of the trainer."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

SEED = 7


def make_model(features: int, hidden: Sequence[int]) -> nn.Module:
    """A small classifier with LayerNorm, GELU and dropout: inputs (B, features) -> logits (B,)."""
    layers: list[nn.Module] = []
    width = features
    for size in hidden:
        layers += [nn.Linear(width, size), nn.LayerNorm(size), nn.GELU(), nn.Dropout(0.2)]
        width = size
    return nn.Sequential(*layers, nn.Linear(width, 1), nn.Flatten(0))


def make_data(rows: int, features: int, seed: int) -> tuple[Tensor, Tensor]:
    """Points on two sides of a plane: inputs (rows, features) and labels (rows,)."""
    draw = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows, features, generator=draw)
    return inputs, (inputs @ torch.linspace(-1, 1, features) > 0).float()


def loss_sum(model: nn.Module, inputs: Tensor, labels: Tensor) -> Tensor:
    """Summed log loss of a batch."""
    return nn.functional.binary_cross_entropy_with_logits(model(inputs), labels, reduction="sum")


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW: two moments for each parameter to be kept and restored."""
    return torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.01)
