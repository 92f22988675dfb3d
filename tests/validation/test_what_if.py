"""What a job would have taken without its stragglers."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from helpers_what_if import trace

from validation.canonical import canonical_json
from validation.errors import DataError, InputError
from validation.records import TIMELINE_COLUMNS
from validation.what_if import what_if

BASE_S = {
    "forward-compute": 0.1, "backward-compute": 0.2, "params-all-gather": 0.03, "grads-reduce-scatter": 0.04, "optimizer": 0.02,
    "optimizer-clip-main-grad": 0.01, "forward-recv": 0.005, "backward-recv": 0.007,
}  # fmt: skip
SCHEDULES = (
    {},
    {"stages": 1},
    {"ranks": 1, "stages": 4, "micro": 8},
    {"stages": 4, "micro": 8},
    {"chunks": 2},
    {"stages": 4, "chunks": 3, "micro": 8},
    {"stages": 4, "chunks": 2, "micro": 4},
)
NAMES = ["pipeline", "one stage", "no data parallelism", "four stages", "interleaved", "three chunks", "few micro-batches"]


def even(rank, stage, step, optype, number):
    return BASE_S[optype]


def slow_worker(rank, stage, step, optype, number):
    """Rank 1 of stage 1 computes three times as long."""
    return BASE_S[optype] * (3 if (rank, stage) == (1, 1) and "compute" in optype else 1)


def long_last_stage(rank, stage, step, optype, number):
    return BASE_S[optype] * (1.5 if stage == 1 and "compute" in optype else 1)


def noisy(rank, stage, step, optype, number):
    seed = (rank, stage, step, sorted(BASE_S).index(optype), number)
    return BASE_S[optype] * np.random.default_rng(seed).uniform(0.8, 1.3)


def mean_step_s(table):
    """Mean over steps of the last end; every step starts at 0."""
    return (table["start_ts"] + table["duration"]).groupby(table["step"]).max().mean()


def means(table):
    """optype -> mean recorded duration."""
    return table.groupby("optype")["duration"].mean()


@pytest.mark.parametrize("sizes", SCHEDULES, ids=NAMES)
def test_replay_with_real_durations_gives_the_recorded_steps(sizes):
    """Dependencies are complete: nothing of a step's time is left unexplained, and no dependency is too many."""
    found = what_if(trace(duration=noisy, **sizes))

    assert found.replayed_s == pytest.approx(found.recorded_s, rel=1e-9)
    assert found.notes == () or "one worker" in found.notes[0]


@pytest.mark.parametrize("sizes", SCHEDULES[3:], ids=NAMES[3:])
def test_slowdown_is_time_over_time_of_the_ideal_schedule(sizes):
    """T_ideal is what the schedule itself makes of mean computations and plain transfers."""
    table = trace(duration=slow_worker, **sizes)
    mean = means(table)

    def ideal(rank, stage, step, optype, number):
        return mean[optype] if "compute" in optype else BASE_S[optype]

    expected = mean_step_s(table) / mean_step_s(trace(duration=ideal, **sizes))

    assert what_if(table).slowdown == pytest.approx(expected, rel=1e-9)


def test_worker_keeps_its_own_durations_and_all_others_are_ideal():
    """S_w of the slow worker is the schedule with only that worker slow; it is the slowest, and M_W takes it."""
    table = trace(duration=slow_worker)
    mean = means(table)

    def only_it(rank, stage, step, optype, number):
        if "compute" not in optype or (rank, stage) == (1, 1):
            return slow_worker(rank, stage, step, optype, number)
        return mean[optype]

    def ideal(rank, stage, step, optype, number):
        return mean[optype] if "compute" in optype else BASE_S[optype]

    found = what_if(table)

    expected = mean_step_s(trace(duration=only_it)) / mean_step_s(trace(duration=ideal))
    assert found.by_worker[3] == pytest.approx(expected, rel=1e-9)
    assert (next(iter(found.by_worker)), found.slowest_workers) == (3, (3,))
    assert found.slowest_workers_share > 0.95


def test_long_last_stage_is_seen_as_the_stage_and_not_as_a_worker():
    """M_S explains it, M_W (one worker of four) does not."""
    found = what_if(trace(duration=long_last_stage))

    assert found.last_stage_share > 0.95
    assert found.slowest_workers_share < 0.1
    assert next(iter(found.by_stage.overall)) == "1"


def test_waiting_is_no_duration_of_a_communication():
    """Ranks that wait in a collective for a slow one have no part in the slowdown: only the slow one's computations have."""
    found = what_if(trace(duration=slow_worker))

    others = {name: value for name, value in found.by_type.overall.items() if "compute" not in name}
    assert max(others.values()) < found.slowdown / 1.1
    assert found.by_dp_rank.overall["1"] == pytest.approx(found.slowdown, rel=0.02)


