"""Betting on bounded means: what a purse is worth, and that it keeps its promise however often one looks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.betting import blocks, confidence_sequence, log_purse


def test_the_purse_of_one_day_is_the_mean_over_bets_and_beginnings() -> None:
    """A day at -3 margins: g = (-1 + 3) / 2 = 1; 3/4 of the stake (beginning on day 1) grows by 1.5 and 1.9, the rest waits."""
    found = np.exp(log_purse(np.array([-3.0]), margin=1.0))

    assert found == pytest.approx([0.75 * (1.5 + 1.9) / 2 + 0.25])


def test_a_splendid_day_counts_no_more_than_a_good_one() -> None:
    """Gains are capped at the margin, so no single day can pay for many bad ones."""
    assert np.array_equal(log_purse(np.array([1.0, -3.0]), margin=1.0), log_purse(np.array([500.0, -3.0]), margin=1.0))


@pytest.mark.parametrize("margin", [0.01, 1.0, 250.0])
def test_the_purse_does_not_depend_on_the_unit(margin: float) -> None:
    """Minutes or dollars: only values in margins matter."""
    values = np.random.default_rng(0).normal(-1.0, 1.0, 20)

    assert log_purse(values * margin, margin=margin) == pytest.approx(log_purse(values, margin=1.0))


@pytest.mark.parametrize(
    "draw",
    [
        lambda random: random.choice([1.0, -3.0], size=(4000, 120)),
        lambda random: np.where(random.random((4000, 120)) < 0.9, -0.5, -5.5),
        lambda random: np.minimum(random.normal(-1.0, 0.4, (4000, 120)), 1.0),
    ],
    ids=["two values", "rare bad days", "normal"],
)
def test_a_version_exactly_at_the_margin_is_rarely_ended(draw: object) -> None:
    """Ville: at a mean of exactly -margin the purse ever reaches 20 in at most one run of 20, looked at on each of 120 days."""
    values = draw(np.random.default_rng(1))  # type: ignore[operator]

    ended = (log_purse(values, margin=1.0).max(axis=1) >= np.log(20)).mean()
    assert ended <= 0.05


@pytest.mark.parametrize(("mean", "within"), [(-3.0, 13), (-5.0, 8), (-10.0, 5)])
def test_a_regression_is_found_within_days(mean: float, within: int) -> None:
    """Nine of ten regressions reach 200 within the days that docs/monitoring.md states."""
    values = np.random.default_rng(2).normal(mean, 0.5, (500, 30))
    reached = log_purse(values, margin=1.0) >= np.log(200)

    assert np.quantile(np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, 999), 0.9) <= within


def test_good_weeks_do_not_shelter_a_version_that_breaks() -> None:
    """After 30 good days a drop to -5 margins is found within 16 days."""
    values = np.r_[np.full(30, 0.1), np.full(30, -5.0)]

    assert 30 < int((log_purse(values, margin=1.0) >= np.log(200)).argmax()) + 1 <= 46


def test_what_is_no_number_never_passes_for_good() -> None:
    """A NaN day leaves a purse that is NaN, not one that looks small."""
    assert np.isnan(log_purse(np.array([0.1, np.nan, 0.1]), margin=1.0)[1:]).all()


def test_days_wait_for_enough_rows() -> None:
    """Small days are put together; the rest at the end waits and is not bet on."""
    found = blocks(["a", "b", "c", "d"], [60, 60, 100, 20], [6.0, 0.0, -50.0, 9.0], 100)

    assert [(block.day, block.rows, block.mean) for block in found] == [("b", 120, 0.05), ("c", 100, -0.5)]


@given(st.lists(st.floats(min_value=-1.0, max_value=1e6), min_size=1, max_size=40))
def test_days_within_the_margin_are_never_evidence(values: list[float]) -> None:
    """Whatever their order and size, days that are no worse than the margin leave no more in the purse than was put in."""
    assert (log_purse(np.array(values), margin=1.0) <= 1e-9).all()


def test_the_confidence_sequence_says_what_the_purse_says() -> None:
    """The upper end falls to the margin on the very day on which the purse reaches 1 / its error."""
    values = np.random.default_rng(3).normal(-2.5, 0.5, 40)
    _, high = confidence_sequence(values, margin=1.0, alpha=0.01)

    assert int((high <= -1.0 + 1e-9).argmax()) == int((log_purse(values, margin=1.0) >= np.log(200)).argmax())


def test_the_confidence_sequence_covers_on_all_days_at_once() -> None:
    """It leaves out the true mean on any of 60 days in at most 5 of 100 runs."""
    random = np.random.default_rng(4)
    wrong = 0
    for _ in range(200):
        low, high = confidence_sequence(random.uniform(-0.6, 1.0, 60), margin=1.0, alpha=0.05)
        wrong += bool((low > 0.2).any() or (high < 0.2).any())

    assert wrong <= 10
