"""The other way to the same numbers: plain autograd on the full global batch, one process, float64, no lanes and no ranks.

Written apart from the loop on purpose, so that a mistake in one is not repeated in the other; they share the permutation and nothing
else of the data path. Dropout modules are off throughout. A tensor's float noise is measured, not assumed: how far its gradient moves
when weights change by one unit in the last place, or when samples are added up in another order.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from trainer.checks import is_coupled, switch_off_dropout
from trainer.dataset import fetch
from trainer.order import permute
from trainer.recipe import Batch, Recipe, SplitData, load_recipe
from trainer.state import tensor_sha256
from trainer.streams import NOISE, hash64, sample_keys
from validation.errors import EvidenceError
from validation.records import GRADIENT_ERROR_COLUMNS

VARIANTS = 8  # of each kind of noise
MOST_PIECES = 16  # random micro-batches of a re-ordering
ZERO = 1e-12  # a tensor whose share of the whole gradient's norm is below this has no gradient of its own, only rounding

Rows = npt.NDArray[np.int64]


class Samples(NamedTuple):
    """Samples of a batch or of a part of it, and the keys of their own random streams."""

    rows: Rows
    keys: npt.NDArray[np.uint64]

    def part(self, chosen: Any) -> "Samples":
        """Some of them, by slice or index."""
        return Samples(self.rows[chosen], self.keys[chosen])


Gradients = dict[str, Tensor]  # by parameter name, mean over the global batch, before clipping


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a plain training: the weights before it and the gradient there."""

    weights: dict[str, Tensor]
    gradients: Gradients


@dataclass(frozen=True, slots=True)
class Problem:
    """A recipe and the rows of its first global batches."""

    recipe: Recipe
    data: SplitData
    batches: tuple[Samples, ...]
    steps: int  # updates of the recipe's whole training: what its schedule is made for
    coupled: bool  # samples of a micro-batch see one another, so a batch has to be cut as the recipe's Training says


def expected_order(recipe_path: str, steps: int) -> tuple[int, ...]:
    """Sample ids of the first steps in position order, from the permutation alone."""
    problem = load_problem(recipe_path, steps)
    return tuple(int(problem.data.sample_ids[row]) for batch in problem.batches for row in batch.rows)


def reference_gradients(recipe_path: str, steps: int, folder: str) -> str:
    """Train in float64 and write the gradients and weights of each step as `<folder>/reference.safetensors`, named as a run's are."""
    moments = plain_training(load_problem(recipe_path, steps))
    tensors = {f"step{step}/{name}": value for step, moment in enumerate(moments) for name, value in moment.gradients.items()}
    tensors |= {f"step{step}/weights/{name}": value for step, moment in enumerate(moments) for name, value in moment.weights.items()}
    path = Path(folder) / "reference.safetensors"
    save_file(tensors, path)
    return str(path)


def gradient_noise(recipe_path: str, steps: int) -> pd.DataFrame:
    """Float noise of every tensor: columns precision, step, tensor, noise (relative Frobenius norm, dimensionless).

    At each step 8 variants have every weight moved by one unit in the last place, up or down at random, and 8 have the batch re-ordered and
    cut into random micro-batches; the noise is the largest distance seen. float32 variants start from the reference's weights, rounded, and
    are compared with float64 at these weights. float64 variants train on their own from the first step, so that noise that has grown in the
    weights is in it; they are compared with the reference. Distances are relative to the tensor's own norm, or to the whole gradient's for
    a tensor without a true gradient (a bias in front of a LayerNorm): nothing is divided by zero, and its noise is small, not infinite. No
    noise is below half a unit in the last place: the result itself is rounded to that.
    """
    problem = load_problem(recipe_path, steps)
    return _noise_table(problem, plain_training(problem))


def gradient_errors(recipe_path: str, runs: Sequence[Mapping[str, Any]], steps: int) -> pd.DataFrame:
    """Distance of every run's kept gradients to the float64 reference, beside the tensors' noise.

    Args: runs, each {leg, world_size, folder, precision}; their folders hold gradients.safetensors of at least `steps` steps.
    Returns: GRADIENT_ERROR_COLUMNS. A float64 run is compared with the reference's own training, weights' evolution included. A float32
        run's weights part from the reference's by rounding after one update, so the reference is asked at the run's own weights: that
        compares the computation of gradients and nothing else.
    Raises: EvidenceError when a run kept fewer steps or other tensors.
    """
    problem = load_problem(recipe_path, steps)
    moments = plain_training(problem)
    noise = _noise_table(problem, moments).set_index(["precision", "step", "tensor"])["noise"]
    rows = []
    at_weights: dict[tuple[int, str], Gradients] = {}  # runs of the exact reduction share their weights: ask once
    for run in runs:
        kept = _kept(Path(run["folder"]), moments)
        for step, moment in enumerate(moments):
            expected = moment.gradients
            if run["precision"] == "float32":
                weights = {name: kept[f"step{step}/weights/{name}"].double() for name in moment.weights}
                key = (step, "".join(tensor_sha256(value) for value in weights.values()))
                if key not in at_weights:
                    at_weights[key] = _at(problem, weights, step)
                expected = at_weights[key]
            found = {name: kept[f"step{step}/{name}"] for name in expected}
            for name, error in distances(found, expected, _no_gradient(moment.gradients)).items():
                rows.append((run["leg"], run["world_size"], step, name, error, float(noise[run["precision"], step, name])))
    return pd.DataFrame(rows, columns=list(GRADIENT_ERROR_COLUMNS))


