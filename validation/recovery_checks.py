"""What kill_and_resume demands of a killed run: each function gives the checks of one run, in the order in which a person asks."""

from collections.abc import Iterator

from validation.completeness import listed
from validation.diagnosis_kinds import KINDS, Diagnosis
from validation.diagnosis_state import diagnose_state
from validation.errors import EvidenceError
from validation.ledger import compare_ledgers
from validation.policy import RecoveryPolicy
from validation.records import RecoveryRun
from validation.recovery_projection import SEGMENTS, measured_s
from validation.recovery_samples import ConsumedDifference, compare_consumed
from validation.recovery_states import RATE, SAVED, StateDifference, load_differences, shared_streams, twin_differences
from validation.verdict import Check, check

TWIN = "a resumed run has to be the uninterrupted twin, bit for bit (docs/gates/kill_and_resume.md)"
KEPT = "a load brings back what was saved, whatever the number of ranks"
LOST, SAMPLES = "state lost at a load", "difference from the twin: samples"  # names of the checks that the two controls have to fail
DEATHS = ("kill", "stop", "launcher")  # kinds of planned faults that end an attempt, each to be recovered from
SAVE_PHASES = ("staging", "write", "seal")  # of a planned fault: inside a save


def fault_parts(fault: str) -> dict[str, str]:
    """A fault's text as values: "kill:rank=1,step=7,phase=backward" -> {"kind": "kill", "rank": "1", ...}."""
    kind, _, rest = fault.partition(":")
    return {"kind": kind, **dict(part.split("=", 1) for part in rest.split(",") if "=" in part)}


def resume_checks(number: int, run: RecoveryRun) -> Iterator[Check]:
    """The way back starts at the newest checkpoint that the plan leaves, so that no more is made again than has to be."""
    refused = {text.partition(":")[0] for text in run.record.unsaved}  # by a full disk: a note, since training goes on without them
    saved = sorted({int(step) for step in run.states.loc[run.states["moment"] == SAVED, "step"] if f"step {step}" not in refused})
    newest = 0
    for recovery in run.record.recoveries:
        given = fault_parts(recovery.fault)
        if given["kind"] not in DEATHS or "step" not in given:
            continue  # an unplanned death left what it left
        newest = max(newest if given["phase"] == "load" else 0, _left_by(given, saved, newest))
        why = f"; refused: {run.record.refused[0]}" if run.record.refused else ""
        yield check(
            "checkpoint resumed from", float(recovery.resumed_from_step), ">=", newest, unit="updates", source="the kill plan",
            where=f"run {number}, {recovery.fault}{why}",
            action="look at what was there when the attempt began: a checkpoint that was not sealed, was removed or did not verify",
        )  # fmt: skip


def _left_by(given: dict[str, str], saved: list[int], newest: int) -> int:
    """The newest checkpoint that a planned death leaves for certain."""
    step = int(given["step"])
    if given["phase"] == "load":
        return newest
    if given["phase"] in SAVE_PHASES:
        struck = min((one for one in saved if one > step), default=step)
        return max((one for one in saved if one < struck), default=0)
    return max((one for one in saved if one <= step), default=0)


def state_checks(number: int, run: RecoveryRun, twin: RecoveryRun) -> Iterator[Check]:
    """Nothing is lost at a load; no state on the way, nor the last, differs from the twin's."""
    found = load_differences(run.states, same_ranks=run.same_bits)
    lost = [difference for difference in found if difference.lost]
    names = {name for difference in lost for name in difference.lost}
    said, action = _lost(lost[0]) if lost else ("", "")
    yield check(LOST, float(len(names)), "==", 0, unit="parts", source=KEPT, where=f"run {number}{said}", action=action)
    yield from _drift(number, run, twin, found, bool(lost))
    if run.same_bits:
        yield from _final(number, run, twin)


def _lost(difference: StateDifference) -> tuple[str, str]:
    """Where and what a load lost, and what to do."""
    keep = set(difference.lost)
    expected, got = ({name: sha for name, sha in side.items() if name in keep or name not in difference.names}
                     for side in (difference.expected, difference.found))  # fmt: skip
    named = diagnose_state(expected, got, when="loaded")
    return f", {difference.words} differ from what was saved" + (
        f": {named.words}" if named else ""
    ), named.next_step if named else "compare the checkpoint with the state it was taken from"


def _drift(number: int, run: RecoveryRun, twin: RecoveryRun, at_loads: list[StateDifference], is_lost: bool) -> Iterator[Check]:
    """Where a run first parts from its twin, for reasons that are no loss at a load."""
    found = twin_differences(run.states, twin.states, only="" if run.same_bits else RATE)
    apart = [difference for difference in found if difference.lost]
    where, action = f"run {number}", ""
    if apart:
        first = apart[0]
        since, named = _since(first, [load for load in at_loads if load.attempt <= first.attempt], is_lost=is_lost)
        where += f", {first.words} differ from the twin's; {since}"
        action = named.next_step if named else ""
    what = "states" if run.same_bits else "learning rates"
    yield check(
        f"difference from the twin: {what}", float(len(apart)), "==", 0, unit="saved states", source=TWIN, where=where, action=action
    )  # fmt: skip


