"""Are the samples right: consumed ids of every step, their contents, what the ledger claims, and the order of epochs."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd

from validation.completeness import absent_columns, listed
from validation.diagnosis_data import diagnose_samples
from validation.diagnosis_kinds import said
from validation.equivalence_legs import LEGS, finished, place
from validation.errors import EvidenceError
from validation.ledger import LedgerDifference, compare_order
from validation.records import CONSUMED_COLUMNS, EXPECTED_COLUMNS, LEDGER_COLUMNS, EquivalenceRecords, Frame, Leg
from validation.verdict import Check, check

MAIN = ("exact", "own")  # legs in the training precision, with everything on
CONSUMING = (*MAIN, *(name for name, kind in LEGS.items() if kind.compared))  # legs whose steps consume what one process would
UNKNOWN = -1  # id of a sample that a loss was computed of without anybody telling which it was
ONE_PROCESS = "what one process alone consumes with the same seed"
UNFORETOLD = (
    "What samples look like could not be foretold (random numbers without a key, or padding to the longest of a micro-batch): contents "
    "were not compared, the gradients of them were."
)
PERMUTATION = "data order is a function of seed, epoch and position alone"
RENEWED = 20  # samples that come twice from which on none looking new is no chance: 1 in 2**20 where half of them change
MEANT = 0.5  # share of repeated samples that stand in one update with their repeat, from which on that is a sampler's purpose
REREAD = "the order comes again while it is still under way: several workers, or several readers of a stream, each read all of it"
SHORTEST = 8  # samples of a second epoch from which on an equal order is no chance: 1 in 8! = 40,320


def data_checks(records: EquivalenceRecords) -> list[Check]:
    """All checks about samples, the first ones first: wrong samples explain most of what follows."""
    if absent_columns(records.expected, EXPECTED_COLUMNS) or records.expected.empty:
        return []
    legs = {(leg.name, leg.world_size): (leg, consumed_of(leg, records.expected)) for leg in finished(records.legs, *CONSUMING)}
    pairs = [(leg, consumed) for leg, consumed in legs.values() if consumed is not None]
    main = [(leg, consumed) for leg, consumed in pairs if leg.name in MAIN]
    return [
        *_samples_check(pairs, records.expected), *_content_check(main, records.expected), *_renewed_check(records, main),
        *_claims_check(main), *_order_check(records), *_epoch_check(records),
    ]  # fmt: skip


def consumed_of(leg: Leg, expected: Frame) -> Frame | None:
    """A leg's samples; ids that nobody told are found by content, or else taken from the ledger's claims. None when nothing was kept."""
    consumed = leg.consumed
    if absent_columns(consumed, CONSUMED_COLUMNS) or consumed.empty:
        return None
    if is_told(leg, expected):
        return _found_by_content(consumed, expected) if (consumed["sample_id"] == UNKNOWN).any() else consumed
    if absent_columns(leg.ledger, LEDGER_COLUMNS) or leg.ledger.empty:
        return None
    return leg.ledger[["step", "sample_id"]].assign(rank=0, micro=0, content="", poisoned=False)


def is_told(leg: Leg, expected: Frame) -> bool:
    """Whether it can be told which samples the losses were computed of: by their ids, or by contents that were foretold."""
    return not (leg.consumed["sample_id"] == UNKNOWN).any() or bool((expected["content"].fillna("") != "").any())


def _found_by_content(consumed: Frame, expected: Frame) -> Frame:
    """Fill in unknown ids: a sample of the same step with these bytes that is not taken yet, else one of any step."""
    order = consumed.sort_values(["step", "rank", "micro", "content", "sample_id"]).reset_index(drop=True)
    told = Counter(_rows(order[order["sample_id"] != UNKNOWN], "step", "sample_id"))
    left: dict[tuple[int, str], list[int]] = {}
    anywhere: dict[str, int] = {}
    for step, sample, content in sorted(_rows(expected[expected["content"].fillna("") != ""], "step", "sample_id", "content")):
        anywhere.setdefault(content, int(sample))
        if told[step, sample]:
            told[step, sample] -= 1
        else:
            left.setdefault((step, content), []).append(int(sample))
    ids = []
    for step, sample, content in _rows(order, "step", "sample_id", "content"):
        here = left.get((step, content))
        ids.append(int(sample) if sample != UNKNOWN else here.pop(0) if here else anywhere.get(content, UNKNOWN))
    return order.assign(sample_id=np.array(ids, dtype=np.int64))


def unknown_notes(records: EquivalenceRecords) -> list[str]:
    """Legs whose samples could not be told."""
    if absent_columns(records.expected, EXPECTED_COLUMNS):
        return []
    legs = [leg for leg in finished(records.legs, *MAIN) if not absent_columns(leg.consumed, CONSUMED_COLUMNS)]
    lost = [place(leg) for leg in legs if not is_told(leg, records.expected)]
    blind = legs and not bool((records.expected["content"].fillna("") != "").any())
    return [
        *(
            [f"Which samples the losses were computed of could not be told in {listed(lost)}: the ledger's claims stand alone."]
            if lost
            else []
        ),
        *([UNFORETOLD] if blind else []),
    ]


def _rows(frame: Frame, *columns: str) -> Iterable[tuple[Any, ...]]:
    return zip(*(frame[column] for column in columns), strict=True)


def _surplus(found: Frame, expected: Frame, columns: list[str]) -> Frame:
    """Rows with `more` = how often each combination was found beyond what was expected (negative: missing), where that is not 0."""
    counted = pd.concat([found[columns].assign(more=1), expected[columns].assign(more=-1)], ignore_index=True)
    total = counted.groupby(columns)["more"].sum().reset_index()
    return total[total["more"] != 0].sort_values(columns)


def _samples_check(legs: list[tuple[Leg, Frame]], expected: Frame) -> list[Check]:
    wrong, first = 0, ("", "")
    for leg, consumed in legs:
        steps = sorted(set(_surplus(consumed, expected, ["step", "sample_id"])["step"]))
        wrong += len(steps)
        if steps and not first[0]:
            first = (f"first in {place(leg, steps[0])}", _sampled(consumed, expected, steps[0]))
    if not legs:
        return []
    return [check("steps with wrong samples", float(wrong), "==", 0, unit="", source=ONE_PROCESS, where=first[0], action=first[1])]


def _sampled(consumed: Frame, expected: Frame, step: object) -> str:
    there, wanted = consumed[consumed["step"] == step], expected[expected["step"] == step]
    found = {int(rank): [int(v) for v in there[there["rank"] == rank]["sample_id"]] for rank in sorted(set(there["rank"]))}
    elsewhere = frozenset(int(v) for v in expected[expected["step"] != step]["sample_id"])
    return str(diagnose_samples(found, [int(v) for v in wanted["sample_id"]], elsewhere=elsewhere) or "")


def _content_check(legs: list[tuple[Leg, Frame]], expected: Frame) -> list[Check]:
    """Contents of right samples; a wrong sample is the check above's."""
    foretold = expected[expected["content"].fillna("") != ""]
    wrong, where = 0, ""
    for leg, consumed in legs:
        there = consumed.merge(foretold[["step", "sample_id"]].drop_duplicates(), on=["step", "sample_id"])
        differ = _surplus(there, foretold, ["step", "sample_id", "content"])
        differ = differ[differ["more"] > 0]
        wrong += int(differ["more"].sum())
        if len(differ) and not where:
            row = differ.iloc[0]
            ranks = there[(there["step"] == row["step"]) & (there["sample_id"] == row["sample_id"]) & (there["content"] == row["content"])]
            where = f"first in {place(leg, row['step'], ranks['rank'].min())}: sample {row['sample_id']}"
    if foretold.empty or not legs:
        return []
    action = said("content", "the sample's id is right and its bytes are not") if wrong else ""
    return [check("samples with other contents", float(wrong), "==", 0, unit="", source=ONE_PROCESS, where=where, action=action)]


