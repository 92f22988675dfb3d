"""How hard the conditions may be: what a recipe is like, and the sizes, limit and samples that follow from it."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np
import torch

from trainer.checks import evaluating, is_coupled, is_random
from trainer.conditions import CONDITIONS, Chosen
from trainer.config import Conditions
from trainer.dataset import fetch
from trainer.hardening import hardened, spread
from trainer.hooks import PATH, brought
from trainer.plain import Moment, Setting, train
from trainer.problem import Problem, doubled, fresh_model, load_problem
from trainer.recipe import Batch, Recipe, Training
from trainer.streams import sample_keys
from validation.errors import RecipeError
from validation.records import Condition

LARGEST_BATCH = 250  # samples of a global batch: uneven cuts show as well on few, and a gate trains dozens of short runs
LARGEST_JUDGED = 250
PROBED = 64  # samples that the loss is asked of
LAST_BATCH = 0.7  # of a global batch: the window ends with a smaller one
MORE_EPOCHS = 4  # that are tried beyond the window, so that the very last batch is large enough for BatchNorm
OWN_TAIL = 0.4  # of a global batch: what an own sampler has left at the end of an epoch

Held = tuple[bool, str]


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


def chosen(recipe: Recipe, world_sizes: tuple[int, ...], steps: int) -> Chosen:
    """Conditions for runs of `steps` updates, and which of CONDITIONS hold. Raises RecipeError."""
    excludes, facts = excluded(recipe), look(recipe, world_sizes)
    plan = recipe.training
    accumulation = plan.accumulation if "accumulation" in excludes or (facts.is_own and facts.coupled) else max(2, plan.accumulation)
    sizes = choose_sizes(plan, facts, accumulation, steps, excludes)
    conditions = Conditions(
        samples=sizes.samples, judged=_uneven_below(min(LARGEST_JUDGED, facts.judged), world_sizes), global_batch_size=sizes.batch,
        accumulation=accumulation, epochs=sizes.epochs, clip_norm=plan.clip_norm,
        ragged_weights=facts.weights_count and "ragged_weights" not in excludes,
    )  # fmt: skip
    problem = load_problem(hardened(recipe, conditions, dropout=False), steps)
    moments = list(train(problem, Setting(limit=None)))
    limit, clipping = choose_limit(problem, moments)
    if "clipping" not in excludes:
        conditions = replace(conditions, clip_norm=limit)
    found: dict[str, Held] = {
        "ragged_weights": _weights_held(facts), "ragged_batches": _batches_held(plan, facts, sizes), "clipping": clipping,
        "dropout": (facts.draws, "as the recipe has it" if facts.draws else "the model has no dropout, and its loss draws nothing"),
        "accumulation": _accumulation_held(facts, accumulation), "epoch_border": _border_held(facts, sizes, steps),
        "rate_change": _rates_held(moments), "spike": _spike_held(facts),
        "overflow": (True, "an infinite loss on one rank"), "finite_differences": _slopes_held(facts),
    }  # fmt: skip
    found |= {name: (False, f"excluded by the recipe: {reason}") for name, reason in excludes.items()}
    held = tuple(Condition(name=name, held=found[name][0], detail=found[name][1]) for name in CONDITIONS)
    return Chosen(conditions=conditions, held=held)


def excluded(recipe: Recipe) -> Mapping[str, str]:
    """Conditions that a recipe excludes, with its reasons. Raises RecipeError for what is no condition, or has no reason."""
    excludes = getattr(recipe, "excludes", {})
    is_read = isinstance(excludes, Mapping) and all(isinstance(reason, str) and reason.strip() for reason in excludes.values())
    if not is_read or (strange := sorted(map(str, set(excludes) - set(CONDITIONS)))):
        what = f"names {', '.join(strange)}" if is_read else f"is {excludes!r}"
        raise RecipeError(
            f"recipe {recipe.name}: excludes {what}. The gates cannot tell what they may not switch on. Give a dictionary of a reason for "
            f"each condition left out; there are {', '.join(CONDITIONS)}."
        )
    return excludes


def look(recipe: Recipe, world_sizes: tuple[int, ...]) -> Facts:
    """Ask a recipe's loss of a few samples."""
    data, mine = recipe.data("train"), set(brought(getattr(recipe, "hooks", None)))
    rows = spread(PROBED, len(data))
    batch = doubled(fetch(data, rows, sample_keys(recipe.training.seed, np.zeros_like(rows), np.asarray(data.sample_ids)[rows])))
    model = fresh_model(recipe, torch.float64)
    stays_random = is_random(recipe, model, batch)
    draws = stays_random or is_random(recipe, model.train(), batch)
    return Facts(
        world_sizes=world_sizes, rows=len(data), judged=len(recipe.data("judge")), weights_count=_weights_count(recipe, batch),
        coupled=is_coupled(recipe, fresh_model(recipe, torch.float64), batch), draws=draws, stays_random=stays_random,
        is_own=bool(mine & set(PATH)), has_own_order=bool(mine & {"sampler", "loader"}),
    )  # fmt: skip


