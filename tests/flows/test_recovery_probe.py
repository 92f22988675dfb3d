"""The probe of kill_and_resume with real kills: a right trainer passes, a load that forgets is named."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import cast

import pandas as pd
import pytest

from flows.kill_plan import plan_same_ranks, span_of
from flows.plan import ReleaseRequest, make_plan
from flows.probes import Bench
from flows.recovery_probe import Setup, first_world_size, other_world_sizes, plan_conditions, probe_recovery, without_unreached
from infra.settings import load_settings
from trainer.config import SAVE_PHASES, WINDOW_PHASES, Conditions
from trainer.runlog import machine
from validation.policy import parse_policy
from validation.records import PlannedFault, RecoveryRecords, RecoveryRun, RunRecord
from validation.recovery import judge_recovery
from validation.recovery_checks import LOST, fault_parts
from validation.verdict import GateVerdict, Outcome

POLICY = parse_policy().kill_and_resume
EMPTY = pd.DataFrame()
BORDER = "resumed_behind_an_epochs_end"
RECORD = RunRecord(
    recipe="tiny", world_size=2, parallel="ddp", reduction="exact", precision="float32", steps=30, seed=1, state_sha256="a",
    state_sha256_by_rank=("a", "a"), ledger_sha256="b", throughput_sps=1.0, seconds=1.0, worker_seconds=2.0, attempts=1, faults_fired=(),
    recoveries=(), peak_memory_mib=1.0, machine=machine(),
)  # fmt: skip


def bench_of(recipe: str, folder: Path) -> Bench:
    """A bench for a recipe on one and two ranks."""
    plan = make_plan(ReleaseRequest(recipe=recipe, world_sizes=(1, 2)), load_settings(home=folder))
    return Bench(plan=plan, gate="kill_and_resume", say=lambda _text: None, folder=folder / "runs")


def held(recipe: str, folder: Path) -> tuple[RecoveryRecords, GateVerdict]:
    """The gate held on a recipe."""
    records = probe_recovery(bench_of(recipe, folder))
    return records, judge_recovery(records, POLICY)


@pytest.mark.timeout(300)
def test_nothing_is_lost_by_the_trainers_own_parts(tmp_path: Path) -> None:
    """Two runs die by plan, on the same ranks and on others: twice in one epoch after the first, in a save, between two micro-batches."""
    records, verdict = held("tiny_recipe:recipe", tmp_path)

    assert verdict.outcome is Outcome.PASS, verdict.reason
    assert verdict.control is not None
    assert verdict.control.caught
    fired = [fault_parts(fault)["phase"] for fault in records.killed[0].record.faults_fired]
    assert fired[-1] in WINDOW_PHASES
    assert set(fired) & set(SAVE_PHASES)
    assert len(records.killed[1].record.recoveries) == 2
    assert all(run.same_bits for run in records.killed)
    assert all(condition.held for condition in records.conditions if condition.name.startswith(("killed", "moved")))
    assert {table.title for table in verdict.tables} >= {"Kill plan", "States loaded, beside what was saved"}


@pytest.mark.timeout(300)
def test_own_checkpoints_that_are_right_pass(tmp_path: Path) -> None:
    """What a team brings to save and load is judged as ours."""
    records, verdict = held("forgetful_recipe:right", tmp_path)

    assert records.brought == ("save", "load")
    assert verdict.outcome is Outcome.PASS, verdict.reason


@pytest.mark.timeout(300)
def test_a_load_that_forgets_moments_is_named(tmp_path: Path) -> None:
    """The verdict says which load, which parts and what it looks like."""
    _, verdict = held("forgetful_recipe:forgetful", tmp_path)

    assert verdict.outcome is Outcome.FAIL
    assert verdict.reason.startswith(LOST)
    assert "moments are gone" in verdict.reason


@pytest.mark.parametrize(
    ("sizes", "is_own", "expected"),
    [
        ((1, 2, 4, 8), False, 4),
        ((1, 2, 4, 8), True, 2),
        ((1, 4), True, 4),
        ((1,), True, 1),
        ((1, 2), False, 2),
        ((8,), False, 8),
        ((1, 8), False, 8),
    ],
)
def test_an_own_trainer_is_killed_on_few_ranks(sizes: tuple[int, ...], is_own: bool, expected: int) -> None:
    """A sum of two has the same bits in any order, a sum of eight may not."""
    assert first_world_size(sizes, is_own=is_own) == expected


@pytest.mark.parametrize("seed", range(8))
def test_a_run_moves_to_other_ranks(seed: int) -> None:
    """First to all that were asked for, never to as many as before; an own trainer to more and to fewer that were asked for."""
    moved = (4, *other_world_sizes((1, 2, 4, 8), 4, seed=seed, lanes=8, is_own=False))

    assert moved[:2] == (4, 8)
    assert all(before != after and 1 <= after <= 8 for before, after in pairwise(moved))
    assert other_world_sizes((1, 2), 2, seed=seed, lanes=8, is_own=False) == (1, 2)
    assert other_world_sizes((1, 2, 4, 8), 2, seed=seed, lanes=8, is_own=True) == (4, 1)
    assert [other_world_sizes(sizes, 2, seed=seed, lanes=8, is_own=True) for sizes in ((2, 4), (1, 2), (2,))] == [(4,), (1,), (1,)]


def setup_of_plan(epoch_steps: float, windowed: tuple[int, ...], *, is_own: bool = False) -> Setup:
    """What a plan's conditions are read from; nothing can be run with it."""
    span = span_of(steps=30, epoch_steps=epoch_steps, extra=int(not windowed))
    return Setup(
        bench=cast(Bench, None), conditions=cast(Conditions, None), span=span, world_size=2, other_world_sizes=(1,), is_own=is_own,
        same_ranks=plan_same_ranks(span, seed=1, world_size=2, windowed=windowed, kills=4), other_ranks=(),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("epoch_steps", "windowed", "is_reached", "not_held"),
    [
        pytest.param(10.5, (0, 1), True, set(), id="all"),
        pytest.param(0.7, (0, 1), True, {"killed_mid_epoch", "killed_twice_in_an_epoch", BORDER}, id="short-epochs"),
        pytest.param(10.5, (), True, {"killed_inside_accumulation", BORDER}, id="no-window"),
        pytest.param(10.5, (0, 1), False, {"killed_inside_accumulation", BORDER}, id="unreached-window"),
    ],
)
def test_what_the_plan_could_not_hold_is_said(epoch_steps: float, windowed: tuple[int, ...], is_reached: bool, not_held: set[str]) -> None:
    """Every kind of death is a condition, held or not, with the reason."""
    found = plan_conditions(setup_of_plan(epoch_steps, windowed), is_reached=is_reached)

    assert {condition.name for condition in found if not condition.held} == not_held
    assert all(condition.detail for condition in found)


@pytest.mark.parametrize("is_own", [True, False])
def test_a_moment_that_an_own_step_never_has_is_taken_out_of_the_plan(is_own: bool) -> None:
    """An own step may put all micro-batches through the model at once; our own may not, and is then told to be incomplete."""
    kills = setup_of_plan(10.5, (0, 1)).same_ranks
    planned = tuple(PlannedFault(fault=str(kill.fault), purpose=kill.purpose) for kill in kills)
    record = replace(RECORD, faults_fired=tuple(item.fault for item in planned[:-1]))
    run = RecoveryRun(record=record, ledger=EMPTY, states=EMPTY, consumed=EMPTY, planned=planned)

    kept, is_reached = without_unreached(run, is_own=is_own)

    assert (kept.planned, is_reached) == ((planned[:-1], False) if is_own else (planned, True))
