"""Serving modules and their scores. Runs in a warm process; import paths of these functions are handed to the registry as builders."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file
from torch import nn

from trainer.recipe import SplitData, load_recipe

SCORE_BATCH = 8192  # rows a forward pass; bounds memory


def candidate_module(recipe: str, weights: str) -> nn.Module:
    """The serving module of trained weights: `weights` is a run's model.safetensors."""
    loaded = load_recipe(recipe)
    model = loaded.model()
    model.load_state_dict(load_file(weights))
    return loaded.scorer(model).eval()


def baseline_module(recipe: str) -> nn.Module:
    """The recipe's simple statistical model, fitted on the train split."""
    loaded = load_recipe(recipe)
    return loaded.baseline(loaded.data("train")).eval()


def example_inputs(recipe: str, rows: int = 2) -> npt.NDArray[np.generic]:
    """The first rows of the judge split as the serving module takes them: (rows, ...)."""
    inputs: npt.NDArray[np.generic] = load_recipe(recipe).data("judge").batch(np.arange(rows)).inputs.numpy()
    return inputs


def save_judge_inputs(recipe: str, path: str) -> None:
    """Write the whole judge split's inputs as one .npy, for models that are loaded without the recipe's code."""
    data = load_recipe(recipe).data("judge")
    np.save(Path(path), data.batch(np.arange(len(data))).inputs.numpy())


def judge_scores(module: nn.Module, data: SplitData) -> npt.NDArray[np.float64]:
    """Scores of every row of a split, in row order: (N,) or (N, C)."""
    parts = []
    with torch.no_grad():
        for start in range(0, len(data), SCORE_BATCH):
            rows = np.arange(start, min(start + SCORE_BATCH, len(data)))
            parts.append(module(data.batch(rows).inputs).double().numpy())
    return np.concatenate(parts)
