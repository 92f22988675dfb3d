"""Evidence of gradient_equivalence that has to be there: every leg, rank, step and tensor; what is absent is named, and nothing passes."""

from collections.abc import Iterator, Sequence

from validation.completeness import absent_columns, listed
from validation.equivalence_errors import ERROR_STAGES
from validation.equivalence_exact import COMPARED, digests_of, repeats
from validation.equivalence_legs import EVALUATION, LEGS, finished, place, required_legs
from validation.equivalence_poison import answer_of
from validation.policy import EquivalencePolicy
from validation.records import (
    CONSUMED_COLUMNS,
    DIGEST_COLUMNS,
    EXPECTED_COLUMNS,
    GRADIENT_ERROR_COLUMNS,
    LEDGER_COLUMNS,
    SLOPE_COLUMNS,
    STREAM_COLUMNS,
    UPDATE_COLUMNS,
    EquivalenceRecords,
    Frame,
    Leg,
)

TOLD = 240  # characters of what stopped a leg: the error, and the hook, rank and step that it came from


def missing_evidence(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[str]:
    """Name everything that had to be measured and was not."""
    if not any(size > 1 for size in records.world_sizes):
        return ["a world size above 1"]
    missing = [] if records.conditions else ["the hard conditions"]
    if records.steps < policy.steps.value:
        missing.append(f"{policy.steps.value} steps in every leg (they had {records.steps})")
    for name, size in required_legs(records.brought, records.world_sizes, records.conditions):
        missing += _missing_leg(records, policy, name, size)
    return [*missing, *_missing_tables(records), *_missing_errors(records), *_missing_evaluations(records)]


def _missing_leg(records: EquivalenceRecords, policy: EquivalencePolicy, name: str, size: int) -> list[str]:
    leg = next((leg for leg in records.legs if (leg.name, leg.world_size) == (name, size)), None)
    if leg is None:
        return [f"{name} leg, W={size}"]
    if leg.stopped and name != "overflow":
        return [f"{place(leg)} (it stopped: {leg.stopped[:TOLD]})"]
    if name == "soak":
        done = repeats(leg)
        return [f"{policy.soak_repeats.value} repeats in {place(leg)} (it made {done})"] if done < policy.soak_repeats.value else []
    if LEGS[name].condition and answer_of(leg).answer == "unknown":
        return [f"the poisoned step in {place(leg)}"]
    return [] if leg.stopped else [f"{what} in {place(leg)}" for what in (*_missing_steps(records, leg), *_missing_samples(records, leg))]


def _missing_steps(records: EquivalenceRecords, leg: Leg) -> Iterator[str]:
    """Updates and digests of every rank and step; final states of every rank."""
    kind = LEGS[leg.name]
    steps = range(records.steps) if kind.hardened else sorted(_steps(leg.updates, UPDATE_COLUMNS))
    ranks = {(rank, step) for rank in range(leg.world_size) for step in steps}
    found = set() if absent_columns(leg.updates, UPDATE_COLUMNS) else set(zip(leg.updates["rank"], leg.updates["step"], strict=True))
    if not ranks or ranks - found:
        yield f"updates of {_first(ranks - found)}"
    if absent_columns(leg.digests, DIGEST_COLUMNS) or leg.digests.empty:
        yield "digests"
        return
    yield from _missing_digests(records, leg, ranks)
    if leg.name in ("exact", "own", "real") and (len(leg.states) != leg.world_size or not all(leg.states)):
        yield f"final states of all {leg.world_size} ranks"


def _missing_digests(records: EquivalenceRecords, leg: Leg, ranks: set[tuple[int, int]]) -> Iterator[str]:
    """Weights on every rank; gradients of every step; all tensors on all ranks where the trainer is ours.

    An own optimizer may be stepped with a part of the tensors on each rank, and one that was never used has no gradient: there the weights
    say whether ranks agree.
    """
    digests = digests_of([leg], COMPARED)
    digests = digests[digests["sha256"].fillna("") != ""]
    asked = () if LEGS[leg.name].condition else ("clipped",) if "step" in records.brought else ("reduced", "clipped")
    for stage in (stage for stage in asked if set(ranks) and not {step for _, step in ranks} <= _steps(digests[digests["stage"] == stage])):
        yield f"digests of the {stage} gradient of every step"
    same = ("weight", "buffer") if leg.reduction == "own" or LEGS[leg.name].condition else COMPARED
    for stage in same:
        there = digests[digests["stage"] == stage]
        if there.empty and stage != "weight":
            continue
        tensors = there["tensor"].nunique()
        counts = there.drop_duplicates(["rank", "step", "tensor"]).groupby(["rank", "step"]).size().to_dict()
        short = {key for key in ranks if counts.get(key, 0) < max(tensors, 1)}
        if short:
            yield f"digests of all {tensors} tensors (stage {stage}) of {_first(short)}"


def _missing_samples(records: EquivalenceRecords, leg: Leg) -> Iterator[str]:
    """What the legs that stand for the samples have to have kept."""
    if leg.name not in ("exact", "own"):
        return
    if not set(range(records.steps)) <= _steps(leg.consumed, CONSUMED_COLUMNS):
        yield "consumed samples of every step"
    if not set(range(records.steps)) <= _steps(leg.ledger, LEDGER_COLUMNS):
        yield "a ledger of every step"
    random = any(condition.name == "dropout" and condition.held for condition in records.conditions)
    if random and (absent_columns(leg.streams, STREAM_COLUMNS) or leg.streams.empty):
        yield "random streams"


def _missing_tables(records: EquivalenceRecords) -> list[str]:
    missing = []
    if not set(range(records.steps)) <= _steps(records.expected, EXPECTED_COLUMNS):
        missing.append("the samples that one process consumes in every step")
    if finished(records.legs, "exact") and len(records.expected_order) != len(records.expected):
        missing.append(f"the expected order of {len(records.expected)} samples (it names {len(records.expected_order)})")
    if len(records.expected_rates) < records.steps:
        missing.append(f"the learning rates of {records.steps} steps")
    if not records.slopes_excluded and (absent_columns(records.slopes, SLOPE_COLUMNS) or records.slopes.empty):
        missing.append("slopes by finite differences")
    return missing


def _missing_errors(records: EquivalenceRecords) -> list[str]:
    """Every tensor, step and stage of every compared leg at every world size it is held at."""
    absent = absent_columns(records.errors, GRADIENT_ERROR_COLUMNS)
    if absent or records.errors.empty:
        return [f"errors against the reference ({listed(absent)} absent)" if absent else "errors against the reference"]
    stages = [stage for stage in ERROR_STAGES if stage != "reduced" or "step" not in records.brought]
    double = {(leg.name, leg.world_size) for leg in records.legs if leg.precision == "float64"}  # updates are compared in these alone
    tensors = records.errors.groupby("stage")["tensor"].nunique().to_dict()
    counts = records.errors.drop_duplicates(["leg", "world_size", "step", "stage", "tensor"])
    held = counts.groupby(["leg", "world_size", "step", "stage"]).size().to_dict()
    missing = []
    for name, size in required_legs(records.brought, records.world_sizes, records.conditions):
        if not LEGS[name].compared:
            continue
        short = [
            (step, stage) for step in range(records.steps) for stage in stages
            if (stage != "weight" or (name, size) in double) and held.get((name, size, step, stage), 0) < max(1, tensors.get(stage, 0))
        ]  # fmt: skip
        if short:
            step, stage = short[0]
            missing.append(f"errors of all {tensors.get(stage, 0)} tensors ({stage}) at step {step} in the {name} leg, W={size}")
    return missing


def _missing_evaluations(records: EquivalenceRecords) -> list[str]:
    if "evaluate" not in records.brought:
        return []
    widest = max(records.world_sizes)
    missing = [] if records.judged_ids else ["the samples that an evaluation has to count"]
    if widest not in {item.world_size for item in records.evaluations}:
        stopped = next((leg.stopped for leg in records.legs if (leg.name, leg.world_size) == (EVALUATION, widest)), "")
        missing.append(f"an evaluation at W={widest}{f' (it stopped: {stopped[:TOLD]})' if stopped else ''}")
    return missing


def _steps(frame: Frame, columns: Sequence[str] = ()) -> set[int]:
    return set() if absent_columns(frame, columns or ("step",)) else {int(step) for step in set(frame["step"])}


def _first(places: set[tuple[int, int]]) -> str:
    return f"rank {min(places)[0]}, step {min(places)[1]}" if places else "any rank"
