"""gradient_equivalence: clean trainers pass, bits and errors fail at their edges, evidence that is missing is named, the control works."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers_equivalence import (
    BUFFER,
    OWN,
    POLICY,
    STEPS,
    TENSORS,
    change,
    changed,
    errors,
    records,
    with_leg,
    with_legs,
    without_leg,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.canonical import canonical_json
from validation.equivalence import judge_equivalence, unreadable
from validation.equivalence_evidence import missing_evidence
from validation.equivalence_legs import LEGS, is_own, required_legs
from validation.records import Condition, EquivalenceRecords
from validation.verdict import GateVerdict, Outcome

TRAINERS = {"ours": (), "own": OWN, "own-step": ("step", "sampler"), "own-evaluation": ("evaluate",), "all": ("wrap", "step", "evaluate")}


def failed(verdict: GateVerdict) -> list[str]:
    """Names of failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


# Clean runs and the control


@pytest.mark.parametrize("brought", TRAINERS.values(), ids=TRAINERS)
def test_clean_run_passes(brought: tuple[str, ...]) -> None:
    """Right samples, right bits and errors within the noise pass, with the control caught, whoever wrote the trainer."""
    verdict = judge_equivalence(records(brought), POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason
    assert verdict.control is not None
    assert verdict.control.caught
    assert all(not item.action for item in verdict.checks)


def test_cost_is_told() -> None:
    """What the gate cost stands beside what it judges."""
    notes = judge_equivalence(records(), POLICY).notes

    assert "Cost: 30 worker-seconds; one plain run of 6 steps, which all this judges, took 1.5 s: 20 times that." in notes


@pytest.mark.parametrize("planted", [errors(legs=(("training", 2),)), errors(legs=()), pd.DataFrame()], ids=["clean", "empty", "none"])
def test_missed_control_is_inconclusive(planted: pd.DataFrame) -> None:
    """A planted defect that is not seen takes the verdict's word away."""
    verdict = judge_equivalence(records(planted_errors=planted), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert verdict.control is not None
    assert not verdict.control.caught
    assert "positive control was missed" in verdict.reason


def test_a_control_that_stopped_does_not_hide_what_stopped_the_run() -> None:
    """The legs say what happened, and what to do about it; the control's own end explains nothing."""
    made = replace(with_leg(records(), "exact", 4, stopped="no word from rank 3"), planted_errors=errors(legs=()))

    verdict = judge_equivalence(made, POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "it stopped: no word from rank 3" in verdict.reason
    assert verdict.action.startswith("mend what stopped the run")
    assert any("control was not tried" in note for note in verdict.notes)


# Bits


@pytest.mark.parametrize(
    ("leg", "where", "words", "kind"),
    [
        pytest.param(
            "exact",
            {"rank": 2, "step": 3, "tensor": "head.weight"},
            "gradient before clipping, tensor head.weight, W=4, rank 2",
            "unreduced tensors",
            id="one-rank",
        ),
        pytest.param("exact", {"step": 3}, "gradient before clipping, tensor body.bias, W=4, rank 0", "world size", id="world-size"),
        pytest.param("exact", {"step": 3, "stage": "buffer"}, f"buffer, tensor {BUFFER}, W=4, rank 0", "buffers", id="buffer"),
        pytest.param("exact", {"step": 3, "stage": "weight"}, "update, tensor body.bias, W=4, rank 0", "world size", id="update"),
        pytest.param("real", {"step": 3, "stage": "weight"}, "update, tensor body.bias, W=4, rank 0", "world size", id="own-sizes"),
    ],
)
def test_other_bits_of_our_trainer(leg: str, where: dict[str, Any], words: str, kind: str) -> None:
    """The first divergence of bits is named by step, stage, tensor, world size and rank, and sorted."""
    verdict = judge_equivalence(with_leg(records(), leg, 4, digests=change("sha256", "other", **where)), POLICY)

    assert failed(verdict) == [f"{leg} leg: digests that differ"]
    assert f"first at step 3, {words}" in verdict.reason
    assert verdict.action.startswith(f"{kind}: ")


@pytest.mark.parametrize(
    ("where", "kind"),
    [
        pytest.param({"rank": 1}, "no reduction", id="nothing-reduced"),
        pytest.param(
            {"rank": 1, "step": 0, "stage": ("reduced", "clipped"), "tensor": "head.weight"}, "unreduced tensors", id="one-tensor"
        ),
        pytest.param({"rank": 1, "stage": ("clipped", "weight")}, "clipping", id="own-norm"),
        pytest.param({"rank": 1, "stage": "weight"}, "initial weights", id="other-start"),
        pytest.param({"rank": 1, "stage": "weight", "step": (4, 5)}, "update", id="skipped-later"),
        pytest.param({"rank": 1, "stage": "buffer"}, "buffers", id="statistics"),
    ],
)
def test_ranks_of_an_own_trainer_disagree(where: dict[str, Any], kind: str) -> None:
    """Ranks of one world size have to hold the same bits at every stage."""
    verdict = judge_equivalence(with_leg(records(OWN), "own", 2, digests=change("sha256", "other", **where)), POLICY)

    assert failed(verdict) == ["own leg: digests that differ between ranks"]
    assert "W=2, rank 1" in verdict.reason
    assert verdict.action.startswith(f"{kind}: ")


def test_own_step_that_clips_on_one_rank() -> None:
    """A step that does it all shows no gradient before clipping; the leg without clipping tells that ranks agreed before it."""
    off_after = change("sha256", "other", rank=1, stage=("clipped", "weight"))
    made = with_leg(records(("step",)), "own", 2, digests=lambda table: off_after(table).query("stage != 'reduced'"))
    both = with_leg(made, "unclipped", 2, digests=off_after)

    assert judge_equivalence(made, POLICY).action.startswith("clipping: ")
    assert judge_equivalence(both, POLICY).action.startswith("no reduction: ")


def test_rank_without_a_gradient() -> None:
    """A tensor whose gradient one rank never got is named as unreduced when its weights part."""

    def lost(table: pd.DataFrame) -> pd.DataFrame:
        kept = table[~((table["rank"] == 1) & (table["tensor"] == "head.weight") & table["stage"].isin(["reduced", "clipped"]))]
        return changed(kept, "sha256", "other", rank=1, tensor="head.weight", stage="weight")

    verdict = judge_equivalence(with_leg(records(OWN), "own", 2, digests=lost), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert "some ranks have no gradient of head.weight and others have" in verdict.action


def test_majority_is_the_reference_without_one_worker() -> None:
    """Without W=1 the odd one out is named, not the majority."""
    made = with_leg(records(), "exact", 2, digests=change("sha256", "a-first-by-name", rank=0, step=0, stage="reduced", tensor="body.bias"))
    verdict = judge_equivalence(replace(made, world_sizes=(2, 4)), POLICY)

    assert "tensor body.bias, W=2, rank 0" in verdict.reason or "W=1" in verdict.reason
    assert [item.observed for item in verdict.checks if item.name == "exact leg: digests that differ"] == [1.0]


def test_final_states_differ() -> None:
    """A rank of ours whose final state differs fails although all digests agree; of an own trainer it is said."""
    other = lambda states: (*states[:-1], "other")  # noqa: E731 - one word for both
    ours = judge_equivalence(with_leg(records(), "exact", 4, states=other), POLICY)
    own = judge_equivalence(with_leg(records(OWN), "own", 4, states=other), POLICY)

    assert failed(ours) == ["exact leg: final states that differ"]
    assert "first at W=4, rank 3" in ours.reason
    assert Outcome.PASS is own.outcome
    assert any(note.startswith("Final states differ between ranks at W=4") for note in own.notes)


# Errors against the reference


@pytest.mark.parametrize("stage", ["reduced", "clipped", "weight"])
@pytest.mark.parametrize(
    ("in_noise", "outcome"),
    [
        pytest.param(8.0, Outcome.PASS, id="at-the-limit"),
        pytest.param(np.nextafter(8.0, 9.0), Outcome.FAIL, id="one-ulp-above"),
        pytest.param(math.nan, Outcome.FAIL, id="nan"),
        pytest.param(math.inf, Outcome.FAIL, id="infinite"),
        pytest.param(-1.0, Outcome.FAIL, id="negative"),
    ],
)
def test_error_at_the_limit(in_noise: float, outcome: Outcome, stage: str) -> None:
    """One tensor's error passes at the limit exactly and at nothing beyond it, at every stage."""
    where = {"leg": "logic", "step": 1, "tensor": "head.weight", "stage": stage, "world_size": 2}
    found = changed(errors().assign(noise=1.0, rel_err=1.0), "rel_err", in_noise, **where)
    verdict = judge_equivalence(records(errors=found), POLICY)

    assert outcome is verdict.outcome
    assert outcome is Outcome.PASS or "first at step 1, W=2, tensor head.weight" in verdict.reason


@pytest.mark.parametrize(
    ("rel_err", "noise", "outcome"),
    [
        pytest.param(0.0, 0.0, Outcome.PASS, id="exact-without-noise"),
        pytest.param(1e-30, 0.0, Outcome.FAIL, id="error-without-noise"),
        pytest.param(0.0, math.nan, Outcome.FAIL, id="noise-nan"),
        pytest.param(1.0, math.inf, Outcome.FAIL, id="noise-infinite"),
    ],
)
def test_noise_edges(rel_err: float, noise: float, outcome: Outcome) -> None:
    """An estimate of no noise allows no error, and a broken estimate allows nothing."""
    found = changed(changed(errors(), "rel_err", rel_err, tensor="body.bias"), "noise", noise, tensor="body.bias")

    assert outcome is judge_equivalence(records(errors=found), POLICY).outcome


def off(
    leg: str | tuple[str, ...], rel_err: float, scale: float = 1.0, brought: tuple[str, ...] = OWN,
    more: Mapping[int, tuple[float, float]] | None = None, **where: Any,
) -> EquivalenceRecords:  # fmt: skip
    """An own trainer whose errors are `rel_err` in some rows; more: world size -> (rel_err, scale)."""
    found = changed(changed(errors(brought), "rel_err", rel_err, leg=leg, **where), "scale", scale, leg=leg, **where)
    for size, (error, part) in (more or {}).items():
        found = changed(changed(found, "rel_err", error, leg=leg, world_size=size), "scale", part, leg=leg, world_size=size)
    return records(brought, errors=found)


EVERYTHING = ("logic", "training")


@pytest.mark.parametrize(
    ("made", "first", "kind"),
    [
        pytest.param(
            off(EVERYTHING, 0.5, 0.5, world_size=2, more={4: (0.75, 0.25)}),
            "logic leg: gradient before clipping",
            "factor: every tensor is off by the same factor 0.25 = 1/W",
            id="divided-twice",
        ),
        pytest.param(
            off(EVERYTHING, 0.5, 0.5),
            "logic leg: gradient before clipping",
            "factor: every tensor is off by the same factor 0.5 = 1/A",
            id="over-micro-batches",
        ),
        pytest.param(
            off(EVERYTHING, 0.8, 0.7, world_size=4, tensor="head.weight"),
            "logic leg: gradient before clipping",
            "some tensors: only tensor head.weight",
            id="one-tensor",
        ),
        pytest.param(off(EVERYTHING, 0.5, 0.9, world_size=(2, 4)), "logic leg: gradient before clipping", "per rank: ", id="mean-of-means"),
        pytest.param(off(EVERYTHING, 0.5, 0.9), "logic leg: gradient before clipping", "per micro batch: ", id="micro-batches"),
        pytest.param(off(EVERYTHING, 0.5, 0.9, stage=("clipped", "weight")), "logic leg: gradient handed", "clipping: ", id="clipping"),
        pytest.param(off(EVERYTHING, 0.5, 0.9, stage="weight"), "logic leg: update", "update: ", id="update"),
        pytest.param(off(EVERYTHING, 1.0, 0.0, stage="weight"), "logic leg: update", "nothing moves: ", id="no-update"),
        pytest.param(off("logic", 1.0, 0.2, world_size=4), "logic leg: gradient before clipping", "initial weights: ", id="other-start"),
        pytest.param(off("training", 4e-3), "training leg: gradient before clipping", "precision: ", id="bfloat16"),
        pytest.param(off("fast", 0.4, 0.8, brought=()), "fast leg: gradient before clipping", "torch reduction: ", id="torch"),
        pytest.param(
            off((*EVERYTHING, "unclipped"), 0.4, 0.8, ("step",), world_size=4),
            "logic leg: gradient handed",
            "per rank: ",
            id="own-step",
        ),
        pytest.param(
            off("logic", 0.4, 0.8, ("step",), world_size=4, step=2), "logic leg: gradient handed", "clipping: ", id="own-step-clips"
        ),
    ],
)
def test_first_error_is_sorted(made: EquivalenceRecords, first: str, kind: str) -> None:
    """The first failed check names leg and stage, and its action the kind."""
    verdict = judge_equivalence(made, POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert verdict.reason.startswith(first)
    assert verdict.action.startswith(kind), verdict.action


def test_later_stages_follow_from_the_first() -> None:
    """What fails because something before it failed says so instead of guessing."""
    verdict = judge_equivalence(off("logic", 0.5, 0.5, world_size=4), POLICY)
    actions = {item.name: item.action for item in verdict.checks if item.passed is False}

    assert "follows from the gradient before clipping at step 0" in actions.values()


def test_narrow_collectives_are_named() -> None:
    """A leg that lost precision names the types its collectives carried."""
    made = with_leg(off("training", 4e-3), "training", 4, collectives=lambda table: table.assign(dtype="bfloat16"))

    assert judge_equivalence(made, POLICY).action.endswith("collectives of this leg carried bfloat16")


@pytest.mark.parametrize(
    ("rel_err", "outcome"),
    [(1e-4, Outcome.PASS), (np.nextafter(1e-4, 1), Outcome.FAIL), (math.nan, Outcome.FAIL), (-1.0, Outcome.FAIL)],
    ids=["at-the-limit", "one-ulp-above", "nan", "negative"],
)
def test_slopes(rel_err: float, outcome: Outcome) -> None:
    """Finite differences name the tensor whose formula is wrong: the reference shares such a fault."""
    made = records()
    verdict = judge_equivalence(replace(made, slopes=changed(made.slopes, "rel_err", rel_err, tensor="body.weight")), POLICY)

    assert outcome is verdict.outcome
    assert outcome is Outcome.PASS or (verdict.action.startswith("shared: ") and "body.weight" in verdict.action)


def test_excluded_slopes_are_told() -> None:
    """Without finite differences there is a note instead of a check."""
    verdict = judge_equivalence(records(slopes=pd.DataFrame(), slopes_excluded="the loss is computed in float32"), POLICY)

    assert Outcome.PASS is verdict.outcome
    assert any("No finite differences: the loss is computed in float32." in note for note in verdict.notes)


# Legs and missing evidence


def test_required_legs() -> None:
    """The kind of trainer, its hooks and the conditions decide which legs are held, and at which world sizes."""
    ours, own = dict.fromkeys(required_legs((), (1, 2, 8))), dict.fromkeys(required_legs(("step", "save"), (2, 8)))
    excluded = (Condition(name="spike", held=False, detail="the loss raises"),)

    assert {"exact", "real", "logic", "training", "fast", "spike", "overflow", "soak"} == {name for name, _ in ours}
    assert {"own", "logic", "unclipped", "training", "spike", "overflow", "soak"} == {name for name, _ in own}
    assert {("exact", 2), ("spike", 1), ("soak", 2), ("training", 8)} <= set(ours)
    assert {("unclipped", 2), ("spike", 2), ("soak", 8)} <= set(own)
    assert ("real", 2) not in ours
    assert "spike" not in {name for name, _ in required_legs((), (1, 2), excluded)}
    assert not is_own(("evaluate", "save", "load"))


def dropped(field: str, query: str) -> Callable[[EquivalenceRecords], EquivalenceRecords]:
    """Rows of a table of all legs left out."""
    return lambda made: replace(made, legs=tuple(replace(leg, **{field: getattr(leg, field).query(query)}) for leg in made.legs))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        pytest.param(lambda made: replace(made, world_sizes=(1, 2, 4, 8)), "exact leg, W=8", id="world-size"),
        pytest.param(lambda made: replace(made, world_sizes=(1,)), "a world size above 1", id="one-rank-only"),
        pytest.param(lambda made: replace(made, world_sizes=()), "a world size above 1", id="no-world-size"),
        pytest.param(lambda made: replace(made, conditions=()), "the hard conditions", id="conditions"),
        pytest.param(lambda made: replace(made, steps=5), "6 steps in every leg (they had 5)", id="steps"),
        *(
            pytest.param(lambda made, name=name, size=size: without_leg(made, name, size), f"{name} leg, W={size}", id=f"{name}-{size}")
            for name, size in required_legs((), (1, 2, 4))
        ),
        pytest.param(
            lambda made: with_leg(made, "logic", 2, stopped="no progress"), "logic leg, W=2 (it stopped: no progress)", id="stopped"
        ),
        pytest.param(
            lambda made: with_leg(made, "spike", 4, stopped="rank 1 died"), "spike leg, W=4 (it stopped: rank 1 died)", id="spike"
        ),
        pytest.param(
            dropped("digests", "world_size < 4 or rank != 3"), "digests of all 3 tensors (stage reduced) of rank 3, step 0", id="rank"
        ),
        pytest.param(dropped("digests", "step != 4 or stage != 'clipped'"), "digests of the clipped gradient of every step", id="stage"),
        pytest.param(
            lambda made: with_leg(made, "exact", 4, digests=change("sha256", "", rank=2, step=5, stage="weight", tensor="body.bias")),
            "(stage weight) of rank 2, step 5 in exact leg, W=4",
            id="blank-digest",
        ),
        pytest.param(lambda made: with_leg(made, "exact", 4, digests=pd.DataFrame()), "digests in exact leg, W=4", id="no-digests"),
        pytest.param(dropped("updates", "step != 3 or rank != 1"), "updates of rank 1, step 3", id="update"),
        pytest.param(
            lambda made: with_leg(made, "exact", 4, states=("a", "a")), "final states of all 4 ranks in exact leg, W=4", id="states"
        ),
        pytest.param(dropped("consumed", "step != 2"), "consumed samples of every step in exact leg, W=1", id="consumed"),
        pytest.param(dropped("ledger", "step != 2"), "a ledger of every step in exact leg, W=1", id="ledger"),
        pytest.param(
            lambda made: with_leg(made, "exact", 2, ledger=lambda table: table.assign(position=0.5)), "holds no whole numbers", id="odd"
        ),
        pytest.param(dropped("streams", "step < 0"), "random streams in exact leg, W=1", id="streams"),
        pytest.param(lambda made: replace(made, expected=made.expected.query("step < 5")), "consumes in every step", id="expected"),
        pytest.param(lambda made: replace(made, expected_order=made.expected_order[:-1]), "the expected order of 48 samples", id="order"),
        pytest.param(lambda made: replace(made, expected_rates=made.expected_rates[:-1]), "the learning rates of 6 steps", id="rates"),
        pytest.param(lambda made: replace(made, slopes=pd.DataFrame()), "slopes by finite differences", id="slopes"),
        pytest.param(lambda made: replace(made, errors=pd.DataFrame()), "errors against the reference (leg, world_size", id="no-errors"),
        pytest.param(lambda made: replace(made, errors=made.errors.query("leg != 'fast'")), "in the fast leg, W=4", id="error-leg"),
        pytest.param(
            lambda made: replace(made, errors=made.errors.iloc[1:]), "errors of all 3 tensors (reduced) at step 0", id="error-row"
        ),
        pytest.param(
            lambda made: replace(made, errors=made.errors.query("stage != 'weight'")), "(weight) at step 0 in the logic", id="error-stage"
        ),
        pytest.param(dropped("digests", "stage != 'again' or step < 4"), "5 repeats in soak leg, W=2 (it made 4)", id="soak"),
        pytest.param(
            lambda made: with_legs(made, "spike", consumed=change("poisoned", value=False)), "the poisoned step in spike leg", id="poison"
        ),
    ],
)
def test_missing_evidence_is_named(spoil: Callable[[EquivalenceRecords], EquivalenceRecords], words: str) -> None:
    """What had to be measured and was not is named."""
    made = spoil(records())

    assert any(words in missing for missing in (*missing_evidence(made, POLICY), *unreadable(made)))


def test_stopped_leg_alone_is_inconclusive() -> None:
    """A leg that stopped is missing, not wrong."""
    verdict = judge_equivalence(with_leg(records(), "training", 4, stopped="no progress for 120 s"), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "no progress for 120 s" in verdict.reason
    assert "seatrial gate gradient_equivalence" in verdict.action


def test_clean_evidence_is_complete() -> None:
    """Nothing is missing in clean records of any trainer."""
    assert all(not missing_evidence(records(brought), POLICY) for brought in TRAINERS.values())


def test_unknown_legs_are_no_matter() -> None:
    """A leg that nobody asked for changes nothing."""
    made = records()
    extra = replace(made, legs=(*made.legs, replace(made.legs[0], name="planted", stopped="as planned")))

    assert canonical_json(judge_equivalence(made, POLICY)) == canonical_json(judge_equivalence(extra, POLICY))


# Tables


SPOILED: dict[str, Callable[[EquivalenceRecords], EquivalenceRecords]] = {
    "clean": lambda made: made,
    "bits": lambda made: with_legs(made, "own", digests=change("sha256", "other", rank=1, tensor="head.weight")),
    "errors": lambda made: replace(made, errors=changed(made.errors, "rel_err", 0.5, leg="logic", world_size=2)),
    "samples": lambda made: with_legs(made, "own", consumed=change("sample_id", 100, rank=1)),
    "streams": lambda made: with_legs(made, "own", streams=change("state", "same", step=(2, 3))),
    "rates": lambda made: with_legs(made, "logic", updates=change("rates", "[0.3]", step=2)),
    "unknown": lambda made: with_legs(made, "own", consumed=change("sample_id", -1, rank=0)),
}
TABLES = ("digests", "consumed", "streams", "updates", "collectives", "ledger")


@settings(max_examples=14, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from(sorted(SPOILED)))
def test_row_order_does_not_matter(seed: int, kind: str) -> None:
    """Shuffled tables give the same verdict, and it has a canonical JSON form."""
    made = SPOILED[kind](records(("gradients", "sampler", "evaluate")))
    legs = tuple(replace(leg, **{name: getattr(leg, name).sample(frac=1, random_state=seed) for name in TABLES}) for leg in made.legs)
    frames = {name: getattr(made, name).sample(frac=1, random_state=seed) for name in ("errors", "planted_errors", "expected", "slopes")}
    shuffled = replace(made, legs=legs[::-1], **frames)

    assert canonical_json(judge_equivalence(made, POLICY)) == canonical_json(judge_equivalence(shuffled, POLICY))


def test_plots_hold_no_zero_on_a_log_axis() -> None:
    """An exact tensor stands in the table and is left out of the logarithmic picture."""
    verdict = judge_equivalence(records(errors=changed(errors(), "rel_err", 0.0, tensor="body.bias")), POLICY)

    assert all(value > 0 for plot in verdict.plots for series in plot.series for value in series.y)
    assert {"logic", "training", "fast"} == {series.name for plot in verdict.plots for series in plot.series}


def test_tables_for_the_reader() -> None:
    """Distances, legs, poisons, evaluations, conditions and collectives stand in tables of one width each."""
    verdict = judge_equivalence(records(("gradients", "evaluate")), POLICY)

    assert len(verdict.tables) == 6
    assert all(len(row) == len(table.columns) for table in verdict.tables for row in table.rows)
    assert len(verdict.checks) < 30


def test_every_leg_says_what_it_shows() -> None:
    """The list of legs is what the page and the probe go by."""
    assert all(kind.shows for kind in LEGS.values())
    assert POLICY.steps.value == STEPS
    assert len(TENSORS) == 3


def test_update_before_the_gradient_it_spoils() -> None:
    """A wrong update at one step makes the next gradient wrong: the update is named."""
    wrong = off("logic", 0.5, 0.9, stage="weight", world_size=2)
    late = changed(wrong.errors, "rel_err", 0.01, leg="logic", world_size=2, step=(1, 2, 3, 4, 5), stage=("reduced", "clipped"))
    verdict = judge_equivalence(replace(wrong, errors=late), POLICY)

    assert verdict.reason.startswith("logic leg: update, worst tensor (first at step 0")
    assert verdict.action.startswith("update: ")


def test_buffers_after_gradients() -> None:
    """Statistics of one rank spoil the gradient first, and the buffers after the update."""
    made = with_leg(off(EVERYTHING, 0.4, 0.9, world_size=(2, 4)), "own", 2, digests=change("sha256", "other", rank=1, stage="buffer"))
    verdict = judge_equivalence(made, POLICY)

    assert verdict.action.startswith("per rank: ")
    assert "own leg: digests that differ between ranks" in failed(verdict)
