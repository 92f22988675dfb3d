"""Does the service answer, in time, on inputs as it knows them? Checks of the last day, and drift of the last week, which only warns.

That requests are not answered is the one state that ends a version at once, so it has to be proven: the exact lower limit of the day's
share (Clopper and Pearson, 1934) lies above what is allowed, at alpha_k = 6 alpha / (pi^2 k^2) on the k-th day of service. These add up to
alpha over all days, so looking daily is safe here too, as far as requests fail one by one; an outage is no accident of counting.
"""

import math
from collections.abc import Iterable

import numpy as np
from scipy import stats

from validation.drift import CHANCE, Drift
from validation.monitoring_join import Joined
from validation.monitoring_outcomes import SHARES
from validation.policy import MonitoringPolicy
from validation.served import MonitorRecords
from validation.verdict import Check, check

REQUESTS = "requests that were not answered"
SCORES = "scores that are no number"
MISSING = "missing values beyond the training share"


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
    """The column with the most missing values today beyond its training share; a few rows alone cannot fail it."""
    limit = policy.missing_max
    known = [drift for drift in drifts if drift.missing_rows[1] > 0]
    if not known:
        return Check(
            name=MISSING, observed=None, threshold=limit.value, unit="share of rows", passed=None, comparison="<=", where=records.today,
            source=limit.source, action="count the inputs of each day: there is no row of today",
        )  # fmt: skip
    worst = max(known, key=lambda drift: (_proven_missing(drift) - drift.reference_missing_share, _excess(drift)))
    excess = _excess(worst)
    fails = _proven_missing(worst) - worst.reference_missing_share > limit.value
    return Check(
        name=MISSING, observed=excess, threshold=limit.value, unit="share of rows", passed=not fails, comparison="<=", source=limit.source,
        where=f"{worst.column}, {worst.missing_rows[0]:,} of {worst.missing_rows[1]:,} rows on {records.today}",
        action=f"find out who no longer delivers {worst.column}; the version goes on serving until its outcomes say otherwise",
    )  # fmt: skip


def drift_warnings(policy: MonitoringPolicy, drifts: Iterable[Drift], *, of_scores: bool) -> Iterable[Check]:
    """One failed check for each column, or for the scores, whose index over a week is beyond the limit and beyond chance."""
    limit = policy.drift_max
    what = "the scores" if of_scores else "inputs"
    for drift in sorted(drifts, key=lambda drift: -drift.index):
        if drift.index > limit.value and not drift.is_chance:
            yield check(
                f"drift of {what}", drift.index, "<=", limit.value, unit="PSI", source=limit.source, where=drift.column,
                action="look at its distribution; train again if it is there to stay. Outcomes decide whether the version stays",
            )  # fmt: skip


def proven_share(count: float, n: float, alpha: float) -> float:
    """Lower limit of a share that `count` of `n` cases prove with error at most alpha; 0 without cases."""
    return float(stats.beta.ppf(alpha, count, n - count + 1)) if 0 < count <= n else 0.0


def _proven_missing(drift: Drift) -> float:
    missing, rows = drift.missing_rows
    return proven_share(missing, rows, 1 - CHANCE)


def _excess(drift: Drift) -> float:
    return drift.missing_share - drift.reference_missing_share


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
