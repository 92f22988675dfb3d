"""Random streams named by what they are for, never by who draws: (seed, step, lane) -> one 64-bit seed. Torch-free.

A stream's seed does not contain the rank, the world size or a loader worker, so a lane draws the same dropout masks, and a sample the
same augmentation, wherever they are computed.
"""

import numpy as np
import numpy.typing as npt

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15  # 2**64 / golden ratio, splitmix64's increment
MIX_1 = 0xBF58476D1CE4E5B9  # splitmix64's two multipliers (Steele, Lea, Flood, OOPSLA 2014)
MIX_2 = 0x94D049BB133111EB

# first word of every key: keeps streams of different purposes apart
PERMUTATION = 1
LANE = 2
NOISE = 3
SAMPLE = 4
RAGGED = 5

Words = npt.NDArray[np.uint64]


def hash64(*words: int) -> int:
    """Hash integers to one 64-bit integer; a change in any word, or in their order, gives an unrelated value."""
    state = len(words)
    for word in words:
        state = _mixed((state + _GOLDEN) ^ _mixed(word & _MASK))
    return state


def stream_seed(seed: int, step: int, lane: int, part: int = 0) -> int:
    """The seed with which one part of one lane of one step draws (dropout); a lane that is not cut has the one part 0."""
    return hash64(LANE, seed, step, lane, part) if part else hash64(LANE, seed, step, lane)


def sample_keys(seed: int, epochs: npt.NDArray[np.int64], sample_ids: npt.NDArray[np.int64]) -> Words:
    """The key of each sample's own stream (augmentation): hash64(SAMPLE, seed, epoch, sample id), vectorised.

    Args: epochs and sample_ids (B,). Returns: (B,).
    """
    head = np.full(len(sample_ids), 4, dtype=np.uint64)
    for word in (np.full_like(head, SAMPLE), np.full_like(head, seed), epochs.astype(np.uint64), sample_ids.astype(np.uint64)):
        head = _mixed_words((head + np.uint64(_GOLDEN)) ^ _mixed_words(word))
    return head


def _mixed(value: int) -> int:
    value = (value + _GOLDEN) & _MASK
    value = ((value ^ (value >> 30)) * MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * MIX_2) & _MASK
    return value ^ (value >> 31)


def _mixed_words(values: Words) -> Words:
    """`_mixed` of each word; uint64 arrays wrap, as intended."""
    values = values + np.uint64(_GOLDEN)
    values = (values ^ (values >> np.uint64(30))) * np.uint64(MIX_1)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(MIX_2)
    return values ^ (values >> np.uint64(31))
