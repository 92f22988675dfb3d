"""Gate kill_and_resume: is anything lost when a worker dies, and is the job back in time?"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from validation.completeness import absent_columns, complete
from validation.errors import EvidenceError
from validation.ledger import compare_ledgers
from validation.policy import RecoveryPolicy
from validation.records import CONSUMED_COLUMNS, STATE_COLUMNS, Frame, RecoveryRecords, RecoveryRun, RunRecord
from validation.recovery_checks import (
    DEATHS,
    LOST,
    SAMPLES,
    budget_checks,
    fault_parts,
    ledger_checks,
    resume_checks,
    sample_checks,
    state_checks,
    stream_checks,
)
from validation.recovery_projection import SEGMENTS
from validation.recovery_states import END, loads, unsaved_loads
from validation.recovery_view import notes, plots, tables
from validation.verdict import Check, Control, GateVerdict, Outcome, conclude, controlled

GATE = "kill_and_resume"
HIDDEN = "A planted defect did not show in this run. The failure was measured without it."
NO_MOMENTS = (
    "The optimizer holds no moments: a resume that loses them was not planted. What is kept elsewhere is seen by what follows from it."
)
RERUN = "run the gate again: `seatrial gate kill_and_resume --release ID`, or `seatrial check RECIPE` outside a release"
ROUNDING_S = 0.01  # the segments of a recovery add up to its total within this and one percent


def judge_recovery(records: RecoveryRecords, policy: RecoveryPolicy) -> GateVerdict:
    """Judge that killed runs end as their uninterrupted twin, with nothing lost at any load, the same samples, and within the budget.

    Two controls are judged as killed runs by the same function: repeated data has to be seen in the samples, lost moments at the load. A
    failure stands: what is wrong with the run may hide what was planted in it. An optimizer without moments (plain SGD) cannot lose any.
    """
    verdict = _judge(records, policy)
    if verdict.outcome is Outcome.INCONCLUSIVE:
        return verdict  # what is missing is the reason; a control could not be judged either
    controls: list[Control] = []
    has_moments = bool(records.twin.states["name"].str.startswith("optimizer/").any())
    if not has_moments:
        verdict = replace(verdict, notes=(*verdict.notes, NO_MOMENTS))
    for planted, name in ((records.repeated, SAMPLES), *[(records.stale, LOST)] * has_moments):
        judged = controlled(verdict, planted.defect, name, _judge(replace(records, killed=(planted,)), policy))
        if verdict.outcome is Outcome.FAIL and judged.outcome is not Outcome.FAIL:
            return replace(verdict, notes=(*verdict.notes, HIDDEN))
        verdict = judged
        assert verdict.control is not None  # just attached
        controls.append(verdict.control)
        if not verdict.control.caught:
            return verdict
    return replace(verdict, control=_together(controls))


def _together(controls: Sequence[Control]) -> Control:
    """Several controls that were all caught, as one."""
    return Control(
        planted="; ".join(control.planted for control in controls), expected="; ".join(control.expected for control in controls),
        caught=all(control.caught for control in controls), detail="; ".join(control.detail for control in controls),
    )  # fmt: skip


def _judge(records: RecoveryRecords, policy: RecoveryPolicy) -> GateVerdict:
    missing = _missing(records, policy)
    checks = [complete(missing, source="every planned fault has to fire, and be recovered from, in a run that is compared", action=RERUN)]
    for number, run in enumerate(records.killed):
        checks += _checks(number, run, records.twin, policy)
    recoveries = [recovery for run in records.killed for recovery in run.record.recoveries]
    slowest = max((recovery.total_s for recovery in recoveries), default=math.nan)
    return conclude(
        GATE, checks, tables=tables(records), plots=plots(records, policy), notes=notes(records, policy),
        passed_reason=f"after {len(recoveries)} deaths nothing was lost at a load, and states, samples and ledger equal the twin's; "
        f"the slowest recovery took {slowest:.2f} s of {policy.budget_s.value:g} s",
    )  # fmt: skip


def _checks(number: int, run: RecoveryRun, twin: RecoveryRun, policy: RecoveryPolicy) -> Iterator[Check]:
    """What can be compared, in the order in which a loss shows."""
    if not any(_frame_problems(run)) and not any(_frame_problems(twin)):
        yield from resume_checks(number, run)
        yield from sample_checks(number, run, twin)
        yield from state_checks(number, run, twin)
        yield from stream_checks(number, run, twin)
    yield from ledger_checks(number, run, twin)
    yield from budget_checks(number, run, policy)


# What is missing


def _missing(records: RecoveryRecords, policy: RecoveryPolicy) -> list[str]:
    if not records.killed:
        return ["a killed run"]
    missing = [f"the twin: {text}" for text in _frame_problems(records.twin)]
    for number, run in enumerate(records.killed):
        missing += [f"run {number}: {text}" for text in _missing_of(run, records.twin)]
    kills = max(len(_kill_phases(run.record)) for run in records.killed)
    if kills < policy.kills.value:
        missing.append(f"{policy.kills.value} kills in one run, each in another phase ({kills} fired)")
    twin = records.twin.record
    if twin.attempts != 1 or (not records.brought and len(set(twin.state_sha256_by_rank)) != 1):
        missing.append("a twin that ran once and whose ranks agree")
    return missing


def _missing_of(run: RecoveryRun, twin: RecoveryRun) -> Iterator[str]:
    yield from _frame_problems(run)
    yield from _record_problems(run, twin.record)
    problem = _ledger_problem(run.ledger, twin.ledger) if run.same_bits else ""
    if problem:
        yield problem


def _record_problems(run: RecoveryRun, twin: RunRecord) -> Iterator[str]:
    record = run.record
    unfired = [planned.fault for planned in run.planned if planned.fault not in record.faults_fired]
    deaths = [fault for fault in record.faults_fired if fault_parts(fault)["kind"] in DEATHS]
    last_size = record.recoveries[-1].resumed_world_size if record.recoveries else record.world_size
    if unfired or not run.planned:
        yield f"the fault {unfired[0]} did not fire" if unfired else "a planned fault"
    if len(record.recoveries) < len(deaths):
        yield f"a recovery for each of {len(deaths)} kills ({len(record.recoveries)} recorded)"
    if len(record.state_sha256_by_rank) != last_size or not all(record.state_sha256_by_rank):
        yield f"final states of all {last_size} ranks"
    if (record.recipe, record.seed, record.steps, record.precision) != (twin.recipe, twin.seed, twin.steps, twin.precision):
        yield "the twin's recipe, seed, number of steps and precision"
    for number, recovery in enumerate(record.recoveries):
        total = sum(float(getattr(recovery, segment)) for segment in SEGMENTS)
        if abs(total - recovery.total_s) > ROUNDING_S + 0.01 * abs(recovery.total_s):
            yield f"segments of recovery {number} that add up to its total ({total:.3f} s of {recovery.total_s:.3f} s)"


def _frame_problems(run: RecoveryRun) -> list[str]:
    """What is lacking of the tables that an audited run leaves."""
    wanted = (("states", run.states, STATE_COLUMNS), ("consumed samples", run.consumed, CONSUMED_COLUMNS))
    broken = [f"its {name}" for name, frame, columns in wanted if frame.empty or absent_columns(frame, columns)]
    if broken:
        return broken
    ends = run.states[run.states["moment"] == END]["rank"].nunique()
    if ends != len(run.record.state_sha256_by_rank):
        broken.append(f"the last state of every rank by name ({ends} of {len(run.record.state_sha256_by_rank)})")
    broken += [f"what was saved at step {step}, which attempt {attempt} loaded" for attempt, step in unsaved_loads(run.states)]
    steps = {step for _, step in loads(run.states)}
    for recovery in run.record.recoveries:
        if recovery.resumed_from_step and recovery.resumed_from_step not in steps:
            broken.append(f"the state that was loaded at step {recovery.resumed_from_step} after {recovery.fault}")
    return broken


def _kill_phases(record: RunRecord) -> set[str]:
    """Phases in which a planned SIGKILL fired."""
    kills = (fault_parts(fault) for fault in record.faults_fired)
    return {given.get("phase", "") for given in kills if given["kind"] == "kill"}


def _ledger_problem(ledger: Frame, twin: Frame) -> str:
    """Why a killed run's ledger and its twin's cannot be compared; "" when they can."""
    if ledger.empty or twin.empty:
        return "the ledger or its twin's is empty"
    try:
        compare_ledgers(ledger, twin)
    except EvidenceError as error:
        return str(error)
    return ""
