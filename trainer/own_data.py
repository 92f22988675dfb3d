"""What an own training path is fed with: the trainer's order, or the recipe's own sampler and loader.

N = samples of the split, B = samples of a micro-batch, n = samples of one rank's step, W = ranks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.dataset import fetch, kept_streams
from trainer.feed import Feed, cast_input
from trainer.hooks import Rows, Sampler, StepData, brought, hooks_of, naming
from trainer.lanes import rank_lanes
from trainer.order import Order, lane_span
from trainer.parts import Ledger
from trainer.recipe import Batch, Recipe, SplitData
from trainer.reduce import Reduction
from trainer.streams import Words, sample_keys
from trainer.world import World
from validation.errors import RecipeError

STEP_POSITIONS = 1 << 31  # of an own order's ledger: more than a step has samples


class Taken(NamedTuple):
    """One step's samples of this rank; micro-batches without samples are left out."""

    rows: tuple[Rows, ...]  # (B,) each
    batches: tuple[Batch, ...]  # on the device
    ledger: Ledger


class GlobalStep(NamedTuple):
    """One step's samples of all ranks together."""

    rows: Rows  # (n,)
    keys: Words  # (n,) of the samples' own random streams


def own_keys(seed: int, step: int, sample_ids: Rows) -> Words:
    """Keys of the samples' own random streams (augmentation) where a recipe's own sampler chose them: of (seed, step, sample id).

    An own sampler says no epoch; the step keeps a sample from looking the same in every pass. Args: sample_ids (B,). Returns: (B,).
    """
    return sample_keys(seed, np.full(len(sample_ids), step, dtype=np.int64), sample_ids)


def one_process(recipe: Recipe) -> Iterator[GlobalStep]:
    """Every global batch as the recipe's own sampler and loader give it to one rank alone; the trainer's order where neither was brought.

    Raises: RecipeError when they give something else than rows of the train split.
    """
    data, seed = recipe.data("train"), recipe.training.seed
    order = Order.of(recipe.training, len(data))
    source = Source(recipe, data, order, World(rank=0, world_size=1))
    position = 0
    for step in range(order.steps):
        parts = source.rows(step, position)
        if parts is None:
            return
        rows = np.concatenate([*parts, np.empty(0, dtype=np.int64)])
        ids, span = data.sample_ids[rows], order.span(position)
        in_order = source.sampler is None and len(rows) == len(span)
        yield GlobalStep(rows, order.keys(span, ids) if in_order else own_keys(seed, step, ids))
        position = span.stop


