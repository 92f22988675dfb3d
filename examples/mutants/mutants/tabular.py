"""Points in a few classes: BatchNorm, dropout, averaged weights and noise that is drawn anew in every epoch.

B = samples, F = FEATURES, C = CLASSES.
"""

import numpy as np
import torch
from torch import Tensor, nn

from mutants.plain import PlainRecipe, log_of, two_groups
from trainer.dataset import MapSplit
from trainer.recipe import Batch, Training

FEATURES, HIDDEN, CLASSES = 7, 22, 3
ROWS = {"train": 120, "judge": 21}
NOISE = 0.1


class Points:
    """A map-style dataset: points around the centre of their class, moved a little each time they are looked at."""

    def __init__(self, split: str, *, noisy: bool = True) -> None:
        draw = np.random.default_rng(21 if split == "train" else 22)
        centres = np.random.default_rng(20).normal(size=(CLASSES, FEATURES))
        self.labels = draw.integers(0, CLASSES, size=ROWS[split])
        self.inputs = torch.from_numpy((centres[self.labels] + 0.7 * draw.normal(size=(ROWS[split], FEATURES))).astype(np.float32))
        self.noisy = noisy and split == "train"

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        point = self.inputs[index]
        return point + NOISE * torch.randn(FEATURES) if self.noisy else point, int(self.labels[index])


class Network(nn.Module):
    """Inputs (B, F) -> logits (B, C)."""

    def __init__(self, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(FEATURES, HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, CLASSES)
        self.first_norm, self.second_norm = norm(HIDDEN), norm(HIDDEN)
        self.dropout = nn.Dropout(0.1)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = torch.tanh(self.first_norm(self.first(inputs)))
        hidden = hidden + self.dropout(torch.tanh(self.second_norm(self.second(hidden))))
        logits: Tensor = self.last(hidden)
        return logits


class Probabilities(nn.Module):
    """Serving module: inputs (B, F) -> (B, C)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.softmax(self.model(inputs), dim=1)


class Tabular(PlainRecipe):
    """The recipe: weighted log loss."""

    name = "mutant-tabular"
    classes = CLASSES
    training = Training(global_batch_size=16, epochs=3, lanes=4, seed=6, evaluate_every=4, clip_norm=1.0, ema_decay=0.9)

    def data(self, split: str) -> MapSplit:
        points = Points(split)
        return MapSplit(points, log_of(split, points.labels, np.arange(len(points))))

    def model(self) -> nn.Module:
        return Network()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return two_groups(model, lr=1e-2)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed log loss and summed weight."""
        each = nn.functional.cross_entropy(model(batch.inputs), batch.labels, reduction="none")
        return (each * batch.weights).sum(), batch.weights.sum()

    def scorer(self, model: nn.Module) -> nn.Module:
        return Probabilities(model)


recipe = Tabular()
