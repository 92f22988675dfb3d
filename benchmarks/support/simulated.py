"""Made-up versions in service, day by day, to see how often a test ends one that is good, and how soon one that is bad.

Everything is in margins: 0 is a version exactly as good as its fallback, -1 one that is worse by all that is tolerated. Rows are like those
of flights: one in sixteen decisions differs, and is then worth 11 or 33 margins more or less. Each day has a shock that all its rows share.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats

from validation.betting import log_purse
from validation.monitoring_outcomes import SHARES
from validation.monitoring_service import proven_share

Floats = npt.NDArray[np.float64]

DAYS, ROWS, SLICES, REQUESTS = 90, 800, 8, 1000  # days; rows a day; slices that share them evenly; requests a day
JUMPS, CHANCES = np.array([-33.0, -11.0, 0.0, 11.0, 33.0]), np.array([0.0047, 0.0266, 0.9374, 0.0266, 0.0047])  # worth of a row
NEVER = 10**6  # a day that no test reaches


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """What becomes of a version after its release."""

    name: str
    mean: float = 0.0  # margins, from day `since` on; 0 before
    since: int = 1
    spread: float = 0.0  # standard deviation of a day's shock, margins
    persistence: float = 0.0  # correlation of a day's shock with the day before
    is_heavy: bool = False  # Student's t with three degrees of freedom
    failing: float = 0.0  # share of requests that are not answered


@dataclass(frozen=True, slots=True, kw_only=True)
class Versions:
    """V simulated versions."""

    slice_means: Floats  # (V, SLICES, DAYS) margins
    failures: npt.NDArray[np.int64]  # (V, DAYS)

    @property
    def means(self) -> Floats:
        """Means (V, DAYS) of all rows of a day."""
        return np.asarray(self.slice_means.mean(axis=1))


def simulate(scenario: Scenario, count: int, seed: int) -> Versions:
    """Draw versions; the same seed gives the same ones."""
    random, rows = np.random.default_rng(seed), ROWS // SLICES
    raw = random.standard_t(3, (count, DAYS)) / np.sqrt(3) if scenario.is_heavy else random.standard_normal((count, DAYS))
    shocks = raw.copy()
    for day in range(1, DAYS):
        shocks[:, day] = scenario.persistence * shocks[:, day - 1] + np.sqrt(1 - scenario.persistence**2) * raw[:, day]
    expected = scenario.spread * shocks + np.where(np.arange(1, DAYS + 1) >= scenario.since, scenario.mean, 0.0)
    worth = random.multinomial(rows, CHANCES, (count, SLICES, DAYS)) @ JUMPS / rows
    return Versions(slice_means=worth + expected[:, None, :], failures=random.binomial(REQUESTS, scenario.failing, (count, DAYS)))


def ended_by_betting(versions: Versions, alpha: float, failures_max: float) -> npt.NDArray[np.int64]:
    """Day (V,) on which the monitor rolls each version back, looked at daily, by any of its three ways; NEVER if it does not."""
    whole = log_purse(versions.means, margin=1.0) >= np.log(1 / (alpha * SHARES["all rows"]))
    slices = log_purse(versions.slice_means, margin=1.0) >= np.log(SLICES / (alpha * SHARES["slices"]))
    spent = alpha * SHARES["requests"] * 6 / (np.pi * np.arange(1, DAYS + 1)) ** 2
    few = np.array([_fewest(float(level), failures_max) for level in spent])
    return _first(whole | slices.any(axis=1) | (versions.failures >= few))


def _fewest(alpha: float, failures_max: float) -> int:
    """The fewest failures of a day's requests that prove more than what is allowed."""
    return next(count for count in range(REQUESTS + 1) if proven_share(count, REQUESTS, alpha) > failures_max)


def ended_by_days(versions: Versions, alpha: float) -> npt.NDArray[np.int64]:
    """Day on which a one-sided t test of the day means so far says "below the margin", looked at daily from the third day on."""
    return _first(_t_test(versions.means, 1.0) < alpha)


def ended_by_rows(versions: Versions, alpha: float) -> npt.NDArray[np.int64]:
    """The same with a t test of all rows so far, which takes the rows of one day for independent."""
    row_variance = float((CHANCES * JUMPS**2).sum())
    n = ROWS * np.arange(1, DAYS + 1)
    running = versions.means.cumsum(axis=1) / np.arange(1, DAYS + 1)
    return _first(stats.norm.cdf((running + 1) / np.sqrt(row_variance / n)) < alpha)


def ended_at_the_end(versions: Versions, alpha: float) -> npt.NDArray[np.int64]:
    """DAYS if the t test of all day means, looked at once on the last day, says so: honest, and too late."""
    return np.where(_t_test(versions.means, 1.0)[:, -1] < alpha, DAYS, NEVER)


TESTS: Mapping[str, Callable[[Versions, float], npt.NDArray[np.int64]]] = {
    "t test of days, daily": ended_by_days, "t test of rows, daily": ended_by_rows, "t test of days, once": ended_at_the_end,
}  # fmt: skip


def _t_test(values: Floats, margin: float) -> Floats:
    """One-sided p-values (V, T) of "the mean is at least -margin" after each day; 1 on the first two days."""
    n = np.arange(1, values.shape[1] + 1)
    mean = values.cumsum(axis=1) / n
    squares = (values**2).cumsum(axis=1) - n * mean**2
    error = np.sqrt(np.maximum(squares, 1e-12) / np.maximum(n - 1, 1) / n)
    return np.where(n < 3, 1.0, stats.t.cdf((mean + margin) / error, np.maximum(n - 1, 1)))


def _first(reached: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1, NEVER)
