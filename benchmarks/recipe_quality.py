"""Quality of the flights candidate on October-November beside logistic regression and the dispatcher's rule.

    python benchmarks/recipe_quality.py [--json] [--seeds 3]

One process, one thread, a plain loop over the recipe; `ratio` is the candidate's utility over the logistic baseline's, and the
goal is met when the median candidate beats both peers on ROC AUC, log loss and utility.

Limits: one data set, two months of one year's flights; few seeds; the peers are simple on purpose.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import nn

from trainer.recipe import Recipe, SplitData, load_recipe

GOAL = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One contender, one seed, on the judge split."""

    contender: str
    seed: int
    auc: float
    log_loss: float  # nats
    utility: float  # minutes per passenger and flight
    seconds: float  # training


def train(recipe: Recipe, data: SplitData, seed: int, *, report: bool = False) -> nn.Module:
    """The recipe's own contract in one process: batch, loss, clip, update, schedule."""
    torch.manual_seed(seed)
    model, size = recipe.model(), recipe.training.global_batch_size
    optimizer = recipe.optimizer(model)
    steps = -(-len(data) * recipe.training.epochs // size)
    schedule = recipe.schedule(optimizer, steps)
    draw = np.random.default_rng(seed)
    order = np.concatenate([draw.permutation(len(data)) for _ in range(recipe.training.epochs)])
    model.train()
    for step in range(steps):
        total, weight = recipe.loss(model, data.batch(order[step * size : (step + 1) * size]))
        optimizer.zero_grad()
        torch.autograd.backward(total / weight)
        if recipe.training.clip_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), recipe.training.clip_norm)
        optimizer.step()
        if schedule is not None:
            schedule.step()
        if report and (step + 1) % recipe.training.evaluate_every == 0:
            print(f"step {step + 1:4d}: quality {curve_point(recipe, model):.4f}", file=sys.stderr)
    return model


def curve_point(recipe: Recipe, model: nn.Module) -> float:
    """Quality on the judge split; the model goes on training."""
    judge = recipe.data("judge")
    quality = recipe.quality(judge.frame, scores(recipe.scorer(model.eval()), judge))
    model.train()
    return quality


def scores(module: nn.Module, data: SplitData) -> npt.NDArray[np.float64]:
    """Scores of every row of a split."""
    with torch.inference_mode():
        found: npt.NDArray[np.float64] = module.eval()(data.batch(np.arange(len(data))).inputs).double().numpy()
    return found


def measure(recipe: Recipe, contender: str, seed: int, found: npt.NDArray[np.float64], seconds: float) -> Sample:
    frame = recipe.data("judge").frame
    worth = recipe.outcomes(frame, found)
    return Sample(
        contender=contender, seed=seed, auc=recipe.quality(frame, found), log_loss=float(worth.loss.mean()),
        utility=float(worth.utility.mean()), seconds=seconds,
    )  # fmt: skip


def calibration(recipe: Recipe, found: npt.NDArray[np.float64]) -> pd.DataFrame:
    """Per slice: n, share late, mean probability and their gap."""
    frame = recipe.data("judge").frame
    table = frame[list(recipe.slices)].astype(str).assign(late=frame["late"], mean_p=found)
    tables = []
    for column in recipe.slices:
        each = table.groupby(column).agg(n=("late", "size"), late=("late", "mean"), mean_p=("mean_p", "mean"))
        tables.append(each.assign(gap=(each["mean_p"] - each["late"]).abs()).set_axis([f"{column}={value}" for value in each.index]))
    return pd.concat(tables)


def median_of(samples: list[Sample], contender: str) -> dict[str, float]:
    chosen = [sample for sample in samples if sample.contender == contender]
    return {key: statistics.median(getattr(sample, key) for sample in chosen) for key in ("auc", "log_loss", "utility")}


def main() -> None:
    """Train, score, print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument("--seeds", type=int, default=3, help="candidates to train")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    recipe = load_recipe("flights")
    data, judge = recipe.data("train"), recipe.data("judge")
    samples = []
    for seed in range(arguments.seeds):
        start = time.perf_counter()
        model = train(recipe, data, recipe.training.seed + seed, report=seed == 0 and not arguments.json)
        seconds = time.perf_counter() - start
        found = scores(recipe.scorer(model), judge)
        samples.append(measure(recipe, "candidate", seed, found, seconds))
    start = time.perf_counter()
    logistic = recipe.baseline(data)
    samples.append(measure(recipe, "baseline", 0, scores(logistic, judge), time.perf_counter() - start))
    samples.append(measure(recipe, "rule", 0, recipe.rule(judge.frame), 0.0))
    if not arguments.json:
        print(pd.DataFrame([asdict(sample) for sample in samples]).to_string(index=False, float_format="%.4f"))
        print(calibration(recipe, found).to_string(float_format="%.4f"))
        return
    candidate, *peers = (median_of(samples, name) for name in ("candidate", "baseline", "rule"))
    ratio = candidate["utility"] / peers[0]["utility"]
    met = ratio > GOAL and all(
        candidate["auc"] > peer["auc"] and candidate["log_loss"] < peer["log_loss"] and candidate["utility"] > peer["utility"]
        for peer in peers
    )
    document = {
        "name": "recipe_quality", "peer": "logistic regression on the same inputs (scikit-learn)", "ratio": ratio, "goal": GOAL,
        "met": met, "unit": "utility of the candidate / of the peer", "samples": [asdict(sample) for sample in samples],
    }  # fmt: skip
    print(json.dumps(document))


if __name__ == "__main__":
    main()
