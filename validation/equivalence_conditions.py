"""What has to hold after any update, whatever the reference says: weights move, all of them, by a gradient within the limit."""

import json
import math
from collections.abc import Iterator

from validation.completeness import absent_columns, listed
from validation.diagnosis_kinds import said
from validation.equivalence_legs import LEGS, finished, place
from validation.equivalence_streams import rates, updates_of
from validation.policy import EquivalencePolicy
from validation.records import COLLECTIVE_COLUMNS, SLOPE_COLUMNS, EquivalenceRecords, Frame, Leg
from validation.verdict import Check, Table, check

PLAIN = tuple(name for name, kind in LEGS.items() if not kind.condition)  # legs without a poison
LEARNING = "an update at a learning rate above zero changes weights"
DECLARED = "a tensor that wants a gradient and never changes has to be declared frozen (requires_grad=False)"
ROUNDING = 1e-8  # a slope below this share of the largest is rounding: float64 leaves 1e-16 in a loss, and 1e-9 and less in a slope
TYPES_SHOWN = ("exact", "own", "logic", "fast", "training")


def condition_checks(records: EquivalenceRecords) -> list[Check]:
    """Weights that do not move: a pure comparison of gradients does not see them."""
    pairs = [(leg, updates) for leg in finished(records.legs, *PLAIN) if (updates := updates_of(leg)) is not None]
    return [*_moved_check(pairs), *_still_check(pairs, records)] if pairs else []


def _moved_check(pairs: list[tuple[Leg, Frame]]) -> list[Check]:
    idle, where = 0, ""
    for leg, updates in pairs:
        for step, rank, moved, text in zip(*(updates[name] for name in ("step", "rank", "moved", "rates")), strict=True):
            if not moved > 0 and any(rates(text)):  # NaN did not move either; at a rate of zero nothing has to
                idle += 1
                where = where or f"first in {place(leg, step, rank)}"
    action = said("nothing_moves", "the update changes no weight") if idle else ""
    return [check("updates that changed nothing", float(idle), "==", 0, unit="", source=LEARNING, where=where, action=action)]


def _still_check(pairs: list[tuple[Leg, Frame]], records: EquivalenceRecords) -> list[Check]:
    allowed = _may_stay(records)
    still: dict[str, str] = {}
    for leg, updates in pairs:
        for name, rank in _never_changed(updates):
            if allowed is not None and name not in allowed:
                still.setdefault(name, place(leg, rank=rank))
    names = sorted(still)
    where = f"{listed(names)}; first in {still[names[0]]}" if names else ""
    action = said("still", f"{listed(names)} never changed") if names else ""
    return [check("tensors that never changed", float(len(names)), "==", 0, unit="", source=DECLARED, where=where, action=action)]


def _may_stay(records: EquivalenceRecords) -> set[str] | None:
    """Frozen tensors, and those whose gradient is nothing but rounding (a bias in front of a normalisation), which SGD need not move.

    A tensor that takes no part at all has a slope of exactly zero, and has to be declared. None: without slopes nobody can tell.
    """
    if absent_columns(records.slopes, SLOPE_COLUMNS) or records.slopes.empty:
        return None
    size = records.slopes["analytic"].abs()
    rounding = records.slopes[(size > 0) & (size <= ROUNDING * size.max())]
    return {*records.frozen, *(str(name) for name in rounding["tensor"])}


def _never_changed(updates: Frame) -> Iterator[tuple[str, int]]:
    """Tensors that stayed in every update of a rank; none where a learning rate was zero throughout, whose tensors may stay."""
    for rank in sorted(set(updates["rank"])):
        rows = updates[updates["rank"] == rank]
        if not any(all(rates(text)) for text in rows["rates"]):
            continue
        sets = [set(json.loads(text)) for text in rows["still"]]
        yield from ((name, int(rank)) for name in sorted(set.intersection(*sets)))


def clip_checks(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[Check]:
    """The largest norm that an optimizer was handed, in units of the limit, over all legs; a skipped update was handed nothing."""
    worst, where = 0.0, ""
    held = False
    for leg in finished(records.legs, *LEGS):
        updates = updates_of(leg)
        if updates is None:
            continue
        poisoned = bool(LEGS[leg.name].condition)
        for step, rank, norm, limit, moved in zip(*(updates[name] for name in ("step", "rank", "norm", "limit", "moved")), strict=True):
            if math.isnan(limit) or (poisoned and (moved == 0 or leg.name == "overflow")):
                continue
            held = True
            share = norm / limit if limit > 0 else math.nan
            if not share <= worst and not math.isnan(worst):
                worst, where = share, f"{place(leg, step, rank)}: norm {norm:.6g}, limit {limit:.6g}"
    if not held:
        return []
    most = 1 + policy.norm_excess.value
    action = "" if worst <= most else said("clipping", "the optimizer was handed more than the limit")
    name = "norm of the handed gradient"
    return [check(name, worst, "<=", most, unit="x the limit", source=policy.norm_excess.source, where=where, action=action)]


def condition_tables(records: EquivalenceRecords) -> list[Table]:
    """The hard conditions, and the types of each leg's collectives."""
    conditions = tuple((item.name, "held" if item.held else "not held", item.detail) for item in records.conditions)
    tables = (
        [Table(title="Hard conditions", columns=("condition", "held", "what was set, or why not"), rows=conditions)] if conditions else []
    )
    rows = []
    for leg in _widest(finished(records.legs, *TYPES_SHOWN)):
        if absent_columns(leg.collectives, COLLECTIVE_COLUMNS) or leg.collectives.empty:
            continue
        total = leg.collectives.groupby(["operation", "dtype"], as_index=False)[["calls", "elements"]].sum()
        for operation, dtype, calls, elements in total.sort_values(["operation", "dtype"]).itertuples(index=False):
            rows.append((leg.name, leg.world_size, str(operation), str(dtype), int(calls), int(elements)))
    columns = ("leg", "world size", "operation", "type", "calls", "elements")
    return [*tables, Table(title="Collectives by type, all ranks", columns=columns, rows=tuple(rows))] if rows else tables


def condition_notes(records: EquivalenceRecords) -> list[str]:
    """Conditions that do not hold: faults that only they would show are not seen."""
    return [
        f"Not held: {item.name} ({item.detail}). Faults that only it shows were not looked for."
        for item in records.conditions
        if not item.held
    ]


def _widest(legs: list[Leg]) -> list[Leg]:
    return [leg for leg in legs if leg.world_size == max(other.world_size for other in legs if other.name == leg.name)]