class OrderSampler:
    """The trainer's order as a Sampler for an own loader: all lanes of a rank in one piece, cut into the parts of an accumulated step."""

    def __init__(self, recipe: Recipe, order: Order, world: World, position: int) -> None:
        self._order, self._lanes, self._parts = order, recipe.training.lanes, recipe.training.accumulation
        self._own = rank_lanes(world.rank, world.world_size, self._lanes)
        self.position = position

    def take(self) -> list[Rows]:
        """Rows of this rank's micro-batches of the next step."""
        batch = self._order.span(self.position)
        self.position = batch.stop
        first, last = (lane_span(batch, lane, self._lanes) for lane in (self._own[0], self._own[-1]))
        share = range(first.start, last.stop)
        return [self._order.rows(lane_span(share, part, self._parts)) for part in range(self._parts)] if batch else []

    def state_dict(self) -> dict[str, Any]:
        """The position, samples consumed."""
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a position."""
        self.position = int(state["position"])


class Source:
    """The rows of a rank's steps, and their batches where the recipe's own loader makes them."""

    def __init__(self, recipe: Recipe, data: SplitData, order: Order, world: World) -> None:
        """Make the recipe's own sampler, if it brought one."""
        self._recipe, self._data, self._order, self._world = recipe, data, order, world
        self._hooks = hooks_of(recipe)
        self._brought = brought(self._hooks)
        self._steps: Iterator[StepData] | None = None  # of an own loader, from the first step that is asked for on
        self.sampler: Sampler | None = None
        if "sampler" in self._brought:
            with naming("sampler", world):
                self.sampler = self._hooks.sampler(len(data), recipe.training, world)
            self._check_sampler()

    def step_data(self, step: int, position: int) -> StepData | None:
        """Rows and batches of this rank's micro-batches, as the recipe gives them; None when its data is used up."""
        if "loader" in self._brought:
            return self._loaded(step, position)
        rows = self.rows(step, position)
        if rows is None:
            return None
        seed, ids = self._order.seed, self._data.sample_ids
        with kept_streams():  # the streams that the step draws from go on as they were
            return StepData(rows, [fetch(self._data, part, own_keys(seed, step, ids[part])) for part in rows])

    def rows(self, step: int, position: int) -> list[Rows] | None:
        """Rows of this rank's micro-batches, those without samples left out; None when the data is used up."""
        if "loader" in self._brought:
            found = self._loaded(step, position)
            return None if found is None else list(found.rows)
        with naming("sampler", self._world, step):
            taken = self._order_sampler(position).take() if self.sampler is None else self.sampler.take()
        if not isinstance(taken, Sequence | np.ndarray):
            raise self._wrong(
                "sampler", step, f"a {type(taken).__name__}", "a list of arrays of rows, an empty one when the data is used up"
            )
        return self._checked("sampler", step, taken) if len(taken) else None

    def restart(self) -> None:
        """The sampler stands elsewhere: let the loader start anew."""
        self._steps = None

    def _order_sampler(self, position: int) -> OrderSampler:
        return OrderSampler(self._recipe, self._order, self._world, position)

    def _loaded(self, step: int, position: int) -> StepData | None:
        with naming("loader", self._world, step):
            if self._steps is None:
                self._steps = iter(self._hooks.loader(self._data, self.sampler or self._order_sampler(position), self._world))
            found = next(self._steps, None)
        if found is None:
            return None
        if not (isinstance(found, tuple) and len(found) == 2 and len(found[0]) == len(found[1])):
            raise self._wrong("loader", step, f"a {type(found).__name__}", "StepData(rows, batches), one entry of each a micro-batch")
        kept = [(rows, batch) for rows, batch in zip(*found, strict=True) if len(rows)]
        rows = self._checked("loader", step, [rows for rows, _ in kept])
        for part, batch in zip(rows, (batch for _, batch in kept), strict=True):
            if not (isinstance(batch, tuple) and len(batch) == 3 and all(len(value) == len(part) for value in batch)):
                raise self._wrong("loader", step, f"no batch of {len(part)} samples for {len(part)} rows", "a Batch for each entry of rows")
        batches = [Batch(*batch) for _, batch in kept]
        if _overwritten([(part, batch.inputs) for part, batch in zip(rows, batches, strict=True)]):
            wanted = "each micro-batch memory of its own: all of a step are there before the first one is trained on"
            raise self._wrong(
                "loader", step, "micro-batches whose inputs lie in the same memory, so that the last one is in all of them", wanted
            )
        return StepData(rows, batches)

    def _checked(self, hook: str, step: int, parts: Sequence[Any]) -> list[Rows]:
        """Rows as int64 arrays, parts without samples left out."""
        wanted = f"whole numbers of [0, {len(self._data)}), one array a micro-batch"
        try:
            arrays = [np.asarray(part) for part in parts]
        except ValueError:
            raise self._wrong(hook, step, "rows that make no array", wanted) from None
        for rows in (rows for rows in arrays if rows.size):
            if rows.ndim != 1 or rows.dtype.kind not in "iu" or rows.min() < 0 or rows.max() >= len(self._data):
                span = f" from {rows.min()} to {rows.max()}" if rows.dtype.kind in "iuf" else ""
                seen = f"rows of type {rows.dtype} and shape {rows.shape}{span}"
                raise self._wrong(hook, step, seen, wanted)
        return [rows.astype(np.int64) for rows in arrays if rows.size]

    def _check_sampler(self) -> None:
        absent = [name for name in ("take", "state_dict", "load_state_dict") if not callable(getattr(self.sampler, name, None))]
        if absent:
            raise RecipeError(
                f"recipe {self._recipe.name}: hooks.sampler returned a {type(self.sampler).__name__} without {', '.join(absent)}(). A run "
                "could not go on where it was. Return an object with take, state_dict and load_state_dict (trainer/hooks.py: Sampler)."
            )

    def _wrong(self, hook: str, step: int, seen: str, wanted: str) -> RecipeError:
        return RecipeError(
            f"recipe {self._recipe.name}: hooks.{hook} gave {seen} on rank {self._world.rank} at step {step}. Nothing can be trained on "
            f"that. Give {wanted}."
        )


