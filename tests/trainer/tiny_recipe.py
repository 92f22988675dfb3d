"""A small recipe with all that makes bits differ: dropout, LayerNorm, sample weights, AdamW, a schedule, clipping, ragged batches."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from trainer.order import Order
from trainer.recipe import Batch, Card, Column, DataContract, Outcomes, Training

TRAIN, JUDGE, FEATURES = 203, 60, 6
TRAINING = Training(global_batch_size=47, epochs=2, lanes=8, seed=3, evaluate_every=4, clip_norm=0.5)
CARD = Card(question="is it on?", action="switch", utility_unit="points", quality_name="accuracy", owner="tests")
CONTRACT = DataContract(
    columns={"colour": Column(kind="category")}, label="on", event_time="when", known_after_cutoff=(), min_rows={"train": 1, "judge": 1},
    period={"train": ("2020-01-01", "2021-01-01"), "judge": ("2021-01-01", "2022-01-01")}, max_gap_days=400.0,
)  # fmt: skip


class TinyData:
    """Points on two sides of a plane, with weights."""

    def __init__(self, rows: int, seed: int) -> None:
        draw = np.random.default_rng(seed)
        self.inputs = draw.normal(size=(rows, FEATURES)).astype(np.float32)
        self.labels = (self.inputs @ np.linspace(-1, 1, FEATURES) > 0).astype(np.float32)
        self.weights = draw.uniform(0.5, 2.0, size=rows).astype(np.float32)
        self.sample_ids = np.arange(rows, dtype=np.int64) * 7 + 1000
        self.frame = pd.DataFrame({
            "colour": np.where(np.arange(rows) % 10 == 0, "red", "blue"), "size": np.where(np.arange(rows) % 3 == 0, "big", "small"),
            "on": self.labels, "when": pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(rows), "D"),
        })  # fmt: skip

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        return Batch(*(torch.from_numpy(part[rows]) for part in (self.inputs, self.labels, self.weights)))


def weighted_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    each = nn.functional.binary_cross_entropy_with_logits(model(batch.inputs).squeeze(-1), batch.labels, reduction="none")
    return (each * batch.weights).sum(), batch.weights.sum()


def small_net() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 13), nn.LayerNorm(13), nn.GELU(), nn.Dropout(0.2), nn.Linear(13, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)


@dataclass(frozen=True)
class TinyRecipe:
    """The Recipe protocol with every part that a test wants to break as a field."""

    name: str = "tiny"
    training: Training = TRAINING
    make_model: Callable[[], nn.Module] = small_net
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw
    make_loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]] = weighted_loss
    card: Card = CARD
    contract: DataContract = CONTRACT
    slices: Sequence[str] = ("colour", "size")
    cluster: str = "size"
    target_quality: float = 0.7

    def data(self, split: str) -> TinyData:
        return TinyData(TRAIN, 1) if split == "train" else TinyData(JUDGE, 2)

    def model(self) -> nn.Module:
        return self.make_model()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.make_optimizer(model)

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler | None:
        return LambdaLR(optimizer, lambda step: 1 - 0.9 * step / steps)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        return self.make_loss(model, batch)

    def scorer(self, model: nn.Module) -> nn.Module:
        return nn.Sequential(model, nn.Flatten(0), nn.Sigmoid())

    def baseline(self, train: TinyData) -> nn.Module:
        return nn.Sequential(nn.Linear(train.inputs.shape[1], 1), nn.Flatten(0), nn.Sigmoid())

    def rule(self, frame: pd.DataFrame) -> npt.NDArray[np.float64]:
        return np.full(len(frame), 0.5)

    def outcomes(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> Outcomes:
        hit = (frame["on"].to_numpy() > 0.5).astype(np.float64)
        chance = np.clip(scores, 1e-6, 1 - 1e-6)
        return Outcomes(
            utility=np.where((scores > 0.5) == (hit > 0.5), 1.0, 0.0), loss=-np.log(np.where(hit > 0.5, chance, 1 - chance)),
            confidence=scores, hit=hit,
        )  # fmt: skip

    def quality(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> float:
        return float(((scores > 0.5) == (frame["on"].to_numpy() > 0.5)).mean())


recipe = TinyRecipe()
long = replace(recipe, name="tiny-long", training=replace(recipe.training, epochs=4))
stub = replace(recipe, name="tiny-stub", training=replace(recipe.training, global_batch_size=200, epochs=1))


class PoisonedData(TinyData):
    """The third batch holds a sample whose input is not a number."""

    def __init__(self) -> None:
        super().__init__(TRAIN, 1)
        row = Order(seed=3, size=TRAIN, epochs=2, global_batch_size=47).rows(range(2 * 47 + 5, 2 * 47 + 6))
        self.inputs[row] = np.nan


class PoisonedRecipe(TinyRecipe):
    """Trains on PoisonedData."""

    def data(self, split: str) -> TinyData:
        return PoisonedData() if split == "train" else TinyData(JUDGE, 2)


poisoned = PoisonedRecipe()
