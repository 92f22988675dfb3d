"""Two views of each thing, pulled together and pushed from all others of the global batch: a loss that couples samples of all ranks.

B = samples of this rank, N = samples of all ranks, T = SLICES of a view, F = FEATURES, D = WIDTH.
"""

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mutants.plain import PlainRecipe, Table, log_of, two_groups
from trainer.hooks import Hooks
from trainer.recipe import Batch, Training

SLICES, FEATURES, WIDTH, CLASSES, TEMPERATURE = 3, 6, 10, 3, 0.3
ROWS = {"train": 120, "judge": 21}
WHOLE = {"accumulation": "the loss looks at all samples of an update at once"}


def world_size() -> int:
    """How many ranks train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


class SumOverRanks(torch.autograd.Function):
    """A sum over all ranks through which gradients flow back: every rank's gradient reaches every rank."""

    @staticmethod
    def forward(_ctx: Any, value: Tensor) -> Tensor:
        total = value.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(_ctx: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


def counts_of(rows: int) -> list[int]:
    """How many rows each rank has. Collective."""
    if world_size() == 1:
        return [rows]
    counts = [torch.zeros(1, dtype=torch.int64) for _ in range(world_size())]
    dist.all_gather(counts, torch.tensor([rows]))
    return [int(count) for count in counts]


def gathered(own: Tensor) -> tuple[Tensor, int]:
    """All ranks' rows (N, ...) one after the other, and where this rank's (B, ...) begin. Gradients flow back. Collective."""
    counts = counts_of(len(own))
    start = sum(counts[: dist.get_rank()]) if world_size() > 1 else 0
    if world_size() == 1:
        return own, start
    after = own.new_zeros(sum(counts) - start - len(own), *own.shape[1:])
    padded = torch.cat([own.new_zeros(start, *own.shape[1:]), own, after])
    return SumOverRanks.apply(padded), start  # type: ignore[no-untyped-call]


class Views(nn.Module):
    """Two views (B, 2, T, F) to two unit vectors (B, 2, D)."""

    def __init__(self) -> None:
        super().__init__()
        self.slices, self.pooled = nn.Linear(FEATURES, 16), nn.Linear(16, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        pooled = torch.tanh(self.slices(inputs)).mean(dim=2)
        return nn.functional.normalize(self.pooled(self.dropout(pooled)), dim=2)


class FirstPlaces(nn.Module):
    """Serving module: (B, 2, T, F) -> (B, CLASSES), by the first places of the first view."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.softmax(self.model(inputs)[:, 0, :CLASSES], dim=1)


class Contrastive(PlainRecipe):
    """The recipe: each first view has to find its second among those of the global batch."""

    name = "mutant-contrastive"
    classes = CLASSES
    training = Training(global_batch_size=16, epochs=3, lanes=4, seed=7, evaluate_every=4, clip_norm=1.0)

    def __init__(self, hooks: Hooks) -> None:
        super().__init__(hooks, WHOLE)

    def data(self, split: str) -> Table:
        draw = np.random.default_rng(31 if split == "train" else 32)
        labels = draw.integers(0, CLASSES, size=ROWS[split])
        things = draw.normal(size=(ROWS[split], 1, 1, FEATURES)) + labels[:, None, None, None]
        views = things + 0.5 * draw.normal(size=(ROWS[split], 2, SLICES, FEATURES))
        frame = log_of(split, labels, np.arange(ROWS[split]))
        return Table(split, torch.from_numpy(views.astype(np.float32)), torch.from_numpy(labels), frame)

    def model(self) -> nn.Module:
        return Views()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return two_groups(model, lr=1e-2)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed log loss of this rank's first views against the second views of all ranks, and this rank's weight. Collective."""
        own = model(batch.inputs)
        everywhere, start = gathered(own[:, 1])
        logits_BN = own[:, 0] @ everywhere.T / TEMPERATURE
        each = nn.functional.cross_entropy(logits_BN, start + torch.arange(len(own)), reduction="none")
        return (each * batch.weights).sum(), batch.weights.sum()

    def scorer(self, model: nn.Module) -> nn.Module:
        return FirstPlaces(model)
