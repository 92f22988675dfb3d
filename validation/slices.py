"""slice_quality: is the candidate good for everyone it serves?

In every slice that is large enough its utility may not fall behind last known-good, baseline or rule by more than a margin, its
confidence has to match what came true, and on the whole it has to be better than the baseline and the rule. The statistics
stand in slice_comparisons and slice_stats; claim, control and blind spots in docs/gates/slice_quality.md.
"""

import math
from collections.abc import Iterable, Sequence

import numpy as np
import pandas as pd

from validation.errors import EvidenceError
from validation.policy import SlicePolicy
from validation.records import SliceRecords
from validation.slice_comparisons import CALIBRATION, FAILED, INCUMBENT, PASSED, UNCERTAIN, UNDECIDABLE, Comparison, Comparisons, compare
from validation.slice_stats import cells
from validation.slice_tables import slice_plots, slice_tables
from validation.verdict import Check, GateVerdict, check, conclude, controlled, inconclusive

GATE = "slice_quality"
MEASURES = ("utility", "loss", "confidence", "hit")
MIN_LATENCIES = 20  # below, the 95th percentile is the maximum by another name
MIN_PLANT_CLUSTERS = 10  # a control in a slice of a few clusters would test Student's t, not the gate
PASS_OF = {PASSED: True, FAILED: False, UNCERTAIN: None, UNDECIDABLE: None}
SEVERITY = {PASSED: 0, UNDECIDABLE: 1, UNCERTAIN: 1, FAILED: 2}


def judge_slices(records: SliceRecords, policy: SlicePolicy) -> GateVerdict:
    """Judge utility and calibration by slice, utility and quality overall, latency, and how much of the traffic could be judged.

    NaN fails naming the contender; absent columns, rows or contenders are inconclusive; so is an interval that straddles its limit.
    """
    unsound = [item for item in _soundness(records, records.outcomes) if item.passed is not True]
    if unsound:
        return conclude(GATE, unsound, passed_reason="", notes=("The positive control was not run: it needs complete outcomes.",))
    found = compare(records, policy, records.outcomes)
    checks = [*_slice_checks(records, found, policy), *_overall_checks(records, found, policy), *_whole_checks(records, policy)]
    verdict = conclude(
        GATE, checks, passed_reason=_passed_reason(records, found), tables=slice_tables(records, found),
        plots=slice_plots(records, found, margin=policy.margin.value), notes=_notes(found, policy),
    )  # fmt: skip
    planted = f"the candidate made worse on {records.planted_slice or 'no slice'}"
    return controlled(verdict, planted, f"utility of {records.planted_slice} against", _judge_planted(records, policy))


def plant(outcomes: pd.DataFrame, slice_name: str) -> pd.DataFrame:
    """Make the candidate really worse on one slice, whatever the recipe's action is.

    Each of its samples there gets the lowest utility that any contender had on it, less one standard deviation (the largest of the
    contenders'), so that the candidate trails every reference by at least that. A planted number, not a decision anyone took.
    Raises: EvidenceError when no row belongs to `slice_name` ("column=value").
    """
    column, _, value = slice_name.partition("=")
    rows = outcomes[column].astype(str) == value if column in outcomes else pd.Series(False, index=outcomes.index)
    if not rows.any():
        raise EvidenceError(
            f"no outcome belongs to slice '{slice_name}'. A control planted there could not be caught, so the gate would call itself "
            "blind. Choose a slice with `smallest_slice(outcomes, slices, min_n)`."
        )
    utilities = outcomes[[name for name in outcomes if str(name).startswith("utility_")]].to_numpy(np.float64)
    finite = [column[np.isfinite(column)] for column in utilities.T]  # whatever is not finite fails the gate itself, not this function
    spread = max((float(column.std()) for column in finite if column.size), default=0.0) or 1.0
    planted = np.where(rows, utilities.min(axis=1) - spread, outcomes["utility_candidate"].to_numpy(np.float64))
    return outcomes.assign(utility_candidate=planted)


def smallest_slice(outcomes: pd.DataFrame, slices: Sequence[str], min_n: int) -> str:
    """Name the smallest slice that the gate judges ("" when there is none): a gate that sees a defect there sees it anywhere larger."""
    found: list[tuple[bool, int, str]] = []
    for column in slices:
        group = cells(outcomes[column], outcomes["cluster"])
        sizes = zip(group.labels, group.n.tolist(), group.clusters.tolist(), strict=True)
        found += [(clusters < MIN_PLANT_CLUSTERS, n, f"{column}={label}") for label, n, clusters in sizes if n >= min_n and clusters > 1]
    return min(found)[2] if found else ""


