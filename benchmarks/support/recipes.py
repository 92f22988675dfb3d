"""Recipes on synthetic data for benchmarks that need no real one: `tiny` and `chunked` run often, `wide` is as large as `flights`."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from support.network import SEED, loss_sum, make_data, make_model, make_optimizer
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer.recipe import Batch, Card, Column, DataContract, Outcomes, Training

CARD = Card(question="Which side of the plane?", action="none", utility_unit="hits", quality_name="accuracy", owner="benchmarks")
CONTRACT = DataContract(
    columns={"half": Column(kind="category")}, label="on", event_time="when", known_after_cutoff=(), min_rows={"train": 1, "judge": 1},
    period={"train": ("2020-01-01", "2021-01-01"), "judge": ("2021-01-01", "2022-01-01")}, max_gap_days=400.0,
)  # fmt: skip


class Points:
    """make_data as a split."""

    def __init__(self, rows: int, features: int, seed: int) -> None:
        self.inputs, self.labels = make_data(rows, features, seed)
        self.sample_ids = np.arange(rows, dtype=np.int64)
        when = pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(rows), "min")
        self.frame = pd.DataFrame({"half": np.where(np.arange(rows) % 2, "odd", "even"), "on": self.labels.numpy(), "when": when})

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        chosen = torch.from_numpy(rows)
        return Batch(self.inputs[chosen], self.labels[chosen], torch.ones(len(rows)))


@dataclass(frozen=True)
class Synthetic:
    """The Recipe protocol around support.network."""

    name: str
    training: Training
    rows: int
    features: int
    hidden: tuple[int, ...]
    slices: Sequence[str] = ("half",)
    cluster: str = "half"
    target_quality: float = 0.6
    card: Card = CARD
    contract: DataContract = CONTRACT

    def data(self, split: str) -> Points:
        return Points(self.rows, self.features, SEED) if split == "train" else Points(64, self.features, SEED + 1)

    def model(self) -> nn.Module:
        return make_model(self.features, self.hidden)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return make_optimizer(model)

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        return LambdaLR(optimizer, lambda step: 1 - 0.9 * step / steps)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return loss_sum(model, batch.inputs, batch.labels), batch.weights.sum()

    def scorer(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model, nn.Sigmoid())

    def baseline(self, train: Points) -> nn.Module:
        return nn.Sequential(nn.Linear(train.inputs.shape[1], 1), nn.Flatten(0), nn.Sigmoid())

    def rule(self, frame: pd.DataFrame) -> npt.NDArray[np.float64]:
        return np.full(len(frame), 0.5)

    def outcomes(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> Outcomes:
        hit = frame["on"].to_numpy(np.float64)
        chance = np.clip(np.where(hit > 0.5, scores, 1 - scores), 1e-6, 1.0)
        return Outcomes(utility=(chance > 0.5).astype(np.float64), loss=-np.log(chance), confidence=scores, hit=hit)

    def quality(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> float:
        return float(((scores > 0.5) == (frame["on"].to_numpy() > 0.5)).mean())


tiny = Synthetic("tiny", Training(global_batch_size=47, epochs=3, seed=SEED, clip_norm=0.5), rows=203, features=6, hidden=(13,))
# its gradients go over the ranks by chunks from two ranks on (trainer.reduce.AT_ONCE_BYTES)
chunked = Synthetic(
    "chunked", Training(global_batch_size=47, epochs=3, seed=SEED, clip_norm=0.5), rows=203, features=6, hidden=(512, 512)
)  # fmt: skip
wide = Synthetic("wide", Training(global_batch_size=4096, epochs=10, seed=SEED, clip_norm=1.0), rows=8192, features=64, hidden=(256, 128))
