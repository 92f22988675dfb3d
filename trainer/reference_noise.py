"""How far a tensor moves without any fault: its float noise, measured and not assumed.

Eight variants of a training have every weight moved by one unit in the last place before each step, up or down at random, and eight have
each batch re-ordered and cut into random micro-batches; the noise is the largest distance seen. float64 variants train on their own from
the first step, so that noise that has grown in weights and moments is in it, and are compared with the reference's training. float32
variants (in the recipe's autocast, where it has one) start at each step from the reference's weights, rounded, and are compared with
float64 at these weights.

Distances are relative to the tensor's own norm, or to the norm of all tensors for one without a true gradient (a bias in front of a
LayerNorm): nothing is divided by zero, and its noise is small, not infinite. No noise is below half a unit in the last place: the result
itself is rounded to that. An update is read off as the weights after a step minus those before, so it is rounded as the weights are.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from trainer.plain import Gradients, Moment, Setting, clip, mean_gradients, move, norms, pieces, put, train, whole_norm
from trainer.problem import Problem, fresh_model, trained_type
from trainer.streams import NOISE, hash64

VARIANTS = 8  # of each kind
ZERO = 1e-12  # a tensor whose share of the whole gradient's norm is below this has no gradient of its own, only rounding

Noise = dict[tuple[str, int, str], float]  # (stage, step, tensor) -> relative Frobenius norm
Variant = dict[tuple[str, int], dict[str, float]]  # (stage, step) -> tensor -> distance of one variant


def float64_noise(problem: Problem, setting: Setting, moments: Sequence[Moment]) -> Noise:
    """Noise of every stage, step and tensor. Args: moments, the reference's training under `setting`."""
    return _largest(_float64(problem, setting, moments), moments, torch.float64)


def float32_noise(problem: Problem, setting: Setting, moments: Sequence[Moment], step: int) -> Noise:
    """Noise of one step's stages "reduced" and "clipped" and every tensor. Args: moments, the reference's training under `setting`."""
    return _largest(_as_trained(problem, setting, moments[step], step), moments, trained_type(problem.recipe))


def _largest(variants: Iterable[Variant], moments: Sequence[Moment], precision: torch.dtype) -> Noise:
    seen: dict[tuple[str, int, str], list[float]] = {}
    for variant in variants:
        for (stage, step), found in variant.items():
            for name, value in found.items():
                seen.setdefault((stage, step, name), []).append(value)
    half_ulp = torch.finfo(precision).eps / 2
    floors = {place: _floors(moments[place[1]], place[0], half_ulp) for place in {(stage, step) for stage, step, _ in seen}}
    # np.max hands NaN on, max() may lose it
    return {(stage, step, name): float(np.max([*values, floors[stage, step][name]])) for (stage, step, name), values in seen.items()}


def distances(found: Mapping[str, Tensor], expected: Gradients, no_gradient: frozenset[str]) -> dict[str, float]:
    """Relative Frobenius distance of each tensor; `no_gradient` names those measured by the norm of all."""
    whole, scales = whole_norm(expected), norms(expected)
    errors = norms({name: found[name].double() - value for name, value in expected.items()})
    result = {}
    for name, error in errors.items():
        scale = whole if name in no_gradient else scales[name]
        result[name] = error / scale if scale else (0.0 if error == 0.0 else math.inf)
    return result


def without_gradient(moment: Moment, stage: str) -> frozenset[str]:
    """Tensors whose true gradient is zero, and for stage "weight" those whose update is."""
    asked = [moment.reduced, moment.update] if stage == "weight" else [moment.reduced]
    return frozenset(name for tensors in asked for name in _zeros(tensors))


def _zeros(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    whole = whole_norm(tensors)
    yield from (name for name, value in norms(tensors).items() if value <= ZERO * whole)


def _float64(problem: Problem, setting: Setting, moments: Sequence[Moment]) -> Iterator[Variant]:
    """Each variant's distances from the reference."""
    nothing = {(stage, step): without_gradient(moment, stage) for step, moment in enumerate(moments) for stage in ("reduced", "weight")}
    for moved, shuffled in _variants(problem):
        found = {}
        for step, moment in enumerate(train(problem, setting, moved=moved, shuffled=shuffled)):
            right, none = moments[step], nothing["reduced", step]
            found["reduced", step] = distances(moment.reduced, right.reduced, none)
            found["clipped", step] = distances(moment.clipped, right.clipped, none)
            found["weight", step] = distances(moment.update, right.update, nothing["weight", step])
        yield found


def _as_trained(problem: Problem, setting: Setting, moment: Moment, step: int) -> Iterator[Variant]:
    """Each variant's distances from float64 at the same weights, rounded to the type that is trained in."""
    kind = trained_type(problem.recipe)
    rounded = {name: value.to(kind) for name, value in moment.weights.items()}
    right = gradients_at(problem, setting, rounded, step)
    none = without_gradient(moment, "reduced")
    model = fresh_model(problem.recipe, kind)
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    for moved, shuffled in _variants(problem):
        put(model, rounded | buffers)
        if moved is not None:
            move(model, moved)
        reduced = mean_gradients(problem.recipe, model, pieces(problem, setting, step, shuffled))
        found = {"reduced": reduced, "clipped": clip(reduced, setting)}
        yield {(stage, step): distances(value, right[stage], none) for stage, value in found.items()}


def gradients_at(problem: Problem, setting: Setting, weights: Mapping[str, Tensor], step: int) -> dict[str, Gradients]:
    """float64 gradient of one step's whole batch at given weights, by stage: "reduced" and "clipped"."""
    model = fresh_model(problem.recipe, torch.float64)
    put(model, weights)
    reduced = mean_gradients(problem.recipe, model, pieces(problem, setting, step))
    return {"reduced": reduced, "clipped": clip(reduced, setting)}


def _variants(problem: Problem) -> Iterator[tuple[torch.Generator | None, torch.Generator | None]]:
    """(moved, shuffled): 8 of each kind, with a generator of its own."""
    for number in range(2 * VARIANTS):
        draw = torch.Generator().manual_seed(hash64(NOISE, problem.recipe.training.seed, number) >> 1)
        yield (draw, None) if number < VARIANTS else (None, draw)


def _floors(moment: Moment, stage: str, half_ulp: float) -> dict[str, float]:
    """Half a unit in the last place of what is compared, by tensor."""
    if stage != "weight":
        return dict.fromkeys(moment.reduced, half_ulp)
    whole, scales, sizes, none = whole_norm(moment.update), norms(moment.update), norms(moment.weights), without_gradient(moment, stage)
    scales = {name: whole if name in none else scale for name, scale in scales.items()}
    return {name: max(half_ulp, half_ulp * sizes[name] / scale) if scale else half_ulp for name, scale in scales.items()}
