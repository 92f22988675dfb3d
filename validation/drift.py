"""Have the inputs, or the scores, moved away from what the model was made on? The population stability index, from counts.

    PSI = sum over bins of (p - q) * ln(p / q)        p, q: shares served and in the reference

dimensionless, 0 when the shares agree; credit scoring reads 0.1 to 0.25 as some and more than 0.25 as a major shift (Siddiqi, "Credit Risk
Scorecards", 2006). Two corrections make it usable day by day: half a row is added to every bin, so that an empty one is no infinity; and
under no change PSI / (1/n + 1/m) is about chi-squared with bins - 1 degrees of freedom (Yurdakul and Naranjo, "Statistical properties of
the population stability index", Journal of Risk Model Validation 14, 2020), so a few rows show a large index by chance alone: what chance
gives is subtracted (in the mean, bins - 1 times 1/n + 1/m), and an index within its 99 % quantile is no drift.

A window is a whole week: weekdays differ, and a column that says the weekday would drift every day. Rows are not independent (one week's
weather), so a week spreads far more than chi-squared says. How much, training tells: each of its weeks is held against all its other weeks,
and the largest index is what the column does by itself (`Usual`). Days are measured so too: the worst share of missing values, and the
largest share of one bin. Limits: one column at a time, so a change of what belongs together is not seen; a training split with a broken day
or week calls it usual.
"""

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pandas as pd
import scipy  # its parts are loaded when they are first asked for

from validation.served import ColumnCounts, Usual

BINS = 10  # quantiles of the reference: each holds a tenth of it, the custom behind the limit of 0.25
VALUES = 20  # of a category: the most frequent ones, the rest is one bin
OTHER = "(other)"
WINDOW_DAYS = 7
USUAL_WEEKS = 4  # of training at least, before a week of it says what weeks are like
USUAL_ROWS = 0.5  # of a training day's mean: a day with fewer rows has shares by accident
CHANCE = 0.99  # an index below this quantile of what no change gives is not called drift


@dataclass(frozen=True, slots=True, kw_only=True)
class Drift:
    """One column over a window of days."""

    column: str
    rows: int  # with a value
    index: float  # PSI less what chance gives in the mean, at least 0; NaN without rows
    is_chance: bool  # no larger than no change would give in 99 of 100 windows
    missing_share: float  # of the last day; NaN without rows
    missing_rows: tuple[int, int]  # of the last day: without a value, all
    reference_missing_share: float
    largest_rows: tuple[int, int] = (0, 0)  # of the last day: in its largest bin, all with a value
    usual: Usual = field(default_factory=Usual)
    is_whole: bool = True  # a week is over since the first day that was counted

    @property
    def usual_missing(self) -> float:
        """Share of missing values that is no news."""
        return max(self.usual.missing, self.reference_missing_share)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bins:
    """A column's bins, set where the model was made and kept with it, and how many rows fell into each there."""

    name: str
    is_number: bool
    edges: tuple[float, ...]  # inner ones, of a number
    names: tuple[str, ...]  # what falls into each; of a category its values
    reference: tuple[int, ...]  # rows a bin
    reference_missing: int  # rows without a value
    usual: Usual = field(default_factory=Usual)


def count_column(name: str, reference: pd.Series, served: pd.Series, days: pd.Series) -> ColumnCounts:
    """Count a column's rows over bins that the reference sets: quantiles of a number, the most frequent values of anything else.

    Args: reference, values where the model was made; served and days, a value and its day for each row served. Infinity is a value.
    """
    bins = reference_bins(name, reference)
    return counted(bins, served_counts(bins, served, days))


def reference_bins(name: str, reference: pd.Series, days: pd.Series | None = None) -> Bins:
    """Bins of a column, the reference's rows in them, and what is usual there. Args: days, of each row; None = nothing is called usual."""
    is_number = pd.api.types.is_numeric_dtype(reference) and not pd.api.types.is_bool_dtype(reference)
    edges = _edges(reference) if is_number else np.empty(0)
    values = () if is_number else tuple(str(value) for value in reference.dropna().astype(str).value_counts().index[:VALUES])
    names = _interval_names(edges) if is_number else (*values, OTHER)
    codes = _codes_of_numbers(reference, edges) if is_number else _codes_of_values(reference, names)
    return Bins(
        name=name, is_number=is_number, edges=tuple(edges.tolist()), names=names, reference=_counts(codes, len(names)),
        reference_missing=int((codes < 0).sum()), usual=Usual() if days is None else _usual(codes, len(names), days),
    )  # fmt: skip


def served_counts(bins: Bins, served: pd.Series, days: pd.Series) -> dict[str, tuple[tuple[int, ...], int]]:
    """Rows served, day by day: how many fell into each bin, and how many had no value."""
    codes = _codes_of_numbers(served, np.asarray(bins.edges)) if bins.is_number else _codes_of_values(served, bins.names)
    by_day = {str(day): codes[places] for day, places in pd.Series(days.to_numpy()).groupby(days.to_numpy()).indices.items()}
    return {day: (_counts(found, len(bins.names)), int((found < 0).sum())) for day, found in by_day.items()}


def counted(bins: Bins, by_day: Mapping[str, tuple[tuple[int, ...], int]]) -> ColumnCounts:
    """Bins and what `served_counts` found, as the monitor judges them."""
    return ColumnCounts(
        name=bins.name, bins=bins.names, reference=bins.reference, reference_missing=bins.reference_missing,
        served={day: counts for day, (counts, _) in by_day.items()}, served_missing={day: missing for day, (_, missing) in by_day.items()},
        usual=bins.usual,
    )  # fmt: skip


