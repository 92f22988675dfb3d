"""What a reader of kill_and_resume is shown: the kill plan, the states compared, the segments of each recovery, and what it cannot say."""

import math
from collections.abc import Iterator

from validation.completeness import listed
from validation.policy import RecoveryPolicy
from validation.records import Recovery, RecoveryRecords
from validation.recovery_checks import fault_parts
from validation.recovery_projection import SEGMENTS, measured_s, projection_lines
from validation.recovery_states import kinds_held, load_differences, readable
from validation.verdict import Plot, Series, Table

OTHER_RANKS = (
    "This trainer adds gradients its own way, so on other ranks its sums round otherwise: what comes back there is compared with what was "
    "saved, and its samples and learning rates with the twin's, but not its later weights."
)


def tables(records: RecoveryRecords) -> list[Table]:
    """The plan, what its loads brought back, what a state holds, and the times."""
    return [table for table in (_plan(records), _loads(records), _held(records), _segments(records)) if table.rows]


def _plan(records: RecoveryRecords) -> Table:
    rows = []
    for number, run in enumerate(records.killed):
        ways = {recovery.fault: recovery for recovery in run.record.recoveries}
        for planned in run.planned:
            way = ways.get(planned.fault)
            back = (way.world_size, way.resumed_world_size, way.resumed_from_step) if way else (None, None, None)
            rows.append((number, planned.purpose, planned.fault, *back))
    columns = ("run", "what it shows", "planned fault", "ranks before", "ranks after", "from step")
    return Table(title="Kill plan", columns=columns, rows=tuple(rows))


def _loads(records: RecoveryRecords) -> Table:
    rows = [
        (number, found.attempt, found.step, found.compared, len(found.lost))
        for number, run in enumerate(records.killed) if readable(run.states)
        for found in load_differences(run.states, same_ranks=run.same_bits)
    ]  # fmt: skip
    columns = ("run", "attempt", "loaded at step", "parts compared", "parts lost")
    return Table(title="States loaded, beside what was saved", columns=columns, rows=tuple(rows))


def _held(records: RecoveryRecords) -> Table:
    held = kinds_held(records.twin.states) if readable(records.twin.states) else {}
    rows = tuple(("others" if kind == "unknown" else kind.replace("_", " "), count) for kind, count in held.items())
    return Table(title="What a state holds, by name", columns=("kind", "parts"), rows=rows)


def _segments(records: RecoveryRecords) -> Table:
    rows: list[tuple[str | float | int | None, ...]] = []
    for label, recovery in _each(records):
        seconds = [round(float(getattr(recovery, segment)), 4) for segment in (*SEGMENTS, "total_s")]
        rows.append((label, recovery.world_size, recovery.resumed_world_size, recovery.resumed_from_step, *seconds))
    names = tuple(f"{segment.removesuffix('_s').replace('_', ' ')} (s)" for segment in (*SEGMENTS, "total_s"))
    return Table(title="Recovery by segment", columns=("recovery", "ranks before", "ranks after", "from step", *names), rows=tuple(rows))


def _each(records: RecoveryRecords) -> Iterator[tuple[str, Recovery]]:
    """Recoveries with a label that is unique in the gate: which death it was, and the fault's rank, step and phase."""
    for run, killed in enumerate(records.killed):
        for number, recovery in enumerate(killed.record.recoveries):
            given = fault_parts(recovery.fault)
            words = ", ".join(f"{key} {given[key]}" for key in ("rank", "step", "phase") if key in given)
            which = f"death {number + 1}" if len(records.killed) == 1 else f"run {run} death {number + 1}"
            yield f"{which}: {words or recovery.fault}", recovery


def plots(records: RecoveryRecords, policy: RecoveryPolicy) -> list[Plot]:
    """Each recovery as one bar of its segments."""
    labelled = list(_each(records))
    labels = tuple(label for label, _ in labelled)
    series = tuple(
        Series(
            name=segment.removesuffix("_s").replace("_", " "), x=labels,
            y=tuple(float(getattr(recovery, segment)) for _, recovery in labelled),
        )
        for segment in SEGMENTS
    )  # fmt: skip
    title = f"Seconds from death to the next update (budget {policy.budget_s.value:g} s)"
    return [Plot(title=title, kind="bar", x_label="recovery", y_label="seconds", series=series, stacked=True)] if labels else []


def notes(records: RecoveryRecords, policy: RecoveryPolicy) -> list[str]:
    """What was not measured or not possible, and the projection."""
    said = ["Ranks of one machine were killed: a lost node, a lost disk and a broken network are not measured here."]
    said += [f"Condition {item.name} does not hold: {item.detail}." for item in records.conditions if not item.held]
    if records.brought:
        said.append(f"The recipe brings its own {', '.join(records.brought)}.")
    if not all(run.same_bits for run in records.killed):
        said.append(OTHER_RANKS)
    for number, run in enumerate(records.killed):
        if run.record.unsaved:
            count, first = len(run.record.unsaved), listed(run.record.unsaved)
            said.append(f"Run {number} could not write {count} checkpoints and went on without them: {first}.")
    usable = [recovery for run in records.killed for recovery in run.record.recoveries if not math.isnan(measured_s(recovery))]
    if not usable or not (math.isfinite(records.state_mib) and records.state_mib >= 0):
        return said
    worst = max(usable, key=lambda recovery: recovery.total_s)
    return [*said, *projection_lines(worst, records.state_mib, policy.budget_s.value)]
