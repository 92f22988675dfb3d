"""monitor: may the version that serves go on serving?

    outcomes worse than the fallback's, proven; requests not answered, proven   -> degraded, roll_back
    latency, inputs that are missing or stand still, a lapsed waiver             -> degraded, watch
    too few outcomes yet, too few outcomes in time, no requests, a missed control -> inconclusive, watch
    drift, contradictory rows, a purse at a tenth of what it takes               -> a warning, watch
    else                                                                         -> healthy, none

Outcomes decide: drift alone never rolls back. The tests may be looked at every day (validation.betting); claims and limits in
docs/monitoring.md. In every judgement defects are planted into the same records (a version worse by PLANTED_DROP, a day without answers, an
empty column, one that stands still), and what does not find its own is taken for blind. A young version is therefore inconclusive: so few
days would not even show the planted drop.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import pandas as pd

from validation.drift import WINDOW_DAYS, measure_drift
from validation.monitoring_join import Joined, absent_columns, join
from validation.monitoring_outcomes import SHARES, Purse, margin_of, purse_of_all, purses_of_slices
from validation.monitoring_service import MISSING, REQUESTS, SCORES, STILL, drift_warnings, missing_check, service_checks, still_check
from validation.monitoring_view import monitoring_plots, monitoring_tables
from validation.policy import MonitoringPolicy
from validation.served import MonitorRecords
from validation.verdict import Check, Control, GateVerdict, Outcome, check, conclude, inconclusive, sentence

NAME = "monitoring"
WORSE = "evidence of being worse"
COVERAGE = "coverage of outcomes"
PLANTED_DROP = 1.0  # standard deviations of the fallback's utility: the size that slice_quality plants
WATCHED_FROM = 0.1  # of what a purse needs
HEALTH: dict[Outcome, Literal["healthy", "degraded", "inconclusive"]] = {
    Outcome.PASS: "healthy", Outcome.FAIL: "degraded", Outcome.INCONCLUSIVE: "inconclusive",
}  # fmt: skip

ENDS_THE_VERSION = (REQUESTS, SCORES, WORSE)

Action = Literal["none", "watch", "roll_back"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MonitorVerdict:
    """What is said of a serving version on one day."""

    action: Action
    verdict: GateVerdict  # in a gate's words, so that whatever shows gates shows it: pass = healthy, fail = degraded
    warnings: tuple[Check, ...]  # what does not decide and still has to be seen; also among the verdict's notes

    @property
    def health(self) -> Literal["healthy", "degraded", "inconclusive"]:
        """The outcome in the words of operations."""
        return HEALTH[self.verdict.outcome]

    @property
    def reason(self) -> str:
        """One sentence: which measurement, which threshold, whose slice, column or day."""
        return self.verdict.reason


def judge_monitoring(records: MonitorRecords, policy: MonitoringPolicy) -> MonitorVerdict:
    """Judge a serving version on everything up to today. Raises: EvidenceError when a day is no ISO date."""
    if unsound := _unsound(records):
        return MonitorVerdict(action="watch", verdict=unsound, warnings=())
    joined = join(records, policy)
    inputs, scores = ([measure_drift(column, records.today) for column in columns] for columns in (records.inputs, records.scores))
    purses = (purse_of_all(records, policy, joined), *purses_of_slices(records, policy, joined))
    plants = _plants(records, policy, joined)
    requests, bad_scores, latency = service_checks(records, policy, joined)
    checks = [
        requests, bad_scores, *_outcome_checks(records, policy, purses), latency, missing_check(records, policy, inputs),
        still_check(records, policy, inputs), _coverage(policy, joined), *_waiver(records),
    ]  # fmt: skip
    checks = [_unless_blind(item, plants) for item in checks]
    warnings = (
        *_suspicions(purses), *_contradictions(joined), *drift_warnings(policy, scores, of_scores=True),
        *drift_warnings(policy, inputs, of_scores=False),
    )  # fmt: skip
    shown = (records, policy, joined, purses, (*inputs, *scores))
    verdict = conclude(
        NAME, checks, passed_reason=_healthy_reason(records, purses[0], warnings), tables=monitoring_tables(*shown),
        plots=monitoring_plots(*shown), notes=(*_told(warnings), *_notes(records, policy, joined, purses)),
    )  # fmt: skip
    return MonitorVerdict(action=_action(verdict, warnings), verdict=replace(verdict, control=_control(verdict, plants)), warnings=warnings)


def _unsound(records: MonitorRecords) -> GateVerdict | None:
    """The verdict on records that cannot be judged at all."""
    absent = absent_columns(records)
    if absent:
        return inconclusive(NAME, reason=f"the records lack {', '.join(absent)}", action="record these columns, then monitor again")
    if not (records.utility_scale > 0 and np.isfinite(records.utility_scale)):
        reason = (
            f"the fallback's utility has a standard deviation of {records.utility_scale:g} on the judge split, so the margin has no size"
        )
        return inconclusive(NAME, reason=reason, action="give the recipe a utility that differs between samples, then release again")
    if records.since > records.today:
        reason = f"version {records.version} serves since {records.since}, and the last day that is over is {records.today}"
        return inconclusive(NAME, reason=reason, action="monitor again when its first whole day is over")
    return None


def _outcome_checks(records: MonitorRecords, policy: MonitoringPolicy, purses: Sequence[Purse]) -> Iterable[Check]:
    """One check of all rows, one of each slice that is proven worse, or of the slice that is nearest to it."""
    whole, slices = purses[0], purses[1:]
    margin = (
        f"more than {margin_of(records, policy):.3g} {records.utility_unit} worse than {records.reference_kind} {records.reference_version}"
    )
    for purse in (whole, *([item for item in slices if item.reached] or slices[:1])):
        found = f"proven on {purse.reached}" if purse.reached else f"{len(purse.values)} bets on {purse.rows:,} outcomes"
        action = f"the fallback serves; look at {purse.name}: what changed since the release" if purse.reached else "wait for more outcomes"
        yield Check(
            name=WORSE, observed=purse.highest, threshold=purse.needed, unit="times the stake", passed=not purse.reached, comparison="<",
            where=f"{purse.name}, {found}: {margin}", source=policy.alpha.source, action=action,
        )  # fmt: skip


def _coverage(policy: MonitoringPolicy, joined: Joined) -> Check:
    """Share of the last mature week's predictions whose outcome came in time; too small a share is inconclusive."""
    week, limit = joined.days.tail(WINDOW_DAYS), policy.coverage_min
    share = float(week["settled"].sum() / week["predictions"].sum()) if len(week) else None
    span = f"{week['day'].iloc[0]} to {week['day'].iloc[-1]}" if len(week) else "no day is mature"
    return Check(
        name=COVERAGE, observed=share, threshold=limit.value, unit="share of predictions", comparison=">=", source=limit.source, where=span,
        passed=True if share is not None and share >= limit.value else None,
        action="find out why outcomes do not come: days without them are not judged" if len(week) else "wait until outcomes are final",
    )  # fmt: skip


