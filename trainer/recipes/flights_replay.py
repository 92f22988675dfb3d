"""December of flights as a version in service saw it: scores of a candidate, clean and with a fault, beside the baseline's. Warm process.

The faults that can be replayed (REGRESSIONS); each begins with a day and stays:

    stale-weights    the first layer is from before training: a restart mixed two checkpoints
    lost-history     the candidate's feature store does not answer, its client goes on without; the baseline reads the nightly table
    stale-features   the candidate's feature cache answers with what it held a day ago for this airport: 2 margins, slow to prove
    dead-feed        delays, queues and aircraft are reported as zero, to everybody: the fallback would be no better
"""

import copy
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import nn

from trainer.recipe import load_recipe
from trainer.recipes.flights_data import encode, load_encoding
from trainer.recipes.flights_features import NUMBERS, QUEUES, WINDOWS
from trainer.recipes.flights_month import Month, write_month
from trainer.scoring import baseline_module, candidate_module
from trainer.serving import days_of, mature, slice_values
from validation.drift import reference_bins, served_counts

RECIPE = "flights"
REGRESSIONS = ("stale-weights", "lost-history", "stale-features", "dead-feed")
_QUEUED = {f"{group}_{what}" for group in QUEUES for what in ("waiting", "overdue")}
HISTORY = tuple(name for name in NUMBERS if name in {"_".join(window) for window in WINDOWS} | _QUEUED or name.startswith("tail_"))
DAY = np.timedelta64(24, "h")
BATCH = 8192

Scores = npt.NDArray[np.float64]


def score_month(weights: str, folder: str, maturity_days: int) -> None:
    """Score December clean and with every fault: `<folder>/<name>.parquet` gets the rows of each and their outcomes, month.json the rest.

    A row also has `day` and `score`. Faults are scored from the first day on: a replay takes them from the day on which they begin.
    """
    torch.set_num_threads(1)
    recipe, encoding = load_recipe(RECIPE), load_encoding()
    live, judge, train = (recipe.data(split) for split in ("live", "judge", "train"))
    candidate, baseline = candidate_module(RECIPE, weights), baseline_module(RECIPE)
    shadow = _scores(baseline, judge.batch(np.arange(len(judge))).inputs.numpy())
    judged = _scores(candidate, judge.batch(np.arange(len(judge))).inputs.numpy())
    trained = days_of(recipe, train.frame)
    columns = tuple(reference_bins(name, train.frame[name], trained) for name in recipe.contract.columns)
    scores = reference_bins("", pd.Series(judged), days_of(recipe, judge.frame))
    inputs, score_counts = {}, {}
    for name, fed, score in _fed(live.frame, candidate):
        seen = encode(fed, encoding)
        answer = score(seen)
        both = seen if name == "dead-feed" else encode(live.frame, encoding)
        asked = pd.DataFrame({"row_id": live.sample_ids, "version": "2", "answered": True, "score": answer})
        days = live.frame["day"]
        _keep(Path(folder), name, days, asked.assign(reference_score=_scores(baseline, both)), maturity_days)
        inputs[name] = {bins.name: served_counts(bins, fed[bins.name], days) for bins in columns}
        score_counts[name] = {"": served_counts(scores, pd.Series(answer), days)}
    month = Month(
        columns=columns, scores=scores, utility_scale=float(recipe.outcomes(judge.frame, shadow).utility.std()),
        utility_unit=recipe.card.utility_unit, inputs=inputs, score_counts=score_counts,
        slices={name: tuple(sorted(set(slice_values(judge.frame[name])))) for name in recipe.slices},
    )  # fmt: skip
    write_month(month, Path(folder) / "month.json")


Scorer = Callable[[npt.NDArray[np.float32]], Scores]


def _fed(frame: pd.DataFrame, candidate: nn.Module) -> list[tuple[str, pd.DataFrame, Scorer]]:
    """(name, what the candidate is fed, how it scores) of the clean month and of each regression."""

    def asked(module: nn.Module) -> Scorer:
        return lambda inputs: _scores(module, inputs)

    dead, lost = (frame.assign(**{name: np.float32(value) for name in HISTORY}) for value in (0.0, np.nan))
    return [
        ("clean", frame, asked(candidate)), ("stale-weights", frame, asked(_torn(candidate))), ("lost-history", lost, asked(candidate)),
        ("stale-features", stale(frame), asked(candidate)), ("dead-feed", dead, asked(candidate)),
    ]  # fmt: skip


def stale(frame: pd.DataFrame) -> pd.DataFrame:
    """History columns as they stood for the same airport's last flight that was due at least a day before; the first day stays."""
    due, held = frame["departure"].to_numpy(), frame[list(HISTORY)].to_numpy()
    old = held.copy()
    for rows in frame.groupby("origin").indices.values():
        order = np.asarray(rows)[np.argsort(due[rows], kind="stable")]
        before = np.searchsorted(due[order], due[order] - DAY, side="right") - 1
        known = before >= 0
        old[order[known]] = held[order[before[known]]]
    return frame.assign(**{name: old[:, place] for place, name in enumerate(HISTORY)})


def _torn(candidate: nn.Module) -> nn.Module:
    """The candidate with an untrained first layer."""
    torn = copy.deepcopy(candidate)
    torch.manual_seed(99)
    first = dict(load_recipe(RECIPE).model().named_parameters())
    own = dict(torn.named_parameters())
    with torch.no_grad():
        for name in ("layers.0.weight", "layers.0.bias"):
            own[f"model.{name}"].copy_(first[name])
    return torn


def _keep(folder: Path, name: str, days: "pd.Series[str]", asked: pd.DataFrame, mature_after: int) -> None:
    """The month's rows with their outcomes, null where none came."""
    asked.to_parquet(folder / "asked.parquet", index=False)
    mature(RECIPE, str(folder / "asked.parquet"), str(folder / f"{name}.parquet"), until="9999-12-31", maturity_days=mature_after)
    found = pd.read_parquet(folder / f"{name}.parquet")
    more = asked[["row_id", "score", "reference_score"]].assign(day=days.to_numpy())
    found.merge(more, on="row_id", how="right", validate="one_to_one").to_parquet(folder / f"{name}.parquet", index=False)


def _scores(module: nn.Module, inputs: npt.NDArray[np.generic]) -> Scores:
    """Scores of all rows, in batches."""
    with torch.no_grad():
        parts = [module(torch.from_numpy(np.array(inputs[at : at + BATCH]))).numpy() for at in range(0, len(inputs), BATCH)]
    return np.concatenate(parts).astype(np.float64)
