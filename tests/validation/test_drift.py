"""Drift from counts: bins, empty ones, and few rows."""

import numpy as np
import pandas as pd
import pytest

from validation.drift import (
    OTHER,
    WINDOW_DAYS,
    Drift,
    chance_index,
    count_column,
    measure_drift,
    reference_bins,
    served_counts,
    stability_index,
)  # fmt: skip
from validation.served import Usual

TODAY = "2013-12-07"


def counted(served: pd.Series, reference: pd.Series | None = None, day: str = TODAY) -> Drift:
    training = pd.Series(np.random.default_rng(0).normal(size=20_000)) if reference is None else reference
    return measure_drift(count_column("temp", training, served, pd.Series([day] * len(served))), TODAY)


def test_the_index_is_the_textbooks() -> None:
    """Two bins, 30:70 against 50:50: the sum of (p - q) ln(p / q), half a row a bin."""
    p, q = np.array([30.5, 70.5]) / 101, np.array([50.5, 50.5]) / 101

    assert stability_index([50, 50], [30, 70]) == pytest.approx(float(((p - q) * np.log(p / q)).sum()))


def test_an_empty_bin_is_large_and_finite() -> None:
    """A value that training never had, or that is gone, is a finite number."""
    assert 1.0 < stability_index([500, 500, 0], [0, 500, 500]) < 20.0


@pytest.mark.parametrize("rows", [5, 30, 100, 1000])
def test_few_rows_do_not_cry_wolf(rows: int) -> None:
    """Without any change at most 2 of 100 windows are called drift, also of five rows."""
    random = np.random.default_rng(rows)
    found = [counted(pd.Series(random.normal(size=rows))) for _ in range(100)]

    assert sum(item.index > 0.25 and not item.is_chance for item in found) <= 2


def test_chance_is_as_large_as_theory_says() -> None:
    """Under no change the mean index is (bins - 1)(1/n + 1/m)."""
    random, reference = np.random.default_rng(5), np.full(10, 2000)
    found = [stability_index(reference.tolist(), random.multinomial(500, np.full(10, 0.1)).tolist()) for _ in range(400)]

    assert np.mean(found) == pytest.approx(chance_index(10, 20_000, 500)[0], rel=0.1)


def test_chance_is_subtracted_and_called_chance() -> None:
    """100 rows without a change: an index of about 0.09 before, next to nothing after, and called chance in 95 of 100 windows."""
    random = np.random.default_rng(6)
    found = [counted(pd.Series(random.normal(size=100))) for _ in range(100)]

    assert np.mean([item.index for item in found]) < 0.03
    assert sum(item.is_chance for item in found) >= 95


def test_a_moved_column_has_drifted() -> None:
    """A shift by one standard deviation is a major one."""
    found = counted(pd.Series(np.random.default_rng(1).normal(1.0, 1.0, 500)))

    assert found.index > 0.5
    assert not found.is_chance


def test_only_the_last_week_counts() -> None:
    """What was served eight days ago is no part of the window."""
    found = counted(pd.Series(np.full(500, 9.0)), day="2013-11-30")

    assert (found.rows, np.isnan(found.index), np.isnan(found.missing_share)) == (0, True, True)


def test_missing_values_are_counted_apart() -> None:
    """A value that is missing falls into no bin, and both shares of missing are told."""
    column = count_column("c", pd.Series(["a", "b", None, "a"]), pd.Series(["a", "z", None]), pd.Series([TODAY] * 3))
    found = measure_drift(column, TODAY)

    assert (column.bins, column.served[TODAY]) == (("a", "b", OTHER), (1, 0, 1))
    assert (found.missing_rows, found.reference_missing_share) == ((1, 3), 0.25)


@pytest.mark.parametrize(
    "values", [[0.0, 1.0], [3.0], [0.0, 0.0, 0.0, 5.0], [np.inf, 1.0]], ids=["flag", "constant", "mostly zero", "infinite"]
)
def test_odd_columns_are_counted(values: list[float]) -> None:
    """Every value falls into exactly one bin."""
    column = count_column("c", pd.Series(values), pd.Series([*values, -7.0]), pd.Series([TODAY] * (len(values) + 1)))

    assert (sum(column.reference), sum(column.served[TODAY])) == (len(values), len(values) + 1)


def seasons(days: int = 90, rows: int = 200) -> tuple[pd.Series, pd.Series]:
    """A column whose mean wanders by half a standard deviation within a month, as weather does, and each row's day."""
    random = np.random.default_rng(8)
    when = pd.Series(np.repeat(pd.date_range("2013-01-01", periods=days).strftime("%Y-%m-%d"), rows))
    return pd.Series(np.repeat(0.5 * np.sin(np.arange(days) / 5), rows) + random.normal(size=days * rows)), when


def test_training_says_what_a_week_may_look_like() -> None:
    """The largest index of training's own weeks is what one by one comparison finds, half of the rest's weeks being quieter."""
    values, days = seasons()
    bins = reference_bins("temp", values, days)
    dates = sorted(set(days))
    found = []
    for first in range(len(dates) - WINDOW_DAYS + 1):
        inside = days.isin(dates[first : first + WINDOW_DAYS])
        told = [served_counts(bins, values[mask], days[mask]).values() for mask in (inside, ~inside)]
        counts = [np.sum([rows for rows, _ in by_day], axis=0) for by_day in told]
        chance, _ = chance_index(10, counts[1].sum(), counts[0].sum())
        found.append(stability_index(counts[1].tolist(), counts[0].tolist()) - chance)

    assert bins.usual.index == pytest.approx(max(found))
    assert bins.usual.index > 0.1


def test_training_says_what_a_day_may_look_like() -> None:
    """The day with the most missing values and the day with the fullest bin; a day of few rows says nothing."""
    values, days = seasons()
    values = values.mask((days == "2013-02-01") & (np.arange(len(days)) % 4 == 0)).mask(days == "2013-03-31")
    kept = (days != "2013-03-31") | (days.groupby(days).cumcount() < 50)
    values = values.where(days != "2013-02-02", 5.0)
    usual = reference_bins("temp", values[kept], days[kept]).usual

    assert usual.missing == pytest.approx(0.25)
    assert usual.share == 1.0


@pytest.mark.parametrize("days", [0, 1, 27], ids=["no row", "a day", "less than four weeks"])
def test_little_training_says_little(days: int) -> None:
    """No week is called usual before there are four, and nothing at all without rows or days."""
    assert reference_bins("temp", *seasons(days)).usual.index == 0.0
    assert reference_bins("temp", seasons(40)[0]).usual == Usual()
