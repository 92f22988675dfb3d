"""Samples as a function of (seed, epoch, sample id): keyed random streams, and any torch map-style dataset as a SplitData.

B = samples asked for, N = samples of the split.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor

from trainer.recipe import Batch, SplitData
from trainer.streams import Words, sample_keys
from validation.errors import DataError, RecipeError

Rows = npt.NDArray[np.int64]

_NUMPY = 1  # numpy and Python seed the same generator in the same way: one more word keeps their draws apart
_NAMED = 8  # rows that an error names


class MapStyle(Protocol):
    """A torch map-style dataset."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any:
        """(input, label) or (input, label, weight): tensors, arrays or numbers."""


def seed_streams(key: int) -> None:
    """Start the global streams: torch's on the CPU, numpy's and Python's. `key` is a 64-bit integer."""
    # torch.manual_seed draws the same bits, and takes up to 0.3 ms to reach every backend
    torch.default_generator.manual_seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32, _NUMPY])
    random.seed(key)


@contextmanager
def kept_streams() -> Iterator[None]:
    """Put these streams back to where they were."""
    of_torch, of_numpy, of_python = torch.default_generator.get_state(), np.random.get_state(legacy=False), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(of_torch)
        np.random.set_state(of_numpy)
        random.setstate(of_python)


def fetch(data: SplitData, rows: Rows, keys: Words) -> Batch:
    """Fetch rows for training: the same bytes in the same layout in every process, whatever was fetched before.

    Args: rows (B,); keys (B,), of the samples' own streams. Data code that is not keyed by sample finds its streams seeded by the first.
    Raises: RecipeError when the recipe returns no Batch of B samples; whatever its code raises, with the rows as a note.
    """
    if len(keys):
        seed_streams(int(keys[0]))
    try:
        return _checked(fetch_keyed(data, rows, keys), rows)
    except Exception as error:
        error.add_note(f"raised while {_named(rows)} of the train split were fetched")
        raise


def fetch_keyed(data: SplitData, rows: Rows, keys: Words) -> Batch:
    """`keyed_batch` where the split has it, else `batch`."""
    keyed = getattr(data, "keyed_batch", None)
    return data.batch(rows) if keyed is None else keyed(rows, keys)


def _checked(batch: object, rows: Rows) -> Batch:
    if not (isinstance(batch, tuple) and len(batch) == 3 and all(isinstance(part, Tensor) and part.ndim for part in batch)):
        raise RecipeError(
            f"data('train').batch(rows) returned a {type(batch).__name__}, not three tensors. There is nothing to train on. Return "
            "Batch(inputs, labels, weights), each with one entry a row."
        )
    if any(len(part) != len(rows) for part in batch):
        raise RecipeError(
            f"data('train').batch(rows) returned {', '.join(str(len(part)) for part in batch)} inputs, labels and weights for "
            f"{len(rows)} rows. Samples would be lost or counted twice. Return one of each a row, repeated rows too."
        )
    # a copy drops gaps and keeps the order of dimensions: what a loader worker hands over has this layout, too
    return Batch(*(part if part.is_contiguous() else part.clone() for part in batch))


def _named(rows: Rows) -> str:
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    return f"rows {', '.join(map(str, rows[:_NAMED]))}{more}"


class MapSplit:
    """A SplitData over a map-style dataset, whose random augmentation belongs to the sample and the epoch.

    Before each `dataset[i]` the streams of torch, numpy and Python are seeded by (run's seed, epoch, sample id); afterwards they are where
    they were. So a sample looks the same whoever fetches it, at any world size, in any loader worker and after any resume. Generators that
    the dataset makes for itself have to be seeded from one of these streams. Without keys (judging, digests) epoch 0 of seed 0 is taken.
    """

    def __init__(self, dataset: MapStyle, frame: pd.DataFrame, sample_ids: Rows | None = None) -> None:
        """Args: frame, a row a sample; sample_ids (N,), unique; default 0..N-1. Raises: DataError when their numbers differ."""
        self.sample_ids = np.arange(len(dataset), dtype=np.int64) if sample_ids is None else np.asarray(sample_ids, dtype=np.int64)
        self.frame = frame
        self._dataset = dataset
        if not len(dataset) == len(frame) == len(self.sample_ids):
            raise DataError(
                f"the dataset has {len(dataset)} samples, its frame {len(frame)} rows and there are {len(self.sample_ids)} ids. They could "
                "not be told which belongs to which. Give MapSplit one frame row and one id for each sample, in the dataset's order."
            )

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, rows: Rows) -> Batch:
        """Fetch rows as they look in epoch 0 of seed 0."""
        return self.keyed_batch(rows, sample_keys(0, np.zeros_like(rows), self.sample_ids[rows]))

    def keyed_batch(self, rows: Rows, keys: Words) -> Batch:
        """Fetch rows, (B,), each with its own stream seeded by its key, (B,)."""
        with kept_streams():
            samples = [self._sample(int(row), int(key)) for row, key in zip(rows, keys, strict=True)]
            if not samples and len(self):  # the shape of no samples is that of some, cut off
                return Batch(*(part[:0] for part in self.keyed_batch(np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.uint64))))
        return Batch(*(self._stacked(rows, name, [sample[place] for sample in samples]) for place, name in enumerate(Batch._fields)))

    def _sample(self, row: int, key: int) -> tuple[Tensor, ...]:
        seed_streams(key)
        try:
            sample = self._dataset[row]
        except Exception as error:
            error.add_note(f"raised by dataset[{row}], sample {self.sample_ids[row]}")
            raise
        if not (isinstance(sample, tuple | list) and len(sample) in (2, 3)):
            raise RecipeError(
                f"dataset[{row}] returned a {type(sample).__name__}, which is no sample. Return (input, label) or (input, label, weight)."
            )
        return tuple(torch.as_tensor(part) for part in (*sample, *([1.0] if len(sample) == 2 else [])))

    def _stacked(self, rows: Rows, name: str, parts: list[Tensor]) -> Tensor:
        if not parts:
            return torch.empty(0)
        if other := next((place for place, part in enumerate(parts) if (part.shape, part.dtype) != (parts[0].shape, parts[0].dtype)), 0):
            first, part = parts[0], parts[other]
            raise RecipeError(
                f"the {name} of dataset[{rows[0]}] are {first.dtype}{tuple(first.shape)}, those of dataset[{rows[other]}] "
                f"{part.dtype}{tuple(part.shape)}. They make no batch. Return one shape and type for every sample (pad or crop)."
            )
        return torch.stack(parts)
