"""A recipe under hard conditions: small, uneven and everything switched on, so that a fault shows. Torch-free until it is asked.

The kinds of silent errors that people met are invisible on easy input: equal batches hide a wrong mean, a limit that is never reached
hides wrong clipping, one epoch hides a wrong order. So gates train `hardened(recipe, conditions)`, the same recipe on another Training and
on fewer samples. What it is made of is in evidence, and so is what a recipe excludes: excludes = {"clipping": "reason"}.

B = samples of a batch, W = ranks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import numpy.typing as npt

from trainer.conditions import Chosen as Chosen
from trainer.config import Conditions
from trainer.recipe import Batch, Recipe, SplitData, Training
from trainer.streams import RAGGED, sample_keys

if TYPE_CHECKING:
    import pandas as pd

    from trainer.streams import Words

Rows = npt.NDArray[np.int64]

LARGEST_EXPONENT = 3  # ragged weights are powers of two from 2**-3 to 2**3: exact, so that nothing is rounded by weighing
TRIED = 8  # rows that are fetched twice to see whether data draws random numbers

_MEMBERS = (
    "name", "card", "contract", "slices", "cluster", "target_quality", "model", "optimizer", "schedule", "loss", "scorer", "baseline",
    "rule", "outcomes", "quality",
)  # fmt: skip


def hardened(recipe: Recipe, conditions: Conditions | None, *, dropout: bool = True) -> Recipe:
    """The same recipe on the conditions' Training and samples; the recipe itself for None.

    Args: dropout, False for runs that are compared with a reference: data that draws random numbers without a key then draws the same ones
        for a sample wherever and whenever it is fetched.
    The recipe's own methods see the recipe itself: a schedule that reads `self.training` reads the untouched one, in every run alike.
    """
    return recipe if conditions is None else cast(Recipe, _Hardened(recipe, conditions, dropout=dropout))


class _Hardened:
    """Another `training` and smaller splits; all else is the recipe's own."""

    def __init__(self, recipe: Recipe, conditions: Conditions, *, dropout: bool) -> None:
        self._recipe, self._conditions, self._dropout = recipe, conditions, dropout
        self.training: Training = replace(
            recipe.training, global_batch_size=conditions.global_batch_size, accumulation=conditions.accumulation,
            epochs=conditions.epochs, clip_norm=conditions.clip_norm,
        )  # fmt: skip
        for name in _MEMBERS:  # a protocol's check looks for members in the object itself, not through __getattr__
            setattr(self, name, getattr(recipe, name))

    def data(self, split: str) -> SplitData:
        """The split, cut to the conditions' rows; train samples perhaps weighed."""
        data, asked = self._recipe.data(split), self._conditions
        is_train = split == "train"
        rows = spread(asked.samples if is_train else asked.judged, len(data))
        kind = _KeyedCut if hasattr(data, "keyed_batch") else _Cut
        cut = kind(data, rows, weighed=is_train and asked.ragged_weights, still=is_train and not self._dropout)
        return cast(SplitData, cut)  # its frame is made when first asked for

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_recipe":
            raise AttributeError(name)  # asked while a copy is made: there is no recipe yet
        return getattr(self._recipe, name)


def spread(wanted: int, size: int) -> Rows:
    """`wanted` rows, evenly spread over a split of `size`; all when there are no more."""
    count = min(wanted, size)
    return np.arange(count, dtype=np.int64) * size // max(count, 1)


def ragged_weights(sample_ids: Rows) -> npt.NDArray[np.float32]:
    """What each sample counts for under hard conditions: a power of two by its id alone, (N,)."""
    drawn = sample_keys(RAGGED, np.zeros_like(sample_ids), sample_ids) % np.uint64(2 * LARGEST_EXPONENT + 1)
    return np.exp2(drawn.astype(np.float32) - LARGEST_EXPONENT)


class _Cut:
    """Some rows of a split, a SplitData again."""

    def __init__(self, data: SplitData, rows: Rows, *, weighed: bool, still: bool) -> None:
        self._data, self._rows = data, rows
        self.sample_ids: Rows = np.asarray(data.sample_ids)[rows]
        self._factors = ragged_weights(self.sample_ids) if weighed else None
        self._still = still and not hasattr(data, "keyed_batch") and draws_without_key(data.batch, rows[:TRIED])

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def frame(self) -> "pd.DataFrame":
        """The rows' frame."""
        return self._data.frame.iloc[self._rows].reset_index(drop=True)

    def batch(self, rows: Rows) -> Batch:
        """Fetch rows of the cut split, (B,)."""
        return self._weighed(self._one_by_one(rows) if self._still and len(rows) else self._data.batch(self._rows[rows]), rows)

    def _one_by_one(self, rows: Rows) -> Batch:
        """Each sample from streams that its id alone starts: the same wherever it is fetched."""
        import torch

        from trainer.dataset import kept_streams, seed_streams

        parts = []
        with kept_streams():
            for row, key in zip(rows, sample_keys(0, np.zeros_like(rows), self.sample_ids[rows]), strict=True):
                seed_streams(int(key))
                parts.append(self._data.batch(self._rows[row : row + 1]))
        return Batch(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def _weighed(self, batch: Batch, rows: Rows) -> Batch:
        if self._factors is None or not batch.weights.is_floating_point():
            return batch
        import torch

        factors = torch.from_numpy(self._factors[rows]).to(batch.weights.dtype)
        return batch._replace(weights=batch.weights * factors.view(-1, *[1] * (batch.weights.ndim - 1)))

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"the splits that gates train on have batch, keyed_batch, sample_ids and frame, and no '{name}': they hold some of the rows "
            "only. Ask data.batch(rows) or data.keyed_batch(rows, keys)."
        )


class _KeyedCut(_Cut):
    """The same of a split whose samples are drawn from keys."""

    def keyed_batch(self, rows: Rows, keys: "Words") -> Batch:
        """Fetch rows of the cut split, (B,), each with its own stream."""
        return self._weighed(self._data.keyed_batch(self._rows[rows], keys), rows)  # type: ignore[attr-defined]  # an optional member


def draws_without_key(fetch: Callable[[Rows], Batch], rows: Rows) -> bool:
    """Whether the same rows come out otherwise when the global random streams stand elsewhere."""
    import torch

    from trainer.dataset import kept_streams, seed_streams

    seen = []
    with kept_streams():
        for seed in (1, 2):
            seed_streams(seed)
            seen.append(fetch(rows))
    return not all(torch.equal(one, other) for one, other in zip(*seen, strict=True))


def choose(recipe_path: str, world_sizes: Sequence[int], steps: int) -> Chosen:
    """Choose conditions that are as hard as a recipe and its data let them be, for runs of `steps` updates. Takes a warm process.

    Raises: RecipeError or DataError when the recipe cannot be asked, or excludes something that is no condition.
    """
    from trainer.choosing import chosen
    from trainer.recipe import load_recipe

    return chosen(load_recipe(recipe_path), tuple(world_sizes), steps)
