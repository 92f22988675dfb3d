"""How hard the conditions may be: what a recipe is like, and the sizes, limit and samples that follow from it."""

import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import nn

from trainer.audit_samples import content_digests
from trainer.checks import (
    HALVES_TOLERANCE,
    check_loss,
    check_model,
    check_modules,
    check_stepping,
    evaluating,
    is_random,
    switch_off_dropout,
)
from trainer.conditions import CONDITIONS, Chosen
from trainer.config import Conditions
from trainer.dataset import fetch
from trainer.hardening import hardened, spread
from trainer.hooks import PATH, brought
from trainer.order import Order, Rows
from trainer.plain import Moment, Setting, train
from trainer.problem import Problem, doubled, fresh_model, load_problem, sees_company
from trainer.recipe import Batch, Recipe, SplitData, Training
from trainer.sample_ids import check_ids
from trainer.streams import sample_keys
from trainer.window import Facts, Sizes, choose_sizes, has_border, is_uneven, is_uneven_data, uneven_below
from validation.errors import RecipeError, ReleaseError
from validation.records import Condition

LARGEST_JUDGED = 250
PROBED = 64  # samples that the loss is asked of

Held = tuple[bool, str]


def chosen(recipe: Recipe, world_sizes: tuple[int, ...], steps: int) -> Chosen:
    """Conditions for runs of `steps` updates, and which of CONDITIONS hold. Raises RecipeError."""
    excludes, facts = excluded(recipe), look(recipe, world_sizes)
    plan = recipe.training
    accumulation = plan.accumulation if "accumulation" in excludes or (facts.is_own and facts.coupled) else max(2, plan.accumulation)
    sizes = choose_sizes(plan, facts, accumulation, steps, excludes)
    conditions = Conditions(
        samples=sizes.samples, judged=uneven_below(min(LARGEST_JUDGED, facts.judged), world_sizes), global_batch_size=sizes.batch,
        accumulation=accumulation, epochs=sizes.epochs, clip_norm=plan.clip_norm,
        ragged_weights=facts.weights_count and "ragged_weights" not in excludes,
    )  # fmt: skip
    conditions = schedulable(recipe, conditions, facts, steps)
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
    """Ask a recipe's loss of a few samples. Raises RecipeError or DataError for what no run could be made of."""
    data, mine = recipe.data("train"), set(brought(getattr(recipe, "hooks", None)))
    check_ids(recipe, "train", data)
    rows = spread(PROBED, len(data))
    keys = sample_keys(recipe.training.seed, np.zeros_like(rows), data.sample_ids[rows])
    fetched = fetch(data, rows, keys)
    if "loader" not in mine:
        _check_repeated(recipe, data, rows, (content_digests(fetched), content_digests(fetch(data, rows, keys))))
    _check(recipe, fetched, mine, Order.of(recipe.training, len(data)).steps)
    batch = doubled(fetched)
    model = fresh_model(recipe, torch.float64)
    stays_random = is_random(recipe, model, batch)
    if not (mine & set(PATH) or stays_random or recipe.training.autocast):
        _check_adding(recipe, model, batch)
    draws = stays_random or is_random(recipe, model.train(), batch)
    return Facts(
        world_sizes=world_sizes, rows=len(data), judged=len(recipe.data("judge")), weights_count=_weights_count(recipe, batch),
        coupled=sees_company(recipe, batch), draws=draws, stays_random=stays_random,
        is_own=bool(mine & set(PATH)), has_own_order=bool(mine & {"sampler", "loader"}),
    )  # fmt: skip


def _check_repeated(recipe: Recipe, data: SplitData, rows: Rows, seen: tuple[list[str], list[str]]) -> None:
    """Refuse data that looks different when the same rows are fetched again with the same keys and streams. Raises RecipeError."""
    if changed := [int(id) for id, once, again in zip(data.sample_ids[rows], *seen, strict=True) if once != again]:
        raise RecipeError(
            f"recipe {recipe.name}: of {len(rows)} samples fetched twice, with the same random streams, {len(changed)} had other bytes the "
            f"second time (sample {changed[0]} first). What a rank sees would depend on what it fetched before, so other ranks see other "
            "samples, and so does a resume. Let `data` change a copy of what it keeps (no `+=` or method_() on it), and draw from the "
            "global streams of torch, numpy.random or random only."
        )