def _soundness(records: SliceRecords, outcomes: pd.DataFrame) -> Iterable[Check]:
    """Checks that have to pass before anything can be compared."""
    yield _present("samples", len(outcomes) > 0, "at least one judged sample", "run the slice probe: no outcome was recorded")
    yield _present("slice columns", len(records.slices) > 0, "at least one", "name slice columns in the recipe")
    complete = records.contenders[:1] == ("candidate",) and bool(set(records.contenders[1:]) - {INCUMBENT})
    yield _present("contenders", complete, "the candidate, and baseline or rule", "score the candidate, the baseline and the rule")
    absent = [column for column in ("sample_id", "cluster", *records.slices) if column not in outcomes]
    yield _present("columns of the outcomes", not absent, f"present: {', '.join(absent)}", "record these columns in the slice probe")
    for contender in records.contenders:
        lacking = [f"{measure}_{contender}" for measure in MEASURES if f"{measure}_{contender}" not in outcomes]
        wanted = f"present: {', '.join(lacking)}"
        yield _present(f"outcomes of {contender}", not lacking, wanted, f"score {contender} on the judge split and run the gate again")
        yield from _finite_check(outcomes, contender)
    if not absent:
        keys = int(outcomes["cluster"].isna().sum()) + int(outcomes["sample_id"].duplicated().sum())
        action = "give each sample one id and one cluster: repeated samples make intervals too narrow"
        yield check("repeated samples or samples without a cluster", float(keys), "<=", 0.0, unit="samples", source=GATE, action=action)


def _present(name: str, there: bool, wanted: str, action: str) -> Check:
    """Evidence that is there, or not measured."""
    return Check(
        name=name,
        observed="present" if there else None,
        threshold=wanted,
        unit="",
        passed=True if there else None,
        source=GATE,
        action=action,
    )


def _finite_check(outcomes: pd.DataFrame, contender: str) -> Iterable[Check]:
    """Count outcomes that are no number; an infinite log loss is a fact about a contender (it was sure and wrong), a NaN never is."""
    bad = {}
    for measure in MEASURES:
        if f"{measure}_{contender}" in outcomes:
            values = outcomes[f"{measure}_{contender}"].to_numpy(np.float64, na_value=np.nan)
            bad[f"{measure}_{contender}"] = int(np.isnan(values).sum() if measure == "loss" else (~np.isfinite(values)).sum())
    where = ", ".join(column for column, count in bad.items() if count)
    action = f"find out why {contender} gives no finite outcome on these samples; never drop them"
    yield check(
        f"outcomes of {contender} that are not finite",
        float(sum(bad.values())),
        "<=",
        0.0,
        unit="values",
        source=GATE,
        where=where,
        action=action,
    )


def _whole_checks(records: SliceRecords, policy: SlicePolicy) -> Iterable[Check]:
    """Quality of the candidate and serving latency."""
    yield check(
        f"{records.quality_name} of the candidate", records.quality.get("candidate"), ">=", records.target_quality, unit="",
        source="the recipe's target_quality", action="train longer or improve the features; the target is the recipe owner's",
    )  # fmt: skip
    times = sorted(records.latency_ms, key=lambda value: (math.isnan(value), value))  # NaN last: it may not hide below the percentile
    p95 = times[math.ceil(0.95 * len(times)) - 1] if len(times) >= MIN_LATENCIES else None
    if any(math.isnan(value) for value in times):
        p95 = math.nan
    measured = "make the exported candidate smaller, or serve it on a faster machine"
    limit = policy.latency_p95_ms
    yield check(
        "latency p95", p95, "<=", limit.value, unit="ms", source=limit.source, where=records.latency_machine,
        action=f"take at least {MIN_LATENCIES} one-row predictions" if p95 is None else measured,
    )  # fmt: skip


def _overall_checks(records: SliceRecords, found: Comparisons, policy: SlicePolicy) -> Iterable[Check]:
    """On the whole the candidate may fall behind nobody by more than the margin, and has to be better than baseline and rule."""
    for item in found.overall:
        yield _comparison_check(item, f"overall utility against {item.reference}", records.utility_unit, policy.margin.source)
    for reference in dict.fromkeys(item.reference for item in found.superiority):
        best = min((item for item in found.superiority if item.reference == reference), key=_rank)
        yield Check(
            name=f"overall superiority over {reference}", observed=best.observed, threshold=0.0, passed=PASS_OF[best.status],
            unit=records.utility_unit if best.column == "utility" else "nats", comparison=">", where=f"by {best.column}",
            interval=(best.low, best.high), source="a trained model has to be worth more than what needs no training",
            action=f"keep what serves: the candidate is not shown to be better than the {reference}, by utility or by log loss",
        )  # fmt: skip


