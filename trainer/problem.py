"""The samples of a plain training: a recipe's first global batches as one process has them, fetched once.

Written apart from trainer/feed.py on purpose (trainer/plain.py). B = samples of a batch or of a part of it.
"""

import copy
import math
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.checks import is_coupled, switch_off_dropout
from trainer.dataset import fetch
from trainer.hooks import PATH, brought
from trainer.order import Order, permute
from trainer.own_data import Source, one_process
from trainer.recipe import Batch, Recipe, SplitData
from trainer.streams import Words, sample_keys
from trainer.world import World
from validation.errors import RecipeError

Rows = npt.NDArray[np.int64]
LOADER_S = 90.0  # for one step's batches: workers may have to be started and import what they need
COMPANY = 1e-9  # relative: float64 sums of gradients agree to 1e-14


class Samples(NamedTuple):
    """Samples and the keys of their own random streams."""

    rows: Rows  # (B,)
    keys: Words  # (B,)

    def part(self, chosen: Any) -> "Samples":
        """Some of them, by slice or index."""
        return Samples(self.rows[chosen], self.keys[chosen])


class Part(NamedTuple):
    """Fetched samples."""

    places: Rows  # (B,) where in the step's samples they stand; an id may stand there twice where an epoch ends inside a batch
    batch: Batch

    def part(self, chosen: Any) -> "Part":
        """Some of them, by slice or index."""
        return Part(self.places[chosen], Batch(*(value[chosen] for value in self.batch)))


Parts = tuple[Part, ...]  # of one step: more than one where samples have to stay apart


@dataclass(frozen=True, slots=True)
class Problem:
    """A recipe and its first global batches."""

    recipe: Recipe
    data: SplitData
    samples: tuple[Samples, ...]  # of each step, in order; without keys where an own loader fetched them
    parts: tuple[Parts, ...]  # the same fetched: one part a step, unless coupled samples have to be cut as the loop cuts them
    steps: int  # updates of the recipe's whole training: what its schedule is made for
    coupled: bool  # samples of a micro-batch see one another
    brought: tuple[str, ...]  # the recipe's own hooks
    state: Mapping[str, Any] | None  # the recipe's own, before it trains; None without one

    @property
    def has_own_order(self) -> bool:
        """Whether the recipe chooses its rows itself."""
        return bool({"sampler", "loader"} & set(self.brought))

    def ids(self, step: int) -> Rows:
        """Sample ids of a step, in order."""
        found: Rows = self.data.sample_ids[self.samples[step].rows]
        return found


def load_problem(recipe: Recipe, steps: int) -> Problem:
    """The recipe, its train split, and its first `steps` global batches (fewer when the data ends before), fetched.

    With an own sampler the rows are those it gives to one process, with an own loader the batches as well.
    """
    data, mine = recipe.data("train"), brought(getattr(recipe, "hooks", None))
    if "loader" in mine:
        samples, parts = _loaded(recipe, data, steps)
    else:
        samples = _own_order(recipe, steps) if "sampler" in mine else _order(recipe, data, steps)
        parts = tuple(_fetched(data, [batch]) for batch in samples)
    coupled = sees_company(recipe, doubled(parts[0][0].batch))
    if coupled and not set(PATH) & set(mine):
        parts = tuple(_fetched(data, _as_the_loop_cuts(recipe, batch)) for batch in samples)
    return Problem(recipe, data, samples, parts, _all_steps(recipe, len(data)), coupled, mine, _state(recipe))


def fresh_model(recipe: Recipe, dtype: torch.dtype) -> nn.Module:
    """The untrained model as every run starts with it, in training mode, dropout off."""
    torch.manual_seed(recipe.training.seed)
    model = recipe.model().to(dtype)
    model.train()
    switch_off_dropout(model)
    return model


def trained_type(recipe: Recipe) -> torch.dtype:
    """What a recipe is trained in: float64 where its model is made of that, float32 otherwise (perhaps in the recipe's autocast)."""
    kinds = {parameter.dtype for parameter in recipe.model().parameters()}
    return torch.float64 if kinds == {torch.float64} else torch.float32


def sees_company(recipe: Recipe, batch: Batch) -> bool:
    """Whether samples of a batch see one another: by the loss; for own hooks, which are compared with whole batches, by the gradient too.

    A small term of a product of means (the balance of experts) hardly moves the loss of an untrained model, and its gradient does.
    Args: batch, in float64.
    """
    if is_coupled(recipe, fresh_model(recipe, torch.float64), batch):
        return True
    if len(batch.weights) < 4 or not set(PATH) & set(brought(getattr(recipe, "hooks", None))):
        return False
    half = len(batch.weights) // 2
    halves = [Batch(*(value[rows] for value in batch)) for rows in (slice(0, half), slice(half, None))]
    model = fresh_model(recipe, torch.float64)
    whole, again, parts = (_gradient(recipe, model, given) for given in ([batch], [batch], halves))
    return bool(torch.equal(whole, again)) and float((whole - parts).norm()) > COMPANY * float(whole.norm())


