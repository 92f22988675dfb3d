"""kill_and_resume: every outcome, at its edges, and its control caught and missed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.canonical import canonical_json
from validation.errors import EvidenceError
from validation.policy import parse_policy
from validation.records import LEDGER_COLUMNS, Machine, Recovery, RecoveryRecords, RunRecord
from validation.recovery import judge_recovery, project_recovery, projection_lines
from validation.verdict import GateVerdict, Outcome

POLICY = parse_policy().kill_and_resume
MACHINE = Machine(device="cpu", devices=2, memory_gib=8.0, system="Linux x86_64", python="3.11", torch="2.13")
BACKWARD = "kill:rank=1,step=7,phase=backward,attempt=0"
COLLECTIVE = "kill:rank=0,step=20,phase=collective,attempt=1"


def recovery(**changes: Any) -> Recovery:
    """One way back of 1 s; name what a test is about."""
    usual = Recovery(
        fault=BACKWARD, world_size=2, resumed_world_size=2, resumed_from_step=5,
        detect_s=0.1, teardown_s=0.05, import_s=0.05, rendezvous_s=0.2, load_s=0.1, first_step_s=0.5, total_s=1.0,
    )  # fmt: skip
    return replace(usual, **changes)


def run(**changes: Any) -> RunRecord:
    """A run on two ranks that nobody killed."""
    usual = RunRecord(
        recipe="tiny", world_size=2, parallel="ddp", reduction="exact", precision="float32", steps=40, seed=0, state_sha256="state",
        state_sha256_by_rank=("state", "state"), ledger_sha256="ledger", throughput_sps=100.0, seconds=2.0, worker_seconds=4.0, attempts=1,
        faults_fired=(), recoveries=(), peak_memory_mib=100.0, machine=MACHINE,
    )  # fmt: skip
    return replace(usual, **changes)


def killed(**changes: Any) -> RunRecord:
    """A run killed twice, in a backward pass and in a collective, that ended as its twin."""
    ways = (recovery(), recovery(fault=COLLECTIVE, resumed_from_step=15))
    return run(**{"attempts": 3, "faults_fired": (BACKWARD, COLLECTIVE), "recoveries": ways, **changes})


def ledger(samples: Any = range(160)) -> pd.DataFrame:
    """Four samples a step in four lanes."""
    return pd.DataFrame([(p // 4, p % 4, p, sample) for p, sample in enumerate(samples)], columns=list(LEDGER_COLUMNS)).astype("int64")


def repeated() -> pd.DataFrame:
    """A resume that went one batch back: samples 16-19 again at step 5, the last batch lost."""
    return ledger([*range(20), *range(16, 156)])


def records(**changes: Any) -> RecoveryRecords:
    """A clean proof; name what a test is about."""
    clean = RecoveryRecords(
        twin=run(), twin_ledger=ledger(), killed=(killed(),), killed_ledgers=(ledger(),), planned=((BACKWARD, COLLECTIVE),),
        planted_defect="a resume that starts one batch too early",
        planted=killed(state_sha256_by_rank=("other", "other"), ledger_sha256="other"), planted_ledger=repeated(), state_mib=20.0,
    )  # fmt: skip
    return replace(clean, **changes)


def failed(verdict: GateVerdict) -> list[str]:
    """Names of failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


