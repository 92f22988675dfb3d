"""Requests to a version in service and what became of them, from a recipe's live split. Runs in a warm process.

A request is known by its row id and its day (of its event time). Nothing of after a request's event time leaves this module before its
outcome is mature: `requests_of` drops the label, `mature` counts days.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from trainer.recipe import LIVE, Recipe, SplitData, load_recipe
from validation.errors import ConfigError, RecipeError

Scores = npt.NDArray[np.float64]  # (N,) or (N, C)

EXCLUDED = "excluded"  # frame column of a live split: why a request never has an outcome, "" or null = it has one
OUTCOME_COLUMNS = ("utility", "reference_utility", "loss", "confidence", "hit")


@dataclass(frozen=True, slots=True, kw_only=True)
class Requests:
    """What was asked on one day, N rows in the split's order."""

    row_ids: npt.NDArray[np.int64]
    frame: pd.DataFrame  # contract and slice columns, nothing of the outcome
    inputs: npt.NDArray[Any]  # (N, ...)


def requests_of(recipe: Recipe, day: str, *, answered: Sequence[int] | npt.NDArray[np.int64] = ()) -> Requests:
    """A day's requests, without those that were answered before.

    Raises: ConfigError when the day is not in the recipe's live period; RecipeError when the split cannot be used.
    """
    first, last = _period(recipe)
    if day < first[:10] or (last and day >= last[:10]):
        raise ConfigError(
            f"recipe {recipe.name} has no requests of {day}, so nothing was scored: its live split is of {first[:10]} up to "
            f"{last[:10] or 'now'}, the last day excluded. Name a day of these."
        )
    data = recipe.data(LIVE)
    _check(recipe, data)
    is_new = (days_of(recipe, data.frame) == day).to_numpy() & ~np.isin(data.sample_ids, np.asarray(answered, np.int64))
    rows = np.flatnonzero(is_new)
    known = list(dict.fromkeys([*recipe.contract.columns, *recipe.slices]))
    return Requests(
        row_ids=np.asarray(data.sample_ids)[rows], frame=data.frame.loc[is_new, known].reset_index(drop=True),
        inputs=data.batch(rows).inputs.numpy(),
    )  # fmt: skip


def days_of(recipe: Recipe, frame: pd.DataFrame) -> "pd.Series[str]":
    """Each row's day, ISO, by the clock that its event time is written in."""
    return pd.to_datetime(frame[recipe.contract.event_time]).dt.strftime("%Y-%m-%d")


def mature(recipe_path: str, predictions: str, into: str, *, until: str, maturity_days: int) -> int:
    """Write the outcomes that are known by the end of day `until` to `into`, one row a prediction that has one; returns how many.

    Args: predictions, a Parquet table of row_id, version, answered and the columns of `score_columns` for "score" and "reference_score".
    Columns written: row_id, version, known (day), excluded, OUTCOME_COLUMNS and the slices. A row without an answer has no decision to
    judge: it is excluded, as is one whose outcome will never be; a mature one whose label is null is left out, and so lacks coverage.
    """
    recipe = load_recipe(recipe_path)
    data = recipe.data(LIVE)
    _check(recipe, data)
    asked = pd.read_parquet(predictions)
    place = pd.Series(np.arange(len(data)), index=np.asarray(data.sample_ids)).reindex(asked["row_id"]).to_numpy()
    asked = asked[~np.isnan(place)].reset_index(drop=True)
    frame = data.frame.iloc[place[~np.isnan(place)].astype(np.int64)].reset_index(drop=True)
    asked = asked.assign(known=_known(recipe, frame, maturity_days), excluded=_excluded(frame, asked))
    kept = ((asked["known"] <= until) & ((asked["excluded"] != "") | frame[recipe.contract.label].notna())).to_numpy()
    matured = _judged(recipe, frame[kept].reset_index(drop=True), asked[kept].reset_index(drop=True))
    matured.to_parquet(into, index=False)
    return len(matured)