@pytest.mark.parametrize("sizes", [{"stages": 4, "micro": 8}, {"stages": 4, "chunks": 2, "micro": 8}], ids=["plain", "interleaved"])
def test_transfers_that_never_took_place_change_nothing(sizes):
    """Receives and sends at the model's ends are records only."""
    bare, full = (what_if(trace(duration=noisy, no_operations=extra, **sizes)) for extra in (False, True))

    assert full.by_stage.overall == pytest.approx(bare.by_stage.overall, rel=0.01)
    assert full.slowdown == pytest.approx(bare.slowdown, rel=0.01)


def test_tensor_parallel_ranks_are_one_worker():
    """Two ranks that do each operation together give the figures of one."""
    one, two = (what_if(trace(duration=slow_worker, tensor=count)) for count in (1, 2))

    assert two.by_stage == one.by_stage
    assert two.slowest_workers == (6,)
    assert "2 ranks a stage" in two.notes[0]


def test_even_job_has_no_slowdown_and_nothing_to_share():
    """S is 1, and the shares of a slowdown that is not there are said to be unknown."""
    found = what_if(trace(duration=even))

    assert found.slowdown == pytest.approx(1)
    assert math.isnan(found.slowest_workers_share)
    assert found.document()["M_W"] is None


def test_document_is_plain_and_the_same_again():
    """`what_if` of `diagnose --json` has the paper's names, and no order of rows changes it."""
    table = trace(duration=noisy, stages=4, micro=8)
    document = what_if(table).document()

    assert {"S", "S_t", "S_w", "M_W", "M_S", "S_dp_rank", "S_stage", "S_step", "S_t_step", "step_s"} <= set(document)
    assert "forward-pp-comm" in document["S_t"]
    json.dumps(document, allow_nan=False)
    assert canonical_json(what_if(table.iloc[::-1]).document()) == canonical_json(document)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.drop(columns="duration"), "no column duration"),
        (lambda t: t.iloc[:0], "no rows"),
        (lambda t: t.assign(duration=math.nan), "no row of the trace has finite"),
        (lambda t: t.assign(optype="sleep"), "no operation of a known type"),
        (lambda t: pd.concat([t, t]), "twice"),
        (lambda t: t[~((t.step == 0) & (t.dp_rank == 0))].groupby("dp_rank").head(3), "same operations on all"),
        (lambda t: t[t.optype != "forward-recv"], "sends 4 times"),
        (lambda t: t[~((t.optype == "forward-recv") & (t.seq_id > 1))], "cannot be told"),
    ],
    ids=["column", "empty", "nan", "types", "twice", "uneven", "one side", "half of it"],
)
def test_what_cannot_be_replayed_is_said(spoil, said):
    """A bad table is an InputError that says what is wrong."""
    with pytest.raises(InputError, match=said):
        what_if(spoil(trace(duration=even)))


def test_what_can_still_be_read_is_used():
    """A broken step, an unknown type and sizes of another run are noted; the rest is replayed."""
    table = trace(duration=noisy)
    extra = table[table.optype == "optimizer"].assign(optype="profiler-marker")
    broken = pd.concat([table, extra], ignore_index=True)
    broken.loc[broken.step == 1, "start_ts"] = math.inf

    found = what_if(broken, {"dp_size": 8, "pp_size": 2})

    assert set(found.by_step) == {0, 2}
    assert ["finite" in found.notes[0], "profiler-marker" in found.notes[1], "dp_size 8" in found.notes[2]] == [True] * 3


def test_orders_that_cannot_be_are_refused():
    """A first stage that goes backward before it goes forward would wait for itself."""
    table = trace(duration=even)
    table.loc[(table.optype == "backward-compute") & (table.stage == 0) & (table.seq_id == 0), "start_ts"] = -1.0

    with pytest.raises(DataError, match="circle"):
        what_if(table)


def timeline(slow=1.5, steps=20, world_size=4):
    """Rank 2 computes `slow` times as long in backward."""
    rng, rows, now = np.random.default_rng(5), [], 0.0
    for step in range(steps):
        backward = 60 * np.where(np.arange(world_size) == 2, slow, 1.0) + rng.uniform(0, 1, world_size)
        arrival = 40 + backward
        for rank in range(world_size):
            wait, took = arrival.max() - arrival[rank], arrival.max() + 15
            rows.append((rank, step, int(now * 1e6), 10.0, 30.0, backward[rank], wait, 10.0, 5.0, 0.0, took, 32))
        now += took
    return pd.DataFrame(rows, columns=TIMELINE_COLUMNS)


def test_own_timeline_is_replayed_by_phase_and_rank():
    """S, S_t and S_w of a data-parallel run name phase and rank: 1.5 times 60 of 100 ms against a mean of 67.5."""
    found = what_if(timeline())

    assert found.slowdown == pytest.approx(145.8 / 123.0, rel=0.01)
    assert next(iter(found.by_type.overall)) == "backward"
    assert next(iter(found.by_worker)) == 2
    assert found.slowest_workers_share == pytest.approx(1, abs=0.05)
    assert math.isnan(found.last_stage_share)


def test_one_rank_is_replayed_and_noted():
    """There is nobody to compare with but its own other steps."""
    found = what_if(timeline(world_size=4).query("rank == 0"))

    assert "one rank only" in found.notes[-1]
