"""Gate kill_and_resume: is anything lost when a worker dies, and is the job back in time?"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from validation.completeness import complete, listed
from validation.errors import EvidenceError
from validation.ledger import LedgerDifference, compare_ledgers
from validation.policy import RecoveryPolicy
from validation.records import Frame, Recovery, RecoveryRecords, RunRecord
from validation.verdict import Check, GateVerdict, Plot, Series, Table, check, conclude, controlled

GATE = "kill_and_resume"
RERUN = "run the gate again: `seatrial gate kill_and_resume --release ID`"
SEGMENTS = ("detect_s", "teardown_s", "import_s", "rendezvous_s", "load_s", "first_step_s")
TWIN = "a resumed run has to be the uninterrupted twin, bit for bit (docs/gates/kill_and_resume.md)"
ROUNDING_S = 0.01  # the segments of a recovery add up to its total within this and one percent
PROJECTED_GPUS = 8  # the service objective names eight
DEATHS = ("kill", "stop", "launcher")  # kinds of planned faults that end an attempt, each to be recovered from


@dataclass(frozen=True, slots=True, kw_only=True)
class Projection:
    """A measured recovery carried over to more ranks; what it assumes stands in `project_recovery`."""

    ranks: int
    total_s: float  # death -> next optimizer update
    headroom_s: float  # left of the budget for what was not measured: a new node, CUDA and NCCL start-up
    load_mib_s: float  # checkpoint bytes / 2**20 loaded a second, every rank at once
    state_mib_in_budget: float  # largest checkpoint that could be loaded in time at that rate


def judge_recovery(records: RecoveryRecords, policy: RecoveryPolicy) -> GateVerdict:
    """Judge that killed runs end as their uninterrupted twin, with the same samples in the same order, within the recovery budget.

    The control judges the run with the planted resume defect as a killed run: its state or its ledger must differ from the twin's.
    """
    verdict = _judge(records, policy)
    planted = replace(
        records, killed=(records.planted,), killed_ledgers=(records.planted_ledger,), planned=(records.planted.faults_fired,)
    )  # fmt: skip
    return controlled(verdict, records.planted_defect, "difference from the twin", _judge(planted, policy))


def _judge(records: RecoveryRecords, policy: RecoveryPolicy) -> GateVerdict:
    ledgers = [_against_twin(ledger, records.twin_ledger) for ledger in records.killed_ledgers]
    missing = [*_missing(records, policy), *(f"run {run}: {found}" for run, found in enumerate(ledgers) if isinstance(found, str))]
    checks = [complete(missing, source="every planned fault has to fire, and be recovered from, in a run that is compared", action=RERUN)]
    for run, (record, found) in enumerate(zip(records.killed, ledgers, strict=False)):
        checks += [*_twin_checks(run, record, records.twin, found), *_budget_checks(run, record, policy)]
    recoveries = [recovery for record in records.killed for recovery in record.recoveries]
    slowest = max((recovery.total_s for recovery in recoveries), default=math.nan)
    return conclude(
        GATE, checks, tables=_tables(records), plots=_plots(records, policy), notes=_notes(records, policy),
        passed_reason=f"after {len(recoveries)} kills state and ledger equal the twin's; the slowest recovery took {slowest:.2f} s "
        f"of {policy.budget_s.value:g} s",
    )  # fmt: skip


# What is missing


def _missing(records: RecoveryRecords, policy: RecoveryPolicy) -> list[str]:
    if not records.killed or not len(records.killed) == len(records.killed_ledgers) == len(records.planned):
        return [f"killed runs with a ledger and a plan each ({len(records.killed)} runs, {len(records.killed_ledgers)} ledgers)"]
    missing = [text for run in range(len(records.killed)) for text in _missing_of(records, run)]
    kills = max(len(_kill_phases(record)) for record in records.killed)
    if kills < policy.kills.value:
        missing.append(f"{policy.kills.value} kills in one run, each in another phase ({kills} fired)")
    if records.twin.attempts != 1 or len(set(records.twin.state_sha256_by_rank)) != 1:
        missing.append("a twin that ran once and whose ranks agree")
    return missing


def _missing_of(records: RecoveryRecords, run: int) -> Iterator[str]:
    record, twin = records.killed[run], records.twin
    unfired = [fault for fault in records.planned[run] if fault not in record.faults_fired]
    deaths = [fault for fault in record.faults_fired if fault.partition(":")[0] in DEATHS]
    last_size = record.recoveries[-1].resumed_world_size if record.recoveries else record.world_size
    if unfired or not records.planned[run]:
        yield f"run {run}: the fault {unfired[0]} did not fire" if unfired else f"run {run}: a planned fault"
    if len(record.recoveries) < len(deaths):
        yield f"run {run}: a recovery for each of {len(deaths)} kills ({len(record.recoveries)} recorded)"
    if len(record.state_sha256_by_rank) != last_size or not all(record.state_sha256_by_rank):
        yield f"run {run}: final states of all {last_size} ranks"
    if (record.recipe, record.seed, record.steps, record.precision) != (twin.recipe, twin.seed, twin.steps, twin.precision):
        yield f"run {run}: the twin's recipe, seed, number of steps and precision"
    for number, recovery in enumerate(record.recoveries):
        total = sum(float(getattr(recovery, segment)) for segment in SEGMENTS)
        if abs(total - recovery.total_s) > ROUNDING_S + 0.01 * abs(recovery.total_s):
            yield f"run {run}: segments of recovery {number} that add up to its total ({total:.3f} s of {recovery.total_s:.3f} s)"


def _kill_phases(record: RunRecord) -> set[str]:
    """Phases in which a planned SIGKILL fired, from fault texts such as "kill:rank=1,step=7,phase=backward,attempt=0"."""
    kills = (fault for fault in record.faults_fired if fault.startswith("kill:"))
    return {part.removeprefix("phase=") for fault in kills for part in fault.split(",") if part.startswith("phase=")}


def _against_twin(ledger: Frame, twin: Frame) -> LedgerDifference | str:
    """The killed run's ledger against the twin's, or why they cannot be compared."""
    try:
        return "the ledger or its twin's is empty" if ledger.empty or twin.empty else compare_ledgers(ledger, twin)
    except EvidenceError as error:
        return str(error)


# What is judged


def _twin_checks(run: int, record: RunRecord, twin: RunRecord, found: LedgerDifference | str) -> Iterator[Check]:
    differ = [rank for rank, sha in enumerate(record.state_sha256_by_rank) if sha != twin.state_sha256]
    if record.state_sha256_by_rank and twin.state_sha256:
        yield check(
            "difference from the twin: final states", float(len(differ)), "==", 0, unit="ranks", source=TWIN,
            where=f"run {run}" + (f", first at rank {differ[0]}" if differ else ""),
            action="compare the checkpoint with the state it was taken from: moments, schedule, buffers, random streams",
        )  # fmt: skip
    if isinstance(found, str):
        return
    yield check(
        "difference from the twin: ledger", float(found.wrong), "==", 0, unit="positions", source=TWIN,
        where=f"run {run}" + (f", {found}" if found.wrong else ""),
        action="compare the position a resume starts from with the step of the checkpoint it loaded",
    )  # fmt: skip
    if not found.wrong and record.ledger_sha256 != twin.ledger_sha256:
        yield Check(
            name="difference from the twin: ledger digest", observed=record.ledger_sha256, threshold=twin.ledger_sha256, unit="",
            passed=False, source=TWIN, where=f"run {run}", action="the ledger file is not the one the run digested: look for a late writer",
        )  # fmt: skip


def _budget_checks(run: int, record: RunRecord, policy: RecoveryPolicy) -> Iterator[Check]:
    for recovery in record.recoveries:
        longest = max(SEGMENTS, key=lambda segment: float(getattr(recovery, segment)))
        yield check(
            "recovery time", _measured_s(recovery), "<=", policy.budget_s.value, unit="s", source=policy.budget_s.source,
            where=f"run {run}, {recovery.fault}", action=f"its longest segment is {longest.removesuffix('_s')}: shorten that first",
        )  # fmt: skip


def _measured_s(recovery: Recovery) -> float:
    """Total seconds, or NaN when any segment is not a finite time: a broken clock may not pass."""
    times = [float(getattr(recovery, segment)) for segment in (*SEGMENTS, "total_s")]
    return recovery.total_s if all(math.isfinite(value) and value >= 0 for value in times) else math.nan


# For the reader


def _each(records: RecoveryRecords) -> Iterator[tuple[str, Recovery]]:
    """Recoveries with a label that is unique in the gate: which death it was, and the fault's rank, step and phase."""
    for run, record in enumerate(records.killed):
        for number, recovery in enumerate(record.recoveries):
            given = dict(part.split("=", 1) for part in recovery.fault.partition(":")[2].split(",") if "=" in part)
            words = ", ".join(f"{key} {given[key]}" for key in ("rank", "step", "phase") if key in given)
            which = f"death {number + 1}" if len(records.killed) == 1 else f"run {run + 1} death {number + 1}"
            yield f"{which}: {words or recovery.fault}", recovery


