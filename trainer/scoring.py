"""Serving modules and example inputs. Runs in a warm process; import paths of these functions are handed to the registry as builders."""

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file
from torch import nn

from trainer.recipe import load_recipe


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
