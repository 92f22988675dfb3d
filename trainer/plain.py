"""Plain training: one process, autograd on the whole batch, no lanes, no ranks and none of a team's hooks but its sampler and loader.

Written apart from the loop on purpose, so that a mistake in one is not repeated in the other; they share the permutation and the fetch of
samples and nothing else. Dropout modules are off throughout. What it is for: trainer/reference.py.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.config import SPIKE
from trainer.problem import Part, Problem, doubled, fresh_model
from trainer.recipe import Batch, Recipe
from validation.canonical import canonical_json

MOST_PIECES = 16  # random micro-batches of a re-ordering
SLACK = 1e-6  # torch.nn.utils.clip_grad_norm_ scales by limit / (norm + SLACK)

Gradients = dict[str, Tensor]  # by parameter name


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a training is made under beside the recipe."""

    limit: float | None  # of the global gradient norm
    slack: float = SLACK  # clipping scales by limit / (norm + slack)
    poisoned: frozenset[tuple[int, int]] = frozenset()  # (step, place in its samples) whose loss counts SPIKE times

    def until(self, step: int) -> "Setting":
        """The same as far as it matters up to and with a step: settings that differ later alone are equal."""
        return replace(self, poisoned=frozenset(pair for pair in self.poisoned if pair[0] <= step))


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a training, tensors by name."""

    weights: dict[str, Tensor]  # before it
    reduced: Gradients  # mean over the global batch, before clipping
    clipped: Gradients
    update: dict[str, Tensor]  # of trainable weights: after minus before
    norm: float  # before clipping
    rates: str  # learning rates of the optimizer's groups, canonical JSON


def train(
    problem: Problem, setting: Setting, *, moved: torch.Generator | None = None, shuffled: torch.Generator | None = None
) -> Iterator[Moment]:
    """Train in float64, yielding every step: autograd on the whole batch, clipping, the recipe's optimizer and schedule.

    Variants: `moved` moves every weight by one unit in the last place before each step; `shuffled` re-orders and cuts each batch.
    """
    if problem.state is not None:
        problem.recipe.load_state_dict(copy.deepcopy(problem.state))  # type: ignore[attr-defined]  # an optional member
    model = fresh_model(problem.recipe, torch.float64)
    optimizer = problem.recipe.optimizer(model)
    schedule = problem.recipe.schedule(optimizer, problem.steps)
    for step in range(len(problem.parts)):
        if moved is not None:
            move(model, moved)
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        reduced = mean_gradients(problem.recipe, model, pieces(problem, setting, step, shuffled))
        clipped = clip(reduced, setting)
        for name, parameter in model.named_parameters():
            parameter.grad = clipped[name].clone() if name in clipped else None
        rates = rates_of(optimizer)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        update = {name: parameter.detach() - weights[name] for name, parameter in model.named_parameters() if name in reduced}
        yield Moment(weights, reduced, clipped, update, whole_norm(reduced), rates)


def mean_gradients(recipe: Recipe, model: nn.Module, given: Sequence[tuple[Batch, float]]) -> Gradients:
    """Mean gradient of batches at the model's weights: sum of factor x loss / sum of weights; zeros for what takes no part.

    Computed in the model's type, a float32 model in the recipe's autocast.
    """
    in_double = next(model.parameters()).dtype == torch.float64
    smaller = recipe.training.autocast
    cast = torch.autocast("cpu", getattr(torch, smaller)) if smaller and not in_double else nullcontext()
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch, factor in given:
        with cast:
            loss_sum, weight = recipe.loss(model, doubled(batch) if in_double else batch)
        (loss_sum * factor).backward()  # type: ignore[no-untyped-call]
        total += weight.item()
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad / total for name, p in trained}


def clip(gradients: Gradients, setting: Setting) -> Gradients:
    """The same gradients with a global norm of at most the limit; the norm is taken in their own type, as torch does it."""
    norm = float(torch.stack([value.norm() for value in gradients.values()]).norm())
    share = 1.0 if setting.limit is None else setting.limit / (norm + setting.slack)
    return gradients if share >= 1.0 else {name: value * share for name, value in gradients.items()}


def pieces(problem: Problem, setting: Setting, step: int, shuffled: torch.Generator | None = None) -> list[tuple[Batch, float]]:
    """A step's batches and what their loss is multiplied by; coupled samples stay together, re-ordered among themselves."""
    parts: Sequence[Part] = problem.parts[step]
    if shuffled is not None:
        parts = [_reordered(part, shuffled) for part in parts]
        parts = parts if problem.coupled else [piece for part in parts for piece in _recut(part, shuffled)]
    spoiled = np.array([place for at, place in setting.poisoned if at == step], dtype=np.int64)
    if not len(spoiled):
        return [(part.batch, 1.0) for part in parts]
    found = []
    for part in parts:
        struck = np.isin(part.places, spoiled)
        sides = ((~struck, 1.0), (struck, SPIKE)) if not problem.coupled else ((np.ones_like(struck), SPIKE if struck.all() else 1.0),)
        found += [(part.part(np.flatnonzero(side)).batch, factor) for side, factor in sides if side.any()]
    return found


def put(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy weights, and buffers that are named, into a model."""
    with torch.no_grad():
        for name, value in (*model.named_parameters(), *model.named_buffers()):
            if name in weights:
                value.copy_(weights[name])


def move(model: nn.Module, draw: torch.Generator) -> None:
    """Move every weight by one unit in the last place, up or down."""
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=draw).bool()
            parameter.copy_(torch.nextafter(parameter, torch.where(up, math.inf, -math.inf).to(parameter.dtype)))


def whole_norm(tensors: Mapping[str, Tensor]) -> float:
    """Euclidean norm of all tensors together."""
    return math.sqrt(sum(value**2 for value in norms(tensors).values()))


def norms(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Frobenius norm of each tensor, taken in float64."""
    if not tensors:
        return {}
    return dict(zip(tensors, torch.stack(torch._foreach_norm([value.double() for value in tensors.values()])).tolist(), strict=True))


def rates_of(optimizer: Optimizer) -> str:
    """Learning rates of an optimizer's groups as canonical JSON."""
    return canonical_json([float(group["lr"]) for group in optimizer.param_groups]).decode()


def _recut(part: Part, draw: torch.Generator) -> list[Part]:
    """Cut at random places."""
    count, size = int(torch.randint(2, MOST_PIECES + 1, (), generator=draw)), len(part.places)
    cuts = torch.randint(0, size + 1, (count - 1,), generator=draw).sort().values.tolist()
    return [part.part(slice(first, last)) for first, last in pairwise([0, *cuts, size]) if last > first]


def _reordered(part: Part, draw: torch.Generator) -> Part:
    return part.part(torch.randperm(len(part.places), generator=draw).numpy())
