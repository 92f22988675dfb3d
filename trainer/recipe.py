"""What a team brings: a Recipe, named by import path `package.module:NAME`. It is the whole of the coupling to their code.

Importing this module does not import torch: the flow process reads cards and contracts, only warm processes build models.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pandas as pd

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

SPLITS = ("train", "judge")


class Batch(NamedTuple):
    """B samples. `inputs` is the one tensor that training and serving feed to the model."""

    inputs: Tensor  # (B, ...) as the model's forward takes it
    labels: Tensor  # (B, ...)
    weights: Tensor  # (B,) float: what each sample counts for; ones unless the recipe weighs samples


class SplitData(Protocol):
    """One split, map-style: random access by row, a stable id for each sample."""

    sample_ids: npt.NDArray[np.int64]  # (N,) unique, the same on every machine and in every release
    frame: pd.DataFrame  # (N rows) contract columns, event time, slice and cluster columns; never fed to the model

    def __len__(self) -> int: ...

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Fetch rows (any order, repeats allowed, may be empty); the same rows give the same bytes on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What a column of the contract frame has to look like."""

    kind: str  # "number" | "category" | "time"
    max_null_share: float = 0.0  # 0..1
    minimum: float | None = None
    maximum: float | None = None
    allowed: tuple[str, ...] = ()  # closed set for a category; empty = open


@dataclass(frozen=True, slots=True, kw_only=True)
class DataContract:
    """What the inputs are, and what did not exist yet when the decision is made (the production cutoff)."""

    columns: Mapping[str, Column]  # every column of the frame that feeds the model
    label: str  # the frame's outcome column
    event_time: str  # the frame's time column, used for the train/judge split and freshness
    known_after_cutoff: tuple[str, ...]  # columns that must appear neither in `columns` nor in the frame (the label excepted)
    min_rows: Mapping[str, int]  # split -> rows
    period: Mapping[str, tuple[str, str]]  # split -> [first, last) event time, ISO; train must end before judge starts
    max_gap_days: float  # freshness: the last event of a split may be this much older than its period's end


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The optimization contract: fixed at every world size."""

    global_batch_size: int  # samples per optimizer update
    epochs: int
    lanes: int = 8  # V, a power of two; a rank runs one or more lanes
    seed: int = 0
    evaluate_every: int = 20  # steps between points of the quality curve
    clip_norm: float | None = None  # limit of the global gradient norm


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What N decisions were worth; float64 arrays of shape (N,)."""

    utility: npt.NDArray[np.float64]  # worth of the action taken, in the recipe's unit
    loss: npt.NDArray[np.float64]  # log loss, nats
    confidence: npt.NDArray[np.float64]  # probability given to the event (binary) or to the predicted class
    hit: npt.NDArray[np.float64]  # 1.0 where that event or class came true


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """Words about the recipe for people: registry page and report."""

    question: str  # what is predicted, when it is decided
    action: str  # what is done with the prediction
    utility_unit: str  # e.g. "minutes per flight"
    quality_name: str  # e.g. "ROC AUC"; higher is better
    owner: str
    notes: tuple[str, ...] = field(default=())  # known limits


@runtime_checkable
class Recipe(Protocol):
    """Everything Sea Trial needs from a team. Functions must be deterministic given their arguments and torch's seed."""

    name: str  # [a-z0-9-]+; the registered model's name
    card: Card
    training: Training
    contract: DataContract
    slices: Sequence[str]  # frame columns; each distinct value is one slice
    cluster: str  # frame column: samples sharing a value are not independent (a day, a user)
    target_quality: float  # of `quality` on the judge split

    def data(self, split: str) -> SplitData:
        """Load "train" or "judge". Called in every rank: cache what is slow under `trainer.recipe.cache_folder()`."""

    def model(self) -> nn.Module:
        """Build an untrained model; torch is seeded before. forward(inputs) -> raw outputs (B, ...)."""

    def optimizer(self, model: nn.Module) -> Optimizer: ...

    def schedule(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """A learning-rate schedule stepped once an update, or None."""

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum, weight), both scalars, never a mean: the global mean is sum over lanes / weight over lanes."""

    def scorer(self, model: nn.Module) -> nn.Module:
        """The serving module: inputs (B, ...) -> scores (B,) or (B, C), probabilities. Exported and registered."""

    def baseline(self, train: SplitData) -> nn.Module:
        """Fit a simple statistical model; a serving module with the same inputs and outputs as `scorer`'s."""

    def rule(self, frame: pd.DataFrame) -> npt.NDArray[np.float64]:
        """Scores (as `scorer`'s) of a rule a person could follow without a model."""

    def outcomes(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> Outcomes:
        """Take the recipe's action on each score and say what it was worth, now that the label is known."""

    def quality(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> float:
        """One number, higher is better, compared with `target_quality`."""
