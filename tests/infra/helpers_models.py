"""Serving modules and inputs named by import path, as flows name them to the registry."""

import numpy as np
import torch
from torch import Tensor, nn


class Scorer(nn.Module):
    """Linear scores through a sigmoid; `shift` tells two versions apart."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 1)
        self.dropout = nn.Dropout(0.5)
        self.shift = shift

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sigmoid(self.dropout(self.linear(inputs)).squeeze(-1) + self.shift)


class Centred(nn.Module):
    """Scores that depend on the whole batch."""

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs - inputs.mean(0)).sum(-1)


class Branching(nn.Module):
    """Cannot be traced: its path depends on a value."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sum(-1) if inputs.sum().item() > 0 else -inputs.sum(-1)


class NotFinite(nn.Module):
    """Scores that are infinite for a zero."""

    def forward(self, inputs: Tensor) -> Tensor:
        return 1 / inputs.sum(-1)


def scorer(shift: float = 0.0) -> nn.Module:
    """A model with dropout, in training mode: the registry has to switch it to eval."""
    return Scorer(shift)


def centred() -> nn.Module:
    """A batch-dependent model."""
    return Centred()


def branching() -> nn.Module:
    """An untraceable model."""
    return Branching()


def not_finite() -> nn.Module:
    """A model that divides by its input."""
    return NotFinite()


def rows(count: int = 2) -> np.ndarray:
    """Inputs (count, 3), float32, no two rows alike, none zero."""
    return np.arange(1, 3 * count + 1, dtype=np.float32).reshape(count, 3) / 7
