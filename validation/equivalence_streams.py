"""Are random numbers and learning rates right: no stream drawn from twice, and the reference's rate in every update of every rank."""

import json
from collections.abc import Iterator
from typing import NamedTuple

from validation.completeness import absent_columns
from validation.diagnosis_data import Draw, diagnose_draws, diagnose_rates, same_rates
from validation.diagnosis_kinds import said
from validation.equivalence_data import MAIN
from validation.equivalence_legs import LEGS, finished, place
from validation.records import CONSUMED_COLUMNS, STREAM_COLUMNS, UPDATE_COLUMNS, EquivalenceRecords, Frame, Leg
from validation.verdict import Check, check

INDEPENDENT = "dropout and augmentation are drawn anew in every rank, step and epoch: a generator in one state gives the same numbers"
REFERENCE_RATES = "the recipe's own schedule, stepped once per update by one process"
DRAWERS = ("model", "data")
DRAWING = "a model with dropout draws in every forward pass of a training"
BACKWARD = "a backward pass follows the masks of its forward pass; one that draws anew differentiates another loss"
RECOMPUTED = "a forward pass is computed again with other masks (activation checkpointing without preserve_rng_state=True)"
SILENT = 2  # last steps without a draw from which on it is no chance of a branch that some samples do not take


def stream_checks(records: EquivalenceRecords) -> list[Check]:
    """Draws that found a generator as another draw had found it, among forward passes and among fetches; and forward passes without any."""
    legs = [leg for leg in finished(records.legs, *MAIN) if not absent_columns(leg.streams, STREAM_COLUMNS) and len(leg.streams)]
    if not legs:
        return []
    again, where, action = 0, "", ""
    for leg in legs:
        for drawer in DRAWERS:
            rows = leg.streams[leg.streams["drawer"] == drawer].sort_values(["step", "rank", "generator", "state"])
            repeated = rows[rows.duplicated(["generator", "state"])]
            again += len(repeated)
            if len(repeated) and not where:
                where, action = _named(leg, drawer, rows, repeated)
    used = check("random streams used twice", float(again), "==", 0, unit="", source=INDEPENDENT, where=where, action=action)
    return [used, *_silence_check(records, legs), _backward_check(legs)]


def _backward_check(legs: list[Leg]) -> Check:
    """Random numbers that a backward pass drew: the gradient is then of other masks than the loss."""
    drawn = [(leg, leg.streams[leg.streams["drawer"] == "backward"]) for leg in legs]
    where, action = "", ""
    for leg, rows in drawn:
        if len(rows) and not where:
            first = rows.sort_values(["step", "rank", "generator"]).iloc[0]
            where = f"first in {place(leg, int(first['step']), int(first['rank']))}, generator {first['generator']}"
            action = said("streams", RECOMPUTED)
    count = float(sum(len(rows) for _, rows in drawn))
    return check("random numbers drawn in backward passes", count, "==", 0, unit="", source=BACKWARD, where=where, action=action)


def _silence_check(records: EquivalenceRecords, legs: list[Leg]) -> list[Check]:
    """Ranks on which a model with dropout draws no more: it was put into eval mode and not back."""
    if not any(condition.name == "dropout" and condition.held for condition in records.conditions):
        return []
    silent, where = 0, ""
    for leg in legs:
        if absent_columns(leg.consumed, CONSUMED_COLUMNS) or leg.consumed.empty:
            continue
        drawn = leg.streams[leg.streams["drawer"] == "model"].groupby("rank")["step"].max().to_dict()
        for rank, steps in leg.consumed.groupby("rank")["step"]:
            after = sorted({int(step) for step in steps if step > drawn.get(rank, -1)})
            if len(after) >= SILENT:
                silent += 1
                where = where or f"first in {place(leg, after[0], int(str(rank)))}: none up to step {after[-1]}"
    action = said("no_draws", "the model drew in training mode when it was asked alone") if silent else ""
    return [check("ranks whose dropout ends", float(silent), "==", 0, unit="", source=DRAWING, where=where, action=action)]


def _named(leg: Leg, drawer: str, rows: Frame, repeated: Frame) -> tuple[str, str]:
    """The two places, and what that means."""
    second = repeated.iloc[0]
    first = rows[(rows["generator"] == second["generator"]) & (rows["state"] == second["state"])].iloc[0]
    one, other = (Draw(rank=int(row["rank"]), step=int(row["step"])) for row in (first, second))
    where = f"first in {place(leg)}: rank {one.rank} in step {one.step} and rank {other.rank} in step {other.step}, generator "
    return f"{where}{second['generator']}", str(diagnose_draws(one, other, drawer, str(second["generator"])))


# Learning rates


class WrongRate(NamedTuple):
    """An update with other learning rates than the reference's."""

    leg: Leg
    rank: int
    step: int
    found: str
    expected: str


def rates(text: str) -> tuple[float, ...]:
    """Learning rates by group out of canonical JSON; not a number where there is none."""
    try:
        return tuple(float(value) for value in json.loads(text))
    except (TypeError, ValueError):
        return (float("nan"),)


def updates_of(leg: Leg) -> Frame | None:
    """A leg's updates sorted by step and rank; None when there are none."""
    if absent_columns(leg.updates, UPDATE_COLUMNS) or leg.updates.empty:
        return None
    return leg.updates.sort_values(["step", "rank"])


def wrong_rates(records: EquivalenceRecords) -> Iterator[WrongRate]:
    """Every update with wrong rates, of the legs under hard conditions; poisoned ones apart, which may skip a step."""
    names = [name for name, kind in LEGS.items() if kind.hardened and not kind.condition]
    for leg in finished(records.legs, *names):
        updates = updates_of(leg)
        if updates is None:
            continue
        for step, rank, found in zip(updates["step"], updates["rank"], updates["rates"], strict=True):
            expected = records.expected_rates[step] if step < len(records.expected_rates) else None
            if expected is not None and found != expected and not same_rates(rates(found), rates(expected)):
                yield WrongRate(leg, int(rank), int(step), str(found), expected)


def rate_checks(records: EquivalenceRecords, wrong: list[WrongRate]) -> list[Check]:
    """One check. Args: wrong, of `wrong_rates`."""
    if not records.expected_rates:
        return []
    where, action = "", ""
    if wrong:
        same = [item for item in wrong if item.leg.name == wrong[0].leg.name]  # one rank alone tells most: no number of ranks is in it
        first = max(same, key=lambda item: (item.leg.world_size == 1, item.leg.world_size, -item.step))
        where = f"{place(first.leg, first.step, first.rank)}: {first.found} instead of {first.expected}"
        updates = updates_of(first.leg)
        assert updates is not None
        series = [rates(text) for text in updates[updates["rank"] == first.rank]["rates"]]
        expected = [rates(text) for text in records.expected_rates]
        action = str(diagnose_rates(series, expected, first.leg.world_size, _micro_batches(first.leg)))
    name = "updates with another learning rate"
    return [check(name, float(len(wrong)), "==", 0, unit="", source=REFERENCE_RATES, where=where, action=action)]


def _micro_batches(leg: Leg) -> int:
    """Micro-batches that a rank puts through one step; 1 where nobody told."""
    return 1 if absent_columns(leg.consumed, CONSUMED_COLUMNS) or leg.consumed.empty else int(leg.consumed["micro"].max()) + 1
