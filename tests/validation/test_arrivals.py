"""When releases are asked for: rates, office hours, nights, recorded times."""

import numpy as np
import pytest

from validation.arrivals import DAY_S, HOUR_S, PATTERNS, WEEK_S, Arrival, Demand, Pattern, arrivals
from validation.errors import ConfigError


def drawn(pattern: Pattern, per_week: float, weeks: int = 200, seed: int = 0, **more: object) -> tuple[Arrival, ...]:
    demand = Demand(pattern=pattern, per_week=per_week, weeks=weeks, **more)  # type: ignore[arg-type]
    return arrivals(demand, np.random.default_rng(seed))


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("per_week", [0.5, 1, 7, 50])
def test_the_rate_is_the_one_asked_for(pattern: Pattern, per_week: float) -> None:
    """Within four standard deviations of a Poisson count; in order of time, inside the weeks."""
    releases = [item for item in drawn(pattern, per_week) if not item.is_rerun]

    assert abs(len(releases) - per_week * 200) <= 4 * (per_week * 200) ** 0.5
    assert [item.at_s for item in releases] == sorted(item.at_s for item in releases)
    assert all(0 <= item.at_s < 200 * WEEK_S for item in releases)


def test_the_same_seed_gives_the_same_arrivals() -> None:
    """Another seed gives others."""
    assert drawn("office", 10) == drawn("office", 10) != drawn("office", 10, seed=1)


def test_office_arrivals_keep_office_hours() -> None:
    """Monday to Friday, nine to five."""
    for item in drawn("office", 50):
        day, second = divmod(item.at_s % WEEK_S, DAY_S)
        assert day < 5
        assert 9 * HOUR_S <= second <= 17 * HOUR_S


def test_a_nights_releases_come_at_once_and_models_take_turns() -> None:
    """Fourteen a week are two each night at 02:00, of different models."""
    releases = [item for item in drawn("nightly", 14, weeks=2, models=2) if not item.is_rerun]

    assert [item.at_s for item in releases] == [night * DAY_S + 2 * HOUR_S for night in range(14) for _ in range(2)]
    assert [item.model for item in releases] == [0, 1] * 14


def test_reruns_come_in_the_office_hours_after_their_night() -> None:
    """About a fifth of the releases, between nine and five."""
    found = drawn("nightly", 50)
    reruns = [item.at_s % DAY_S for item in found if item.is_rerun]

    assert 0.15 < len(reruns) / (len(found) - len(reruns)) < 0.25
    assert 9 * HOUR_S <= min(reruns) <= max(reruns) <= 17 * HOUR_S


def test_recorded_times_keep_their_gaps_at_another_rate() -> None:
    """Two close together, then a long gap: so it stays, stretched to the rate."""
    times = [item.at_s for item in drawn("recorded", 10, weeks=2, recorded_s=(100.0, 101.0, 110.0))]
    gaps = np.diff(times)

    assert gaps[1::2] / gaps[::2] == pytest.approx([1 / 9] * len(gaps[1::2]))
    assert len(times) == pytest.approx(20, abs=1)


@pytest.mark.parametrize("recorded", [(), (5.0,), (5.0, 5.0)])
def test_too_few_recorded_times_are_refused(recorded: tuple[float, ...]) -> None:
    """One time has no gap; the message names the patterns that can be generated."""
    with pytest.raises(ConfigError, match="steady, office, nightly"):
        drawn("recorded", 10, recorded_s=recorded)


@pytest.mark.parametrize("per_week", [0.0, -1.0, float("nan"), float("inf")])
def test_a_rate_that_is_none_is_refused(per_week: float) -> None:
    """Nothing, less than nothing, NaN and infinitely many."""
    with pytest.raises(ConfigError, match="--per-week"):
        drawn("steady", per_week)


def test_an_unknown_pattern_is_refused() -> None:
    """The message names those that there are."""
    with pytest.raises(ConfigError, match="recorded"):
        drawn("lunar", 1)  # type: ignore[arg-type]