def _tables(records: RecoveryRecords) -> list[Table]:
    rows: list[tuple[str | float | int | None, ...]] = []
    for label, recovery in _each(records):
        seconds = [round(float(getattr(recovery, segment)), 4) for segment in (*SEGMENTS, "total_s")]
        rows.append((label, recovery.world_size, recovery.resumed_world_size, recovery.resumed_from_step, *seconds))
    names = tuple(f"{segment.removesuffix('_s').replace('_', ' ')} (s)" for segment in (*SEGMENTS, "total_s"))
    columns = ("recovery", "ranks before", "ranks after", "from step", *names)
    return [Table(title="Recovery by segment", columns=columns, rows=tuple(rows))] if rows else []


def _plots(records: RecoveryRecords, policy: RecoveryPolicy) -> list[Plot]:
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


def project_recovery(recovery: Recovery, *, state_mib: float, budget_s: float, ranks: int = PROJECTED_GPUS) -> Projection:
    """Carry a measured recovery over to `ranks` ranks of one warm node.

    Assumes that teardown, import and rendezvous grow in proportion to ranks and never shrink, that detection and the first step stay as
    measured, and that every rank loads the whole checkpoint at the measured rate. Raises EvidenceError for times or sizes that are not
    finite, negative, or for no ranks.
    """
    if (
        math.isnan(_measured_s(recovery))
        or not (math.isfinite(state_mib) and state_mib >= 0)
        or min(ranks, recovery.resumed_world_size) < 1
    ):
        raise EvidenceError(f"{recovery} with a state of {state_mib} MiB cannot be projected. Run the kill again on a sound clock.")
    growth = max(1.0, ranks / recovery.resumed_world_size)
    others_s = recovery.detect_s + growth * (recovery.teardown_s + recovery.import_s + recovery.rendezvous_s) + recovery.first_step_s
    total_s = others_s + recovery.load_s
    rate = state_mib / recovery.load_s if recovery.load_s else math.inf
    within = max(0.0, budget_s - others_s) * rate if math.isfinite(rate) else math.inf
    return Projection(
        ranks=ranks, total_s=total_s, headroom_s=budget_s - total_s, load_mib_s=rate, state_mib_in_budget=within
    )  # fmt: skip