def _check_adding(recipe: Recipe, model: nn.Module, batch: Batch) -> None:
    """Refuse a loss with a part that samples do not bring, too small for the check of float32 sums. Args: model, batch, float64."""
    with evaluating(model):
        once, twice = (recipe.loss(model, given)[0].item() for given in (batch, Batch(*(torch.cat((item, item)) for item in batch))))
    if abs(twice - 2 * once) > HALVES_TOLERANCE * (abs(once) + 1e-6):
        raise RecipeError(
            f"recipe {recipe.name}: with every sample twice, the loss's sum is {twice:.9g} and not twice {once:.9g}, in float64. A part of "
            f"{2 * once - twice:.3g} does not grow with the samples (a penalty on the weights, say): it counts once a micro-batch, so its "
            "share depends on how a batch is cut over lanes and ranks. Multiply it by the samples' weights, batch.weights.sum(), or leave "
            "it to the optimizer (weight_decay)."
        )


def _check(recipe: Recipe, batch: Batch, mine: set[str], steps: int) -> None:
    """What every run asks before its first step, told here before the first run. Args: steps, of the recipe's whole training.

    Raises: RecipeError, also for whatever the recipe's own code raises.
    """
    try:
        _ask(recipe, batch, mine, steps)
    except ReleaseError:
        raise
    except Exception as error:
        trace = "".join(traceback.format_exception(error)[-3:]).rstrip()
        raise RecipeError(
            f"recipe {recipe.name}: its code raised {type(error).__name__} on the first {len(batch.weights)} samples: {error}. There is "
            f"nothing to judge, so nothing was run. Mend the recipe:\n{trace}"
        ) from error


def _ask(recipe: Recipe, batch: Batch, mine: set[str], steps: int) -> None:
    torch.manual_seed(recipe.training.seed)
    model = recipe.model()
    model.train()
    check_modules(recipe, model)
    switch_off_dropout(model)
    check_loss(recipe, model, batch, dropout=False)
    optimizer = recipe.optimizer(model)
    check_model(recipe, model, optimizer)
    if not {"step", "update"} & mine:
        check_stepping(recipe, optimizer, recipe.schedule(optimizer, steps))


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


def schedulable(recipe: Recipe, conditions: Conditions, facts: Facts, steps: int) -> Conditions:
    """The same, with the epochs of the recipe's own number of updates where its schedule cannot be made for so few (a long warm-up)."""
    updates = Order.of(hardened(recipe, conditions).training, conditions.samples).steps
    if _has_rates(recipe, updates, steps):
        return conditions
    own = Order.of(recipe.training, facts.rows).steps
    return replace(conditions, epochs=max(conditions.epochs, math.ceil(own * conditions.global_batch_size / conditions.samples)))


def _has_rates(recipe: Recipe, updates: int, steps: int) -> bool:
    """Whether a schedule for so many updates can be made and gives sound rates for the first steps."""
    optimizer = recipe.optimizer(fresh_model(recipe, torch.float32))
    rates: list[float] = []
    try:
        schedule = recipe.schedule(optimizer, updates)
        for _ in range(steps):
            rates += [float(group["lr"]) for group in optimizer.param_groups]
            optimizer.step()
            if schedule is not None:
                schedule.step()
    except Exception:  # whatever a schedule makes of too few updates
        return False
    return all(0 <= rate < math.inf for rate in rates)


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
        return is_uneven_data(
            facts, sizes.samples
        ), f"{sizes.samples} samples do not divide by {ranks} ranks; the own sampler's batches of {sizes.batch} have to"
    if facts.rows < sizes.batch:
        return False, f"{facts.rows} samples do not fill a batch of {sizes.batch}: it holds some of them twice"
    held = is_uneven(sizes.batch, plan, facts)
    return held, f"batches of {sizes.batch} samples on {ranks} ranks, {plan.lanes} lanes" + ("" if held else ": they divide")


def _accumulation_held(facts: Facts, accumulation: int) -> Held:
    if accumulation > 1:
        return True, f"{accumulation} micro-batches are accumulated"
    return False, (
        "samples of a micro-batch see one another, and an own trainer is compared with whole batches: cutting them changes the numbers by "
        "design, so the recipe's own 1 stays" if facts.is_own and facts.coupled else "1, as the recipe has it"
    )  # fmt: skip


def _border_held(facts: Facts, sizes: Sizes, steps: int) -> Held:
    held = has_border(facts, sizes.samples, sizes.batch, steps)
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
