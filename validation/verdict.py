"""A gate's word: three outcomes, the checks behind it, and the positive control that proves the gate awake."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal


class Outcome(StrEnum):
    """What a gate concluded. Only PASS lets a release go on."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


Comparison = Literal["<=", ">=", "==", "<", ">"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One measurement against one threshold.

    `passed` is None when the measurement could not be made or its interval straddles the threshold: the check is inconclusive.
    """

    name: str  # what was measured, e.g. "efficiency at W=8"
    observed: float | str | None
    threshold: float | str | None
    unit: str  # "" for a plain count or a digest, else "ms", "samples/s", "ratio", ...
    passed: bool | None
    comparison: Comparison = "=="
    source: str = ""  # where the threshold comes from
    where: str = ""  # whose: rank, tensor, slice, world size
    interval: tuple[float, float] | None = None  # confidence interval of `observed`, same unit
    action: str = ""  # what to do if it does not pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A planted defect and whether the gate caught it in this very run."""

    planted: str  # the defect, in words
    expected: str  # the check that has to fail
    caught: bool
    detail: str = ""  # what the gate said about it


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows to print beside a plot; each row has one value a column."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str | float | int | None, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line, set of bars or set of points of a plot; `low` and `high` are interval ends, in y's unit."""

    name: str
    x: tuple[str | float, ...]
    y: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """A picture described by its data, drawn by whoever shows it."""

    title: str
    kind: Literal["line", "bar", "point"]
    x_label: str  # with unit
    y_label: str  # with unit
    series: tuple[Series, ...]
    y_log: bool = False
    reference: float | None = None  # a horizontal line: the threshold
    reference_label: str = ""
    stacked: bool = False  # kind "bar": the series are parts of one whole and are put end to end


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    """Everything a reader needs to judge a gate again."""

    gate: str
    outcome: Outcome
    reason: str  # one sentence: which measurement, which threshold, whose rank or slice
    action: str  # what to do next; "" when the gate passed
    checks: tuple[Check, ...] = ()
    control: Control | None = None
    tables: tuple[Table, ...] = ()
    plots: tuple[Plot, ...] = ()
    notes: tuple[str, ...] = field(default=())  # what the gate could not see, assumptions, exclusions


def check(
    name: str,
    observed: float | None,
    comparison: Comparison,
    threshold: float,
    *,
    unit: str,
    source: str,
    where: str = "",
    action: str = "",
    interval: tuple[float, float] | None = None,
) -> Check:
    """Compare a number with a threshold; NaN fails, None (not measured) is inconclusive.

    With an `interval` the whole interval has to lie on the good side to pass and on the bad side to fail; otherwise the check is
    inconclusive, since more measurements could turn it either way.
    """
    passed = None if observed is None else _holds(observed, comparison, threshold)
    if passed is not None and interval is not None and observed is not None and not math.isnan(observed):
        ends = [_holds(end, comparison, threshold) for end in interval]
        passed = ends[0] if ends[0] == ends[1] else None
    return Check(
        name=name, observed=observed, threshold=threshold, unit=unit, passed=passed, comparison=comparison,
        source=source, where=where, action=action, interval=interval,
    )  # fmt: skip


def equal(name: str, observed: str, expected: str, *, source: str, where: str = "", action: str = "") -> Check:
    """Demand two digests or words to be the same."""
    return Check(
        name=name, observed=observed, threshold=expected, unit="", passed=bool(observed) and observed == expected,
        comparison="==", source=source, where=where, action=action,
    )  # fmt: skip


def _holds(value: float, comparison: Comparison, threshold: float) -> bool:
    match comparison:
        case "<=":
            return value <= threshold
        case ">=":
            return value >= threshold
        case "<":
            return value < threshold
        case ">":
            return value > threshold
        case "==":
            return value == threshold


def inconclusive(gate: str, *, reason: str, action: str) -> GateVerdict:
    """The verdict when evidence is missing: it never passes."""
    return GateVerdict(gate=gate, outcome=Outcome.INCONCLUSIVE, reason=reason, action=action)


def conclude(
    gate: str,
    checks: Sequence[Check],
    *,
    passed_reason: str,
    tables: Iterable[Table] = (),
    plots: Iterable[Plot] = (),
    notes: Iterable[str] = (),
) -> GateVerdict:
    """Fold checks into an outcome: any failed -> fail; else none at all or any undecided -> inconclusive; else pass.

    The reason quotes the first failed (or undecided) check with its numbers; the action is that check's.
    """
    failed = [item for item in checks if item.passed is False]
    undecided = [item for item in checks if item.passed is None]
    if failed:
        outcome, worst = Outcome.FAIL, failed
    elif undecided:
        outcome, worst = Outcome.INCONCLUSIVE, undecided
    elif not checks:
        return inconclusive(gate, reason="no check could be made: the evidence is empty", action="run the gate's probe again")
    else:
        outcome, worst = Outcome.PASS, []
    reason = passed_reason if not worst else sentence(worst[0])
    if len(worst) > 1:
        reason += f" (and {len(worst) - 1} more of {len(checks)} checks)"
    return GateVerdict(
        gate=gate, outcome=outcome, reason=reason, action=worst[0].action if worst else "", checks=tuple(checks),
        tables=tuple(tables), plots=tuple(plots), notes=tuple(notes),
    )  # fmt: skip


def sentence(item: Check) -> str:
    """One check in words: name, whose, observed, threshold."""
    whose = f" ({item.where})" if item.where else ""
    unit = f" {item.unit}" if item.unit else ""
    if item.observed is None:
        return f"{item.name}{whose} was not measured; it has to be {item.comparison} {_shown(item.threshold)}{unit}"
    spread = f" [{_shown(item.interval[0])}, {_shown(item.interval[1])}]" if item.interval else ""
    verb = {True: "is", False: "is", None: "is too uncertain at"}[item.passed]
    return f"{item.name}{whose} {verb} {_shown(item.observed)}{spread}{unit}, has to be {item.comparison} {_shown(item.threshold)}{unit}"


def _shown(value: float | str | None) -> str:
    if isinstance(value, str):
        return value[:12] + "…" if len(value) > 24 and " " not in value else value
    if value is None:
        return "nothing"
    return "NaN" if math.isnan(value) else f"{value:.4g}"


def controlled(verdict: GateVerdict, planted: str, expected: str, on_planted: GateVerdict) -> GateVerdict:
    """Attach the positive control: `on_planted` is the same gate's verdict on evidence with a planted defect.

    The control is caught when that verdict failed at a check whose name starts with `expected`. A missed control turns any
    verdict into inconclusive: a gate that does not see a planted defect says nothing about the real run.
    """
    named = [item for item in on_planted.checks if item.passed is False and item.name.startswith(expected)]
    caught = on_planted.outcome is Outcome.FAIL and bool(named)
    detail = sentence(named[0]) if named else f"the gate said {on_planted.outcome}: {on_planted.reason}"
    control = Control(planted=planted, expected=expected, caught=caught, detail=detail)
    if caught:
        return replace(verdict, control=control)
    return replace(
        verdict,
        control=control,
        outcome=Outcome.INCONCLUSIVE,
        reason=f"the positive control was missed: {planted} was planted and {detail}",
        action="treat this gate as blind: mend its probe, then run it again with `seatrial gate`",
    )