def _waiver(records: MonitorRecords) -> Iterable[Check]:
    """A version that a person let through for a time is no longer let through."""
    if records.waiver_lapsed:
        yield Check(
            name="waiver", observed=records.waiver_lapsed, threshold="in force", unit="", passed=False, source="decision.waiver_days",
            action="waive the gate again with `seatrial waive`, or release a version that passes it, or roll back",
        )  # fmt: skip


def _suspicions(purses: Sequence[Purse]) -> Iterable[Check]:
    """Purses that today hold a tenth of what they need, or more."""
    for purse in purses:
        today = purse.values[-1] if purse.values else 0.0
        if not purse.reached and today >= WATCHED_FROM * purse.needed:
            yield check(
                f"suspicion of being worse on {purse.name}", today, "<", WATCHED_FROM * purse.needed, unit="times the stake",
                source="a tenth of what ends the version", where=purse.name, action="look at these outcomes before the test has to",
            )  # fmt: skip


def _contradictions(joined: Joined) -> Iterable[Check]:
    """Rows that cannot be as they are told; they were left out. Other versions' and late rows are only noted."""
    told = {why: n for why, n in joined.left_out.items() if not why.endswith(("other versions", "came late"))}
    if joined.not_finite:
        told["outcomes whose utility is no number"] = joined.not_finite
    for why, n in told.items():
        yield check(why, float(n), "<=", 0.0, unit="rows", source=NAME, action="mend what writes the serving log; these rows were left out")


def _plants(records: MonitorRecords, policy: MonitoringPolicy, joined: Joined) -> dict[str, tuple[str, bool, str]]:
    """Check -> what was planted against it, whether it failed as it has to, and what it said."""
    drop = PLANTED_DROP * records.utility_scale
    worse = purse_of_all(records, policy, joined, lowered=drop)
    said = f"proven on {worse.reached}" if worse.reached else f"not to be seen yet in {len(worse.values)} bets"
    plants = {WORSE: (f"a version worse by {drop:.3g} {records.utility_unit}", bool(worse.reached), said)}
    silent = pd.DataFrame({"day": [records.today], "requests": [1000], "answered": [0], "latency_p95_ms": [np.nan]})
    requests = service_checks(replace(records, health=silent), policy, joined)[0]
    plants[REQUESTS] = ("a day without answers", requests.passed is False, sentence(requests))
    return plants | _input_plants(records, policy)


