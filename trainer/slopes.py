"""Finite differences: the loss's slope along random directions, by autograd and by moving the weights. Faults that a run shares with the
reference, like a wrong backward formula in the team's own autograd function, show here and nowhere else.

A direction is drawn for each trainable tensor and one for all together. Central differences f(w + h d) - f(w - h d) over 2 h are taken at
several widths h, and the best agreement counts: a wide h sees curvature, a narrow one rounding, and either may step over a kink (ReLU).

Measured, largest relative error: flights 2.3e-8, bytes 1.7e-8, digits 8.5e-8 with nothing wrong; 7e-4 when a layer's backward formula is
off by a factor of 1.001 in half of its features, 7e-3 at 1.01. A limit of 1e-4 is a thousand times above the one and below the other.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.plain import Gradients, Setting, mean_gradients, pieces, whole_norm
from trainer.problem import Problem, doubled, fresh_model
from trainer.streams import NOISE, hash64
from validation.records import SLOPE_COLUMNS

ALL = "all tensors"
WIDTHS = (1e-4, 1e-5, 1e-3, 1e-6)  # h by the norm of the weights that are moved, or by 1 where that is smaller
GOOD = 1e-7  # agreement at which no other width is tried
FLOOR = 1e-9  # slopes below this share of the whole gradient's norm are zero: rounding of the loss alone looks like that
SMALL_SHARE = 0.5  # a direction is drawn anew while its slope is below this share of what random directions have in the mean square
DRAWS = 16
EXACT = 1e-5  # beyond it a loss that casts to a smaller type is taken to err by its rounding

_CASTING = (torch.ops.aten._to_copy, torch.ops.aten.copy_)

Direction = dict[str, Tensor]


def slopes(problem: Problem) -> tuple[pd.DataFrame, str]:
    """Compare slopes on the first batch, dropout off, float64.

    Returns: (SLOPE_COLUMNS, ""), tensors in the model's order and then ALL; rel_err = |numeric - analytic| / the larger of both, or FLOOR
        of the whole gradient. Or (no rows, why): the loss is random, or is not computed in float64.
    """
    model = fresh_model(problem.recipe, torch.float64)
    given = pieces(problem, Setting(limit=None), 0)
    gradients = mean_gradients(problem.recipe, model, given)
    parameters = {name: parameter for name, parameter in model.named_parameters() if name in gradients}
    start = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    batches = [doubled(batch) for batch, _ in given]

    def loss_at(direction: Direction, width: float) -> float:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(start[name] + width * direction[name] if name in direction else start[name])
            sums, weights = zip(*(problem.recipe.loss(model, batch) for batch in batches), strict=True)
        return float(sum(value.item() for value in sums) / sum(value.item() for value in weights))

    with _Casts() as casts:  # type: ignore[no-untyped-call]
        here = loss_at({}, 0.0)
    if loss_at({}, 0.0) != here:
        return no_slopes("the loss is random with every Dropout module off")
    rows: list[tuple[str, float, float, float]] = []
    floor = FLOOR * whole_norm(gradients)
    for label, names in [*((name, [name]) for name in gradients), (ALL, list(gradients))]:
        direction = _direction(gradients, names, problem.recipe.training.seed)
        analytic = _slope(gradients, direction)
        rows.append((label, analytic, *_numeric(loss_at, direction, analytic, start, floor)))
    if casts.seen and not all(row[3] <= EXACT for row in rows):
        return no_slopes("the loss casts float64 to a smaller type, whose rounding is larger than what a narrow step changes")
    return pd.DataFrame(rows, columns=list(SLOPE_COLUMNS)), ""


def no_slopes(why: str) -> tuple[pd.DataFrame, str]:
    """An empty table and the reason."""
    return pd.DataFrame(columns=list(SLOPE_COLUMNS)), why


def _numeric(
    loss_at: Callable[[Direction, float], float], direction: Direction, analytic: float, start: Mapping[str, Tensor], floor: float
) -> tuple[float, float]:
    """The central difference that agrees best, and its relative error."""
    size = max(1.0, whole_norm({name: start[name] for name in direction}))
    best = (math.nan, math.inf)
    for width in WIDTHS:
        numeric = (loss_at(direction, width * size) - loss_at(direction, -width * size)) / (2 * width * size)
        error = abs(numeric - analytic) / max(abs(numeric), abs(analytic), floor, 1e-300)
        if not error >= best[1]:
            best = (numeric, error)
        if error <= GOOD or math.isnan(error):
            break
    return best


class _Casts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes whether anything of float64 is cast to a smaller type."""

    seen = False

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in _CASTING and isinstance(result, Tensor) and result.is_floating_point():
            given = [value for value in args if isinstance(value, Tensor)]
            self.seen |= result.dtype != torch.float64 and any(value.dtype == torch.float64 for value in given)
        return result


def _direction(gradients: Gradients, names: Sequence[str], seed: int) -> Direction:
    """A random unit direction over some tensors, not almost level by chance."""
    typical = whole_norm({name: gradients[name] for name in names}) / math.sqrt(sum(gradients[name].numel() for name in names))
    draw = torch.Generator().manual_seed(hash64(NOISE, seed, len(names), *names[0].encode()) >> 1)
    for _ in range(DRAWS):
        drawn = {name: torch.randn(gradients[name].shape, generator=draw, dtype=torch.float64) for name in names}
        length = whole_norm(drawn)
        direction = {name: value / length for name, value in drawn.items()}
        if abs(_slope(gradients, direction)) >= SMALL_SHARE * typical:
            break
    return direction


def _slope(gradients: Gradients, direction: Direction) -> float:
    return sum(float((gradients[name] * value).sum()) for name, value in direction.items())
