"""Is the serving version worse than its fallback? One purse for all rows and one a slice (validation.betting), from joined outcomes.

The chance of ever rolling back a version that is as good as its fallback is alpha in all: SHARES say how it is divided. Half of the part of
all rows is enough for one purse: it has to reach 2 / alpha. The slices' part is divided evenly among all that the release knew (Bonferroni,
which holds however they depend on one another), so each of m has to reach 4 m / alpha.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.betting import Floats, blocks, log_purse
from validation.monitoring_join import NEW, Joined
from validation.policy import MonitoringPolicy
from validation.served import MonitorRecords

Ints = npt.NDArray[np.int64]

ALL_ROWS = "all rows"
SHARES: Mapping[str, float] = {"all rows": 1 / 2, "slices": 1 / 4, "requests": 1 / 8, "scores": 1 / 8}  # of alpha


@dataclass(frozen=True, slots=True, kw_only=True)
class Purse:
    """What betting against the version has won, on all rows or on one slice."""

    name: str  # ALL_ROWS or "column=value"
    rows: int  # that were bet on
    difference: float  # their mean, version - reference, recipe's unit; NaN without a bet
    days: tuple[str, ...]  # on which a bet was settled
    means: tuple[float, ...]  # of the blocks
    values: tuple[float, ...]  # of the purse after each bet; it began with 1
    needed: float  # value at which the version is rolled back

    @property
    def highest(self) -> float:
        """The most it ever held: having reached what is needed once is enough."""
        return max((value for value in self.values if np.isfinite(value)), default=1.0)

    @property
    def reached(self) -> str:
        """The day on which it first held what is needed, "" if never."""
        return next((day for day, value in zip(self.days, self.values, strict=True) if value >= self.needed), "")


def margin_of(records: MonitorRecords, policy: MonitoringPolicy) -> float:
    """How much worse than the fallback is tolerated, in the recipe's unit."""
    return policy.margin.value * records.utility_scale


def purse_of_all(records: MonitorRecords, policy: MonitoringPolicy, joined: Joined, *, lowered: float = 0.0) -> Purse:
    """The purse on all rows; with `lowered`, as if every utility of the version were so much lower: the positive control."""
    rows, totals = _by_day(joined, np.zeros(len(joined.rows), np.int64), 1)
    days = _Days(days=joined.days["day"].tolist(), margin=margin_of(records, policy), min_n=policy.min_n.value)
    return days.purse(ALL_ROWS, rows[0], totals[0] - lowered * rows[0], 1 / (policy.alpha.value * SHARES["all rows"]))


def purses_of_slices(records: MonitorRecords, policy: MonitoringPolicy, joined: Joined) -> tuple[Purse, ...]:
    """One purse a slice that has rows, the fullest first (as a share of what it needs), those that were never bet on last."""
    family = sum(len(values) + 1 for values in records.slices.values())
    needed = family / (policy.alpha.value * SHARES["slices"])
    days = _Days(days=joined.days["day"].tolist(), margin=margin_of(records, policy), min_n=policy.min_n.value)
    found: list[Purse] = []
    for column, known in records.slices.items():
        values = (*known, NEW)
        rows, totals = _by_day(joined, pd.Index(values).get_indexer(pd.Index(joined.rows[column])).astype(np.int64), len(values))
        found += [days.purse(f"{column}={values[at]}", rows[at], totals[at], needed) for at in np.flatnonzero(rows.sum(axis=1)).tolist()]
    return tuple(sorted(found, key=lambda purse: (bool(purse.values), purse.highest), reverse=True))


def _by_day(joined: Joined, codes: Ints, size: int) -> tuple[Ints, Floats]:
    """How many rows (size, D) each code has on each mature day, and what their differences add up to."""
    days = len(joined.days)
    cells = codes * days + joined.rows["place"].to_numpy(np.int64)
    differences = joined.rows["difference"].to_numpy(np.float64)
    rows, totals = np.bincount(cells, minlength=size * days), np.bincount(cells, weights=differences, minlength=size * days)
    return rows.reshape(size, days), np.asarray(totals, np.float64).reshape(size, days)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Days:
    days: Sequence[str]
    margin: float
    min_n: int

    def purse(self, name: str, rows: Ints, totals: Floats, needed: float) -> Purse:
        """Bet on a slice's days, given its rows (D,) and their differences' totals (D,)."""
        found = blocks(self.days, rows.tolist(), totals.tolist(), self.min_n)
        means = np.asarray([block.mean for block in found], np.float64)
        with np.errstate(over="ignore"):  # a purse beyond 1e308 has won
            values = np.minimum(np.exp(log_purse(means, margin=self.margin)), np.finfo(np.float64).max)
        n = sum(block.rows for block in found)
        return Purse(
            name=name, rows=n, difference=sum(block.rows * block.mean for block in found) / n if n else float("nan"),
            days=tuple(block.day for block in found), means=tuple(means.tolist()), values=tuple(values.tolist()), needed=needed,
        )  # fmt: skip