def _gradient(recipe: Recipe, model: nn.Module, batches: Sequence[Batch]) -> torch.Tensor:
    """Gradient of the sum of the batches' losses, all parameters in one row."""
    model.zero_grad(set_to_none=True)
    for batch in batches:
        recipe.loss(model, batch)[0].backward()  # type: ignore[no-untyped-call]
    return torch.cat([torch.zeros(p.numel(), dtype=p.dtype) if p.grad is None else p.grad.flatten() for p in model.parameters()])


def _state(recipe: Recipe) -> dict[str, Any] | None:
    return copy.deepcopy(recipe.state_dict()) if hasattr(recipe, "state_dict") else None


def doubled(batch: Batch) -> Batch:
    """Its floats in float64."""
    return Batch(*(value.double() if value.is_floating_point() else value for value in batch))


def _order(recipe: Recipe, data: SplitData, steps: int) -> tuple[Samples, ...]:
    """Global batches by the permutation alone."""
    plan, size = recipe.training, len(data)
    samples = min(steps * plan.global_batch_size, _there(recipe, size))
    passes = [permute(plan.seed, epoch, size, np.arange(size)) for epoch in range(math.ceil(samples / size))]
    rows = np.concatenate(passes)[:samples]
    whole = Samples(rows, sample_keys(plan.seed, np.arange(samples) // size, data.sample_ids[rows]))
    return tuple(whole.part(slice(cut, cut + plan.global_batch_size)) for cut in range(0, samples, plan.global_batch_size))


def _own_order(recipe: Recipe, steps: int) -> tuple[Samples, ...]:
    """Global batches of the recipe's own sampler at world size 1."""
    found = tuple(Samples(*step) for step in islice(one_process(recipe), steps))
    _check_own(recipe, [len(batch.rows) for batch in found])
    return found


def _loaded(recipe: Recipe, data: SplitData, steps: int) -> tuple[tuple[Samples, ...], tuple[Parts, ...]]:
    """Global batches of the recipe's own loader at world size 1, as it made them."""
    order = Order.of(recipe.training, len(data))
    source = Source(recipe, data, order, World(rank=0, world_size=1))
    samples, parts, position = [], [], 0
    for step in range(min(steps, order.steps)):
        with _in_time(recipe, step):
            found = source.step_data(step, position)
        if found is None:
            break
        rows = np.concatenate([*found.rows, np.empty(0, dtype=np.int64)])
        samples.append(Samples(rows, np.empty(0, dtype=np.uint64)))
        parts.append(_joined(_placed(found.batches)))
        position = order.span(position).stop
    _check_own(recipe, [len(batch.rows) for batch in samples])
    return tuple(samples), tuple(parts)


@contextmanager
def _in_time(recipe: Recipe, step: int) -> Iterator[None]:
    """Stop an own loader that gives nothing: it would wait for ever. Not outside of a main thread (no alarm clock). Raises RecipeError."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_: object) -> NoReturn:
        raise RecipeError(
            f"recipe {recipe.name}: hooks.loader gave one process no batch for step {step} within {LOADER_S:g} s. There is nothing to "
            "compare other world sizes with. Look for a worker that waits (a lock, a queue, a collective that one rank alone enters), and "
            "let the loader work at world size 1."
        )

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LOADER_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)


def _joined(parts: Sequence[Part]) -> Parts:
    """One part, where micro-batches have one shape (they may be padded to several)."""
    if len({tuple((value.shape[1:], value.dtype) for value in part.batch) for part in parts}) != 1:
        return tuple(parts)
    batch = Batch(*(torch.cat(values) for values in zip(*(part.batch for part in parts), strict=True)))
    return _placed([batch])


def _check_own(recipe: Recipe, sizes: Sequence[int]) -> None:
    if not sizes or not all(sizes):
        raise RecipeError(
            f"recipe {recipe.name}: its own sampler or loader gave one process no samples at step {max(len(sizes) - 1, 0)}. Other world "
            "sizes have nothing to be compared with. Let it give rows for every step at world size 1, none only at the end."
        )


def _as_the_loop_cuts(recipe: Recipe, batch: Samples) -> list[Samples]:
    plan = recipe.training
    return [part for lane in _cut(batch, plan.lanes) for part in _cut(lane, plan.accumulation) if len(part.rows)]


def _cut(samples: Samples, parts: int) -> list[Samples]:
    """Cut samples into parts of sizes that differ by one at most, as lanes and accumulation do."""
    edges = [part * len(samples.rows) // parts for part in range(parts + 1)]
    return [samples.part(slice(first, last)) for first, last in pairwise(edges)]


def _there(recipe: Recipe, size: int) -> int:
    """Samples that are trained on, counted over all epochs."""
    there = size * recipe.training.epochs
    return there - there % recipe.training.global_batch_size if recipe.training.tail == "drop" else there


def _all_steps(recipe: Recipe, size: int) -> int:
    return math.ceil(_there(recipe, size) / recipe.training.global_batch_size)


def _fetched(data: SplitData, cuts: Sequence[Samples]) -> Parts:
    return _placed([fetch(data, *samples) for samples in cuts])


def _placed(batches: Sequence[Batch]) -> Parts:
    """Batches of one step, in its order."""
    ends = np.cumsum([len(batch.weights) for batch in batches])
    return tuple(Part(np.arange(end - len(batch.weights), end), batch) for batch, end in zip(batches, ends, strict=True))
