"""Does the service answer, in time, on inputs as it knows them? Checks of the last day, and drift of the last week, which only warns.

That requests are not answered is the one state that ends a version at once, so it has to be proven: the exact lower limit of the day's
share (Clopper and Pearson, 1934) lies above what is allowed, at alpha_k = 6 alpha / (pi^2 k^2) on the k-th day of service. These add up to
alpha over all days, so looking daily is safe here too, as far as requests fail one by one; an outage is no accident of counting.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import scipy  # its parts are loaded when they are first asked for

from validation.drift import CHANCE, Drift
from validation.monitoring_join import Joined
from validation.monitoring_outcomes import SHARES
from validation.policy import MonitoringPolicy, Threshold
from validation.served import MonitorRecords
from validation.verdict import Check, check

REQUESTS = "requests that were not answered"
SCORES = "scores that are no number"
MISSING = "missing values beyond training's worst day"
STILL = "values in one bin beyond training's worst day"
SHOWN_DRIFTS = 3  # columns that are named with their numbers; the rest is one warning


def service_checks(records: MonitorRecords, policy: MonitoringPolicy, joined: Joined) -> tuple[Check, ...]:
    """Requests without an answer, scores that are no number, and latency, all of today."""
    today = records.health[records.health["day"].astype(str) == records.today]
    asked, answered = float(today["requests"].sum()), float(today["answered"].sum())
    scores = joined.predictions["score"][joined.predictions["day"].astype(str) == records.today].to_numpy(np.float64)
    latency = float(today["latency_p95_ms"].max(skipna=False)) if len(today) else None
    limit = policy.latency_p95_ms
    return (
        _share(records, policy, REQUESTS, asked - answered, asked, "requests"),
        _share(records, policy, SCORES, float((~np.isfinite(scores)).sum()), float(len(scores)), "scores"),
        check(
            "latency p95", latency, "<=", limit.value, unit="ms", source=limit.source, where=records.today,
            action="find out what slows the service (docs/runbook.md); it still answers, so it goes on serving",
        ),
    )  # fmt: skip


def missing_check(records: MonitorRecords, policy: MonitoringPolicy, drifts: Iterable[Drift]) -> Check:
    """The column with the most missing values today beyond its worst day in training; a few rows alone cannot fail it."""
    told = [_Excess(drift.column, *drift.missing_rows, drift.usual_missing) for drift in drifts]
    action = "find out who no longer delivers {}; the version goes on serving until its outcomes say otherwise"
    return _excess_check(MISSING, policy.missing_max, records.today, told, "share of rows", action)


def still_check(records: MonitorRecords, policy: MonitoringPolicy, drifts: Iterable[Drift]) -> Check:
    """The column whose values crowd most into one bin today, beyond its worst day in training: a feed that reports one number."""
    told = [_Excess(drift.column, *drift.largest_rows, drift.usual.share) for drift in drifts]
    action = "find out whether {} is still measured: its values hardly differ; the version goes on serving until its outcomes say otherwise"
    return _excess_check(STILL, policy.still_max, records.today, told, "share of values", action)


@dataclass(frozen=True, slots=True)
class _Excess:
    """Rows of one column that are as they should not be, of all of today's, and the share of them that is no news."""

    column: str
    count: int
    rows: int
    usual: float

    @property
    def observed(self) -> float:
        return self.count / self.rows - self.usual

    @property
    def proven(self) -> float:
        return proven_share(self.count, self.rows, 1 - CHANCE) - self.usual


def _excess_check(name: str, limit: Threshold[float], today: str, told: Sequence[_Excess], unit: str, action: str) -> Check:
    """A check of the column with the largest proven excess; undecided without a row of today."""
    known = [item for item in told if item.rows > 0]
    if not known:
        return Check(
            name=name, observed=None, threshold=limit.value, unit=unit, passed=None, comparison="<=", where=today,
            source=limit.source, action="count the inputs of each day: there is no row of today",
        )  # fmt: skip
    worst = max(known, key=lambda item: (item.proven, item.observed))
    return Check(
        name=name, observed=worst.observed, threshold=limit.value, unit=unit, passed=not worst.proven > limit.value, comparison="<=",
        source=limit.source, where=f"{worst.column}, {worst.count:,} of {worst.rows:,} on {today}; training's worst day {worst.usual:.3g}",
        action=action.format(worst.column),
    )  # fmt: skip


def drift_limit(policy: MonitoringPolicy, drift: Drift) -> float:
    """The index from which a week is news: the policy's, or what a week of training reached by itself."""
    return max(policy.drift_max.value, drift.usual.index)


def drift_warnings(policy: MonitoringPolicy, drifts: Iterable[Drift], *, of_scores: bool) -> Iterable[Check]:
    """Failed checks of the columns, or the scores, whose index over a week is beyond the limit and beyond chance.

    The worst few (how many times the limit) each on its own, the others in one. A first week that is not over yet is no week.
    """
    name = f"drift of {'the scores' if of_scores else 'inputs'}"
    beyond = [drift for drift in drifts if drift.is_whole and drift.index > drift_limit(policy, drift) and not drift.is_chance]
    beyond.sort(key=lambda drift: (-drift.index / drift_limit(policy, drift), drift.column))
    for drift in beyond[:SHOWN_DRIFTS]:
        yield _drift_check(policy, name, drift, drift.column)
    if rest := beyond[SHOWN_DRIFTS:]:
        yield _drift_check(policy, name, rest[0], f"{len(rest)} more: {', '.join(drift.column for drift in rest)}; the worst of them")


def _drift_check(policy: MonitoringPolicy, name: str, drift: Drift, where: str) -> Check:
    limit = drift_limit(policy, drift)
    source = policy.drift_max.source if limit == policy.drift_max.value else "the largest index of a week of training against the others"
    return check(
        name, drift.index, "<=", limit, unit="PSI", source=source, where=where,
        action="look at its distribution; train again if it is there to stay. Outcomes decide whether the version stays",
    )  # fmt: skip


def proven_share(count: float, n: float, alpha: float) -> float:
    """Lower limit of a share that `count` of `n` cases prove with error at most alpha; 0 without cases."""
    return float(scipy.special.betaincinv(count, n - count + 1, alpha)) if 0 < count <= n else 0.0


def _share(records: MonitorRecords, policy: MonitoringPolicy, name: str, failed: float, asked: float, part: str) -> Check:
    """A share of today's cases: at most what is allowed, or proven to be more, or undecided."""
    limit = policy.failures_max
    contradicts = not 0 <= failed <= asked or not asked
    share = failed / asked if not contradicts else None
    day = int((np.datetime64(records.today) - np.datetime64(records.since)) / np.timedelta64(1, "D")) + 1
    alpha = policy.alpha.value * SHARES[part] * 6 / (math.pi * day) ** 2
    passed = None if share is None or (share > limit.value and proven_share(failed, asked, alpha) <= limit.value) else share <= limit.value
    return Check(
        name=name, observed=share, threshold=limit.value, unit="share", passed=passed, comparison="<=", source=limit.source,
        where=f"{failed:,.0f} of {asked:,.0f} on {records.today}" if asked else f"none on {records.today}",
        action="the fallback serves; find out why this version does not answer" if passed is False
        else "see that requests reach the service and are counted" if share is None else "look again tomorrow: it is more than allowed, "
        "and so few that it may be chance",
    )  # fmt: skip
