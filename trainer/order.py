"""The order of the data as a pure function: (seed, epoch, offset) -> row, and position -> (epoch, offset). Torch-free.

A keyed permutation (Feistel network with cycle walking, Black and Rogaway 2002) takes O(1) memory and can be asked at any offset, so
the whole state of a data loader is one integer: the position, samples consumed so far, counted over all epochs.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from trainer.recipe import Training
from trainer.streams import MIX_1, MIX_2, PERMUTATION, SAMPLE, Words, hash64, sample_keys
from validation.errors import ConfigError, DataError

Rows = npt.NDArray[np.int64]

_ROUNDS = 6  # four suffice for a pseudo-random permutation (Luby and Rackoff); two more since the halves are short
_TABLE_BITS = 12  # halves up to this long are looked up: 4096 words a round, made once an epoch


def permute(seed: int, epoch: int, size: int, offsets: Rows) -> Rows:
    """Give the row at each offset of one epoch's shuffled pass: a bijection of [0, size) for every (seed, epoch).

    Args: offsets, any shape and order, each in [0, size).
    Raises: DataError when size or an offset is out of range.
    """
    values = np.asarray(offsets, dtype=np.int64)
    if size < 1 or (values.size and (values.min() < 0 or values.max() >= size)):
        raise DataError(f"an offset lies outside the {size} samples of an epoch. There is no such row. Ask for offsets in [0, {size}).")
    half = max(1, ((size - 1).bit_length() + 1) // 2)  # bits of each half; the domain 4**half is at most 4 * size (or 4)
    rounds = _rounds(seed, epoch, half)
    words = _feistel(values.ravel(), half, rounds)
    outside = np.flatnonzero(words >= size)
    while outside.size:  # walk each cycle until it is back inside: keeps the bijection on [0, size)
        words[outside] = _feistel(words[outside], half, rounds)
        outside = outside[words[outside] >= size]
    return words.reshape(values.shape)


def _feistel(words: Rows, half: int, rounds: Sequence[Callable[[Rows], Rows]]) -> Rows:
    left, right = words >> half, words & ((1 << half) - 1)
    for mix in rounds:
        left, right = right, left ^ mix(right)
    return (left << half) | right


@functools.lru_cache(maxsize=4)
def _rounds(seed: int, epoch: int, half: int) -> tuple[Callable[[Rows], Rows], ...]:
    """The round functions of one epoch, half words -> half words; short halves by a table, which has the same values."""
    keys = [np.uint64(hash64(PERMUTATION, seed, epoch, number)) for number in range(_ROUNDS)]
    if half > _TABLE_BITS:
        return tuple(functools.partial(_top_bits, key=key, bits=half) for key in keys)
    every = np.arange(1 << half)
    return tuple(_top_bits(every, key=key, bits=half).take for key in keys)


def _top_bits(words: Rows, key: np.uint64, bits: int) -> Rows:
    mixed = words.astype(np.uint64) ^ key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(MIX_1)  # uint64 arrays wrap, as intended
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(MIX_2)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(64 - bits)).astype(np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """Which rows the positions of a run stand for; the same for every world size."""

    seed: int
    size: int  # N: samples of the train split
    epochs: int
    global_batch_size: int  # B
    tail: Literal["keep", "drop"] = "keep"  # the run's last, smaller batch: trained on, or left out

    def __post_init__(self) -> None:
        if self.size < 1:
            raise DataError("the train split has no samples. There is nothing to train on. Check the recipe's data('train').")
        if self.epochs < 1 or self.global_batch_size < 1:
            raise ConfigError(
                f"training asks for {self.epochs} epochs of batches of {self.global_batch_size} samples. No step can be made of that. "
                "Set both to 1 or more in the recipe's Training."
            )
        if self.tail not in ("keep", "drop"):
            raise ConfigError(f"training.tail is '{self.tail}'. Say what becomes of the run's last, smaller batch: 'keep' or 'drop'.")
        if self.steps < 1:
            raise ConfigError(
                f"{self.epochs} epochs of {self.size} samples do not fill one batch of {self.global_batch_size}, and training.tail='drop' "
                "leaves out batches that are not full. No step is left. Use tail='keep', more epochs or a smaller global batch."
            )

    @classmethod
    def of(cls, training: Training, size: int) -> "Order":
        """The order that a recipe's Training asks for on a split of `size` samples."""
        batch = training.global_batch_size
        return cls(seed=training.seed, size=size, epochs=training.epochs, global_batch_size=batch, tail=training.tail)

    @property
    def positions(self) -> int:
        """Samples that are trained on, counted over all epochs."""
        there = self.size * self.epochs
        return there - there % self.global_batch_size if self.tail == "drop" else there

    @property
    def steps(self) -> int:
        """Optimizer updates of all epochs together.

        The last may be smaller than the others; no sample is left out or repeated, but with tail="drop" those of a last, smaller batch.
        """
        return -(-self.positions // self.global_batch_size)

    @property
    def smallest_batch(self) -> int:
        """Samples of the smallest step: the last one."""
        return self.positions - (self.steps - 1) * self.global_batch_size

    def span(self, position: int) -> range:
        """Positions of the batch that starts at `position`; batches straddle epoch borders, empty when the data is used up."""
        return range(position, max(position, min(position + self.global_batch_size, self.positions)))

    def rows(self, positions: range | Rows) -> Rows:
        """Rows at any positions, in order."""
        wanted = _numbers(positions)
        epochs, offsets = np.divmod(wanted, self.size)
        rows = np.empty_like(wanted)
        if wanted.size and epochs.min() == epochs.max():
            return permute(self.seed, int(epochs[0]), self.size, offsets)
        for epoch in np.unique(epochs):
            inside = epochs == epoch
            rows[inside] = permute(self.seed, int(epoch), self.size, offsets[inside])
        return rows

    def keys_of(self, position: int, sample_id: int) -> Words:
        """`keys` of one sample, (1,); a few integers are hashed faster without numpy."""
        return np.array([hash64(SAMPLE, self.seed, position // self.size, sample_id)], dtype=np.uint64)

    def keys(self, positions: range | Rows, sample_ids: Rows) -> Words:
        """Keys of the samples' own random streams at any positions, of (seed, epoch, sample id) alone.

        Args: sample_ids, those of the positions' rows, (B,). Returns: (B,).
        """
        return sample_keys(self.seed, _numbers(positions) // self.size, sample_ids)


def _numbers(positions: range | Rows) -> Rows:
    """numpy would read a range number by number."""
    return (
        np.arange(positions.start, positions.stop, positions.step)
        if isinstance(positions, range)
        else np.asarray(positions, dtype=np.int64)
    )


def lane_span(batch: range, lane: int, lanes: int) -> range:
    """Positions of one lane of a batch: [lane * n // lanes, (lane + 1) * n // lanes) of its n; may be empty when n < lanes.

    A lane is cut into the parts of an accumulated step by the same rule.
    """
    n = len(batch)
    return range(batch.start + lane * n // lanes, batch.start + (lane + 1) * n // lanes)