def _renewed_check(records: EquivalenceRecords, legs: list[tuple[Leg, Frame]]) -> list[Check]:
    """An own loader's samples that come again in a later epoch, where the data draws by sample and epoch."""
    if not (records.draws_by_key and "loader" in records.brought and legs):
        return []
    leg, consumed = legs[0]
    looks = consumed.groupby("sample_id")["content"].agg(["size", "nunique"])
    again = looks[looks["size"] > 1]
    if len(again) < RENEWED:
        return []
    is_same = bool((again["nunique"] == 1).all())
    where = f"{place(leg)}: all {len(again)} samples that came again looked as they did before" if is_same else ""
    action = said("content", "what is drawn for a sample is drawn alike in every epoch") if is_same else ""
    source = "data that draws by (seed, epoch, sample); a loader that is meant to repeat itself excludes the condition epoch_border"
    return [check("samples that look the same in every epoch", float(is_same), "==", 0, unit="", source=source, where=where, action=action)]


def _claims_check(legs: list[tuple[Leg, Frame]]) -> list[Check]:
    wrong, where, held = 0, "", 0
    for leg, consumed in legs:
        if absent_columns(leg.ledger, LEDGER_COLUMNS) or leg.ledger.empty:
            continue
        held += 1
        differ = _surplus(leg.ledger, consumed, ["step", "sample_id"])
        wrong += differ["step"].nunique()
        if len(differ) and not where:
            row = differ.iloc[0]
            what = "is claimed and no loss was computed of it" if row["more"] > 0 else "is not claimed, but a loss was computed of it"
            where = f"first in {place(leg, row['step'])}: sample {row['sample_id']} {what}"
    source = "the ledger is what a resume and an audit go by"
    action = said("claims", "the ledger and the losses do not speak of the same samples") if wrong else ""
    name = "steps whose ledger is not what was consumed"
    return [check(name, float(wrong), "==", 0, unit="", source=source, where=where, action=action)] if held else []


