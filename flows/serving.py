"""What a version in service answers to a day's requests, its fallback beside it. Runs in a warm process: it loads registered models."""

import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from infra.export import load_and_predict
from trainer.recipe import load_recipe
from trainer.serving import Requests, days_of, requests_of, score_columns, slice_values
from validation.drift import Bins, reference_bins, served_counts

LATENCY_CALLS = 200  # requests of a day that are also asked one by one, for their latency
SCORES = ""  # the name of the scores among a part's counts


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A registered version and the digest of its files in the statement that admitted it."""

    version: str
    uri: str
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a version's inputs and scores looked like where it was made, and the scale that its fallback's utility has there."""

    columns: tuple[Bins, ...]  # of the contract's columns, on the train split
    scores: Bins | None  # on the judge split; None when the version could not be asked
    utility_scale: float  # standard deviation of the fallback's utility on the judge split (of its own without one); NaN: not asked
    utility_unit: str
    slices: Mapping[str, tuple[str, ...]]  # slice column -> its values on the judge split
    failures: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOrder:
    """What to score."""

    recipe: str
    day: str
    made_at: str
    answered: npt.NDArray[np.int64]  # row ids that are not asked again
    serving: Contender
    reference: Contender | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What came out beside the table."""

    requests: int
    answered: int
    failure: str
    reference_failure: str
    counts: Mapping[str, Mapping[str, object]]
    origin: Origin | None  # that the requests were counted by; None without requests


def origin_of(recipe_path: str, serving: Contender, reference: Contender | None) -> Origin:
    """Count the train split's columns and the scores on the judge split; once a version."""
    recipe = load_recipe(recipe_path)
    train, judge = recipe.data("train"), recipe.data("judge")
    trained, judged = days_of(recipe, train.frame), days_of(recipe, judge.frame)
    inputs = judge.batch(np.arange(len(judge))).inputs.numpy()
    scores, failure = _asked(serving, inputs)
    shadow, shadow_failure = _asked(reference, inputs) if reference else (scores, "")
    return Origin(
        columns=tuple(reference_bins(name, train.frame[name], trained) for name in recipe.contract.columns),
        scores=None if scores is None else reference_bins(SCORES, pd.Series(score_columns(SCORES, scores)[SCORES]), judged),
        utility_scale=float("nan") if shadow is None else float(np.nanstd(recipe.outcomes(judge.frame, shadow).utility)),
        utility_unit=recipe.card.utility_unit, slices={name: tuple(sorted(set(slice_values(judge.frame[name])))) for name in recipe.slices},
        failures=tuple(filter(None, (failure, shadow_failure))),
    )  # fmt: skip


def score_day(order: ScoreOrder, origin: Origin | None, into: str) -> Scored:
    """Ask the version in service and its fallback for a day's new requests; the table (infra.serving_log.PART_COLUMNS) goes to `into`.

    Args: origin, the version's; None = it was never asked before, and its origin is made.
    A version that cannot be loaded, or whose files are not those that were admitted, answers nothing: that is what its users see.
    """
    recipe = load_recipe(order.recipe)
    asked = requests_of(recipe, order.day, answered=order.answered)
    size = len(asked.row_ids)
    if not size:
        return Scored(requests=0, answered=0, failure="", reference_failure="", counts={}, origin=None)
    origin = origin or origin_of(order.recipe, order.serving, order.reference)
    calls = min(LATENCY_CALLS, size)
    scores, failure, latency = _answer(order.serving, asked.inputs, calls)
    shadow, shadow_failure, _ = _answer(order.reference, asked.inputs, 0)
    answered = np.isfinite(scores).reshape(size, -1).all(axis=1)
    scores[~answered] = np.nan
    table = pd.DataFrame({
        "row_id": asked.row_ids, "made_at": order.made_at, "version": order.serving.version, "model_sha256": order.serving.sha256,
        **score_columns("score", scores), "reference_version": order.reference.version if order.reference else "",
        **score_columns("reference_score", shadow), "latency_ms": np.concatenate([latency, np.full(size - len(latency), np.nan)]),
        "answered": answered,
    })  # fmt: skip
    table.to_parquet(into, index=False)
    return Scored(
        requests=size, answered=int(answered.sum()), failure=failure, reference_failure=shadow_failure,
        counts=_counts(asked, origin, table["score"], order.day), origin=origin,
    )  # fmt: skip


def _counts(asked: Requests, origin: Origin, scores: "pd.Series[float]", day: str) -> dict[str, dict[str, object]]:
    """Rows of the day in each bin of each column, and of the scores."""
    days = pd.Series(day, index=asked.frame.index)
    found = {bins.name: served_counts(bins, asked.frame[bins.name], days)[day] for bins in origin.columns}
    if origin.scores is not None:
        found[SCORES] = served_counts(origin.scores, scores, days)[day]
    return {name: {"rows": list(rows), "missing": missing} for name, (rows, missing) in found.items()}


def _answer(contender: Contender | None, inputs: npt.NDArray[np.generic], calls: int) -> tuple[npt.NDArray[np.float64], str, list[float]]:
    """Scores with NaN where there is no answer, why there is none at all, and milliseconds of the first `calls` rows asked alone."""
    nothing = np.full(len(inputs), np.nan)
    if contender is None:
        return nothing, "", []
    try:
        found = load_and_predict(contender.uri, inputs, latency_calls=calls, sha256=contender.sha256, holes=True)
    except Exception as error:
        return nothing, _words(contender, error), []
    return found.scores.copy(), "", list(found.latency_ms)


def _asked(contender: Contender, inputs: npt.NDArray[np.generic]) -> tuple[npt.NDArray[np.float64] | None, str]:
    try:
        return load_and_predict(contender.uri, inputs, sha256=contender.sha256).scores, ""
    except Exception as error:
        return None, _words(contender, error)


def _words(contender: Contender, error: Exception) -> str:
    last = traceback.format_exception_only(error)[-1].strip()
    return f"version {contender.version} gave no answer ({last})"