def projection_lines(recovery: Recovery, state_mib: float, budget_s: float) -> list[str]:
    """The projection to PROJECTED_GPUS in words, with every assumption it rests on, one a line.

    Args: state_mib, one checkpoint in 2**20 bytes. Raises: EvidenceError as `project_recovery`.
    """
    seen = project_recovery(recovery, state_mib=state_mib, budget_s=budget_s)
    size = f"{seen.state_mib_in_budget / 1024:,.0f} GiB" if math.isfinite(seen.state_mib_in_budget) else "any size"
    growth = max(1.0, seen.ranks / recovery.resumed_world_size)
    grown = f"{recovery.teardown_s:.2f}, {recovery.import_s:.2f} and {recovery.rendezvous_s:.2f} s, times {growth:g}"
    rate = f"{seen.load_mib_s:,.0f} MiB/s ({state_mib:.1f} MiB in {recovery.load_s:.2f} s)"
    return [
        f"Projected to {seen.ranks} GPUs of one warm node: {seen.total_s:.2f} s of {budget_s:g} s, from a recovery of "
        f"{recovery.total_s:.2f} s on {recovery.resumed_world_size} ranks; {seen.headroom_s:.0f} s are left.",
        f"Assumed: tear down, import and rendezvous take time in proportion to ranks and never less than measured ({grown}).",
        f"Assumed: detection ({recovery.detect_s:.2f} s) and the first step ({recovery.first_step_s:.2f} s) stay as measured.",
        f"Assumed: every rank loads and verifies the whole checkpoint at the measured {rate}; at that rate the budget holds {size}. "
        "A small state overstates fixed costs and may sit in the page cache: the rate may be wrong in both directions.",
        "Assumed: the node and its warm server are there. Not measured, and to be paid from what is left: a replacement node, CUDA and "
        "NCCL start-up, state read from remote storage.",
    ]


def _notes(records: RecoveryRecords, policy: RecoveryPolicy) -> list[str]:
    notes = ["Ranks of one machine were killed: a lost node, a lost disk and a broken network are not measured here."]
    for run, record in enumerate(records.killed):
        if record.unsaved:
            notes.append(f"Run {run} could not write {len(record.unsaved)} checkpoints and went on without them: {listed(record.unsaved)}.")
    usable = [recovery for record in records.killed for recovery in record.recoveries if not math.isnan(_measured_s(recovery))]
    if not usable or not (math.isfinite(records.state_mib) and records.state_mib >= 0):
        return notes
    worst = max(usable, key=lambda recovery: recovery.total_s)
    return [*notes, *projection_lines(worst, records.state_mib, policy.budget_s.value)]