def _input_plants(records: MonitorRecords, policy: MonitoringPolicy) -> dict[str, tuple[str, bool, str]]:
    """A column without a value, and one whose values are all the same: those that differ most from training's worst day."""
    plants: dict[str, tuple[str, bool, str]] = {}
    if not records.inputs:
        return plants
    empty = min(records.inputs, key=lambda column: column.usual.missing)
    still = min(records.inputs, key=lambda column: column.usual.share)
    rows = max(sum(empty.served.get(records.today, ())) + empty.served_missing.get(records.today, 0), 1000)
    emptied = replace(empty, served={records.today: (0,) * len(empty.bins)}, served_missing={records.today: rows})
    stilled = replace(still, served={records.today: (rows, *(0,) * (len(still.bins) - 1))}, served_missing={})
    missing = missing_check(records, policy, [measure_drift(emptied, records.today)])
    crowded = still_check(records, policy, [measure_drift(stilled, records.today)])
    plants[MISSING] = (f"no value in {empty.name}", missing.passed is False, sentence(missing))
    if still.usual.share + policy.still_max.value < 1.0:  # else nobody looked at training, or every day is of one value by nature
        plants[STILL] = (f"one value in {still.name}", crowded.passed is False, sentence(crowded))
    return plants


def _unless_blind(item: Check, plants: dict[str, tuple[str, bool, str]]) -> Check:
    """The check, undecided if it did not see what was planted against it."""
    planted, caught, said = plants.get(item.name, ("", True, ""))
    return item if caught else replace(item, passed=None, where=f"{item.where}; {planted} is {said}")


def _control(verdict: GateVerdict, plants: dict[str, tuple[str, bool, str]]) -> Control:
    """All plants as one control. A proven failure stands: its own plant was found, the others do not concern it."""
    missed = [said for _, caught, said in plants.values() if not caught]
    planted = ", ".join(words for words, _, _ in plants.values())
    detail = "; ".join(missed or [said for _, _, said in plants.values()])
    return Control(planted=planted, expected=", ".join(plants), caught=not missed or verdict.outcome is Outcome.FAIL, detail=detail)


def _action(verdict: GateVerdict, warnings: Sequence[Check]) -> Action:
    if any(item.passed is False and item.name in ENDS_THE_VERSION for item in verdict.checks):
        return "roll_back"
    return "none" if verdict.outcome is Outcome.PASS and not warnings else "watch"


def _healthy_reason(records: MonitorRecords, whole: Purse, warnings: Sequence[Check]) -> str:
    text = (
        f"version {records.version} is {whole.difference:+.3g} {records.utility_unit} against {records.reference_kind} "
        f"{records.reference_version} over {whole.rows:,} outcomes; the evidence of being worse is {whole.highest:.3g}, and "
        f"{whole.needed:.0f} would end it"
    )
    count = "a warning" if len(warnings) == 1 else f"{len(warnings)} warnings, the first"
    return f"{text}; {count}: {sentence(warnings[0])}" if warnings else text


def _told(warnings: Sequence[Check]) -> Iterable[str]:
    return (f"Warning: {sentence(item)}." for item in warnings)


def _notes(records: MonitorRecords, policy: MonitoringPolicy, joined: Joined, purses: Sequence[Purse]) -> Iterable[str]:
    alpha = policy.alpha.value
    yield (
        f"A version that is as good as its fallback is ever rolled back with probability at most {alpha:g}, however often one looks: "
        f"{SHARES['all rows']:g} of it is spent on all rows, {SHARES['slices']:g} on the slices, the rest on answers. This holds for the "
        "mean of each day given the days before, a day's gain counted up to the margin."
    )
    unjudged = joined.days["day"][~joined.days["is_judged"]].tolist()
    if unjudged:
        yield f"Not judged, too few outcomes in time: {', '.join(unjudged)}."
    if joined.left_out:
        yield f"Left out: {', '.join(f'{n:,} {why}' for why, n in joined.left_out.items())}."
    if blind := [column.name for column in records.inputs if column.usual.missing + policy.missing_max.value >= 1.0]:
        yield f"Silent for a whole day in training too, so that nobody would see it again: {', '.join(blind)}."
    if never := [item.name for item in purses[1:] if not item.values]:
        yield f"Too few outcomes for one bet ({policy.min_n.value}): {', '.join(never)}."
