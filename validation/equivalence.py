"""Gate gradient_equivalence: do W ranks compute what one computes, from the same samples, whoever wrote the trainer?

Short runs ("legs", equivalence_legs.py) under hard conditions are judged from the cause to its effects: samples, random streams and rates;
bits that have to be equal on ranks and world sizes; weights that do not move; every tensor against an independent float64 reference; the
norm after clipping; answers to a bad micro-batch; repeats of one gradient. The first check that fails is the first divergence.
"""

from dataclasses import replace

from validation.completeness import complete, listed
from validation.diagnosis_kinds import is_said
from validation.equivalence_conditions import clip_checks, condition_checks, condition_notes, condition_tables
from validation.equivalence_data import compared, data_checks, unknown_notes
from validation.equivalence_errors import error_checks, error_plots, error_tables, is_wrong_alone, moved_checks, slope_checks
from validation.equivalence_evaluations import evaluation_checks, evaluation_tables
from validation.equivalence_evidence import missing_evidence
from validation.equivalence_exact import bit_checks, soak_checks, soak_notes, state_notes
from validation.equivalence_legs import LEGS, is_own
from validation.equivalence_poison import poison_checks, poison_notes, poison_tables
from validation.equivalence_streams import rate_checks, stream_checks, wrong_rates
from validation.policy import EquivalencePolicy
from validation.records import EquivalenceRecords
from validation.verdict import GateVerdict, Outcome, Table, conclude, controlled

GATE = "gradient_equivalence"
STOPPED_CHARS = 600  # of what stopped a leg: rank, error and the log's name
CANCELLED = "The planted defect did not show: what is wrong with the run cancels it. The failure was measured without it."
UNTRIED = "The positive control was not tried: its run left nothing to compare."
RERUN = "run the gate again: `seatrial gate gradient_equivalence --release ID`, or `seatrial check RECIPE` outside a release"
STOPPED = f"mend what stopped the run (the table Legs says more, and names its log), then {RERUN}"


def judge_equivalence(records: EquivalenceRecords, policy: EquivalencePolicy) -> GateVerdict:
    """Judge that every world size computes the same gradients and updates from the same samples, and the right ones.

    The control judges the planted errors with the same checks: its leg "training" must fail, or a pass is inconclusive. A failure stands:
    what is wrong with the run may cancel what was planted in it (a gradient W times too large, divided by W).
    """
    verdict = _judge(records, policy)
    errors = error_checks(replace(records, errors=records.planted_errors), policy, rates_differ=False)
    planted = conclude(GATE, errors, passed_reason="every tensor of the planted run is within its float noise")
    if records.planted_errors.empty and verdict.outcome is not Outcome.PASS:
        return replace(verdict, notes=(*verdict.notes, UNTRIED))
    judged = controlled(verdict, records.planted_defect, "training leg", planted)
    if verdict.outcome is Outcome.FAIL and judged.outcome is not Outcome.FAIL:
        return replace(verdict, notes=(*verdict.notes, CANCELLED))
    return judged


def _judge(records: EquivalenceRecords, policy: EquivalencePolicy) -> GateVerdict:
    missing = [*missing_evidence(records, policy), *unreadable(records)]
    rates, bits, soak = list(wrong_rates(records)), bit_checks(records), soak_checks(records)
    late = [item for item in bits if is_said(item.action, "buffers")]  # buffers move after the update
    # what comes and goes explains all that follows, unless one rank alone, which has no peers, is wrong too
    unsteady = [item for item in soak if is_said(item.action, "intermittent") and not is_wrong_alone(records, policy)]
    checks = (
        complete(missing, source="every leg, world size, rank, step and tensor that the trainer's kind asks for", action=_again(records)),
        *data_checks(records),
        *stream_checks(records),
        *rate_checks(records, rates),
        *unsteady,
        *(item for item in bits if item not in late),
        *condition_checks(records),
        *error_checks(records, policy, rates_differ=bool(rates)),
        *late,
        *moved_checks(records, policy),
        *slope_checks(records, policy),
        *clip_checks(records, policy),
        *poison_checks(records),
        *(item for item in soak if item not in unsteady),
        *evaluation_checks(records, policy),
    )
    tables = (
        *error_tables(records, policy), _leg_table(records), *poison_tables(records), *evaluation_tables(records),
        *condition_tables(records),
    )  # fmt: skip
    return conclude(
        GATE, checks, passed_reason=_passed(records), tables=tables, plots=error_plots(records, policy), notes=_notes(records)
    )  # fmt: skip


def _again(records: EquivalenceRecords) -> str:
    return STOPPED if any(leg.stopped and leg.name != "overflow" for leg in records.legs) else RERUN


def _passed(records: EquivalenceRecords) -> str:
    sizes = listed(sorted(records.world_sizes), limit=8)
    kept = "ranks hold one model" if is_own(records.brought) else "ranks end in the same bits"
    return f"at world sizes {sizes} {kept}, consume the samples of one process, and every tensor stays within its own float noise"


def unreadable(records: EquivalenceRecords) -> list[str]:
    """Ledgers of the exact leg that cannot be compared with the order."""
    return [f"the ledger of the exact leg at W={size} ({found})" for size, found in compared(records).items() if isinstance(found, str)]


def _leg_table(records: EquivalenceRecords) -> Table:
    rows = []
    known = [leg for leg in records.legs if leg.name in LEGS]
    for leg in sorted(known, key=lambda leg: (list(LEGS).index(leg.name), leg.world_size)):
        states = listed((sha[:12] for sha in dict.fromkeys(leg.states)), limit=2) if any(leg.states) else ""
        ended = f"stopped: {leg.stopped[:STOPPED_CHARS]}" if leg.stopped else "complete"
        rows.append((leg.name, leg.world_size, leg.reduction, leg.precision, LEGS[leg.name].shows, ended, states))
    columns = ("leg", "world size", "reduction", "precision", "shows", "ended", "final state sha256")
    return Table(title="Legs", columns=columns, rows=tuple(rows))


def _notes(records: EquivalenceRecords) -> list[str]:
    plain = f"; one plain run of {records.steps} steps, which all this judges, took {records.plain_seconds:.1f} s"
    times = f": {records.worker_seconds / records.plain_seconds:.0f} times that" if records.plain_seconds > 0 else ""
    return [
        f"Cost: {records.worker_seconds:.0f} worker-seconds{plain}{times}.",
        *([f"Brought by the recipe and judged here: {listed(records.brought, limit=12)}."] if records.brought else []),
        *([f"No finite differences: {records.slopes_excluded}. A wrong gradient formula would be shared by the reference."]
          if records.slopes_excluded else []),
        *condition_notes(records), *poison_notes(records), *soak_notes(records), *state_notes(records), *unknown_notes(records),
        "Legs that are compared with the reference run without dropout; random streams are judged by their states in the other legs.",
        "A fault in the recipe's own model or loss that autograd and finite differences agree on cannot be seen here.",
    ]  # fmt: skip
