"""A sampled set of the kill campaign (benchmarks/kill_campaign.py), and what its plans promise."""

from dataclasses import replace
from itertools import pairwise

import pytest
from kill_campaign import FSDP2_WORLDS, KINDS, LARGEST_WORLD, MODES, RECIPES, STEPS, Plan, draw_plan, kills_of, run_campaign, run_plan

from trainer.config import FAULT_PHASES

WANTED = ("kill:", "stop:", "launcher:", "phase=load", "phase=staging", "phase=write", "phase=seal")


def sample() -> int:
    """The first seed from which ten deaths hold every kind, a death during recovery and one in each part of a checkpoint, at low cost."""
    for seed in range(100, 10_000):
        plans = [draw_plan(seed)]
        while sum(len(plan.world_sizes) - 1 for plan in plans) < 10:
            plans.append(draw_plan(seed + len(plans)))
        faults = " ".join(str(fault) for plan in plans for fault in plan.faults)
        together = sum(sum(plan.world_sizes) for plan in plans if plan.recipe == RECIPES[-1])
        if all(words in faults for words in WANTED) and 4 <= together <= 16 and sum(sum(plan.world_sizes) for plan in plans) < 80:
            return seed
    raise AssertionError("no ten deaths in a row hold all that is wanted")


SEED = sample()
PLAN = next(plan for plan in map(draw_plan, range(SEED, SEED + 10)) if plan.faults)


def test_ten_kills_leave_no_trace(tmp_path):
    """Runs killed at random moments, stopped, or bereft of their launcher end with the bits of their twin at other world sizes."""
    told = []
    kills = run_campaign(10, seed=SEED, folder=tmp_path, tell=told.append)
    faults = " ".join(kill.fault for kill in kills)

    assert all(kill.equal for kill in kills), "\n".join(told)
    assert len(told) == len(kills) >= 10
    assert all(words in faults for words in WANTED)


def test_plans_cover_what_can_be_killed():
    """Two hundred seeds draw every kind, phase, rank and recipe, first and last step, both attempts, growing and shrinking."""
    plans = [draw_plan(seed) for seed in range(200)]
    faults = [fault for plan in plans for fault in plan.faults]
    changes = {(after > before) - (after < before) for plan in plans for before, after in pairwise(plan.world_sizes)}

    assert {fault.kind for fault in faults} == set(KINDS)
    assert {fault.phase for fault in faults} == set(FAULT_PHASES)
    assert {fault.phase for fault in faults if fault.attempt == 0} == set(FAULT_PHASES) - {"load"}
    assert {fault.rank for fault in faults} == set(range(LARGEST_WORLD))
    assert {0, STEPS - 1} <= {fault.step for fault in faults}
    assert ({plan.recipe for plan in plans}, {plan.parallel for plan in plans}) == (set(RECIPES), set(MODES))
    assert all(size in FSDP2_WORLDS for plan in plans if plan.parallel == "fsdp2" for size in plan.world_sizes)
    assert changes == {-1, 0, 1}
    assert 20 < sum(plan.outside_s is not None for plan in plans) < 60


@pytest.mark.parametrize("field", ["state_sha256", "ledger_sha256"])
def test_other_bits_are_called_different(field, tmp_path):
    """The campaign is not blind: against a twin with another digest no kill counts as equal."""
    record = run_plan(PLAN, tmp_path / "run")
    twin = replace(record, **{field: "0" * 64})

    assert all(kill.equal for kill in kills_of(PLAN, record, record))
    assert not any(kill.equal for kill in kills_of(PLAN, record, twin))


def test_a_kill_that_did_not_fire_is_called_different(tmp_path):
    """A run that nobody disturbed proves nothing, though its bits are right."""
    record = run_plan(replace(PLAN, faults=()), tmp_path / "run")

    assert not any(kill.equal for kill in kills_of(PLAN, record, record))


def test_kill_from_outside_leaves_no_trace(tmp_path):
    """A rank that is killed wherever it is, unannounced, is named in the record; the run's bits are its twin's."""
    plan = Plan(seed=0, recipe=RECIPES[0], parallel="ddp", world_sizes=(2, 3), checkpoint_every=2, faults=(), outside_s=0.1, victim=1)
    record = run_plan(plan, tmp_path / "run")
    [kill] = kills_of(plan, record, run_plan(replace(plan, outside_s=None), tmp_path / "twin"))

    assert (kill.fault, kill.equal) == ("unplanned: rank 1 was killed by signal 9 (SIGKILL)", True)
