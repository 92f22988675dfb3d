"""What a team brings: a Recipe, named by import path `package.module:NAME`. It is the whole of the coupling to their code.

Importing this module does not import torch: the flow process reads cards and contracts, only warm processes build models.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import pandas as pd

from trainer.recipe_code import code_digest as code_digest
from trainer.recipe_code import import_code, split_path
from validation.contract import Column as Column
from validation.contract import DataContract as DataContract
from validation.errors import ConfigError, RecipeError

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

SPLITS = ("train", "judge")
LIVE = "live"  # a third one, of recipes with a `live_period`: what a version in service is asked


class Batch(NamedTuple):
    """B samples. `inputs` is the one tensor that training and serving feed to the model."""

    inputs: Tensor  # (B, ...) as the model's forward takes it
    labels: Tensor  # (B, ...)
    weights: Tensor  # (B,) float: what each sample counts for; ones unless the recipe weighs samples


class SplitData(Protocol):
    """One split, map-style: random access by row, a stable id for each sample.

    A split whose samples are drawn anew in every epoch (augmentation) also has `keyed_batch(rows, keys) -> Batch`: keys, (B,) uint64, seed
    each sample's own random stream and are made of the run's seed, the epoch and the sample id alone, so that the same sample looks the
    same whoever fetches it. Training calls it where it is; judging and digests call `batch`. `trainer.dataset.MapSplit` has it for any
    torch map-style dataset. A `batch` that draws random numbers finds the streams of torch, numpy and random seeded for its rows.

    A split whose `batch` depends on its rows alone, draws nothing and changes nothing, may say so with an attribute `pure = True`: the next
    batch is then fetched by a thread while gradients are computed, where there are more cores than ranks. The claim is tried before the
    first step.
    """

    sample_ids: npt.NDArray[np.int64]  # (N,) unique, the same on every machine and in every release
    frame: pd.DataFrame  # (N rows) contract columns, event time, slice and cluster columns; never fed to the model

    def __len__(self) -> int: ...

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Fetch rows (any order, repeats allowed, may be empty); the same rows give the same bytes on every rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """The optimization contract: fixed at every world size."""

    global_batch_size: int  # samples per optimizer update
    epochs: int
    lanes: int = 8  # V, a power of two; a rank runs one or more lanes
    seed: int = 0
    evaluate_every: int = 20  # steps between points of the quality curve
    clip_norm: float | None = None  # limit of the global gradient norm
    accumulation: int = 1  # micro-batches that each lane is cut into, run one after the other: bounds activation memory
    tail: Literal["keep", "drop"] = "keep"  # the run's last, smaller batch: trained on, or left out
    autocast: Literal["", "bfloat16", "float16"] = ""  # type of the forward pass; weights, gradients and optimizer stay float32
    loss_scale: float | None = None  # first scale of the loss (float16): halved and the update skipped on overflow, doubled when long calm
    ema_decay: float | None = None  # an exponential moving average of the weights is kept, and it is what serves
    loader_workers: int = 0  # processes a rank that fetch batches ahead; 0 = the rank fetches by itself


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
    """Everything Sea Trial needs from a team. Functions must be deterministic given their arguments and torch's seed.

    A recipe that changes while it trains may also have `state_dict() -> dict` (plain values, the same on every rank) and
    `load_state_dict(state)`: they are in every checkpoint and in the state's digest. For FSDP2 it may name the modules that are sharded
    one by one, `shard_units(model) -> Iterable[nn.Module]`; default: the members of every nn.ModuleList, then the whole.

    A recipe whose models are watched in service (docs/monitoring.md) also has `live_period: tuple[str, str]`, (first, last) ISO times,
    last "" when it goes on, and `data("live")`: the requests of that time, made exactly as the judge split's rows, with nothing from
    after each one's event time but its label, null until the outcome is known, and, where there never is one, the reason for that in the
    text column `excluded`.
    """

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


def cache_folder() -> Path:
    """Folder for what recipes prepare once: $SEATRIAL_CACHE, else $SEATRIAL_HOME/cache, else ./.seatrial/cache; created.

    Raises: ConfigError when it cannot be created.
    """
    home = os.environ.get("SEATRIAL_HOME") or ".seatrial"
    folder = Path(os.environ.get("SEATRIAL_CACHE") or Path(home) / "cache").expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder} cannot be created ({error}). Recipes have nowhere to keep prepared data, so nothing was "
            "started. Set SEATRIAL_CACHE to a folder that can be written."
        ) from None
    return folder


def load_recipe(path: str) -> Recipe:
    """Import a recipe and check every member, so that a mistake is told before the first step and not in rank 3.

    Args: path, a shipped recipe's short name or "package.module:NAME"; modules in the current directory are found too.
    Raises: RecipeError naming all that is wrong.
    """
    from trainer.recipe_checks import problems_of  # it knows the classes of this module

    module, name = split_path(path)
    loaded = import_code(path, module)
    if not hasattr(loaded, name):
        offered = ", ".join(key for key, value in vars(loaded).items() if isinstance(value, Recipe) and not isinstance(value, type))
        raise RecipeError(
            f"module {module} has no '{name}'. There is no recipe to release, so nothing was started. "
            f"Recipes found in it: {offered or 'none'}; name one as {module}:NAME."
        )
    recipe = getattr(loaded, name)
    problems = list(problems_of(recipe))
    if problems:
        raise RecipeError(
            f"recipe '{path}' cannot be used: {'; '.join(problems)}. Its runs could not be judged, so nothing was started. "
            "Mend these members; trainer/recipe.py says what each has to be."
        )
    return recipe  # type: ignore[no-any-return]  # every member was checked
