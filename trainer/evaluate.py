"""The quality curve: the recipe's own number on the judge split, measured while training, by rank 0 or by the recipe's own evaluation.

N = rows of the judge split, B = rows asked for, M = rows that an own evaluation counted.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from trainer.checks import evaluating
from trainer.dataset import kept_streams
from trainer.feed import cast_input
from trainer.hooks import Evaluated, Hooks, Rows, naming
from trainer.recipe import Recipe, SplitData
from trainer.world import World
from validation.errors import RecipeError

SCORE_BATCH = 2048  # rows a forward pass; bounds memory (a text model has a row for each position)

Scores = npt.NDArray[np.float64]  # (B,) or (B, C)


class Measured(NamedTuple):
    """What an own evaluation found."""

    sample_ids: tuple[int, ...]  # as counted, in order
    quality: float


def measure_quality(recipe: Recipe, model: nn.Module, judge: SplitData, device: torch.device, *, double: bool) -> float:
    """Score every row of the judge split with the serving module and rate the scores; the model stays as it was."""
    return float(recipe.quality(judge.frame, scores_of(recipe, model, judge, np.arange(len(judge)), device, double=double)))


def scores_of(recipe: Recipe, model: nn.Module, judge: SplitData, rows: Rows, device: torch.device, *, double: bool) -> Scores:
    """Scores of some rows of the judge split by the serving module, (B,) or (B, C); the model stays as it was."""
    with evaluating(model):
        scorer = recipe.scorer(model).eval()
        parts = []
        for start in range(0, len(rows), SCORE_BATCH):
            inputs = judge.batch(rows[start : start + SCORE_BATCH]).inputs
            parts.append(scorer(cast_input(inputs, device, double=double)).double().cpu().numpy())
    return np.concatenate(parts) if parts else np.empty(0)


def own_quality(
    recipe: Recipe, hooks: Hooks, model: nn.Module, judge: SplitData, device: torch.device, world: World, *, step: int, double: bool
) -> Measured | None:  # fmt: skip
    """What the recipe's own evaluation counts and how it rates it, on rank 0; None on the others. Collective, as far as the hook is.

    The random streams of training go on as they were. Raises: RecipeError when it returns something else than rows and their scores.
    """

    def score(module: nn.Module, rows: Rows) -> Scores:
        return scores_of(recipe, module, judge, np.asarray(rows, dtype=np.int64), device, double=double)

    with kept_streams(), evaluating(model), naming("evaluate", world, step):
        found = hooks.evaluate(model, judge, score, world)
    if world.rank > 0:
        return None
    rows, scores = _checked(recipe, judge, found)
    ids = tuple(int(sample_id) for sample_id in judge.sample_ids[rows])
    return Measured(ids, float(recipe.quality(judge.frame.iloc[rows], scores)))


def _checked(recipe: Recipe, judge: SplitData, found: object) -> Evaluated:
    wrong = f"a {type(found).__name__}"
    if isinstance(found, tuple) and len(found) == 2:
        rows, scores = np.asarray(found[0]), np.asarray(found[1], dtype=np.float64)
        is_inside = rows.ndim == 1 and rows.dtype.kind in "iu" and len(rows) > 0 and rows.min() >= 0 and rows.max() < len(judge)
        if is_inside and len(scores) == len(rows):
            return Evaluated(rows.astype(np.int64), scores)
        wrong = f"rows of type {rows.dtype} and shape {rows.shape} with scores of shape {scores.shape}"
    raise RecipeError(
        f"recipe {recipe.name}: hooks.evaluate gave {wrong} on rank 0. A point of the quality curve cannot be made of that. Return "
        f"Evaluated(rows, scores): whole numbers of [0, {len(judge)}) and a score for each, gathered from all ranks."
    )
