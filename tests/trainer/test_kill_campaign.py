"""A sampled set of the kill campaign (benchmarks/kill_campaign.py), and what its plans promise."""

from dataclasses import replace
from itertools import pairwise

import pytest
from kill_campaign import LARGEST_WORLD, STEPS, draw_plan, kills_of, run_campaign, run_plan

from trainer.config import FAULT_PHASES


def test_ten_kills_leave_no_trace(tmp_path):
    """Runs killed at random moments and resumed at other world sizes end with the bits of their twin."""
    told = []
    kills = run_campaign(10, seed=101, folder=tmp_path, tell=told.append)

    assert all(kill.equal for kill in kills), "\n".join(told)
    assert len(told) == len(kills) >= 10


def test_plans_cover_what_can_be_killed():
    """A hundred seeds draw every phase, rank, first and last step, both attempts, and growing, shrinking and equal world sizes."""
    plans = [draw_plan(seed) for seed in range(100)]
    faults = [fault for plan in plans for fault in plan.faults]
    changes = {(after > before) - (after < before) for plan in plans for before, after in pairwise(plan.world_sizes)}

    assert {fault.phase for fault in faults} == set(FAULT_PHASES)
    assert {fault.rank for fault in faults} == set(range(LARGEST_WORLD))
    assert {0, STEPS - 1} <= {fault.step for fault in faults}
    assert {fault.attempt for fault in faults} == {0, 1}
    assert changes == {-1, 0, 1}


@pytest.mark.parametrize("field", ["state_sha256", "ledger_sha256"])
def test_other_bits_are_called_different(field, tmp_path):
    """The campaign is not blind: against a twin with another digest no kill counts as equal."""
    plan = draw_plan(101)
    record = run_plan(plan, tmp_path / "run")
    twin = replace(record, **{field: "0" * 64})

    assert all(kill.equal for kill in kills_of(plan, record, record))
    assert not any(kill.equal for kill in kills_of(plan, record, twin))


def test_a_kill_that_did_not_fire_is_called_different(tmp_path):
    """A run that nobody disturbed proves nothing, though its bits are right."""
    plan = draw_plan(101)
    record = run_plan(replace(plan, faults=()), tmp_path / "run")

    assert not any(kill.equal for kill in kills_of(plan, record, record))
