"""Samples have to be told apart, and there have to be as many of them every time. Torch-free."""

import numpy as np

from trainer.recipe import Recipe, SplitData
from validation.errors import DataError

LARGEST_ID = 2**63 - 1  # of int64, as ledgers hold them


def check_ids(recipe: Recipe, split: str, data: SplitData, *, size: int | None = None) -> None:
    """Refuse a split whose samples cannot be told apart, or whose length changes. Raises DataError.

    Args: size, the length that was seen before. Ask again after a fetch: some code learns only then how many samples there are.
    """
    lengths = [*([] if size is None else [size]), len(data), len(data)]
    if len(set(lengths)) > 1:
        raise DataError(
            f"recipe {recipe.name}: the length of split '{split}' changes: {' and then '.join(map(str, lengths))}. Epochs, order and "
            "ledger are made for one length, so samples would be missed or repeated. Count and filter when data() loads the split, then "
            "keep the number."
        )
    ids = data.sample_ids
    if not (isinstance(ids, np.ndarray) and ids.ndim == 1 and (ids.dtype.kind in "iu" or not len(ids))):
        shown = f"an array of {ids.dtype}, shape {ids.shape}" if isinstance(ids, np.ndarray) else f"a {type(ids).__name__}"
        raise DataError(
            f"recipe {recipe.name}: sample_ids of split '{split}' is {shown}. Samples are told apart by whole numbers. Give a numpy array "
            "of int64, shape (N,): a key of your table, or np.arange(N) where the order never changes."
        )
    if len(ids) and int(ids.max()) > LARGEST_ID:
        raise DataError(
            f"recipe {recipe.name}: sample_ids of split '{split}' reach {ids.max()}, more than {LARGEST_ID}. A ledger holds int64, "
            "where such an id would come out as another one. Give smaller numbers: keep 63 bits of a hash, or number the rows."
        )
    if len(ids) != len(data):
        raise DataError(
            f"recipe {recipe.name}: split '{split}' has {len(data)} samples and {len(ids)} ids. It cannot be told which sample was trained "
            "on. Give one id for each sample, in the same order; filter both alike."
        )
    values, counts = np.unique(ids, return_counts=True)
    if len(values) < len(ids):
        twice = values[counts > 1]
        raise DataError(
            f"recipe {recipe.name}: {len(twice)} sample ids of split '{split}' stand for several ({', '.join(map(str, twice[:3]))}). "
            "A sample that is left out could not be told from one that is repeated. Give each row an id of its own: drop duplicate rows, "
            "or number them."
        )