def test_clean_proof_passes() -> None:
    """Two kills, the twin's bytes and ledger, and times within the budget pass, with the control caught."""
    verdict = judge_recovery(records(), POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason
    assert "after 2 kills" in verdict.reason
    assert verdict.control is not None
    assert verdict.control.caught


@pytest.mark.parametrize(
    ("changes", "check", "words"),
    [
        pytest.param(
            {"killed": (killed(state_sha256_by_rank=("state", "torn")),)},
            "difference from the twin: final states", "first at rank 1", id="state",
        ),
        pytest.param(
            {"killed_ledgers": (repeated(),)}, "difference from the twin: ledger",
            "first at position 20 (step 5, lane 0): sample 16, expected sample 20 at position 20; repeated samples: 16, 17, 18, 19; "
            "missing samples: 156, 157, 158, 159", id="repeated-batch",
        ),
        pytest.param(
            {"killed_ledgers": (ledger([*range(20), *range(24, 160)]),)}, "difference from the twin: ledger",
            "missing samples: 20, 21, 22, 23", id="lost-batch",
        ),
        pytest.param(
            {"killed": (killed(ledger_sha256="other"),)}, "difference from the twin: ledger digest", "run 0", id="digest"
        ),
    ],
)  # fmt: skip
def test_difference_from_the_twin_fails(changes: dict[str, Any], check: str, words: str) -> None:
    """Anything repeated, lost or left in another state fails and is located."""
    verdict = judge_recovery(records(**changes), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert [check] == failed(verdict)
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
    slow = recovery(rendezvous_s=899.2, total_s=float(total_s))
    verdict = judge_recovery(records(killed=(killed(recoveries=(slow, recovery(fault=COLLECTIVE))),)), POLICY)

    assert outcome is verdict.outcome
    assert outcome is Outcome.PASS or "its longest segment is rendezvous" in verdict.action


@pytest.mark.parametrize("segment", ["detect_s", "total_s"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1], ids=["nan", "infinite", "negative"])
def test_broken_clock_fails(segment: str, value: float) -> None:
    """A time that is not a finite time is a broken measurement and fails."""
    broken = recovery(**{segment: value})
    verdict = judge_recovery(records(killed=(killed(recoveries=(broken, recovery(fault=COLLECTIVE))),)), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert failed(verdict) == ["recovery time"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"killed": (), "killed_ledgers": (), "planned": ()}, "killed runs with a ledger and a plan", id="empty"),
        pytest.param({"killed_ledgers": ()}, "1 runs, 0 ledgers", id="no-ledger"),
        pytest.param({"killed": (killed(faults_fired=(BACKWARD,)),)}, f"the fault {COLLECTIVE} did not fire", id="unfired"),
        pytest.param({"planned": ((),)}, "a planned fault", id="no-plan"),
        pytest.param(
            {"killed": (killed(faults_fired=(BACKWARD,), recoveries=(recovery(),)),), "planned": ((BACKWARD,),)},
            "2 kills in one run, each in another phase (1 fired)", id="one-kill",
        ),
        pytest.param(
            {"killed": (killed(faults_fired=(BACKWARD, BACKWARD)),), "planned": ((BACKWARD,),)},
            "each in another phase (1 fired)", id="one-phase",
        ),
        pytest.param({"killed": (killed(recoveries=(recovery(),)),)}, "a recovery for each of 2 kills (1 recorded)", id="no-recovery"),
        pytest.param({"killed": (killed(state_sha256_by_rank=("state",)),)}, "final states of all 2 ranks", id="one-rank"),
        pytest.param({"killed": (killed(steps=39),)}, "the twin's recipe, seed, number of steps", id="other-length"),
        pytest.param({"twin": run(state_sha256_by_rank=("state", "other"))}, "whose ranks agree", id="twin-disagrees"),
        pytest.param({"twin": run(attempts=2)}, "a twin that ran once", id="twin-restarted"),
        pytest.param({"twin_ledger": ledger().iloc[:0]}, "the ledger or its twin's is empty", id="empty-twin"),
        pytest.param({"killed_ledgers": (pd.DataFrame(),)}, "the ledger or its twin's is empty", id="empty-ledger"),
        pytest.param({"killed_ledgers": (ledger().drop(columns="step"),)}, "lacks the columns step", id="ledger-column"),
        pytest.param(
            {"killed": (killed(recoveries=(recovery(total_s=2.0), recovery())),)}, "add up to its total (1.000 s of 2.000 s)", id="segments"
        ),
    ],
)  # fmt: skip
def test_missing_evidence_is_inconclusive(changes: dict[str, Any], words: str) -> None:
    """What had to be shown and was not is named, and nothing passes."""
    verdict = judge_recovery(records(**changes), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome, verdict.reason
    assert words in verdict.reason
    assert "seatrial gate kill_and_resume" in verdict.action


def test_resume_on_fewer_ranks_passes() -> None:
    """A run that comes back on one rank has one final state, equal to the twin's two."""
    ways = (recovery(), recovery(fault=COLLECTIVE, resumed_world_size=1))
    verdict = judge_recovery(records(killed=(killed(recoveries=ways, state_sha256_by_rank=("state",)),)), POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"planted": killed(state_sha256_by_rank=("state", "moments")), "planted_ledger": ledger()}, id="state"),
        pytest.param({"planted": killed()}, id="ledger"),
    ],
)
def test_control_is_caught_by_state_or_ledger(changes: dict[str, Any]) -> None:
    """A planted defect counts as caught when either the state or the ledger differs."""
    verdict = judge_recovery(records(**changes), POLICY)

    assert Outcome.PASS is verdict.outcome
    assert verdict.control is not None
    assert verdict.control.caught