def _known(recipe: Recipe, frame: pd.DataFrame, maturity_days: int) -> "pd.Series[str]":
    later = pd.to_datetime(frame[recipe.contract.event_time]) + pd.Timedelta(days=maturity_days)
    return later.dt.strftime("%Y-%m-%d")


def _excluded(frame: pd.DataFrame, asked: pd.DataFrame) -> "pd.Series[str]":
    never = frame[EXCLUDED].fillna("").astype(str) if EXCLUDED in frame else pd.Series("", index=frame.index, dtype=object)
    unanswered = ~asked["answered"].to_numpy(bool)
    alone = asked["reference_score"].isna().to_numpy()
    why = np.where(never != "", never, np.where(unanswered, "not answered", np.where(alone, "the fallback gave no score", "")))
    return pd.Series(why.astype(object), index=frame.index)


def _judged(recipe: Recipe, frame: pd.DataFrame, asked: pd.DataFrame) -> pd.DataFrame:
    """What the answers were worth, now that the labels are known; NaN where they are excluded."""
    found = asked[["row_id", "version", "known", "excluded"]].assign(**dict.fromkeys(OUTCOME_COLUMNS, np.nan))
    rows = (asked["excluded"] == "").to_numpy()
    if rows.any():
        served = recipe.outcomes(frame[rows].reset_index(drop=True), scores_back(asked[rows], "score"))
        shadow = recipe.outcomes(frame[rows].reset_index(drop=True), scores_back(asked[rows], "reference_score"))
        parts = (served.utility, shadow.utility, served.loss, served.confidence, served.hit)
        for name, values in zip(OUTCOME_COLUMNS, parts, strict=True):
            found.loc[rows, name] = np.asarray(values, np.float64)
    return found.assign(**{name: slice_values(frame[name]) for name in recipe.slices})


def slice_values(column: "pd.Series[Any]") -> "pd.Series[str]":
    """A slice column as text; a missing value is called so."""
    return column.astype("object").where(column.notna(), "(missing)").astype(str)


def score_columns(name: str, scores: Scores) -> Mapping[str, Scores]:
    """Scores as columns: `name` for the event or the largest of C classes, and one a class behind it."""
    if scores.ndim == 1:
        return {name: scores}
    return {name: scores.max(axis=1), **{f"{name}_{place}": scores[:, place] for place in range(scores.shape[1])}}


def scores_back(table: pd.DataFrame, name: str) -> Scores:
    """The scores that `score_columns` made columns of."""
    classes = sorted(
        (column for column in table.columns if column.removeprefix(f"{name}_").isdecimal()), key=lambda one: int(one[len(name) + 1 :])
    )
    return table[classes if classes else name].to_numpy(np.float64)


def _period(recipe: Recipe) -> tuple[str, str]:
    found: tuple[str, str] | None = getattr(recipe, "live_period", None)
    if found is None:
        raise RecipeError(
            f"recipe {recipe.name} has no live split, so there are no requests to score and no outcomes to judge by. Give it a live_period "
            'and let data("live") return the requests (trainer/recipe.py says how).'
        )
    return found


def _check(recipe: Recipe, data: SplitData) -> None:
    wanted = {*recipe.contract.columns, *recipe.slices, recipe.contract.event_time, recipe.contract.label}
    if absent := sorted(wanted - set(data.frame.columns)):
        raise RecipeError(f'recipe {recipe.name}: the frame of data("live") has no column {absent}. Make it as the judge split is made.')
    if not len(data.frame) == len(data) == len(data.sample_ids) or len(np.unique(data.sample_ids)) != len(data):
        raise RecipeError(
            f'recipe {recipe.name}: data("live") has {len(data)} requests, a frame of {len(data.frame)} rows and '
            f"{len(np.unique(data.sample_ids))} different ids. Outcomes could not be joined. Give each request one row and its own id."
        )
