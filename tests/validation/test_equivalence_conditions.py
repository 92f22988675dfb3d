"""gradient_equivalence: weights that move, norms within the limit, answers to a bad micro-batch, repeats, conditions."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
from helpers_equivalence import (
    CONDITIONS,
    OWN,
    POISONED,
    POLICY,
    RATES,
    SIZES,
    STEPS,
    change,
    changed,
    errors,
    leg,
    records,
    with_leg,
    with_legs,
    without_leg,
)

from validation.equivalence import judge_equivalence
from validation.equivalence_poison import UNGUARDED
from validation.records import Condition, EquivalenceRecords
from validation.verdict import GateVerdict, Outcome


def failed(verdict: GateVerdict) -> list[str]:
    """Names of failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


# Weights that move


@pytest.mark.parametrize("moved", [0.0, math.nan, -1.0], ids=["zero", "nan", "negative"])
def test_update_that_changes_nothing(moved: float) -> None:
    """An update at a rate above zero has to move weights."""
    verdict = judge_equivalence(with_leg(records(OWN), "own", 2, updates=change("moved", moved, rank=1, step=3)), POLICY)

    assert failed(verdict) == ["updates that changed nothing"]
    assert "first in own leg, W=2, step 3, rank 1" in verdict.reason
    assert verdict.action.startswith("nothing moves: ")


def test_warm_up_from_zero() -> None:
    """At a rate of zero nothing has to move."""
    rates = ("[0.0]", *RATES[1:])
    start = lambda table: changed(changed(table, "rates", "[0.0]", step=0), "moved", 0.0, step=0)  # noqa: E731
    made = records(OWN, expected_rates=rates)
    for name in {item.name for item in made.legs}:
        made = with_legs(made, name, updates=start)

    assert Outcome.PASS is judge_equivalence(made, POLICY).outcome


STILL = '["body.bias"]'


@pytest.mark.parametrize(
    ("made", "outcome"),
    [
        pytest.param(records(), Outcome.FAIL, id="learns"),
        pytest.param(records(frozen=("body.bias",)), Outcome.PASS, id="frozen"),
        pytest.param(records(slopes=changed(records().slopes, "analytic", 3e-17, tensor="body.bias")), Outcome.PASS, id="rounding-only"),
        pytest.param(records(slopes=changed(records().slopes, "analytic", 0.0, tensor="body.bias")), Outcome.FAIL, id="takes-no-part"),
        pytest.param(records(slopes=pd.DataFrame(), slopes_excluded="in float32"), Outcome.PASS, id="nobody-knows"),
    ],
)
def test_tensor_that_never_changes(made: EquivalenceRecords, outcome: Outcome) -> None:
    """A tensor that wants a gradient and never changes has to be declared, unless its gradient is rounding alone."""
    verdict = judge_equivalence(with_leg(made, "exact", 2, updates=change("still", STILL)), POLICY)

    assert outcome is verdict.outcome
    assert outcome is Outcome.PASS or verdict.action.startswith("still: body.bias never changed")


def test_tensor_that_changes_once() -> None:
    """A tensor that no sample of a step uses may stay in that step."""
    assert (
        Outcome.PASS
        is judge_equivalence(with_leg(records(), "exact", 2, updates=change("still", STILL, step=(0, 1, 2, 3, 4))), POLICY).outcome
    )


@pytest.mark.parametrize(
    ("norm", "outcome"),
    [
        (0.5, Outcome.PASS),
        (0.5 * (1 + 0.9e-6), Outcome.PASS),
        (0.5 * (1 + 1.1e-6), Outcome.FAIL),
        (math.nan, Outcome.FAIL),
        (0.1, Outcome.PASS),
    ],
    ids=["at-the-limit", "rounding", "beyond", "nan", "below"],
)
def test_norm_after_clipping(norm: float, outcome: Outcome) -> None:
    """The optimizer is handed a norm within the limit on every rank in every update."""
    verdict = judge_equivalence(with_leg(records(OWN), "own", 4, updates=change("norm", norm, rank=2, step=1)), POLICY)

    assert outcome is verdict.outcome
    assert outcome is Outcome.PASS or "own leg, W=4, step 1, rank 2" in verdict.reason