# Order


def compared(records: EquivalenceRecords) -> dict[int, LedgerDifference | str]:
    """The exact leg's ledger of each world size against the permutation, or why it cannot be compared."""
    found: dict[int, LedgerDifference | str] = {}
    for leg in finished(records.legs, "exact"):
        try:
            found[leg.world_size] = "it is empty" if leg.ledger.empty else compare_order(leg.ledger, records.expected_order)
        except EvidenceError as error:
            found[leg.world_size] = str(error)
    return found


def _order_check(records: EquivalenceRecords) -> list[Check]:
    found = {size: ledger for size, ledger in compared(records).items() if isinstance(ledger, LedgerDifference)}
    if not found:
        return []
    wrong = [size for size, ledger in found.items() if ledger.wrong]
    where = f"W={wrong[0]}, {found[wrong[0]]}" if wrong else ""
    action = said("order", "samples stand at other positions") if wrong else ""
    total = float(sum(ledger.wrong for ledger in found.values()))
    return [check("wrong ledger positions", total, "==", 0, unit="", source=PERMUTATION, where=where, action=action)]


def _epoch_check(records: EquivalenceRecords) -> list[Check]:
    """An own order's first two epochs, in the ledger of its smallest world size: a sample's second turn belongs to the second epoch.

    A sampler may repeat each sample within one update on purpose; loader workers that all read the whole stream repeat whole updates.
    """
    legs = [leg for leg in finished(records.legs, "own") if not absent_columns(leg.ledger, LEDGER_COLUMNS) and len(leg.ledger)]
    if not {"sampler", "loader"} & set(records.brought) or not legs:
        return []
    order = legs[0].ledger.sort_values(["step", "position", "lane"])
    turn = order.groupby("sample_id").cumcount().to_numpy()
    first, second = (order["sample_id"].to_numpy()[turn == number] for number in (0, 1))
    if len(second) < SHORTEST or len(first) < len(second):
        return []
    steps = order["step"].to_numpy()
    is_meant = bool((order[turn <= 1].groupby("sample_id")["step"].nunique() == 1).mean() > MEANT)
    is_same = bool(np.array_equal(first[: len(second)], second)) and not is_meant
    is_early = is_same and int(np.flatnonzero(turn == 1)[0]) < int(np.flatnonzero(turn == 0)[-1])
    where = f"{place(legs[0])}: {len(second)} samples come again as they came" if is_same else ""
    if is_early:
        where += f", from step {steps[turn == 1][0]} on, before others have come at all"
    action = said("not_split", REREAD) if is_early else said("epoch_order", "each epoch has the order of the first") if is_same else ""
    source = "a new order in each epoch; a sampler that is meant to keep it excludes the condition epoch_border"
    return [check("epochs in the same order", float(is_same), "==", 0, unit="", source=source, where=where, action=action)]
