"""Scores of every contender on the judge split. Runs in a warm process: it loads registered models and the recipe's code."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from infra.export import load_and_predict
from trainer.recipe import load_recipe

LATENCY_CALLS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What `score_contenders` found beside the outcomes it wrote."""

    quality: dict[str, float]  # contender -> the recipe's quality on the judge split
    refused: dict[str, str]  # contender -> why it could not be scored
    latency_ms: tuple[float, ...]  # one-row predictions of the candidate


def score_contenders(recipe_path: str, model_uris: Mapping[str, str], out: str) -> Scored:
    """Ask each registered model and the rule for the whole judge split; write validation.records.SliceRecords' outcomes to `out`.

    A last known-good model that no longer fits the recipe's inputs is reported in `refused`; the candidate's failure is raised.
    """
    recipe = load_recipe(recipe_path)
    data = recipe.data("judge")
    inputs = data.batch(np.arange(len(data))).inputs.numpy()
    outcomes = data.frame[list(recipe.slices)].astype(str).assign(sample_id=data.sample_ids, cluster=data.frame[recipe.cluster].astype(str))
    quality: dict[str, float] = {}
    refused: dict[str, str] = {}
    latency: tuple[float, ...] = ()
    for contender, uri in model_uris.items():
        try:
            scored = load_and_predict(uri, inputs, latency_calls=LATENCY_CALLS if contender == "candidate" else 0)
        except Exception as error:
            if contender == "candidate":
                raise
            refused[contender] = f"{type(error).__name__}: {error}"
            continue
        latency = scored.latency_ms or latency
        outcomes = _joined(outcomes, contender, recipe.outcomes(data.frame, scored.scores))
        quality[contender] = recipe.quality(data.frame, scored.scores)
    rule: npt.NDArray[np.float64] = recipe.rule(data.frame)
    outcomes = _joined(outcomes, "rule", recipe.outcomes(data.frame, rule))
    quality["rule"] = recipe.quality(data.frame, rule)
    outcomes.to_parquet(out, index=False)
    return Scored(quality=quality, refused=refused, latency_ms=latency)


def _joined(outcomes: pd.DataFrame, contender: str, found: object) -> pd.DataFrame:
    parts = ("utility", "loss", "confidence", "hit")
    return outcomes.assign(**{f"{part}_{contender}": getattr(found, part) for part in parts})
