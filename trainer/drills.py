"""Data faults planted for release drills: a candidate that is really worse, so that a gate can be seen refusing it."""

from typing import cast

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from trainer.config import DRILLS
from trainer.dataset import fetch_keyed
from trainer.recipe import Batch, Recipe, SplitData
from trainer.streams import Words
from validation.errors import ConfigError

DRILL_SHARE = 0.10  # of the train split that the chosen slice should hold: enough to learn from, too little to show in the mean
SCAN_ROWS = 8192


def drill_slice(recipe: Recipe, frame: pd.DataFrame) -> tuple[str, str]:
    """Choose the (column, value) whose share of the train frame is closest to a tenth; ties by name."""
    found = []
    for column in recipe.slices:
        shares = frame[column].astype(str).value_counts(normalize=True)
        found += [(abs(float(share) - DRILL_SHARE), column, str(value)) for value, share in shares.items()]
    if not found:
        raise ConfigError("the drill 'slice-regression' needs a slice, and the recipe names none. Add slice columns to the recipe.")
    _, column, value = min(found)
    return column, value


def drilled(drill: str, recipe: Recipe, train: SplitData) -> SplitData:
    """The train split under a drill; "" is the split itself. Raises ConfigError for a drill that nobody wrote."""
    if not drill:
        return train
    if drill not in DRILLS:
        raise ConfigError(f"training drill '{drill}' is unknown: nothing would be planted. Use one of: {', '.join(DRILLS)}.")
    column, value = drill_slice(recipe, train.frame)
    return RelabelledData(train, (train.frame[column].astype(str) == value).to_numpy(dtype=bool))


class RelabelledData:
    """A split in which the labels of some rows are moved to the next distinct label (binary: flipped; classes: shifted in a ring)."""

    def __init__(self, data: SplitData, inside: npt.NDArray[np.bool_]) -> None:
        self.sample_ids = data.sample_ids
        self.frame = data.frame
        self._data = data
        self._inside = inside  # (N,) rows to relabel
        self._values = _distinct_labels(data)

    def __len__(self) -> int:
        return len(self._data)

    def batch(self, rows: npt.NDArray[np.int64]) -> Batch:
        """Fetch rows, with the labels of the chosen ones moved."""
        return self._moved(rows, self._data.batch(rows))

    def keyed_batch(self, rows: npt.NDArray[np.int64], keys: Words) -> Batch:
        """Fetch rows by the keys of their random streams where the split has such."""
        return self._moved(rows, fetch_keyed(self._data, rows, keys))

    def _moved(self, rows: npt.NDArray[np.int64], batch: Batch) -> Batch:
        following = (torch.searchsorted(self._values, batch.labels.contiguous()) + 1) % len(self._values)
        inside = torch.from_numpy(self._inside[rows]).view(-1, *([1] * (batch.labels.ndim - 1)))
        return batch._replace(labels=torch.where(inside, self._values[following], batch.labels))


def _distinct_labels(data: SplitData) -> Tensor:
    """Sorted distinct labels of the whole split."""
    chunks = [np.arange(start, min(start + SCAN_ROWS, len(data))) for start in range(0, len(data), SCAN_ROWS)]
    return cast(Tensor, torch.unique(torch.cat([torch.unique(data.batch(rows).labels) for rows in chunks])))
