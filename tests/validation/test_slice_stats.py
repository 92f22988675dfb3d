"""The statistics under slice_quality against plain loops, known answers and simulated error rates."""

import math

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from validation.slice_stats import MISSING, bounds, cells, mean_by_slice, standard_error


def plain_error(values: np.ndarray, clusters: np.ndarray) -> float:
    """The CR1 standard error of a mean, written as the formula."""
    mean, groups = values.mean(), np.unique(clusters)
    totals = [((values - mean)[clusters == group]).sum() for group in groups]
    return math.sqrt(len(groups) / (len(groups) - 1) * sum(total**2 for total in totals)) / len(values)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 4), st.floats(-100, 100)), min_size=8, max_size=60))
def test_means_and_errors_equal_the_formula_in_every_slice(rows: list[tuple[str, int, float]]) -> None:
    """The vectorised cells give what a loop over slices gives, in any order of rows."""
    frame = pd.DataFrame(rows, columns=["slice", "cluster", "value"])
    group = cells(frame["slice"], frame["cluster"])
    means, errors = mean_by_slice(group, frame["value"].to_numpy()), standard_error(group, frame["value"].to_numpy())

    for index, label in enumerate(group.labels):
        mine = frame[frame["slice"] == label]
        assert group.n[index] == len(mine)
        assert means[index] == pytest.approx(mine["value"].mean(), abs=1e-9)
        if mine["cluster"].nunique() > 1:
            assert errors[index] == pytest.approx(plain_error(mine["value"].to_numpy(), mine["cluster"].to_numpy()), abs=1e-9)
        else:
            assert math.isnan(errors[index])


def test_with_one_sample_a_cluster_the_error_is_the_textbook_one() -> None:
    """Independent samples give s / sqrt(n)."""
    values = np.array([1.0, 2.0, 4.0, 9.0])
    group = cells(pd.Series(["a"] * 4), pd.Series(range(4)))

    assert standard_error(group, values)[0] == pytest.approx(values.std(ddof=1) / 2)


def test_repeating_every_sample_in_its_cluster_adds_no_certainty() -> None:
    """Ten copies of a day are one day: the error stays what it was."""
    values = np.array([1.0, 2.0, 4.0, 9.0])
    once = cells(pd.Series(["a"] * 4), pd.Series(range(4)))
    often = cells(pd.Series(["a"] * 40), pd.Series(np.repeat(range(4), 10)))

    assert standard_error(often, np.repeat(values, 10))[0] == pytest.approx(standard_error(once, values)[0])


def test_bounds_are_students_t_alone_and_bonferroni_in_the_family() -> None:
    """Four degrees of freedom from five clusters; a family of 20 shares the 5%."""
    group = cells(pd.Series(["a"] * 5), pd.Series(range(5)))
    reach = bounds(group, np.array([2.0]), confidence=0.95, family=20)

    assert reach.plain[0] == pytest.approx(2.0 * stats.t.ppf(0.95, 4))
    assert reach.family[0] == pytest.approx(2.0 * stats.t.ppf(1 - 0.05 / 20, 4))


def test_rows_without_a_value_are_a_slice_of_their_own() -> None:
    """Nobody drops out of the judged samples for want of a value."""
    group = cells(pd.Series(["b", None, "a", np.nan]), pd.Series([1, 2, 3, 4]))

    assert group.labels == (MISSING, "a", "b")
    assert group.n.tolist() == [2, 1, 1]


def test_the_plain_bound_errs_about_as_often_as_it_says() -> None:
    """Over 2,000 simulated judge sets of 40 days with shared luck, a one-sided 95% bound misses the truth in 3.5 to 6.5%."""
    random = np.random.default_rng(7)
    runs, days, per_day = 2000, 40, 8
    values = random.normal(size=(runs, days, per_day)) + random.normal(size=(runs, days, 1))
    run = np.repeat(np.arange(runs), days * per_day)
    group = cells(pd.Series(run), pd.Series(np.tile(np.repeat(np.arange(days), per_day), runs)))

    flat = values.reshape(-1)
    reach = bounds(group, standard_error(group, flat), confidence=0.95, family=1)
    missed = float((mean_by_slice(group, flat) - reach.plain > 0).mean())

    assert 0.035 < missed < 0.065
