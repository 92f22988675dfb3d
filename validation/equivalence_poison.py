"""A bad micro-batch on one rank: do all ranks, at every world size, give one answer to it?

A huge loss may be used by all ranks or skipped by all, and the same at every world size. An infinite one may be skipped by all, or may
stop the run; it may reach the weights only where it does so at every world size, in one process too: nobody looks for it there, and a note
says so.
"""

import math
from typing import Literal, NamedTuple

import numpy as np

from validation.completeness import absent_columns, listed
from validation.diagnosis_kinds import said
from validation.equivalence_exact import digest_check
from validation.equivalence_legs import finished, place
from validation.equivalence_streams import rates, updates_of
from validation.records import CONSUMED_COLUMNS, EquivalenceRecords, Frame, Leg
from validation.verdict import Check, Table, check

Answer = Literal["used", "skipped", "stopped", "mixed", "spoiled", "unknown"]
UNGUARDED = (
    "An infinite loss goes into the weights, at every world size as in one process: no hook asks whether the gradient is finite. To guard "
    "the weights, decide it on all ranks together before the optimizer steps, or leave hooks.update to the trainer."
)
TOGETHER = "ranks hold one model: a step is made by all of them or by none, and what decides it does not depend on how many there are"
WORDS: dict[Answer, str] = {
    "used": "used by all ranks", "skipped": "skipped by all ranks", "stopped": "the run stopped", "mixed": "used by some ranks only",
    "spoiled": "weights that are no numbers", "unknown": "no poisoned step on record",
}  # fmt: skip


class Answered(NamedTuple):
    """What one run did about its poison."""

    leg: Leg
    answer: Answer
    step: int  # that was poisoned; -1 when nobody knows
    detail: str


def answers(records: EquivalenceRecords, name: str) -> list[Answered]:
    """Every run's answer, by rising world size."""
    return [answer_of(leg) for leg in sorted((leg for leg in records.legs if leg.name == name), key=lambda leg: leg.world_size)]


def answer_of(leg: Leg) -> Answered:
    """Read a run's answer from its updates at the poisoned step and after it."""
    step = poisoned_step(leg)
    if leg.stopped:
        return Answered(leg, "stopped", step, leg.stopped)
    updates = updates_of(leg)
    if updates is None or step < 0 or updates[updates["step"] == step].empty:
        return Answered(leg, "unknown", step, "")
    after = updates[updates["step"] >= step]
    if any(not math.isfinite(moved) for moved in after["moved"]):
        broken = next(row for row in after.itertuples() if not math.isfinite(float(str(row.moved))))
        return Answered(leg, "spoiled", step, f"rank {broken.rank}, step {broken.step}")
    at = updates[updates["step"] == step]
    stayed = [int(rank) for rank, moved, norm in zip(at["rank"], at["moved"], at["norm"], strict=True) if moved == 0 or norm == 0]
    if len(stayed) == len(at):
        return Answered(leg, "skipped", step, "")
    return Answered(leg, "mixed", step, f"ranks {listed(stayed)} skipped it") if stayed else Answered(leg, "used", step, "")


def poisoned_step(leg: Leg) -> int:
    """The step whose loss was spoiled; -1 when it is not on record."""
    if absent_columns(leg.consumed, CONSUMED_COLUMNS) or leg.consumed.empty:
        return -1
    steps = leg.consumed[leg.consumed["poisoned"].astype(bool)]["step"]
    return int(steps.min()) if len(steps) else -1


def poison_checks(records: EquivalenceRecords) -> list[Check]:
    """Both poisons: one answer of all ranks, and equal replicas afterwards."""
    checks = [*_answer_check(records, "spike"), *_answer_check(records, "overflow")]
    for name in ("spike", "overflow"):
        legs = [leg for leg in finished(records.legs, name) if leg.world_size > 1]
        checks += digest_check(f"{name} leg: digests that differ between ranks", legs, across=False)
        checks += _rates_check(name, legs)
    return checks


def is_unguarded(records: EquivalenceRecords) -> bool:
    """Whether an infinite loss goes into the weights whatever the number of ranks, one included: a plain loop without a guard."""
    found = [item for item in answers(records, "overflow") if item.answer != "unknown"]
    return any(item.leg.world_size == 1 for item in found) and all(item.answer == "spoiled" for item in found)


def poison_notes(records: EquivalenceRecords) -> list[str]:
    """What is no fault of distribution."""
    return [UNGUARDED] if is_unguarded(records) else []


def _answer_check(records: EquivalenceRecords, name: str) -> list[Check]:
    found = [item for item in answers(records, name) if item.answer != "unknown"]
    if not found:
        return []
    allowed: tuple[Answer, ...] = ("used", "skipped", "stopped") if name == "spike" else ("skipped", "stopped")
    wrong = [] if name == "overflow" and is_unguarded(records) else [item for item in found if item.answer not in allowed]
    if name == "spike" and not wrong and len({item.answer for item in found}) > 1:
        wrong = [item for item in found if item.answer != found[0].answer]
    where, action = "", ""
    if wrong:
        each = "; ".join(f"W={item.leg.world_size} {WORDS[item.answer]}{f' ({item.detail})' if item.detail else ''}" for item in found)
        step = wrong[0].step if wrong[0].step >= 0 else None
        where, action = f"{place(wrong[0].leg, step)}: {each}", said("poison", "ranks do not answer alike")
        if name == "overflow" and wrong[0].answer in ("used", "spoiled"):
            action = said("poison", "an infinite loss went into the weights")
    check_name = f"{name} leg: runs with a wrong answer"
    return [check(check_name, float(len(wrong)), "==", 0, unit="", source=TOGETHER, where=where, action=action)]


def _rates_check(name: str, legs: list[Leg]) -> list[Check]:
    """Learning rates are the same on all ranks, whether or not the schedule counts a skipped step."""
    wrong, where, held = 0, "", False
    for leg in legs:
        updates = updates_of(leg)
        if updates is None:
            continue
        held = True
        for step in sorted(set(updates["step"])):
            at = updates[updates["step"] == step]
            if len({rates(text) for text in at["rates"]}) > 1:
                wrong += 1
                where = where or f"first in {place(leg, step)}: {listed(sorted(set(at['rates'])))}"
    action = said("poison", "ranks do not count the step alike") if wrong else ""
    name = f"{name} leg: steps whose ranks have other learning rates"
    return [check(name, float(wrong), "==", 0, unit="", source=TOGETHER, where=where, action=action)] if held else []


def without_skipped(records: EquivalenceRecords, errors: Frame) -> Frame:
    """Errors of the spike leg count where all ranks gave one answer; those of a step that all skipped are nobody's."""
    found = {item.leg.world_size: item for item in answers(records, "spike") if item.answer in ("used", "skipped")}
    skipped = [(size, item.step) for size, item in found.items() if item.answer == "skipped"]
    at = [pair in skipped for pair in zip(errors["world_size"], errors["step"], strict=True)]
    return errors[(errors["leg"] != "spike") | (errors["world_size"].isin(found) & ~np.array(at, dtype=bool))]


def poison_tables(records: EquivalenceRecords) -> list[Table]:
    """What became of each poison."""
    rows = tuple(
        (name, item.leg.world_size, item.step if item.step >= 0 else None, WORDS[item.answer], item.detail[:200])
        for name in ("spike", "overflow") for item in answers(records, name)
    )  # fmt: skip
    columns = ("leg", "world size", "at step", "answer", "detail")
    return [Table(title="A bad micro-batch on one rank", columns=columns, rows=rows)] if rows else []