def load_problem(recipe_path: str, steps: int) -> Problem:
    """The recipe, its train split, and the rows of its first `steps` global batches (fewer when the data ends before)."""
    recipe = load_recipe(recipe_path)
    data = recipe.data("train")
    plan, size = recipe.training, len(data)
    there = size * plan.epochs
    there -= there % plan.global_batch_size if plan.tail == "drop" else 0
    samples = min(steps * plan.global_batch_size, there)
    passes = [permute(plan.seed, epoch, size, np.arange(size)) for epoch in range(math.ceil(samples / size))]
    rows = np.concatenate(passes)[:samples]
    whole = Samples(rows, sample_keys(plan.seed, np.arange(samples) // size, data.sample_ids[rows]))
    batches = tuple(whole.part(slice(cut, cut + plan.global_batch_size)) for cut in range(0, samples, plan.global_batch_size))
    coupled = is_coupled(recipe, _model(recipe, torch.float64), _double(fetch(data, *batches[0])))
    return Problem(recipe, data, batches, math.ceil(there / plan.global_batch_size), coupled)


def plain_training(problem: Problem, *, moved: torch.Generator | None = None, shuffled: torch.Generator | None = None) -> list[Moment]:
    """Train in float64 and keep every step: autograd on the whole batch, the recipe's clipping, optimizer and schedule.

    Variants: `moved` moves every weight by one unit in the last place before each step; `shuffled` re-orders and cuts each batch.
    """
    model = _model(problem.recipe, torch.float64)
    optimizer = problem.recipe.optimizer(model)
    plan = problem.recipe.training
    schedule = problem.recipe.schedule(optimizer, problem.steps)
    moments = []
    for samples in problem.batches:
        if moved is not None:
            _move(model, moved)
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        moments.append(Moment(weights, gradients_of(problem, model, _pieces(problem, samples, shuffled))))
        for name, parameter in model.named_parameters():
            parameter.grad = moments[-1].gradients[name].clone() if name in moments[-1].gradients else None
        if plan.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), plan.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return moments


def gradients_of(problem: Problem, model: nn.Module, pieces: Sequence[Samples]) -> Gradients:
    """Mean gradient of some samples at the model's weights: sum over pieces / weight over pieces; zeros for what takes no part."""
    in_double = next(model.parameters()).dtype == torch.float64
    smaller = problem.recipe.training.autocast
    cast = torch.autocast("cpu", getattr(torch, smaller)) if smaller and not in_double else nullcontext()
    model.zero_grad(set_to_none=True)
    total = 0.0
    for samples in pieces:
        batch = fetch(problem.data, *samples)
        with cast:
            loss_sum, weight = problem.recipe.loss(model, _double(batch) if in_double else batch)
        loss_sum.backward()  # type: ignore[no-untyped-call]
        total += weight.item()
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
    return {name: torch.zeros_like(p) if p.grad is None else p.grad / total for name, p in trained}


def distances(found: Mapping[str, Tensor], expected: Gradients, no_gradient: frozenset[str]) -> dict[str, float]:
    """Relative Frobenius distance of each tensor; `no_gradient` names those measured by the whole gradient's norm."""
    whole = _whole(expected)
    result = {}
    for name, value in expected.items():
        scale = whole if name in no_gradient else float(value.norm())
        error = float((found[name].double() - value).norm())
        result[name] = error / scale if scale else (0.0 if error == 0.0 else math.inf)
    return result


def _noise_table(problem: Problem, moments: Sequence[Moment]) -> pd.DataFrame:
    rows = []
    for precision, measure in (("float32", _float32_noise), ("float64", _float64_noise)):
        floor = torch.finfo(getattr(torch, precision)).eps / 2
        for step, noise in enumerate(measure(problem, moments)):
            rows += [(precision, step, name, max(value, floor)) for name, value in noise.items()]
    return pd.DataFrame(rows, columns=["precision", "step", "tensor", "noise"])


def _float32_noise(problem: Problem, moments: Sequence[Moment]) -> list[dict[str, float]]:
    """For each step, the largest distance of float32 variants from float64 at the same (rounded) weights."""
    found = []
    for step, moment in enumerate(moments):
        rounded = {name: value.float() for name, value in moment.weights.items()}
        expected = _at(problem, {name: value.double() for name, value in rounded.items()}, step)
        seen = []
        for moved, shuffled in _variants(problem):
            model = _model(problem.recipe, torch.float32)
            _put(model, rounded)
            if moved is not None:
                _move(model, moved)
            gradients = gradients_of(problem, model, _pieces(problem, problem.batches[step], shuffled))
            seen.append(distances(gradients, expected, _no_gradient(moment.gradients)))
        found.append(_largest(seen))
    return found


def _float64_noise(problem: Problem, moments: Sequence[Moment]) -> list[dict[str, float]]:
    """For each step, the largest distance of float64 variants, each trained on its own, from the reference."""
    trained = [plain_training(problem, moved=moved, shuffled=shuffled) for moved, shuffled in _variants(problem)]
    return [
        _largest([distances(variant[step].gradients, moment.gradients, _no_gradient(moment.gradients)) for variant in trained])
        for step, moment in enumerate(moments)
    ]


def _variants(problem: Problem) -> list[tuple[torch.Generator | None, torch.Generator | None]]:
    """(moved, shuffled): 8 of each kind, with a generator of its own."""
    draws = [torch.Generator().manual_seed(hash64(NOISE, problem.recipe.training.seed, number) >> 1) for number in range(2 * VARIANTS)]
    return [(draw, None) for draw in draws[:VARIANTS]] + [(None, draw) for draw in draws[VARIANTS:]]


def _largest(seen: Sequence[Mapping[str, float]]) -> dict[str, float]:
    # np.max hands NaN on, max() may lose it
    return {name: float(np.max([distance[name] for distance in seen])) for name in seen[0]}


def _double(batch: Batch) -> Batch:
    return Batch(*(value.double() if value.is_floating_point() else value for value in batch))


def _pieces(problem: Problem, samples: Samples, shuffled: torch.Generator | None) -> list[Samples]:
    """The batch as it is, or re-ordered and cut at random places; coupled samples stay together, re-ordered among themselves."""
    if problem.coupled:
        plan = problem.recipe.training
        parts = [part for lane in _cut(samples, plan.lanes) for part in _cut(lane, plan.accumulation) if len(part.rows)]
        return parts if shuffled is None else [_reordered(part, shuffled) for part in parts]
    if shuffled is None:
        return [samples]
    reordered = _reordered(samples, shuffled)
    count = int(torch.randint(2, MOST_PIECES + 1, (), generator=shuffled))
    cuts = torch.randint(0, len(samples.rows) + 1, (count - 1,), generator=shuffled).sort().values.tolist()
    return [reordered.part(slice(first, last)) for first, last in pairwise([0, *cuts, len(samples.rows)]) if last > first]


def _reordered(samples: Samples, draw: torch.Generator) -> Samples:
    return samples.part(torch.randperm(len(samples.rows), generator=draw).numpy())


def _cut(samples: Samples, parts: int) -> list[Samples]:
    """Cut samples into parts of sizes that differ by one at most, as lanes and accumulation do."""
    edges = [part * len(samples.rows) // parts for part in range(parts + 1)]
    return [samples.part(slice(first, last)) for first, last in pairwise(edges)]


def _move(model: nn.Module, draw: torch.Generator) -> None:
    """Move every weight by one unit in the last place, up or down."""
    with torch.no_grad():
        for parameter in model.parameters():
            up = torch.randint(0, 2, parameter.shape, generator=draw).bool()
            parameter.copy_(torch.nextafter(parameter, torch.where(up, math.inf, -math.inf).to(parameter.dtype)))


def _model(recipe: Recipe, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(recipe.training.seed)
    model = recipe.model().to(dtype)
    model.train()
    switch_off_dropout(model)
    return model


def _put(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def _at(problem: Problem, weights: Mapping[str, Tensor], step: int) -> Gradients:
    """float64 gradient of one step's whole batch at given weights."""
    model = _model(problem.recipe, torch.float64)
    _put(model, weights)
    return gradients_of(problem, model, _pieces(problem, problem.batches[step], None))


def _whole(gradients: Gradients) -> float:
    return math.sqrt(sum(float(value.norm()) ** 2 for value in gradients.values()))


def _no_gradient(gradients: Gradients) -> frozenset[str]:
    """Tensors whose true gradient is zero."""
    whole = _whole(gradients)
    return frozenset(name for name, value in gradients.items() if float(value.norm()) <= ZERO * whole)


def _kept(folder: Path, moments: Sequence[Moment]) -> dict[str, Tensor]:
    """A run's kept gradients and weights, complete. Raises EvidenceError."""
    path = folder / "gradients.safetensors"
    wanted = {f"step{step}/{name}" for step, moment in enumerate(moments) for name in moment.gradients}
    wanted |= {f"step{step}/weights/{name}" for step, moment in enumerate(moments) for name in moment.weights}
    kept = load_file(path) if path.exists() else {}
    if missing := sorted(wanted - kept.keys()):
        raise EvidenceError(
            f"{path} lacks {len(missing)} of {len(wanted)} tensors ({', '.join(missing[:3])}). The run cannot be compared with the "
            f"reference. Run it again with keep_gradients={len(moments)} and without faults."
        )
    return kept
