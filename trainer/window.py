"""How large the batches of a gate's runs are, of how many samples and over how many epochs. Torch-free.

B = samples of a batch.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from trainer.recipe import Training

LARGEST_BATCH = 250  # samples of a global batch: uneven cuts show as well on few, and a gate trains dozens of short runs
LAST_BATCH = 0.7  # of a global batch: the window ends with a smaller one
MORE_EPOCHS = 4  # that are tried beyond the window, so that the very last batch is large enough for BatchNorm
OWN_TAIL = 0.4  # of a micro-batch of all ranks: what an own sampler has left at the end of an epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What a recipe is like, as far as conditions depend on it."""

    world_sizes: tuple[int, ...]
    rows: int  # of the train split
    judged: int  # of the judge split
    weights_count: bool  # the loss uses Batch.weights
    coupled: bool  # samples of a micro-batch see one another
    draws: bool  # dropout or any other randomness in the loss
    stays_random: bool  # with every Dropout module off
    is_own: bool  # a hook of trainer.hooks.PATH was brought
    has_own_order: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the window."""

    batch: int
    samples: int  # of the train split
    epochs: int


def choose_sizes(plan: Training, facts: Facts, accumulation: int, steps: int, excludes: Mapping[str, str]) -> Sizes:
    """Batches that no number of ranks or lanes divides, and so many samples that epochs end inside a batch of the window.

    An own sampler has to divide its batches over ranks: there only the samples do not divide. Where there is too little data the closest.
    """
    share = float(steps) if "epoch_border" in excludes else _epoch_share(plan, facts, steps, accumulation)
    least = 2 * accumulation * (max(facts.world_sizes) if facts.is_own else plan.lanes)
    most = max(least, min(plan.global_batch_size, LARGEST_BATCH, int(facts.rows / share)))
    batch = most
    if facts.has_own_order or "ragged_batches" in excludes:
        unit = accumulation * math.lcm(*facts.world_sizes, 1 if facts.has_own_order else plan.lanes)
        batch = max(most // unit, 1) * unit
    else:
        batch = next((size for size in chain(range(most, least - 1, -1), range(most, 2 * most)) if is_uneven(size, plan, facts)), most)
    if "epoch_border" in excludes:
        samples = min(facts.rows, steps * batch)
        return Sizes(batch=batch, samples=samples, epochs=_epochs(plan, facts, samples, batch, steps))
    wanted = round(share * batch)
    near = sorted(range(max(1, wanted // 2), min(facts.rows, 2 * wanted) + 1), key=lambda samples: (abs(samples - wanted), samples))
    for samples in (samples for samples in near if is_uneven_data(facts, samples) and has_border(facts, samples, batch, steps)):
        first = _epochs(plan, facts, samples, batch, steps)
        for epochs in range(first, first + MORE_EPOCHS):
            if _ends_well(plan, facts, samples * epochs % batch, least):
                return Sizes(batch=batch, samples=samples, epochs=epochs)
    samples = min(wanted, facts.rows)
    return Sizes(batch=batch, samples=samples, epochs=_epochs(plan, facts, samples, batch, steps))


def _epoch_share(plan: Training, facts: Facts, steps: int, accumulation: int) -> float:
    """Global batches in an epoch: two or three epochs in the window, the last batch a smaller one where it may be.

    Where micro-batches are accumulated an own sampler has one whole one left beside the rest: its last window is a short one.
    """
    passes = 3 if steps >= 6 else 2
    if facts.has_own_order:
        return max(2.0, steps // passes) + (OWN_TAIL if accumulation == 1 else 1 + OWN_TAIL) / accumulation
    return max(LAST_BATCH, (steps - 1 + LAST_BATCH if plan.tail == "keep" else steps + 0.1) / passes)


def _epochs(plan: Training, facts: Facts, samples: int, batch: int, steps: int) -> int:
    """Epochs that the window takes, at least two."""
    if facts.has_own_order:  # whether it keeps a smaller batch at the end of an epoch is its own affair
        return max(2, math.ceil(steps / max(samples // batch, 1)))
    return max(2, (steps - 1) * batch // samples + 1 if plan.tail == "keep" else math.ceil(steps * batch / samples))


def is_uneven_data(facts: Facts, samples: int) -> bool:
    return all(samples % size for size in facts.world_sizes if size > 1)


def _ends_well(plan: Training, facts: Facts, last: int, least: int) -> bool:
    """Whether the run's last batch, of `last` samples where it is smaller, still has two coupled samples in every micro-batch."""
    return plan.tail == "drop" or not facts.coupled or last == 0 or last >= least


def has_border(facts: Facts, samples: int, batch: int, steps: int) -> bool:
    """Whether an epoch ends inside the window: within a batch, or with an own sampler after at least one."""
    if facts.has_own_order:
        return 1 <= samples // batch < steps
    return samples % batch != 0 and samples < steps * batch


def is_uneven(size: int, plan: Training, facts: Facts) -> bool:
    return size % 2 == 1 and all(size % parts for parts in (plan.lanes, *facts.world_sizes) if parts > 1)


def uneven_below(most: int, world_sizes: Sequence[int]) -> int:
    """The largest number up to `most` that no number of ranks divides; `most` when there is none."""
    return next((size for size in range(most, 1, -1) if all(size % ranks for ranks in world_sizes if ranks > 1)), most)