def _since(first: StateDifference, before: list[StateDifference], *, is_lost: bool) -> tuple[str, Diagnosis | None]:
    """What a first difference from the twin comes after, and what it most likely is. Args: before, the loads before it."""
    told = next((load for load in before if load.names and not load.lost), None)
    later = diagnose_state(first.expected, first.found, when="later")
    if not before:
        return "nobody had been killed: the run is not the same twice", later
    if is_lost:
        return "it follows from the loss", later
    if told is None:
        return f"what was loaded at step {before[-1].step} was what was saved", later
    words = f"of what was loaded at step {told.step} only {told.names[0]} differed from what was saved, on rank {told.ranks[0]}"
    return words, diagnose_state(told.expected, told.found, when="loaded")


def _final(number: int, run: RecoveryRun, twin: RecoveryRun) -> Iterator[Check]:
    record = run.record
    expected = dict(enumerate(twin.record.state_sha256_by_rank))
    is_alike = len(set(expected.values())) == 1
    differ = [
        rank for rank, sha in enumerate(record.state_sha256_by_rank) if sha != expected.get(0 if is_alike else rank, "")
    ]  # fmt: skip
    if record.state_sha256_by_rank and twin.record.state_sha256:
        yield check(
            "difference from the twin: final states", float(len(differ)), "==", 0, unit="ranks", source=TWIN,
            where=f"run {number}" + (f", first at rank {differ[0]}" if differ else ""),
            action="compare the checkpoint with the state it was taken from: moments, schedule, buffers, random streams",
        )  # fmt: skip


def sample_checks(number: int, run: RecoveryRun, twin: RecoveryRun) -> Iterator[Check]:
    """Every step of the surviving lineage consumes the twin's samples with the twin's contents, whichever rank takes them."""
    found = compare_consumed(run.consumed, twin.consumed, same_bits=run.same_bits)
    yield check(
        SAMPLES, float(len(found.steps)), "==", 0, unit="steps", source=TWIN,
        where=f"run {number}" + (f", {found.words}" if found.words else ""), action=_sample_action(found),
    )  # fmt: skip


def stream_checks(number: int, run: RecoveryRun, twin: RecoveryRun) -> Iterator[Check]:
    """On other ranks no two draw the same numbers, where the twin's never do: a rank that is new may have got another's stream.

    Not asked of a run that has to have the twin's bits, which say more; nor where streams stand still, since nobody draws from them.
    """
    streams = twin.states[twin.states["name"].str.startswith("stream/")]
    if run.same_bits or shared_streams(twin.states) or streams.groupby(["rank", "name"])["sha256"].nunique().le(1).all():
        return
    shared = shared_streams(run.states)
    where = f"run {number}"
    if shared:
        attempt, step, ranks = shared[0]
        where += f", attempt {attempt}, after step {step}: ranks {listed(ranks)} have one generator in one state and draw the same numbers"
    action = "start a stream of its own on every rank that was not there when the state was saved" if shared else ""
    yield check(
        "random streams that ranks share", float(len(shared)), "==", 0, unit="states", source="ranks draw independently", where=where,
        action=action,
    )  # fmt: skip


def _sample_action(found: ConsumedDifference) -> str:
    return KINDS["random_streams" if found.same_ids else "position"].next_step


def ledger_checks(number: int, run: RecoveryRun, twin: RecoveryRun) -> Iterator[Check]:
    """The ledger is the twin's, row by row; not asked of an own trainer on other ranks, whose lanes are its ranks."""
    if not run.same_bits:
        return
    try:
        found = compare_ledgers(run.ledger, twin.ledger)
    except EvidenceError:
        return  # told as missing
    if run.ledger.empty or twin.ledger.empty:
        return
    yield check(
        "difference from the twin: ledger", float(found.wrong), "==", 0, unit="positions", source=TWIN,
        where=f"run {number}" + (f", {found}" if found.wrong else ""),
        action="compare the position a resume starts from with the step of the checkpoint it loaded",
    )  # fmt: skip
    if not found.wrong and run.record.ledger_sha256 != twin.record.ledger_sha256:
        yield Check(
            name="difference from the twin: ledger digest", observed=run.record.ledger_sha256, threshold=twin.record.ledger_sha256, unit="",
            passed=False, source=TWIN, where=f"run {number}",
            action="the ledger file is not the one the run digested: look for a late writer",
        )  # fmt: skip


def budget_checks(number: int, run: RecoveryRun, policy: RecoveryPolicy) -> Iterator[Check]:
    """Every way back takes no longer than the budget; a time that is none fails."""
    for recovery in run.record.recoveries:
        longest = max(SEGMENTS, key=lambda segment: float(getattr(recovery, segment)))
        yield check(
            "recovery time", measured_s(recovery), "<=", policy.budget_s.value, unit="s", source=policy.budget_s.source,
            where=f"run {number}, {recovery.fault}", action=f"its longest segment is {longest.removesuffix('_s')}: shorten that first",
        )  # fmt: skip
