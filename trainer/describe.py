"""A recipe as plain values, for the process that decides and never imports torch. Runs in a warm process."""

import hashlib
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from trainer.order import Order
from trainer.recipe import SPLITS, Batch, Card, DataContract, Recipe, SplitData, Training, code_digest, load_recipe
from trainer.sample_ids import check_ids
from validation.canonical import digest, sha256_hex
from validation.errors import DataError, RecipeError, ReleaseError

Rows = npt.NDArray[np.int64]

CHUNK_ROWS = 16384  # bounds memory while the content is digested


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeFacts:
    """What the rest of a release has to know about a recipe."""

    path: str  # import path as given
    name: str
    card: Card
    training: Training
    contract: DataContract
    slices: tuple[str, ...]
    cluster: str
    target_quality: float
    steps: int  # optimizer updates of a full training
    code_sha256: str  # sources of the recipe and of what it imports from its own package
    data_sha256: str  # both splits: ids, contract frames, inputs, labels and weights
    rows: dict[str, int]  # split -> samples
    brought: tuple[str, ...] = ()  # hooks that the recipe brings itself, in the order of a run: trainer.hooks


def describe(recipe_path: str, folder: str) -> RecipeFacts:
    """Load a recipe and both splits, check them, and leave the contract frames as `<folder>/<split>.parquet`.

    Raises RecipeError or DataError before anything of a release exists.
    """
    recipe = load_recipe(recipe_path)
    digests: dict[str, str] = {}
    rows: dict[str, int] = {}
    for split in SPLITS:
        data = _loaded(recipe, split)
        check_ids(recipe, split, data)
        frame = _checked_frame(recipe, split, data)
        frame.to_parquet(Path(folder) / f"{split}.parquet", use_dictionary=False)  # read twice, on this machine: half the time
        frame_sha256 = sha256_hex(pd.util.hash_pandas_object(frame, index=False).to_numpy().tobytes())
        digests[split] = digest([frame_sha256, _content_sha256(recipe, split, data)])
        rows[split] = len(frame)
        check_ids(recipe, split, data, size=len(frame))
    training = recipe.training
    return RecipeFacts(
        path=recipe_path, name=recipe.name, card=recipe.card, training=training, contract=recipe.contract,
        slices=tuple(recipe.slices), cluster=recipe.cluster, target_quality=recipe.target_quality,
        steps=Order.of(training, rows["train"]).steps if rows["train"] else 0,  # an empty split is for the data contract to judge
        code_sha256=code_digest(recipe_path), data_sha256=digest(digests), rows=rows, brought=_brought(recipe),
    )  # fmt: skip


def training_of(recipe_path: str) -> Training:
    """A recipe's optimization contract alone; loads no data. Raises RecipeError."""
    return load_recipe(recipe_path).training


def _brought(recipe: Recipe) -> tuple[str, ...]:
    from trainer.hooks import brought, hooks_of  # torch, which only warm processes have

    return brought(hooks_of(recipe))


def _content_sha256(recipe: Recipe, split: str, data: SplitData) -> str:
    """sha256 over inputs, labels and weights of every row in order, read in chunks; data that draws random numbers draws the same ones."""
    from torch import uint8  # which only warm processes have

    from trainer.dataset import seed_streams

    seen = hashlib.sha256()
    for start in range(0, len(data), CHUNK_ROWS):
        seed_streams(start)
        for part in _batch(recipe, split, data, np.arange(start, min(start + CHUNK_ROWS, len(data)))):
            seen.update(f"{part.dtype}{tuple(part.shape)}".encode())
            seen.update(part.detach().contiguous().reshape(-1).view(uint8).numpy().tobytes())  # numpy has no bfloat16
    return seen.hexdigest()


def _batch(recipe: Recipe, split: str, data: SplitData, rows: Rows) -> Batch:
    """Rows of a split as they are judged. Raises RecipeError for what its code raises, and for what is no batch of tensors."""
    from torch import Tensor

    with _named(recipe, f"data('{split}').batch(rows)"):
        batch = data.batch(rows)
    if not (isinstance(batch, tuple) and len(batch) == 3 and all(isinstance(part, Tensor) for part in batch)):
        raise RecipeError(
            f"recipe {recipe.name}: data('{split}').batch(rows) returned a {type(batch).__name__}, not three tensors. There is nothing to "
            "train on or to judge. Return Batch(inputs, labels, weights), each with one entry a row."
        )
    return batch


def _checked_frame(recipe: Recipe, split: str, data: SplitData) -> pd.DataFrame:
    """The split's frame with its sample ids in front, checked against the split itself."""
    frame = data.frame
    if not len(frame) == len(data) == len(data.sample_ids):
        raise DataError(
            f"recipe {recipe.name}: split '{split}' has {len(data)} samples, {len(data.sample_ids)} ids and a frame of {len(frame)} rows. "
            "Slices could not be joined to predictions. Return one frame row and one id for each sample, in the same order."
        )
    wanted = {*recipe.slices, recipe.cluster, recipe.contract.label, recipe.contract.event_time}
    if absent := sorted(wanted - set(frame.columns)):
        raise DataError(
            f"recipe {recipe.name}: the frame of split '{split}' has no column {absent}. Add it to the frame or correct the recipe."
        )
    for column in frame.columns:
        if not pd.api.types.is_hashable(frame[column].iloc[0] if len(frame) else 0):
            raise DataError(
                f"recipe {recipe.name}: frame column '{column}' holds {type(frame[column].iloc[0]).__name__} objects. Give plain values."
            )
    return frame.assign(sample_id=data.sample_ids).reset_index(drop=True)


def _loaded(recipe: Recipe, split: str) -> SplitData:
    with _named(recipe, f"data('{split}')"):
        return recipe.data(split)


@contextmanager
def _named(recipe: Recipe, call: str) -> Iterator[None]:
    """What the recipe's own loading raises becomes a RecipeError that names the call."""
    try:
        yield
    except ReleaseError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-2:]).rstrip()
        raise RecipeError(
            f"recipe {recipe.name}: {call} raised {type(error).__name__}: {error}. There is nothing to train on, so nothing was "
            f"started. Mend the recipe's loader:\n{trace}"
        ) from error
