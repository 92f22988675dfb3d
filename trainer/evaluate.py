"""The quality curve: the recipe's own number on the judge split, measured while training."""

import numpy as np
import torch
from torch import nn

from trainer.checks import evaluating
from trainer.feed import cast_input
from trainer.recipe import Recipe, SplitData

SCORE_BATCH = 2048  # rows a forward pass; bounds memory (a text model has a row for each position)


def measure_quality(recipe: Recipe, model: nn.Module, judge: SplitData, device: torch.device, *, double: bool) -> float:
    """Score every row of the judge split with the serving module and rate the scores; the model stays as it was."""
    with evaluating(model):
        scorer = recipe.scorer(model).eval()
        parts = []
        for start in range(0, len(judge), SCORE_BATCH):
            rows = np.arange(start, min(start + SCORE_BATCH, len(judge)))
            parts.append(scorer(cast_input(judge.batch(rows).inputs, device, double=double)).double().cpu().numpy())
    return float(recipe.quality(judge.frame, np.concatenate(parts)))
