"""kill_and_resume: every outcome, at its edges, and its controls caught and missed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers_recovery import (
    BACKWARD,
    PLAN,
    STARTS,
    WINDOW,
    consumed,
    killed,
    killed_record,
    ledger,
    one_batch_back,
    record,
    records,
    recovery,
    states,
    twin,
    ways,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.canonical import canonical_json
from validation.policy import parse_policy
from validation.records import Condition, PlannedFault
from validation.recovery import HIDDEN, NO_MOMENTS, judge_recovery
from validation.recovery_checks import SAMPLES
from validation.verdict import GateVerdict, Outcome

POLICY = parse_policy().kill_and_resume


def failed(verdict: GateVerdict) -> list[str]:
    """Names of failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


def slow(**changes: Any) -> Any:
    """A clean run whose first way back took another time."""
    return killed(record=killed_record(recoveries=(recovery(**changes), *ways()[1:])))


def test_clean_proof_passes() -> None:
    """Four kills, nothing lost at a load, the twin's states, samples and ledger, times within the budget, both controls caught."""
    verdict = judge_recovery(records(), POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason
    assert "after 4 deaths nothing was lost at a load" in verdict.reason
    assert verdict.control is not None
    assert verdict.control.caught
    assert (
        verdict.control.planted, verdict.control.expected
    ) == ("repeated data; empty moments", "difference from the twin: samples; state lost at a load")  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "checks", "words"),
    [
        pytest.param(
            {"record": killed_record(state_sha256_by_rank=("state", "torn"))},
            ["difference from the twin: final states"], "first at rank 1", id="state",
        ),
        pytest.param(
            {"ledger": ledger(one_batch_back())}, ["difference from the twin: ledger"],
            "first at position 20 (step 5, lane 0): sample 16, expected sample 20 at position 20; repeated samples: 16, 17, 18, 19; "
            "missing samples: 156, 157, 158, 159", id="repeated-batch",
        ),
        pytest.param(
            {"ledger": ledger([*range(20), *range(24, 160)])}, ["difference from the twin: ledger"],
            "missing samples: 20, 21, 22, 23", id="lost-batch",
        ),
        pytest.param(
            {"consumed": consumed(one_batch_back())}, ["difference from the twin: samples"],
            "first at step 5: it consumed the samples of step 4", id="consumed-batch",
        ),
        pytest.param(
            {"record": killed_record(ledger_sha256="other")}, ["difference from the twin: ledger digest"], "run 0", id="digest"
        ),
    ],
)  # fmt: skip
def test_difference_from_the_twin_fails(changes: dict[str, Any], checks: list[str], words: str) -> None:
    """Anything repeated, lost or left in another state fails and is located."""
    verdict = judge_recovery(records(killed=(killed(**changes),)), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert checks == failed(verdict)
    assert words in verdict.reason


@pytest.mark.parametrize(
    ("total_s", "outcome"),
    [
        pytest.param(900.0, Outcome.PASS, id="at-the-budget"),
        pytest.param(np.nextafter(900.0, 0.0), Outcome.PASS, id="one-ulp-below"),
        pytest.param(np.nextafter(900.0, 1e3), Outcome.FAIL, id="one-ulp-above"),
    ],
)
def test_budget(total_s: float, outcome: Outcome) -> None:
    """A recovery passes at the budget exactly; beyond it the longest segment is named."""
    verdict = judge_recovery(records(killed=(slow(rendezvous_s=899.2, total_s=float(total_s)),)), POLICY)

    assert outcome is verdict.outcome
    assert outcome is Outcome.PASS or "its longest segment is rendezvous" in verdict.action


@pytest.mark.parametrize("segment", ["detect_s", "total_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1], ids=["nan", "infinite", "negative"])
def test_broken_clock_fails(segment: str, value: float) -> None:
    """A time that is not a finite time is a broken measurement and fails."""
    verdict = judge_recovery(records(killed=(slow(**{segment: value}),)), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert failed(verdict) == ["recovery time"]


def fewer(count: int) -> Any:
    """A run of which only the first faults fired."""
    fired, back = tuple(PLAN)[:count], ways()[:count]
    planned = tuple(PlannedFault(fault=fault, purpose="") for fault in fired)
    return killed(record=killed_record(faults_fired=fired, recoveries=back), planned=planned, states=states(STARTS[:count]))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"killed": ()}, "a killed run", id="empty"),
        pytest.param({"record": {"faults_fired": tuple(PLAN)[:3]}}, f"the fault {WINDOW} did not fire", id="unfired"),
        pytest.param({"killed": (killed(planned=()),)}, "a planned fault", id="no-plan"),
        pytest.param({"killed": (fewer(3),)}, "4 kills in one run, each in another phase (3 fired)", id="three-kills"),
        pytest.param({"record": {"recoveries": ways()[:3]}}, "a recovery for each of 4 kills (3 recorded)", id="no-recovery"),
        pytest.param({"record": {"state_sha256_by_rank": ("state",)}}, "final states of all 2 ranks", id="one-rank"),
        pytest.param({"record": {"steps": 39}}, "the twin's recipe, seed, number of steps", id="other-length"),
        pytest.param({
            "twin": twin(record=record(state_sha256_by_rank=("state", "other"))),
            "killed": (killed(record=killed_record(state_sha256_by_rank=("state", "other"))),),
        }, "whose ranks agree", id="twin-disagrees"),
        pytest.param({"twin": twin(record=record(attempts=2))}, "a twin that ran once", id="twin-restarted"),
        pytest.param({"twin": twin(ledger=ledger().iloc[:0])}, "the ledger or its twin's is empty", id="empty-twin"),
        pytest.param({"killed": (killed(ledger=pd.DataFrame()),)}, "the ledger or its twin's is empty", id="empty-ledger"),
        pytest.param({"killed": (killed(ledger=ledger().drop(columns="step")),)}, "lacks the columns step", id="ledger-column"),
        pytest.param({"killed": (slow(total_s=2.0),)}, "add up to its total (1.000 s of 2.000 s)", id="segments"),
        pytest.param({"twin": twin(states=pd.DataFrame())}, "the twin: its states", id="twin-states"),
        pytest.param({"killed": (killed(states=states().drop(columns="name")),)}, "run 0: its states", id="state-column"),
        pytest.param({"killed": (killed(consumed=consumed().iloc[:0]),)}, "run 0: its consumed samples", id="consumed"),
        pytest.param(
            {"killed": (killed(states=states(STARTS).query("moment != 'end'")),)}, "the last state of every rank by name (0 of 2)", id="end"
        ),
        pytest.param(
            {"killed": (killed(states=states(STARTS).query("not (moment == 'saved' and step == 20)")),)},
            "what was saved at step 20, which attempt 2 loaded", id="unsaved",
        ),
        pytest.param(
            {"killed": (killed(states=states(STARTS).query("not (moment == 'loaded' and step == 5)")),)},
            f"the state that was loaded at step 5 after {BACKWARD}", id="unloaded",
        ),
    ],
)  # fmt: skip
def test_missing_evidence_is_inconclusive(changes: dict[str, Any], words: str) -> None:
    """What had to be shown and was not is named, and nothing passes. "record": of the killed run."""
    if "record" in changes:
        changes = {"killed": (killed(record=killed_record(**changes["record"])),)}
    verdict = judge_recovery(records(**changes), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome, verdict.reason
    assert words in verdict.reason
    assert "seatrial gate kill_and_resume" in verdict.action


def test_a_resume_from_too_old_a_checkpoint_fails() -> None:
    """More updates were made again than the death had cost: the newest checkpoint was not used, and the reason is told."""
    older = (*ways()[:1], recovery(fault=tuple(PLAN)[1], resumed_from_step=15), *ways()[2:])
    run = killed(
        record=killed_record(recoveries=older, refused=("checkpoint step-00000020 is damaged",)), states=states((5, 15, 20, 30))
    )  # fmt: skip
    verdict = judge_recovery(records(killed=(run,)), POLICY)

    assert failed(verdict) == ["checkpoint resumed from"]
    assert "refused: checkpoint step-00000020 is damaged" in verdict.reason
    assert "is 15 updates, has to be >= 20 updates" in verdict.reason


def test_resume_on_fewer_ranks_passes() -> None:
    """A run that comes back on one rank has one final state, equal to the twin's two; each rank's own stream is left out."""
    back = tuple(replace(way, resumed_world_size=1) for way in ways())
    run = killed(record=killed_record(recoveries=back, state_sha256_by_rank=("state",)), states=states(STARTS, ranks=(2, 1)))
    verdict = judge_recovery(records(killed=(run,)), POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason


@pytest.mark.parametrize("which", ["repeated", "stale"])
def test_a_missed_control_is_inconclusive(which: str) -> None:
    """A planted run that looks like its twin takes the verdict's word away, whatever the other one shows."""
    verdict = judge_recovery(records(**{which: killed(defect="a defect nobody sees")}), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "positive control was missed: a defect nobody sees" in verdict.reason


def test_an_optimizer_without_moments() -> None:
    """Plain SGD has none to lose: the other control stands alone, and a note says so."""
    usual = records()
    twin, run, again = (
        replace(run, states=run.states[~run.states["name"].str.startswith("optimizer/")])
        for run in (usual.twin, usual.killed[0], usual.repeated)
    )
    verdict = judge_recovery(records(twin=twin, killed=(run,), repeated=again, stale=run), POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason
    assert NO_MOMENTS in verdict.notes
    assert verdict.control is not None
    assert verdict.control.expected == SAMPLES


@pytest.mark.parametrize("which", ["repeated", "stale"])
def test_a_failure_stands_when_a_control_is_missed(which: str) -> None:
    """A run that parts from its twin failed, whatever the planted ones show."""
    wrong = killed(record=killed_record(state_sha256_by_rank=("other", "state")))
    verdict = judge_recovery(records(killed=(wrong,), **{which: killed(defect="a defect nobody sees")}), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert "difference from the twin: final states" in verdict.reason
    assert HIDDEN in verdict.notes


def test_picture_and_tables_show_plan_states_and_segments() -> None:
    """Each recovery is one bar of six stacked segments that add up to the table's total; plan, loads and kinds of state are tables."""
    verdict = judge_recovery(records(), POLICY)
    plot, tables = verdict.plots[0], {table.title: table for table in verdict.tables}

    assert plot.stacked
    assert plot.series[0].x[:2] == ("death 1: rank 1, step 7, phase backward", "death 2: rank 0, step 20, phase collective")
    totals = [row[-1] for row in tables["Recovery by segment"].rows]
    assert [1.0] * 4 == totals == pytest.approx([sum(series.y[at] for series in plot.series) for at in range(4)])
    assert tables["Kill plan"].rows[0] == (0, "in the middle of epoch 1", BACKWARD, 2, 2, 5)
    assert [(0, attempt, step, 36, 0) for attempt, step in enumerate(STARTS, start=1)] == list(
        tables["States loaded, beside what was saved"].rows
    )
    assert {"weights": 2, "moments": 4, "position": 1}.items() <= dict(tables["What a state holds, by name"].rows).items()


def test_conditions_that_do_not_hold_are_notes() -> None:
    """What the gate could not make hard is said, in the words of whoever excluded it."""
    conditions = (Condition(name="dropout", held=False, detail="the recipe has none"), Condition(name="clipping", held=True, detail="0.1"))
    verdict = judge_recovery(records(conditions=conditions, brought=("save", "load")), POLICY)

    assert "Condition dropout does not hold: the recipe has none." in verdict.notes
    assert "The recipe brings its own save, load." in verdict.notes
    assert not any("clipping" in note for note in verdict.notes)


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**32 - 1), st.booleans())
def test_row_order_does_not_matter(seed: int, is_clean: bool) -> None:
    """Shuffled tables give the same verdict, and it has a canonical JSON form."""
    made = records() if is_clean else records(killed=(records().stale,))

    def shuffled(run: Any) -> Any:
        return replace(run, **{name: getattr(run, name).sample(frac=1, random_state=seed) for name in ("ledger", "states", "consumed")})

    mixed = replace(made, twin=shuffled(made.twin), killed=tuple(shuffled(run) for run in made.killed))

    assert canonical_json(judge_recovery(made, POLICY)) == canonical_json(judge_recovery(mixed, POLICY))


def test_unsaved_checkpoints_are_a_note() -> None:
    """A checkpoint that could not be written is said, and decides nothing: the run came back from an older one."""
    older = (*ways()[:1], recovery(fault=tuple(PLAN)[1], resumed_from_step=15), *ways()[2:])
    unsaved = killed(
        record=killed_record(recoveries=older, unsaved=("step 20: No space left on device",)), states=states((5, 15, 20, 30))
    )  # fmt: skip
    verdict = judge_recovery(records(killed=(unsaved,)), POLICY)

    assert verdict.outcome is Outcome.PASS, verdict.reason
    assert any("could not write 1 checkpoints" in note and "step 20: No space left" in note for note in verdict.notes)


@pytest.mark.parametrize("kind", ["stop", "launcher"])
def test_every_planned_death_needs_a_recovery(kind: str) -> None:
    """A stopped rank and a lost launcher are deaths like a kill."""
    fired = (*PLAN, f"{kind}:rank=0,step=35,phase=data,attempt=4")
    verdict = judge_recovery(records(killed=(killed(record=killed_record(faults_fired=fired)),)), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "a recovery for each of 5 kills (4 recorded)" in verdict.reason
