"""A recipe with a live split, and models of it: does a lamp's reading mean that it is on? Requests come in all day long.

LAMPS_NOW is how late it is: requests after it have not come yet. LAMPS_LOST is a day whose outcomes never come.
"""

import os

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from tiny_recipe import TinyRecipe, weighted_loss
from torch import Tensor, nn

from trainer.recipe import Batch, Column, DataContract, Outcomes, Training

FEATURES, PER_DAY = 3, 120
PERIODS = {"train": ("2025-01-01", 8), "judge": ("2025-06-01", 4), "live": ("2026-01-01", 12)}  # first day, days
ALWAYS = "2027-01-01"


class Lamps:
    """One split: PER_DAY rows a day, evenly over it; every fortieth is a lamp that was taken down."""

    def __init__(self, split: str) -> None:
        first, days = PERIODS[split]
        draw = np.random.default_rng(len(split))
        self.inputs = draw.normal(size=(days * PER_DAY, FEATURES)).astype(np.float32)
        when = pd.Timestamp(first) + pd.to_timedelta(np.arange(len(self.inputs)) * (1440 // PER_DAY), "min")
        on = (self.inputs.sum(axis=1) + draw.normal(size=len(self.inputs)) > 0).astype(np.float64)
        self.sample_ids = np.arange(len(self.inputs), dtype=np.int64) + 10_000 * (split == "live")
        self.frame = pd.DataFrame(self.inputs, columns=["x0", "x1", "x2"]).assign(
            colour=np.where(np.arange(len(on)) % 3 == 0, "red", "blue"), on=on, when=when, day=when.strftime("%Y-%m-%d")
        )
        if split == "live":
            self._as_of(os.environ.get("LAMPS_NOW", ALWAYS), os.environ.get("LAMPS_LOST", ""))

    def _as_of(self, now: str, lost: str) -> None:
        down = np.arange(len(self.frame)) % 40 == 0
        self.frame = self.frame.assign(
            on=self.frame["on"].mask(down | (self.frame["day"] == lost).to_numpy()), excluded=np.where(down, "taken down", "")
        )
        come = (self.frame["when"] < pd.Timestamp(now)).to_numpy()
        self.frame, self.inputs, self.sample_ids = self.frame[come].reset_index(drop=True), self.inputs[come], self.sample_ids[come]

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        labels = self.frame["on"].to_numpy(np.float32)[rows]
        return Batch(torch.from_numpy(self.inputs[rows]), torch.from_numpy(labels), torch.ones(len(rows)))


class LampsRecipe(TinyRecipe):
    """Switch on what is taken for on: +1 when right, -1 when wrong."""

    live_period = ("2026-01-01", "2026-01-13")

    def data(self, split: str) -> Lamps:
        return Lamps(split)

    def outcomes(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> Outcomes:
        assert frame["on"].notna().all(), "an outcome was asked for that nobody knows"
        on = frame["on"].to_numpy(np.float64)
        worth = np.where((scores > 0.5) == (on > 0.5), 1.0, -1.0)
        chance = np.clip(np.where(on > 0.5, scores, 1 - scores), 1e-6, 1)
        return Outcomes(utility=np.where(np.isnan(scores), np.nan, worth), loss=-np.log(chance), confidence=scores, hit=on)


recipe = LampsRecipe(
    name="lamps", training=Training(global_batch_size=64, epochs=1), make_loss=weighted_loss, slices=("colour",), cluster="day",
    contract=DataContract(
        columns={name: Column(kind="number", minimum=-9, maximum=9) for name in ("x0", "x1", "x2")} | {"colour": Column(kind="category")},
        label="on", event_time="when", known_after_cutoff=(), min_rows={"train": 1, "judge": 1},
        period={"train": ("2025-01-01", "2025-02-01"), "judge": ("2025-06-01", "2025-07-01")}, max_gap_days=99.0,
    ),
)  # fmt: skip


class Reader(nn.Module):
    """Scores by the sum of the readings; `slope` below zero is a model that takes on for off, `hole` one that cannot read bright ones."""

    def __init__(self, slope: float, hole: float) -> None:
        super().__init__()
        self.slope, self.hole = slope, hole

    def forward(self, inputs: Tensor) -> Tensor:
        scores = torch.sigmoid(self.slope * inputs.sum(-1))
        return torch.where(inputs[:, 0] > self.hole, torch.full_like(scores, torch.nan), scores)


def reader(slope: float = 1.0, hole: float = 99.0) -> nn.Module:
    """The builder that `log_model` is given."""
    return Reader(slope, hole)


def rows() -> npt.NDArray[np.float32]:
    """Its example."""
    return Lamps("judge").inputs[:2]
