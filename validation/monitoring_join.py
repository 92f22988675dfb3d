"""Predictions and their outcomes, joined by exact version and row: what may be judged, and what was left out and why.

What was judged once stays as it was: a day is judged when it is mature, on the outcomes that had come by then. An outcome that comes later
changes nothing (it is counted as late), so a test that looks daily sees each day once. A day with too few outcomes is not judged.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.errors import EvidenceError
from validation.policy import MonitoringPolicy
from validation.served import HEALTH_COLUMNS, MATURED_COLUMNS, PREDICTION_COLUMNS, MonitorRecords

NEW = "(new)"  # a slice value that the judge split did not have, or none at all

Dates = npt.NDArray[np.datetime64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Joined:
    """One version's predictions beside their outcomes."""

    predictions: pd.DataFrame  # PREDICTION_COLUMNS of this version, each row once, from its first day to today
    rows: (
        pd.DataFrame
    )  # outcomes of judged days that have a utility: MATURED_COLUMNS, slices, day, its place in `days`, and their difference
    days: pd.DataFrame  # one row a mature day: day, predictions, settled (outcome in time), excluded, coverage, is_judged
    left_out: Mapping[str, int]  # why -> rows; other versions' rows are no fault, the rest are
    not_finite: int  # outcomes in time whose utility is no number: they count as missing


def absent_columns(records: MonitorRecords) -> tuple[str, ...]:
    """Columns that the records should have and have not, as "frame.column"."""
    wanted = {"health": HEALTH_COLUMNS, "predictions": PREDICTION_COLUMNS, "matured": (*MATURED_COLUMNS, *records.slices)}
    frames = {"health": records.health, "predictions": records.predictions, "matured": records.matured}
    return tuple(f"{frame}.{column}" for frame, columns in wanted.items() for column in columns if column not in frames[frame])


def join(records: MonitorRecords, policy: MonitoringPolicy) -> Joined:
    """Join on (version, row id), each row once. Raises: EvidenceError for a day that is no ISO date."""
    left_out: dict[str, int] = {}
    predictions = _of_version(records.predictions, records.version, "predictions of other versions", left_out)
    inside = predictions["day"].astype(str).between(records.since, records.today)
    predictions = _kept(predictions, inside, f"predictions before {records.since} or after {records.today}", left_out)
    predictions = _kept(predictions, ~predictions["row_id"].duplicated(), "predictions made twice", left_out)
    outcomes = _of_version(records.matured, records.version, "outcomes of other versions", left_out)
    outcomes = _kept(outcomes, ~outcomes["row_id"].duplicated(), "outcomes told twice", left_out)
    outcomes = _kept(outcomes, outcomes["row_id"].isin(predictions["row_id"]), "outcomes of rows that were not predicted", left_out)
    outcomes = outcomes.merge(predictions[["row_id", "day"]], on="row_id", validate="one_to_one")
    day, known = _dates(outcomes["day"]), _dates(outcomes["known"])
    early, future = known < day, known > np.datetime64(records.today)
    left_out["outcomes known before their prediction"], left_out["outcomes known after today"] = int(early.sum()), int(future.sum())
    in_time = known <= day + np.timedelta64(policy.maturity_days.value, "D")
    left_out["outcomes that came late"] = int((~early & ~future & ~in_time).sum())
    return _by_day(records, policy, predictions, outcomes[~early & ~future & in_time], left_out)


def _by_day(
    records: MonitorRecords, policy: MonitoringPolicy, predictions: pd.DataFrame, outcomes: pd.DataFrame, left_out: Mapping[str, int]
) -> Joined:
    """Sort outcomes in time into mature days, and say which of these have enough of them."""
    difference = outcomes["utility"].to_numpy(np.float64) - outcomes["reference_utility"].to_numpy(np.float64)
    excluded = outcomes["excluded"].fillna("").astype(str).to_numpy() != ""
    finite = np.isfinite(difference)
    asked = predictions.groupby("day").size()
    last_mature = str(np.datetime64(records.today) - np.timedelta64(policy.maturity_days.value, "D"))
    asked = asked[asked.index.astype(str) <= last_mature]
    settled, left = (outcomes[mask].groupby("day").size().reindex(asked.index, fill_value=0) for mask in (finite | excluded, excluded))
    coverage = settled.to_numpy() / asked.to_numpy()
    days = pd.DataFrame(
        {
            "day": asked.index.astype(str), "predictions": asked.to_numpy(), "settled": settled.to_numpy(), "excluded": left.to_numpy(),
            "coverage": coverage, "is_judged": coverage >= policy.coverage_min.value,
        }
    )  # fmt: skip
    judged = outcomes["day"].isin(days["day"][days["is_judged"]]).to_numpy() & finite & ~excluded
    place = pd.Index(days["day"]).get_indexer(pd.Index(outcomes["day"]))
    rows = outcomes.assign(difference=difference, place=place)[judged].sort_values(["place", "row_id"], ignore_index=True)
    for column, values in records.slices.items():
        text = rows[column].astype(str)
        rows[column] = text.where(text.isin(values), NEW)
    not_finite = int((~finite & ~excluded).sum())
    return Joined(
        predictions=predictions, rows=rows, days=days, left_out={why: n for why, n in left_out.items() if n}, not_finite=not_finite
    )


def _of_version(frame: pd.DataFrame, version: str, why: str, left_out: dict[str, int]) -> pd.DataFrame:
    return _kept(frame, frame["version"].astype(str) == version, why, left_out)


def _kept(frame: pd.DataFrame, mask: pd.Series, why: str, left_out: dict[str, int]) -> pd.DataFrame:
    left_out[why] = int((~mask).sum())
    return frame[mask]


def _dates(days: pd.Series) -> Dates:
    try:
        return np.asarray(days.astype(str).to_numpy(str), "datetime64[D]")
    except ValueError as error:
        raise EvidenceError(
            f"a day of the monitor's records is no ISO date ({error}). Outcomes cannot be put in order, so nothing was judged. "
            'Write days as "2013-12-24".'
        ) from None
