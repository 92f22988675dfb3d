"""readiness: could we operate it?

A rubric scored from evidence alone: every failure mode has detector, owner, mitigation and stop condition, and a drill that fired in
this release and was seen; costs were measured; a fallback is named, loads and answers. Claim, control and blind spots:
docs/gates/readiness.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from validation.failure_modes import BAD_RELEASE, default_modes
from validation.policy import ReadinessPolicy
from validation.records import Drill, FailureMode, FallbackCheck, ReadinessRecords
from validation.verdict import Check, GateVerdict, Plot, Series, Table, check, conclude, controlled, inconclusive

GATE = "readiness"
SOURCE = "docs/gates/readiness.md"
WORDS = ("detector", "owner", "mitigation", "stop_condition")
PLACEHOLDERS = frozenset({"", "?", "-", "tbd", "n/a", "none", "unknown", "nobody"})  # say that there is none
REQUIRED_MODES = tuple(mode.name for mode in default_modes("anyone"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One row of the rubric, worth one point."""

    name: str
    satisfied: bool
    critical: bool  # open, it fails the gate whatever the score
    detail: str
    action: str


def judge_readiness(records: ReadinessRecords, policy: ReadinessPolicy) -> GateVerdict:
    """Score the rubric; below the floor or with a critical item open it fails, without modes or drills it is inconclusive."""
    if not records.modes or not records.drills:
        missing = "failure mode is listed" if not records.modes else "drill was run"
        return inconclusive(GATE, reason=f"no {missing}", action="give the recipe an owner and run the drills of a release")
    verdict = _judged(records, policy)
    target = _plant_target(records)
    planted = replace(records, modes=tuple(replace(mode, owner="") if mode.name == target else mode for mode in records.modes))
    return controlled(verdict, f"the owner of failure mode {target} removed", _words_name(target), _judged(planted, policy))


def rubric(records: ReadinessRecords) -> tuple[Item, ...]:
    """Make the rubric's items in order: modes, costs, fallbacks."""
    listed = {mode.name for mode in records.modes}
    drills = (*records.drills, _fallback_drill(records.fallbacks))
    items = [item for mode in records.modes for item in (_words_item(mode), _drill_item(mode, drills))]
    items += [_unlisted_item(name) for name in REQUIRED_MODES if name not in listed]
    return (*items, _cost_item(records), *_fallback_items(records.fallbacks))


def _judged(records: ReadinessRecords, policy: ReadinessPolicy) -> GateVerdict:
    items = rubric(records)
    still_open = [item for item in items if not item.satisfied]
    points = len(items) - len(still_open)
    floor = policy.score_floor
    score = check(
        "rubric score", points / len(items), ">=", floor.value, unit="of the points", source=floor.source,
        where=f"{points} of {len(items)}",
        action="; ".join(dict.fromkeys(item.action for item in still_open[:3])),
    )  # fmt: skip
    return conclude(
        GATE, [*(_critical_check(item) for item in items if item.critical), score],
        passed_reason=f"{points} of {len(items)} points, no critical item open", tables=(_rubric_table(items), _cost_table(records)),
        plots=(_points_plot(records, items),),
        notes=("Words are counted, not understood: that a mitigation works is shown by its drill only.", _gates_note(records)),
    )  # fmt: skip


def _points_plot(records: ReadinessRecords, items: Sequence[Item]) -> Plot:
    """Points won and open, by failure mode; what belongs to no mode (costs, fallbacks) stands under its own name."""
    groups = {mode.name: [item for item in items if item.name.startswith(f"{mode.name} ")] for mode in records.modes}
    modes = {item.name for mine in groups.values() for item in mine}
    groups["costs and fallbacks"] = [item for item in items if item.name not in modes]
    named = (("won", True), ("open", False))
    series = tuple(
        Series(name=name, x=tuple(groups), y=tuple(float(sum(item.satisfied is won for item in mine)) for mine in groups.values()))
        for name, won in named
    )
    return Plot(title="Points of the rubric", kind="bar", x_label="failure mode", y_label="points", series=series, stacked=True)


def _critical_check(item: Item) -> Check:
    observed = "satisfied" if item.satisfied else f"open: {item.detail}"
    return Check(
        name=item.name, observed=observed, threshold="satisfied", unit="", passed=item.satisfied, source=SOURCE, action=item.action
    )  # fmt: skip


def _plant_target(records: ReadinessRecords) -> str:
    """Choose the critical mode to plant into: one that has its words, so that the planted hole is the only one there."""
    critical = [mode for mode in records.modes if mode.critical]
    whole = [mode for mode in critical if _words_item(mode).satisfied]
    return (whole or critical or list(records.modes))[0].name


