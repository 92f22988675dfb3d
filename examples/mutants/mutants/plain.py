"""What the three small recipes have in common: a made-up log, slices, and scores of a few classes.

N = rows of a split, B = rows asked for, C = classes.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn

from trainer.hooks import Hooks
from trainer.recipe import Batch, Card, Column, DataContract, Outcomes, SplitData, Training

Rows = npt.NDArray[np.int64]
Scores = npt.NDArray[np.float64]  # (N, C)

CARD = Card(
    question="which class follows?", action="name the likeliest", utility_unit="points", quality_name="accuracy", owner="nobody",
    notes=("Made to be broken: the gates are tried on it.",),
)  # fmt: skip
CONTRACT = DataContract(
    columns={"size": Column(kind="number")}, label="label", event_time="seen", known_after_cutoff=(), min_rows={"train": 1, "judge": 1},
    period={"train": ("2024-01-01", "2024-03-01"), "judge": ("2024-03-01", "2024-04-01")}, max_gap_days=30.0,
)  # fmt: skip


def log_of(split: str, labels: Rows, sizes: Rows) -> pd.DataFrame:
    """The contract frame (N rows): when each sample was seen, its label and size, and two columns to slice by."""
    seen = pd.date_range(*CONTRACT.period[split], periods=len(labels) + 1)[:-1]
    return pd.DataFrame({
        "seen": seen, "day": seen.strftime("%Y-%m-%d"), "label": labels, "size": sizes,
        "half": np.where(np.arange(len(labels)) % 2, "odd", "even"), "long": np.where(sizes > np.median(sizes), "yes", "no"),
    })  # fmt: skip


class Table:
    """One split in memory."""

    def __init__(self, split: str, inputs: Tensor, labels: Tensor, frame: pd.DataFrame) -> None:
        """Args: inputs (N, ...), labels (N, ...)."""
        self.inputs, self.labels, self.frame = inputs, labels, frame
        self.sample_ids = np.arange(len(inputs), dtype=np.int64) * 3 + (1000 if split == "train" else 5000)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: Rows) -> Batch:
        """Fetch rows, each of weight one."""
        return Batch(self.inputs[rows], self.labels[rows], torch.ones(len(rows)))


class Guess(nn.Module):
    """Serving module that always says the same: inputs (B, ...) -> (B, C)."""

    def __init__(self, shares: Tensor) -> None:
        super().__init__()
        self.register_buffer("shares", shares)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.get_buffer("shares").expand(len(inputs), -1)


class PlainRecipe:
    """Everything of a recipe but its name, training, data, model and loss."""

    name = "plain"
    training: Training
    classes = 3
    card = CARD
    contract = CONTRACT
    slices = ("half", "long")
    cluster = "day"
    target_quality = 0.0
    excludes: Mapping[str, str]

    def __init__(self, hooks: Hooks | None = None, excludes: Mapping[str, str] | None = None) -> None:
        """Args: excludes, hard conditions that do not fit this recipe, and why."""
        self.excludes = {} if excludes is None else excludes
        if hooks is not None:
            self.hooks = hooks

    def data(self, split: str) -> Any:
        raise NotImplementedError

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> torch.optim.lr_scheduler.LRScheduler:
        """Four updates of warm-up, then down to a tenth."""

        def share(step: int) -> float:
            return (step + 1) / 4 if step < 4 else 1 - 0.9 * min(1.0, (step - 3) / max(1, steps - 3))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, share)

    def baseline(self, train: SplitData) -> nn.Module:
        """How often each label was seen."""
        counts = np.bincount(train.frame["label"], minlength=self.classes) + 1.0
        return Guess(torch.from_numpy((counts / counts.sum()).astype(np.float32)))

    def rule(self, frame: pd.DataFrame) -> Scores:
        """Every class alike."""
        return np.full((len(frame), self.classes), 1 / self.classes)

    def outcomes(self, frame: pd.DataFrame, scores: Scores) -> Outcomes:
        """A point for the right class."""
        label = frame["label"].to_numpy(np.int64)
        hit = (scores.argmax(axis=1) == label).astype(np.float64)
        chance = np.maximum(scores[np.arange(len(label)), label], 1e-7)
        return Outcomes(utility=hit, loss=-np.log(chance), confidence=scores.max(axis=1), hit=hit)

    def quality(self, frame: pd.DataFrame, scores: Scores) -> float:
        """Share of right classes, each sample with how sure the model was of it, so that no change stays unseen."""
        label = frame["label"].to_numpy(np.int64)
        return float(scores[np.arange(len(label)), label].mean()) if len(label) else float("nan")


def two_groups(model: nn.Module, lr: float = 3e-3) -> torch.optim.Optimizer:
    """AdamW that decays matrices and leaves vectors alone."""
    matrices, vectors = ([p for p in model.parameters() if (p.ndim > 1) == wanted] for wanted in (True, False))
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=lr)
