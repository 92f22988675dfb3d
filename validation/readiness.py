"""readiness: could we operate it?

A rubric scored from evidence alone: every failure mode has detector, owner, mitigation, stop condition, drill and page; its drill fired,
was detected, and what was promised against it happened; costs were measured; a fallback is named, loads and answers. Cheap drills fire
in every release. Of the others a drill on record for this code counts; one that was never run is shown as open and is not scored, unless
the policy's drilled_floor asks for it. Claim, control and blind spots: docs/gates/readiness.md.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from validation.failure_modes import BAD_RELEASE, default_modes
from validation.policy import ReadinessPolicy
from validation.records import Drill, FailureMode, FallbackCheck, Page, ReadinessRecords
from validation.verdict import Check, GateVerdict, Plot, Series, Table, check, conclude, controlled, inconclusive

GATE = "readiness"
SOURCE = "docs/gates/readiness.md"
WORDS = ("detector", "owner", "mitigation", "stop_condition", "drill")
PLACEHOLDERS = frozenset({"", "?", "-", "tbd", "n/a", "none", "unknown", "nobody"})  # say that there is none
REQUIRED_MODES = tuple(mode.name for mode in default_modes())


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """One row of the rubric, worth one point; None is an open row that nothing was asked of."""

    name: str
    satisfied: bool | None
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
    scored = [item for item in items if item.satisfied is not None]
    still_open = [item for item in scored if not item.satisfied]
    points = len(scored) - len(still_open)
    floor = policy.score_floor
    score = check(
        "rubric score", points / len(scored), ">=", floor.value, unit="of the points", source=floor.source,
        where=f"{points} of {len(scored)}",
        action="; ".join(dict.fromkeys(item.action for item in still_open[:3])),
    )  # fmt: skip
    return conclude(
        GATE, [*(_critical_check(item) for item in scored if item.critical), score, _drilled_check(records, items, policy)],
        passed_reason=f"{points} of {len(scored)} points, no critical item open; {_drilled_shown(records, items)}",
        tables=(_rubric_table(items), _cost_table(records)),
        plots=(_points_plot(records, items),),
        notes=("Words are counted, not understood: that a mitigation works is shown by its drill only.", _gates_note(records)),
    )  # fmt: skip


def _points_plot(records: ReadinessRecords, items: Sequence[Item]) -> Plot:
    """Points won and open, by failure mode; what belongs to no mode (costs, fallbacks) stands under its own name."""
    groups = {mode.name: [item for item in items if item.name.startswith(f"{mode.name} ")] for mode in records.modes}
    modes = {item.name for mine in groups.values() for item in mine}
    groups["costs and fallbacks"] = [item for item in items if item.name not in modes]
    named = (("won", True), ("open", False), ("not drilled", None))
    series = tuple(
        Series(name=name, x=tuple(groups), y=tuple(float(sum(item.satisfied is won for item in mine)) for mine in groups.values()))
        for name, won in named
    )
    return Plot(title="Points of the rubric", kind="bar", x_label="failure mode", y_label="points", series=series, stacked=True)


def _drilled_check(records: ReadinessRecords, items: Sequence[Item], policy: ReadinessPolicy) -> Check:
    """How many of the modes have a drill that was run with this code, in this release or on record."""
    floor, missing = policy.drilled_floor, _undrilled(records, items)
    share = 1 - len(missing) / len(records.modes)
    return check(
        "failure modes drilled with this code", share, ">=", floor.value, unit="of the modes", source=floor.source,
        where=_drilled_shown(records, items), action=f"run `seatrial drill {' '.join(missing[:3])}` or `seatrial drill --all`",
    )  # fmt: skip


def _drilled_shown(records: ReadinessRecords, items: Sequence[Item]) -> str:
    return f"{len(records.modes) - len(_undrilled(records, items))} of {len(records.modes)} failure modes drilled with this code"


def _undrilled(records: ReadinessRecords, items: Sequence[Item]) -> list[str]:
    still_open = {item.name for item in items if item.satisfied is None}
    return [mode.name for mode in records.modes if _drill_name(mode.name) in still_open]


def _drill_name(mode: str) -> str:
    return f"{mode} was drilled, detected and mitigated"


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
    return f"{mode} has detector, owner, mitigation, stop condition, drill and page"


def _words_item(mode: FailureMode) -> Item:
    lacking = [word for word in WORDS if getattr(mode, word).strip().lower() in PLACEHOLDERS]
    lacking += [f"page ({part})" for part in empty_parts(mode.page)]
    return Item(
        name=_words_name(mode.name), satisfied=not lacking, critical=mode.critical,
        detail=f"lacks {', '.join(lacking)}" if lacking else f"owner {mode.owner}",
        action=f"name the {', '.join(lacking).replace('_', ' ')} of failure mode {mode.name}",
    )  # fmt: skip


def empty_parts(page: Page) -> list[str]:
    """Name the parts of a page that say nothing."""
    said = {part.name: getattr(page, part.name) for part in fields(page)}
    lines = {name: (value,) if isinstance(value, str) else value for name, value in said.items()}
    return [name for name, value in lines.items() if not value or any(line.strip().lower() in PLACEHOLDERS for line in value)]


def _drill_item(mode: FailureMode, drills: Sequence[Drill]) -> Item:
    """Every run of the mode's drill has to have fired, been detected and mitigated.

    A drill of every release that was not run is an open item. Any other that was not run is open and not scored.
    """
    mine = [drill for drill in drills if drill.name == mode.drill]
    worst = next((drill for drill in mine if not _is_good(drill)), mine[0] if mine else None)
    satisfied = None if worst is None and not mode.in_release else worst is not None and _is_good(worst)
    detail = f"drill {mode.drill} was not run with this code" if worst is None else f"drill {mode.drill} {_fared(worst)}: {worst.detail}"
    return Item(
        name=_drill_name(mode.name), satisfied=satisfied, critical=mode.critical, detail=detail,
        action=f"run `seatrial drill {mode.drill}` and mend detector and mitigation until it passes",
    )  # fmt: skip


def _is_good(drill: Drill) -> bool:
    return drill.fired and drill.detected and drill.mitigated


def _fared(drill: Drill) -> str:
    when = f" on {drill.made_at}" if drill.made_at else ""
    if not drill.fired:
        return f"did not fire{when}"
    if not drill.detected:
        return f"went unseen{when}"
    return f"was detected and mitigated{when}" if drill.mitigated else f"was detected and not mitigated{when}"


def _fallback_drill(fallbacks: Sequence[FallbackCheck]) -> Drill:
    """Asking a fallback is the drill for a bad release: it can be rolled back when one of them answers."""
    named, ready = _named_and_ready(fallbacks)
    return Drill(name=BAD_RELEASE, fired=bool(named), detected=bool(ready), mitigated=bool(ready), detail=_fallbacks_shown(named))


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
    rows = tuple(
        (item.name, int(bool(item.satisfied)), int(item.satisfied is not None), "critical" if item.critical else "", item.detail)
        for item in items
    )
    return Table(title="Rubric", columns=("item", "points", "of", "critical", "evidence"), rows=rows)


def _cost_table(records: ReadinessRecords) -> Table:
    return Table(title="Costs of this release", columns=("cost", "measured"), rows=tuple(sorted(records.costs.items())))


def _gates_note(records: ReadinessRecords) -> str:
    gates = ", ".join(f"{gate} {outcome}" for gate, outcome in records.gates.items())
    return f"Gates so far: {gates or 'none'}; their outcomes are judged by the decision, not here."