def _weights_count(recipe: Recipe, batch: Batch) -> bool:
    """Whether another weight gives another sum or weight."""
    if not batch.weights.is_floating_point():
        return False
    other = batch.weights.clone()
    other[::2] *= 2
    model = fresh_model(recipe, torch.float64)
    with evaluating(model):
        once, again = ([value.item() for value in recipe.loss(model, given)] for given in (batch, batch._replace(weights=other)))
    return once != again


def choose_sizes(plan: Training, facts: Facts, accumulation: int, steps: int, excludes: Mapping[str, str]) -> Sizes:
    """Batches that no number of ranks or lanes divides, and so many samples that epochs end inside a batch of the window.

    An own sampler has to divide its batches over ranks: there only the samples do not divide. Where there is too little data the closest.
    """
    share = float(steps) if "epoch_border" in excludes else _epoch_share(plan, facts, steps)
    least = 2 * accumulation * (max(facts.world_sizes) if facts.is_own else plan.lanes)
    most = max(least, min(plan.global_batch_size, LARGEST_BATCH, int(facts.rows / share)))
    batch = most
    if facts.has_own_order or "ragged_batches" in excludes:
        unit = accumulation * math.lcm(*facts.world_sizes, 1 if facts.has_own_order else plan.lanes)
        batch = max(most // unit, 1) * unit
    else:
        batch = next((size for size in chain(range(most, least - 1, -1), range(most, 2 * most)) if _is_uneven(size, plan, facts)), most)
    if "epoch_border" in excludes:
        samples = min(facts.rows, steps * batch)
        return Sizes(batch=batch, samples=samples, epochs=_epochs(plan, facts, samples, batch, steps))
    wanted = round(share * batch)
    near = sorted(range(max(1, wanted // 2), min(facts.rows, 2 * wanted) + 1), key=lambda samples: (abs(samples - wanted), samples))
    for samples in (samples for samples in near if _is_uneven_data(facts, samples) and _has_border(facts, samples, batch, steps)):
        first = _epochs(plan, facts, samples, batch, steps)
        for epochs in range(first, first + MORE_EPOCHS):
            if _ends_well(plan, facts, samples * epochs % batch, least):
                return Sizes(batch=batch, samples=samples, epochs=epochs)
    samples = min(wanted, facts.rows)
    return Sizes(batch=batch, samples=samples, epochs=_epochs(plan, facts, samples, batch, steps))


def _epoch_share(plan: Training, facts: Facts, steps: int) -> float:
    """Global batches in an epoch: two or three epochs in the window, the last batch a smaller one where it may be."""
    passes = 3 if steps >= 6 else 2
    if facts.has_own_order:
        return max(2.0, steps // passes) + OWN_TAIL
    return max(LAST_BATCH, (steps - 1 + LAST_BATCH if plan.tail == "keep" else steps + 0.1) / passes)


def _epochs(plan: Training, facts: Facts, samples: int, batch: int, steps: int) -> int:
    """Epochs that the window takes, at least two."""
    if facts.has_own_order:  # whether it keeps a smaller batch at the end of an epoch is its own affair
        return max(2, math.ceil(steps / max(samples // batch, 1)))
    return max(2, (steps - 1) * batch // samples + 1 if plan.tail == "keep" else math.ceil(steps * batch / samples))


def _is_uneven_data(facts: Facts, samples: int) -> bool:
    return all(samples % size for size in facts.world_sizes if size > 1)


def _ends_well(plan: Training, facts: Facts, last: int, least: int) -> bool:
    """Whether the run's last batch, of `last` samples where it is smaller, still has two coupled samples in every micro-batch."""
    return plan.tail == "drop" or not facts.coupled or last == 0 or last >= least


def _has_border(facts: Facts, samples: int, batch: int, steps: int) -> bool:
    """Whether an epoch ends inside the window: within a batch, or with an own sampler after at least one."""
    if facts.has_own_order:
        return 1 <= samples // batch < steps
    return samples % batch != 0 and samples < steps * batch


def _is_uneven(size: int, plan: Training, facts: Facts) -> bool:
    return size % 2 == 1 and all(size % parts for parts in (plan.lanes, *facts.world_sizes) if parts > 1)


def _uneven_below(most: int, world_sizes: Sequence[int]) -> int:
    """The largest number up to `most` that no number of ranks divides; `most` when there is none."""
    return next((size for size in range(most, 1, -1) if all(size % ranks for ranks in world_sizes if ranks > 1)), most)


def choose_limit(problem: Problem, moments: Sequence[Moment]) -> tuple[float | None, Held]:
    """Half of the smallest norm of the window, so that every step is clipped, in the clipped training as well."""
    norms = [moment.norm for moment in moments]
    limit = float(f"{min(norms) / 2:.3g}") if norms and all(map(math.isfinite, norms)) else 0.0
    for _ in range(3):
        if not limit > 0:
            break
        clipped = [moment.norm for moment in train(problem, Setting(limit=limit))]
        if all(norm > limit for norm in clipped):
            return limit, (True, f"the limit is {limit:g}, the norms are {min(clipped):.3g} to {max(clipped):.3g}")
        limit = float(f"{min(clipped) / 2:.3g}")
    shown = ", ".join(f"{norm:.3g}" for norm in norms)
    return problem.recipe.training.clip_norm, (False, f"the gradient's norms are {shown}: no limit clips them all")


def _weights_held(facts: Facts) -> Held:
    if not facts.weights_count:
        return False, "the loss does not use the samples' weights"
    return True, "samples count for 1/8 to 8, by their id"


def _batches_held(plan: Training, facts: Facts, sizes: Sizes) -> Held:
    ranks = ", ".join(map(str, facts.world_sizes))
    if facts.has_own_order:
        return _is_uneven_data(
            facts, sizes.samples
        ), f"{sizes.samples} samples do not divide by {ranks} ranks; the own sampler's batches of {sizes.batch} have to"
    held = _is_uneven(sizes.batch, plan, facts)
    return held, f"batches of {sizes.batch} samples on {ranks} ranks, {plan.lanes} lanes" + ("" if held else ": they divide")


def _accumulation_held(facts: Facts, accumulation: int) -> Held:
    if accumulation > 1:
        return True, f"{accumulation} micro-batches are accumulated"
    return False, (
        "samples of a micro-batch see one another, and an own trainer is compared with whole batches: cutting them changes the numbers by "
        "design, so the recipe's own 1 stays" if facts.is_own and facts.coupled else "1, as the recipe has it"
    )  # fmt: skip


def _border_held(facts: Facts, sizes: Sizes, steps: int) -> Held:
    held = _has_border(facts, sizes.samples, sizes.batch, steps)
    where = "after" if facts.has_own_order else "within"
    borders = sizes.samples / sizes.batch
    if held:
        return True, f"{sizes.samples} samples in batches of {sizes.batch}: an epoch ends {where} step {math.ceil(borders)} of {steps}"
    return False, f"{sizes.samples} samples in batches of {sizes.batch}: no epoch ends inside a batch of the {steps} steps"


def _rates_held(moments: Sequence[Moment]) -> Held:
    rates = list(dict.fromkeys(moment.rates for moment in moments))
    if len(rates) > 1:
        return True, f"{len(rates)} different rates in {len(moments)} steps"
    return False, f"the recipe's schedule keeps the rate at {', '.join(rates)} in the window"


def _spike_held(facts: Facts) -> Held:
    if facts.coupled:
        return False, "samples of a micro-batch see one another, so the loss of a part of a batch has no number of its own to be multiplied"
    return True, "the loss of one rank's first micro-batch counts 10,000 times"


def _slopes_held(facts: Facts) -> Held:
    if facts.stays_random:
        return False, "the loss is random with every Dropout module off"
    return True, "slopes of the loss along random directions, float64"