@pytest.mark.parametrize("planted_ledger", [ledger(), ledger().iloc[:0]], ids=["equal", "empty"])
def test_missed_control_is_inconclusive(planted_ledger: pd.DataFrame) -> None:
    """A planted run that looks like its twin, or left nothing to compare, takes the verdict's word away."""
    verdict = judge_recovery(records(planted=killed(), planted_ledger=planted_ledger), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "positive control was missed" in verdict.reason


def test_picture_and_table_show_the_segments() -> None:
    """Each recovery is one bar of six stacked segments that add up to the table's total."""
    verdict = judge_recovery(records(), POLICY)
    plot, table = verdict.plots[0], verdict.tables[0]

    assert plot.stacked
    assert plot.series[0].x == ("death 1: rank 1, step 7, phase backward", "death 2: rank 0, step 20, phase collective")
    assert [1.0, 1.0] == [row[-1] for row in table.rows] == pytest.approx([sum(series.y[at] for series in plot.series) for at in range(2)])


@settings(max_examples=20, deadline=None)
@given(st.randoms(use_true_random=False), st.booleans())
def test_row_order_does_not_matter(random: Any, clean: bool) -> None:
    """Shuffled ledgers give the same verdict, and it has a canonical JSON form."""
    made = records() if clean else records(killed_ledgers=(repeated(),))
    seed = random.randrange(2**32)
    shuffled = replace(
        made, twin_ledger=made.twin_ledger.sample(frac=1, random_state=seed),
        killed_ledgers=tuple(frame.sample(frac=1, random_state=seed) for frame in made.killed_ledgers),
    )  # fmt: skip

    assert canonical_json(judge_recovery(made, POLICY)) == canonical_json(judge_recovery(shuffled, POLICY))


def test_projection_by_hand() -> None:
    """Four times the ranks: 0.1 + 4 (0.1 + 0.2) + 0.1 + 0.5 = 1.9 s; 20 MiB in 0.1 s are 200 MiB/s for the 898.2 s that others leave."""
    found = project_recovery(recovery(), state_mib=20.0, budget_s=900.0)

    assert pytest.approx((found.total_s, found.headroom_s, found.load_mib_s)) == (1.9, 898.1, 200.0)
    assert pytest.approx(found.state_mib_in_budget) == 898.2 * 200


def test_projection_never_shrinks() -> None:
    """A group larger than the projected one is taken as measured, and a resume from the start bounds no state."""
    found = project_recovery(recovery(resumed_world_size=16, load_s=0.0), state_mib=20.0, budget_s=900.0)

    assert pytest.approx(found.total_s) == 0.9
    assert math.isinf(found.state_mib_in_budget)


@pytest.mark.parametrize("changes", [{"load_s": math.nan}, {"resumed_world_size": 0}], ids=["nan", "no-rank"])
def test_projection_refuses(changes: dict[str, Any]) -> None:
    """A recovery without sound times or ranks has no projection."""
    with pytest.raises(EvidenceError, match="Run the kill again"):
        project_recovery(recovery(**changes), state_mib=20.0, budget_s=900.0)


def test_projection_in_words_names_every_assumption() -> None:
    """The result, what grows, what stays, the load rate and what nobody measured; the gate's notes carry all of it."""
    lines = projection_lines(recovery(), 20.0, 900.0)
    notes = judge_recovery(records(), POLICY).notes

    assert lines[0].startswith("Projected to 8 GPUs of one warm node: 1.90 s of 900 s, from a recovery of 1.00 s on 2 ranks")
    assert all(line.startswith("Assumed: ") for line in lines[1:])
    for words in ("proportion to ranks", "first step (0.50 s)", "200 MiB/s (20.0 MiB in 0.10 s)", "replacement node"):
        assert sum(words in line for line in lines) == 1
    assert set(lines) <= set(notes)


def test_unsaved_checkpoints_are_a_note() -> None:
    """A checkpoint that could not be written is said, and decides nothing: the run came back from an older one."""
    verdict = judge_recovery(records(killed=(killed(unsaved=("step 30: No space left on device",)),)), POLICY)

    assert Outcome.PASS is verdict.outcome
    assert any("could not write 1 checkpoints" in note and "step 30: No space left" in note for note in verdict.notes)


@pytest.mark.parametrize("kind", ["stop", "launcher"])
def test_every_planned_death_needs_a_recovery(kind: str) -> None:
    """A stopped rank and a lost launcher are deaths like a kill."""
    fired = (BACKWARD, COLLECTIVE, f"{kind}:rank=0,step=30,phase=data,attempt=2")
    verdict = judge_recovery(records(killed=(killed(faults_fired=fired),), planned=(fired,)), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "a recovery for each of 3 kills (2 recorded)" in verdict.reason
