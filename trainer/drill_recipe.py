"""The recipe that drills train: numbers drawn from a seed, so that nothing has to be fetched or prepared, and steps of a millisecond.

Is a machine part worn out? Named `trainer.drill_recipe:recipe`. What drills need of it beyond a recipe stands in `trainer.drill_scoring`.
"""

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, StepLR

from trainer.recipe import Batch, Card, Column, DataContract, Outcomes, SplitData, Training

# N = samples of a split, B = samples of a batch
FEATURES = 8
ROWS = {"train": 2048, "judge": 2400}
PERIOD = {"train": ("2024-01-01", "2024-03-01"), "judge": ("2024-03-01", "2024-04-01")}  # made up, as all of it is
COLUMNS = tuple(f"sensor_{number}" for number in range(FEATURES))
NORTH_ABOVE = 0.85  # of the first sensor: the plant in the north is hot, which is how a model can tell its parts from the others
RIGHT, WRONG = 1.0, -1.0  # worth of a decision: an hour of the fitter's time


class Parts:
    """One split; each sample is a part with FEATURES readings, and worn when their weighted sum is high."""

    def __init__(self, split: str) -> None:
        rows, seed = ROWS[split], ["train", "judge"].index(split)
        draw = np.random.default_rng([20240101, seed])
        self.inputs = draw.uniform(0, 1, size=(rows, FEATURES)).astype(np.float32)
        noise = draw.normal(scale=0.05, size=rows)
        self.labels = (self.inputs @ np.linspace(-1, 1, FEATURES) + noise > 0).astype(np.float32)
        self.sample_ids = np.arange(rows, dtype=np.int64) + seed * 100_000
        at = pd.date_range(*PERIOD[split], periods=rows + 1)[:-1]
        self.frame = pd.DataFrame({
            "at": at, "day": at.strftime("%Y-%m-%d"), "worn": self.labels,
            "plant": np.where(self.inputs[:, 0] > NORTH_ABOVE, "north", "south"),
            "shift": np.where(np.arange(rows) % 3 == 0, "night", "day"),
        } | {name: self.inputs[:, place].astype(np.float64) for place, name in enumerate(COLUMNS)})  # fmt: skip

    def __len__(self) -> int:
        return len(self.sample_ids)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Fetch rows: inputs (B, FEATURES), labels (B,), weights (B,) of one."""
        return Batch(torch.from_numpy(self.inputs[rows]), torch.from_numpy(self.labels[rows]), torch.ones(len(rows)))


class Probability(nn.Module):
    """Serving module: inputs (B, FEATURES) -> the chance that each part is worn (B,)."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.sigmoid(self.model(inputs)).squeeze(-1)


class DrillRecipe:
    """The recipe."""

    name = "drill"
    card = Card(
        question="Is this part worn out? Decided at the inspection.", action="Change it when it is more likely worn than not.",
        utility_unit="hours saved per part", quality_name="accuracy", owner="on call", notes=("Made-up data: it exists to be broken.",),
    )  # fmt: skip
    training = Training(global_batch_size=64, epochs=8, lanes=8, seed=5, evaluate_every=50)
    contract = DataContract(
        columns=dict.fromkeys(COLUMNS, Column(kind="number", minimum=0.0, maximum=1.0)), label="worn", event_time="at",
        known_after_cutoff=("found",), min_rows={"train": 1000, "judge": 1000}, period=PERIOD, max_gap_days=1.0,
    )  # fmt: skip
    slices = ("plant", "shift")
    cluster = "day"
    target_quality = 0.8

    def data(self, split: str) -> Parts:
        return Parts(split)

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.LayerNorm(16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def optimizer(self, model: nn.Module) -> Optimizer:
        return AdamW(model.parameters(), lr=0.01)

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler:
        return StepLR(optimizer, step_size=max(1, steps // 3), gamma=0.5)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Summed log loss and summed weight of a batch."""
        each = nn.functional.binary_cross_entropy_with_logits(model(batch.inputs).squeeze(-1), batch.labels, reduction="none")
        return (each * batch.weights).sum(), batch.weights.sum()

    def scorer(self, model: nn.Module) -> nn.Module:
        return Probability(model)

    def baseline(self, train: SplitData) -> nn.Module:
        """Least squares on the readings, through a sigmoid."""
        batch = train.batch(np.arange(len(train)))
        design = torch.cat([batch.inputs, torch.ones(len(batch.inputs), 1)], dim=1).double()
        weights = torch.linalg.lstsq(design, batch.labels.double()[:, None] * 2 - 1).solution.float()
        linear = nn.Linear(FEATURES, 1)
        with torch.no_grad():
            linear.weight.copy_(weights[:FEATURES].T)
            linear.bias.copy_(weights[FEATURES])
        return Probability(linear)

    def rule(self, frame: pd.DataFrame) -> npt.NDArray[np.float64]:
        """The last sensor above its middle."""
        return np.where(frame[COLUMNS[-1]].to_numpy() > 0.5, 0.75, 0.25)

    def outcomes(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> Outcomes:
        """Change the part when it is more likely worn than not."""
        worn = frame["worn"].to_numpy() > 0.5
        chance = np.clip(scores, 1e-6, 1 - 1e-6)
        right = (scores > 0.5) == worn
        utility = np.where(np.isnan(scores), np.nan, np.where(right, RIGHT, WRONG))
        return Outcomes(utility=utility, loss=-np.log(np.where(worn, chance, 1 - chance)), confidence=scores, hit=worn.astype(np.float64))

    def quality(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> float:
        """Share of right decisions; NaN if a score is NaN."""
        if not len(frame) or np.isnan(scores).any():
            return float("nan")
        return float(((scores > 0.5) == (frame["worn"].to_numpy() > 0.5)).mean())


recipe = DrillRecipe()