def _words_name(mode: str) -> str:
    return f"{mode} has detector, owner, mitigation and stop condition"


def _words_item(mode: FailureMode) -> Item:
    lacking = [word for word in WORDS if getattr(mode, word).strip().lower() in PLACEHOLDERS]
    return Item(
        name=_words_name(mode.name), satisfied=not lacking, critical=mode.critical,
        detail=f"lacks {', '.join(lacking)}" if lacking else f"owner {mode.owner}",
        action=f"name the {', '.join(lacking).replace('_', ' ')} of failure mode {mode.name}",
    )  # fmt: skip


def _drill_item(mode: FailureMode, drills: Sequence[Drill]) -> Item:
    """Every run of the mode's drill has to have fired and been detected; a drill that was not run is an open item."""
    mine = [drill for drill in drills if drill.name == mode.drill]
    satisfied = bool(mine) and all(drill.fired and drill.detected for drill in mine)
    worst = next((drill for drill in mine if not (drill.fired and drill.detected)), mine[0] if mine else None)
    if worst is None:
        detail = f"drill {mode.drill} was not run"
    elif not worst.fired:
        detail = f"drill {mode.drill} did not fire: {worst.detail}"
    else:
        detail = f"drill {mode.drill} {'was detected' if satisfied else 'went unseen'}: {worst.detail}"
    return Item(
        name=f"{mode.name} was drilled and detected", satisfied=satisfied, critical=mode.critical, detail=detail,
        action=f"run drill {mode.drill} and mend the detector until it sees {mode.name}",
    )  # fmt: skip


def _fallback_drill(fallbacks: Sequence[FallbackCheck]) -> Drill:
    """Asking a fallback is the drill for a bad release: it can be rolled back when one of them answers."""
    named, ready = _named_and_ready(fallbacks)
    return Drill(name=BAD_RELEASE, fired=bool(named), detected=bool(ready), detail=_fallbacks_shown(named))


def _unlisted_item(name: str) -> Item:
    """A mode cannot leave the rubric by not being listed."""
    return Item(
        name=f"{name} is listed", satisfied=False, critical=True, detail="the failure mode is missing from the release's list",
        action=f"list failure mode {name} with its owner and drill",
    )  # fmt: skip


def _cost_item(records: ReadinessRecords) -> Item:
    bad = [name for name, value in records.costs.items() if not (math.isfinite(value) and value >= 0)]
    measured = bool(records.costs) and not bad
    detail = f"{len(records.costs)} costs measured" if measured else f"not a cost: {', '.join(bad)}" if bad else "no cost was measured"
    return Item(
        name="costs are measured", satisfied=measured, critical=True, detail=detail, action="measure worker seconds, wall clock and storage"
    )


def _fallback_items(fallbacks: Sequence[FallbackCheck]) -> tuple[Item, ...]:
    """One fallback that answers is critical; that every named one answers is worth a point."""
    named, ready = _named_and_ready(fallbacks)
    shown = _fallbacks_shown(named)
    action = "register a baseline that loads and gives finite predictions"
    return (
        Item(name="a fallback is named and answers", satisfied=bool(ready), critical=True, detail=shown, action=action),
        Item(name="every named fallback answers", satisfied=0 < len(ready) == len(named), critical=False, detail=shown, action=action),
    )


def _named_and_ready(fallbacks: Sequence[FallbackCheck]) -> tuple[list[FallbackCheck], list[FallbackCheck]]:
    named = [item for item in fallbacks if item.version]
    return named, [item for item in named if item.loaded and item.predicted]


def _fallbacks_shown(named: Sequence[FallbackCheck]) -> str:
    return "; ".join(f"{item.kind} {item.version}: {item.detail}" for item in named) or "no fallback is named"


def _rubric_table(items: Sequence[Item]) -> Table:
    rows = tuple((item.name, int(item.satisfied), 1, "critical" if item.critical else "", item.detail) for item in items)
    return Table(title="Rubric", columns=("item", "points", "of", "critical", "evidence"), rows=rows)


def _cost_table(records: ReadinessRecords) -> Table:
    return Table(title="Costs of this release", columns=("cost", "measured"), rows=tuple(sorted(records.costs.items())))


def _gates_note(records: ReadinessRecords) -> str:
    gates = ", ".join(f"{gate} {outcome}" for gate, outcome in records.gates.items())
    return f"Gates so far: {gates or 'none'}; their outcomes are judged by the decision, not here."