def _slice_checks(records: SliceRecords, found: Comparisons, policy: SlicePolicy) -> Iterable[Check]:
    """One utility check a judged slice, the worst first; one calibration and one coverage check a slice column."""
    slices = list(dict.fromkeys(item.slice_name for item in found.utility))
    worst = [item for name in slices if (item := _worst([item for item in found.utility if item.slice_name == name]))]
    for item in sorted(worst, key=_rank, reverse=True):
        yield _comparison_check(item, f"utility of {item.slice_name} against {item.reference}", records.utility_unit, policy.margin.source)
    for column in records.slices:
        gap = _worst([item for item in found.calibration if item.column == column and item.status != UNDECIDABLE])
        if gap:
            yield _comparison_check(gap, f"calibration gap by {column}", "", policy.calibration_max.source)
        yield _coverage_check(found, column, policy)


def _rank(item: Comparison) -> tuple[int, float]:
    return SEVERITY[item.status], item.severity


def _worst(rivals: Sequence[Comparison]) -> Comparison | None:
    """The comparison that decides; None when nothing decides (no rival, or the rest passes and one is not decidable)."""
    decided = [item for item in rivals if item.status != UNDECIDABLE]
    worst = max(decided, key=_rank, default=None)
    return None if worst and worst.status == PASSED and len(decided) < len(rivals) else worst


def _comparison_check(item: Comparison, name: str, unit: str, source: str) -> Check:
    calibration = item.reference == CALIBRATION
    more = f"collect more outcomes of {item.slice_name}: what there is does not decide between good and bad"
    look = f"look at {item.slice_name}: what changed in its data since training; recalibrate or train again with more of it"
    return Check(
        name=name, observed=item.observed, threshold=item.limit, unit=unit, passed=PASS_OF[item.status], source=source,
        comparison="<=" if calibration else ">=", where=item.slice_name if calibration else f"n={item.n}", interval=(item.low, item.high),
        action=look if item.status == FAILED else more,
    )  # fmt: skip


def _coverage_check(found: Comparisons, column: str, policy: SlicePolicy) -> Check:
    """Share of samples in slices of this column in which every comparison was decided; too small a share is inconclusive."""
    open_slices = {item.slice_name for item in (*found.utility, *found.calibration) if item.status == UNDECIDABLE}
    judged = sum(fact.n for fact in found.facts if fact.column == column and fact.slice_name not in open_slices)
    share = judged / found.samples
    return Check(
        name=f"coverage of {column}", observed=share, threshold=policy.min_coverage.value, unit="share of samples",
        passed=True if share >= policy.min_coverage.value else None, comparison=">=", source=policy.min_coverage.source,
        action=f"judge more samples, or merge the small values of {column} in the recipe",
    )  # fmt: skip


def _judge_planted(records: SliceRecords, policy: SlicePolicy) -> GateVerdict:
    """Judge the planted outcomes by the same utility checks."""
    unsound = [item for item in _soundness(records, records.planted_outcomes) if item.passed is not True]
    if unsound:
        return inconclusive(GATE, reason="the planted outcomes are not complete", action="plant into the records' own outcomes")
    found = compare(records, policy, records.planted_outcomes)
    return conclude(GATE, list(_slice_checks(records, found, policy)), passed_reason="the planted outcomes passed")


def _passed_reason(records: SliceRecords, found: Comparisons) -> str:
    slices = len({item.slice_name for item in found.utility if item.status == PASSED})
    return (
        f"{slices} slices of {found.samples:,} samples are no worse than {', '.join(records.contenders[1:])}, "
        f"and {records.quality_name} is {records.quality.get('candidate', math.nan):.4g}"
    )


def _notes(found: Comparisons, policy: SlicePolicy) -> tuple[str, ...]:
    share = f"{policy.confidence.value:.0%}"
    notes = [
        f"Intervals are cluster-robust t intervals. The unfavourable end is one-sided at {share} by itself (all have to hold to pass), the "
        f"favourable end is one-sided at {share} over all {found.family} comparisons by Bonferroni (one is enough to fail)."
    ]
    undecided = sorted({f"{item.slice_name} (n={item.n})" for item in (*found.utility, *found.calibration) if item.status == UNDECIDABLE})
    if undecided:
        notes.append(f"Not decidable, n too small for the margin, counted against coverage: {', '.join(undecided)}.")
    return tuple(notes)