def stability_index(reference: Sequence[int], served: Sequence[int]) -> float:
    """PSI of two counts over the same bins, half a row added to each bin; NaN when either has no row."""
    if not sum(reference) or not sum(served):
        return float("nan")
    q, p = ((np.asarray(counts, np.float64) + 0.5) / (sum(counts) + 0.5 * len(counts)) for counts in (reference, served))
    return float(((p - q) * np.log(p / q)).sum())


def chance_index(bins: int, reference_rows: int, served_rows: int) -> tuple[float, float]:
    """PSI that no change gives: its mean, and its 99 % quantile."""
    scale = 1 / max(reference_rows, 1) + 1 / max(served_rows, 1)
    freedom = max(bins - 1, 1)
    return freedom * scale, float(2 * scipy.special.gammaincinv(freedom / 2, CHANCE)) * scale


def measure_drift(column: ColumnCounts, today: str) -> Drift:
    """The drift of a column over the week that ends today, and today's missing values."""
    first = str(np.datetime64(today) - np.timedelta64(WINDOW_DAYS - 1, "D"))
    window = [counts for day, counts in column.served.items() if first <= day <= today]
    served = np.asarray([[0] * len(column.bins), *window], np.int64).sum(axis=0)
    # a bin that neither has is no bin: "(other)" of a closed category
    kept = (served + np.asarray(column.reference)) > 0
    counts = np.asarray(column.reference)[kept].tolist(), served[kept].tolist()
    found = stability_index(*counts)
    mean, quantile = chance_index(int(kept.sum()), sum(counts[0]), sum(counts[1]))
    of_today = column.served.get(today, ())
    missing, present = column.served_missing.get(today, 0), sum(of_today)
    trained = sum(column.reference) + column.reference_missing
    return Drift(
        column=column.name, rows=sum(counts[1]), index=float(np.maximum(found - mean, 0.0)), is_chance=not found > quantile,
        missing_share=missing / (missing + present) if missing + present else float("nan"), missing_rows=(missing, missing + present),
        reference_missing_share=column.reference_missing / trained if trained else 0.0, usual=column.usual,
        largest_rows=(max(of_today, default=0), present), is_whole=min(column.served, default=today) <= first,
    )  # fmt: skip


def _usual(codes: npt.NDArray[np.int64], size: int, days: pd.Series) -> Usual:
    """The worst day and the worst week of the reference. Args: codes, each row's bin, -1 = missing; days, ISO."""
    when = np.asarray(days.astype(str).to_numpy(str), "datetime64[D]")
    if not len(when):
        return Usual()
    place = (when - when.min()).astype(np.int64)
    span = int(place.max()) + 1
    table = np.bincount(place * (size + 1) + codes + 1, minlength=span * (size + 1)).reshape(span, size + 1)  # (days, missing and bins)
    rows, values = table.sum(axis=1), table[:, 1:]
    told = table[rows >= USUAL_ROWS * rows[rows > 0].mean()]
    valued = told[told[:, 1:].sum(axis=1) > 0, 1:]
    return Usual(
        missing=float((told[:, 0] / told.sum(axis=1)).max()),
        share=float((valued.max(axis=1) / valued.sum(axis=1)).max()) if len(valued) else 1.0, index=_usual_index(values),
    )  # fmt: skip


def _usual_index(values: npt.NDArray[np.int64]) -> float:
    """The largest index of any seven days (of counts (D, B)) against all other days; 0 for a reference of less than USUAL_WEEKS."""
    values = values[:, values.sum(axis=0) > 0]
    if len(values) < USUAL_WEEKS * WINDOW_DAYS or not values.size:
        return 0.0
    until = np.vstack([np.zeros_like(values[:1]), values.cumsum(axis=0)])
    week = until[WINDOW_DAYS:] - until[:-WINDOW_DAYS]
    rest = until[-1] - week
    week, rest = (counts[(week.sum(axis=1) > 0) & (rest.sum(axis=1) > 0)] for counts in (week, rest))
    bins = values.shape[1]
    p, q = ((counts + 0.5) / (counts.sum(axis=1, keepdims=True) + 0.5 * bins) for counts in (week, rest))
    chance = max(bins - 1, 1) * (1 / week.sum(axis=1) + 1 / rest.sum(axis=1))
    return float(np.max(((p - q) * np.log(p / q)).sum(axis=1) - chance, initial=0.0))


def _edges(reference: pd.Series) -> npt.NDArray[np.float64]:
    """Inner edges: quantiles, each once. A column with few values (0 or 1, hours) gets a bin a value."""
    values = reference.dropna().to_numpy(np.float64)
    distinct = np.unique(values)
    if len(distinct) <= BINS:
        return np.asarray((distinct[:-1] + distinct[1:]) / 2, np.float64)
    return np.asarray(np.unique(np.quantile(values, np.arange(1, BINS) / BINS)), np.float64)


def _interval_names(edges: npt.NDArray[np.float64]) -> tuple[str, ...]:
    ends = ["-inf", *(f"{edge:.6g}" for edge in edges), "inf"]
    return tuple(f"({low}, {high}]" for low, high in itertools.pairwise(ends))


def _codes_of_numbers(values: pd.Series, edges: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    numbers = pd.to_numeric(values, errors="coerce").to_numpy(np.float64, na_value=np.nan)
    return np.where(np.isnan(numbers), -1, np.searchsorted(edges, numbers, side="left")).astype(np.int64)


def _codes_of_values(values: pd.Series, names: Sequence[str]) -> npt.NDArray[np.int64]:
    found = pd.Index(names[:-1]).get_indexer(pd.Index(values.astype(str)))
    return np.where(values.isna(), -1, np.where(found < 0, len(names) - 1, found)).astype(np.int64)


def _counts(codes: npt.NDArray[np.int64], size: int) -> tuple[int, ...]:
    return tuple(int(count) for count in np.bincount(codes[codes >= 0], minlength=size))