def test_no_limit_no_check() -> None:
    """Without a limit any norm is right."""
    made = records(OWN)
    for name in {item.name for item in made.legs}:
        made = with_legs(made, name, updates=lambda table: table.assign(limit=math.nan, norm=1e6))
    verdict = judge_equivalence(made, POLICY)

    assert Outcome.PASS is verdict.outcome
    assert all(item.name != "norm of the handed gradient" for item in verdict.checks)


# A bad micro-batch


def answered(name: str, size: int, made: EquivalenceRecords, **changes: Any) -> EquivalenceRecords:
    """A poisoned leg that ran to its end, with some updates changed at the poisoned step."""
    where = {"step": POISONED} | {key: changes.pop(key) for key in ("rank",) if key in changes}

    def spoil(table: pd.DataFrame) -> pd.DataFrame:
        for column, value in changes.items():
            table = changed(table, column, value, **where)
        return table

    return with_leg(made, name, size, stopped="", updates=spoil)


def skipped(name: str, made: EquivalenceRecords) -> EquivalenceRecords:
    """All ranks at all world sizes leave the poisoned update out."""
    return answered(name, 4, answered(name, 1, made, moved=0.0, norm=math.nan), moved=0.0, norm=math.nan)


@pytest.mark.parametrize(
    ("made", "words"),
    [
        pytest.param(
            answered("spike", 4, records(OWN), moved=0.0, rank=2),
            "W=1 used by all ranks; W=4 used by some ranks only (ranks 2 skipped it)",
            id="one-rank-skips",
        ),
        pytest.param(
            answered("spike", 4, records(OWN), moved=0.0), "W=1 used by all ranks; W=4 skipped by all ranks", id="other-rank-decides"
        ),
        pytest.param(
            answered("spike", 4, records(OWN), moved=math.nan, rank=1), "W=4 weights that are no numbers (rank 1, step 3)", id="spoiled"
        ),
        pytest.param(with_leg(records(OWN), "spike", 4, stopped="stalled"), "W=4 the run stopped (stalled)", id="hangs"),
        pytest.param(
            answered("overflow", 4, records(OWN)),
            "W=1 the run stopped (rank 0: the loss is infinite in step 3); W=4 used by all ranks",
            id="infinite-used",
        ),
        pytest.param(answered("overflow", 4, records(OWN), moved=0.0, rank=(0, 1, 2)), "W=4 used by some ranks only", id="one-rank-steps"),
        pytest.param(
            answered("overflow", 4, records(OWN), moved=math.nan), "W=4 weights that are no numbers (rank 0, step 3)", id="nan-weights"
        ),
    ],
)
def test_wrong_answer(made: EquivalenceRecords, words: str) -> None:
    """A bad micro-batch is answered by all ranks alike, and a huge loss alike at every world size."""
    verdict = judge_equivalence(made, POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert words in verdict.reason
    assert verdict.action.startswith("poison: ")


@pytest.mark.parametrize(
    "made",
    [
        pytest.param(records(OWN), id="used-and-stopped"),
        pytest.param(skipped("spike", records(OWN)), id="spike-skipped"),
        pytest.param(skipped("overflow", records(OWN)), id="overflow-skipped"),
        pytest.param(answered("overflow", 4, records(OWN), moved=0.0, norm=math.inf), id="stopped-and-skipped"),
        pytest.param(answered("overflow", 4, answered("overflow", 1, records(OWN), moved=math.nan), moved=math.nan), id="unguarded"),
    ],
)
def test_right_answers(made: EquivalenceRecords) -> None:
    """Used by all, skipped by all, or for an infinite loss stopped."""
    verdict = judge_equivalence(made, POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason


def test_nobody_looks_for_an_overflow() -> None:
    """What one process does too is no fault of distribution: a note. It is one where one process is not asked."""
    made = answered("overflow", 4, answered("overflow", 1, records(OWN), moved=math.nan), moved=math.nan)

    assert UNGUARDED in judge_equivalence(made, POLICY).notes
    assert UNGUARDED not in judge_equivalence(records(OWN), POLICY).notes


def test_replicas_after_a_spike() -> None:
    """Ranks hold one model after the bad micro-batch, too."""
    verdict = judge_equivalence(
        with_leg(records(OWN), "spike", 4, digests=change("sha256", "other", rank=3, step=5, stage="weight")), POLICY
    )

    assert failed(verdict) == ["spike leg: digests that differ between ranks"]


def test_rates_after_a_spike() -> None:
    """A schedule may count a skipped step or not, but on all ranks alike."""
    every = with_leg(records(OWN), "spike", 4, updates=change("rates", "[0.3]", step=4))
    some = with_leg(records(OWN), "spike", 4, updates=change("rates", "[0.3]", step=4, rank=1))

    assert Outcome.PASS is judge_equivalence(every, POLICY).outcome
    assert failed(judge_equivalence(some, POLICY)) == ["spike leg: steps whose ranks have other learning rates"]


def test_spike_that_is_left_out_of_a_step() -> None:
    """A step that is made without the bad micro-batch is wrong by the reference, which used it; a skipped step is not compared.

    What a later step finds of it is wrong.
    """
    name, spiked = "spike leg: gradient before clipping, worst tensor", errors(OWN, legs=(("spike", 1), ("spike", 4)))
    wrong, later = (
        pd.concat([errors(OWN), spiked[chosen].assign(rel_err=0.4, scale=0.6)]) for chosen in (spiked["step"] == 3, spiked["step"] == 4)
    )

    assert name in failed(judge_equivalence(records(OWN, errors=wrong), POLICY))
    assert Outcome.PASS is judge_equivalence(skipped("spike", records(OWN, errors=wrong)), POLICY).outcome
    verdict = judge_equivalence(skipped("spike", records(OWN, errors=later)), POLICY)
    assert name in failed(verdict)
    assert "is in a later gradient" in verdict.action


# The soak


@pytest.mark.parametrize(
    ("digests", "kind", "words"),
    [
        pytest.param(
            change("sha256", "other", stage="again", step=3, rank=1, tensor="head.weight"),
            "intermittent",
            "first at repeat 3 of 5, tensor head.weight, rank 1",
            id="once",
        ),
        pytest.param(change("sha256", "other", stage="again", step=3), "intermittent", "first at repeat 3 of 5", id="all-ranks"),
        pytest.param(change("sha256", "other", stage="again", rank=1), "no reduction", "first at repeat 0 of 5", id="never-reduced"),
        pytest.param(
            change("sha256", "other", stage="again", rank=1, tensor="head.weight"), "unreduced tensors", "rank 1", id="one-tensor"
        ),
        pytest.param(
            lambda t: t.assign(sha256=[f"{s}{r}" for s, r in zip(t["sha256"], t["step"], strict=True)]),
            "intermittent",
            "repeat 1 of 5",
            id="always-other",
        ),
    ],
)
def test_gradient_that_does_not_repeat(digests: Callable[[pd.DataFrame], pd.DataFrame], kind: str, words: str) -> None:
    """The same gradient every time, on every rank."""
    verdict = judge_equivalence(with_leg(records(OWN), "soak", 2, digests=digests), POLICY)

    assert failed(verdict) == ["soak leg: repeats that differ at W=2"]
    assert words in verdict.reason
    assert verdict.action.startswith(f"{kind}: ")


def test_what_a_soak_can_find() -> None:
    """The note says how probable it is that a fault in one of a hundred gradients was seen."""
    again = [(size, rank, repeat, "again", "a", "same") for size in (2,) for repeat in range(299) for rank in range(2)]
    long = leg("soak", 2).digests.iloc[:0]
    frame = pd.concat([long, pd.DataFrame(again, columns=long.columns)])
    made = without_leg(records(world_sizes=(1, 2)), "soak", 4)
    notes = judge_equivalence(with_leg(made, "soak", 2, digests=frame), POLICY).notes

    assert any("299 repeats at W=2; a fault in one of a hundred gradients is found with probability 0.95" in note for note in notes)


# Conditions


def test_excluded_condition_is_told() -> None:
    """A condition that the recipe excludes takes its leg away, and evidence says why."""
    conditions = (*CONDITIONS[:3], Condition(name="spike", held=False, detail="the loss raises on purpose"), CONDITIONS[4])
    made = records(conditions=conditions)
    for size in SIZES:
        made = without_leg(made, "spike", size)
    verdict = judge_equivalence(made, POLICY)

    assert Outcome.PASS is verdict.outcome
    assert "Not held: spike (the loss raises on purpose). Faults that only it shows were not looked for." in verdict.notes
    (table,) = (table for table in verdict.tables if table.title == "Hard conditions")
    assert ("spike", "not held", "the loss raises on purpose") in table.rows


def test_collectives_are_shown_by_type() -> None:
    """What a leg's collectives carried stands in a table, summed over ranks."""
    (table,) = (table for table in judge_equivalence(records(), POLICY).tables if table.title == "Collectives by type, all ranks")

    assert ("logic", 4, "all_reduce", "float64", 4 * STEPS, 4 * 600) in table.rows


def test_own_sizes_have_own_rates() -> None:
    """The leg at the recipe's own sizes follows a schedule of another length."""
    made = replace(with_legs(records(), "real", updates=change("rates", "[0.3]")))

    assert Outcome.PASS is judge_equivalence(made, POLICY).outcome


def test_what_comes_and_goes_is_named_first() -> None:
    """A fault that strikes now and then strikes other legs too; the repeats say what it is."""
    hit = with_leg(records(OWN), "own", 2, digests=change("sha256", "other", rank=1, step=3))
    verdict = judge_equivalence(with_leg(hit, "soak", 2, digests=change("sha256", "other", stage="again", step=3, rank=1)), POLICY)

    assert failed(verdict) == ["soak leg: repeats that differ at W=2", "own leg: digests that differ between ranks"]
    assert verdict.action.startswith("intermittent: ")


def with_buffers(size: int, rel_err: float, brought: tuple[str, ...] = OWN, micro: int = 0) -> EquivalenceRecords:
    """An own trainer whose buffers are measured. Args: rel_err, of those of this many ranks; micro, the last micro-batch's number."""
    made = records(brought)
    rows = [("logic", w, 0, "buffer", "norm.mean", rel_err if w == size else 0.0, 1e-10, float("nan")) for w in made.world_sizes]
    errors = pd.concat([made.errors, pd.DataFrame(rows, columns=made.errors.columns)], ignore_index=True)
    return with_legs(replace(made, errors=errors), "logic", consumed=lambda table: table.assign(micro=micro))


@pytest.mark.parametrize(
    ("size", "rel_err", "micro", "fails"),
    [(4, 0.3, 0, True), (2, 1e-9, 0, True), (2, 7e-10, 0, False), (4, float("nan"), 0, True), (4, 0.3, 1, False)],
)
def test_buffers_that_depend_on_the_ranks(size: int, rel_err: float, micro: int, fails: bool) -> None:
    """All ranks agree, and the statistics are one rank's; with several micro-batches nobody can tell."""
    verdict = judge_equivalence(with_buffers(size, rel_err, micro=micro), POLICY)

    assert failed(verdict) == (["logic leg: buffers after the first update, worst"] if fails else [])
    assert not fails or (verdict.action.startswith("buffers: ") and "norm.mean" in verdict.action)


@pytest.mark.parametrize(("rel_err", "fails"), [(0.3, True), (1e-9, True), (7e-10, False), (float("nan"), True)])
def test_averages_that_depend_on_the_ranks(rel_err: float, fails: bool) -> None:
    """Weights agree and the average of them does not, however many micro-batches there are."""
    made = with_buffers(4, rel_err, micro=1)
    verdict = judge_equivalence(replace(made, errors=made.errors.replace({"stage": {"buffer": "average"}})), POLICY)

    assert failed(verdict) == (["logic leg: averages after the first update, worst"] if fails else [])
    assert not fails or (verdict.action.startswith("averages: ") and "norm.mean" in verdict.action)


def test_a_gradient_that_changes_on_one_rank_is_no_broken_link() -> None:
    """What hooks keep from one update to the next makes repeats differ, too."""
    made = with_leg(records(OWN), "soak", 2, digests=change("sha256", "other", stage="again", step=3, rank=1))
    wrong = replace(made, errors=changed(made.errors, "rel_err", 0.5, leg="logic", stage="reduced", step=1))

    assert judge_equivalence(made, POLICY).action.startswith("intermittent: ")
    assert failed(judge_equivalence(wrong, POLICY))[0].startswith("logic leg")