def _overwritten(given: Sequence[tuple[Rows, Tensor]]) -> bool:
    """Whether inputs of two micro-batches begin at the same place in memory though they begin with other samples: a buffer used twice.

    Views on one text or table may overlap, and constants may lie in one place: these are left alone.
    """
    return any(
        one.data_ptr() == other.data_ptr() and one.numel() > 0 and other.numel() > 0 and one.stride(0) > 0 and rows[0] != others[0]
        for (rows, one), (others, other) in combinations(given, 2)
    )


class OwnData:
    """One rank's steps as an own training path consumes them: on the device, with what the ledger says of them."""

    def __init__(
        self, recipe: Recipe, data: SplitData, order: Order, feed: Feed, world: World, device: torch.device, *, double: bool
    ) -> None:  # fmt: skip
        """Args: feed, of the trainer's own order, asked where neither a sampler nor a loader was brought; double, floats to float64."""
        self._data, self._order, self._feed, self._world = data, order, feed, world
        self._device, self._double = device, double
        self._source = Source(recipe, data, order, world)
        self.has_own_order = bool({"sampler", "loader"} & set(brought(hooks_of(recipe))))
        self.repeats = False  # a planted defect: the next step's samples are given twice
        self._again: StepData | None = None
        self._held: list[StepData] | None = None  # of a step that is made several times; None: no step is

    @property
    def sampler(self) -> Sampler | None:
        """The recipe's own sampler; None when the trainer's order needs no state."""
        return self._source.sampler

    def take(self, step: int, position: int, reduction: Reduction) -> Taken | None:
        """The next step's samples of this rank; None when the data is used up. Raises RecipeError for what cannot be trained on."""
        if not self.has_own_order:
            return self._in_order(step, position, reduction)
        found = self._next(step, position)
        if found is None:
            return None
        batches = tuple(Batch(*(cast_input(value, self._device, double=self._double) for value in batch)) for batch in found.batches)
        return Taken(tuple(found.rows), batches, self._ledger(step, found.rows))

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, the first step that is asked for is asked for again and again, and taken once."""
        self._held = []
        try:
            yield
        finally:
            self._held = None

    def put_back(self, state: dict[str, Any] | None) -> None:
        """Go on from a state of the sampler, None when there is none; the loader starts anew."""
        if state is not None and self.sampler is not None:
            # anew after every repeat of a held step, too: the sampler then stands where the step begins
            with naming("sampler", self._world):
                self.sampler.load_state_dict(state)
        self._again = None
        self._source.restart()

    def _next(self, step: int, position: int) -> StepData | None:
        if self._held:
            rows, batches = self._held[0]
            return StepData(rows, [Batch(*(part.clone() for part in batch)) for batch in batches])  # a loss may write in it
        found, self._again = self._again or self._source.step_data(step, position), None
        if found is not None and self._held is not None:
            self._held.append(found)
            return self._next(step, position)
        if found is not None and self.repeats:
            self._again, self.repeats = found, False
        return found

    def _in_order(self, step: int, position: int, reduction: Reduction) -> Taken | None:
        batch = self._order.span(position)
        if not batch:
            return None
        with kept_streams():
            micro_batches = self._feed.micro_batches(batch, reduction)
        kept = [(rows, micro.batch) for rows, micro in zip(self._feed.rows(batch, reduction), micro_batches, strict=True) if micro.counts]
        return Taken(tuple(rows for rows, _ in kept), tuple(samples for _, samples in kept), self._feed.ledger(step, batch))

    def _ledger(self, step: int, rows: Sequence[Rows]) -> Ledger:
        """An own order has no positions: numbers that are unique and rise with step, rank and place. The lane is the rank."""
        ids = self._data.sample_ids[np.concatenate([*rows, np.empty(0, dtype=np.int64)])]
        first = step * STEP_POSITIONS + self._world.rank * (STEP_POSITIONS // self._world.world_size)
        spans = np.array([(step, self._world.rank, first, len(ids))] * bool(len(ids)), dtype=np.int64).reshape(-1, 4)
        return Ledger(spans, ids)
