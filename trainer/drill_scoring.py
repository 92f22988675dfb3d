"""What drills of the release need in a warm process: trained weights scored on the judge split, and a version that is asked to answer."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch

from trainer.recipe import load_recipe
from trainer.scoring import baseline_module, candidate_module


def score_weights(recipe_path: str, weights: Mapping[str, str], out: str) -> dict[str, float]:
    """Score contenders on the judge split and write validation.records.SliceRecords' outcomes to `out`.

    Args: weights, contender -> a run's model.safetensors; baseline and rule are added. Returns: contender -> quality.
    """
    recipe = load_recipe(recipe_path)
    data = recipe.data("judge")
    inputs = data.batch(np.arange(len(data))).inputs
    outcomes = data.frame[list(recipe.slices)].astype(str).assign(sample_id=data.sample_ids, cluster=data.frame[recipe.cluster].astype(str))
    modules = {name: candidate_module(recipe_path, path) for name, path in weights.items()} | {"baseline": baseline_module(recipe_path)}
    with torch.no_grad():
        scores = {name: module(inputs).double().numpy() for name, module in modules.items()}
    quality = {}
    for name, given in (scores | {"rule": recipe.rule(data.frame)}).items():
        found = recipe.outcomes(data.frame, given)
        outcomes = outcomes.assign(**{f"{part}_{name}": getattr(found, part) for part in ("utility", "loss", "confidence", "hit")})
        quality[name] = recipe.quality(data.frame, given)
    outcomes.to_parquet(out, index=False)
    return quality


def answers(recipe_path: str, weights: str) -> bool:
    """Load a version's weights and ask it for two predictions: whether they are finite. Raises what loading raises."""
    module = candidate_module(recipe_path, weights) if Path(weights).name != "baseline" else baseline_module(recipe_path)
    inputs = load_recipe(recipe_path).data("judge").batch(np.arange(2)).inputs
    with torch.no_grad():
        return bool(torch.isfinite(module(inputs)).all())
