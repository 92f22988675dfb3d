"""Probes: reductions that need no run."""

import pandas as pd
import pytest

from flows.probes import scaling_point, straggler_delay_ms
from trainer.runlog import machine
from validation.records import TIMELINE_COLUMNS, RunRecord, ScalingPoint


def run_record(world_size: int) -> RunRecord:
    return RunRecord(
        recipe="tiny", world_size=world_size, parallel="ddp", reduction="exact", precision="float32", steps=4, seed=0, state_sha256="a",
        state_sha256_by_rank=("a",) * world_size, ledger_sha256="b", throughput_sps=100.0, seconds=1.0, worker_seconds=2.0, attempts=1,
        faults_fired=(), recoveries=(), peak_memory_mib=10.0, machine=machine(),
    )  # fmt: skip


def timeline(step_ms: dict[int, list[float]], wait_ms: dict[int, float]) -> pd.DataFrame:
    """One row a rank and step; every phase but wait is zero."""
    rows = [
        dict.fromkeys(TIMELINE_COLUMNS, 0.0) | {"rank": rank, "step": step, "step_ms": value, "wait_ms": wait_ms[rank]}
        for rank, values in step_ms.items()
        for step, value in enumerate(values)
    ]
    return pd.DataFrame(rows)


def scaling_point_of(step_ms: float, world_size: int) -> ScalingPoint:
    return ScalingPoint(
        world_size=world_size, repeat=0, reduction="exact", throughput_sps=1.0, step_ms_p50=step_ms, rank_step_ms=(step_ms,) * world_size,
        phase_ms={}, peak_memory_mib=1.0,
    )  # fmt: skip


def test_a_point_leaves_out_warm_up_and_waiting() -> None:
    """A step is as long as its slowest rank's; a rank's own time is its step less its wait; warm-up steps do not count."""
    table = timeline({0: [900.0, 120.0, 120.0], 1: [900.0, 125.0, 125.0]}, {0: 20.0, 1: 0.0})

    point = scaling_point(run_record(2), table, repeat=3, warmup_steps=1)

    assert (point.step_ms_p50, point.rank_step_ms, point.repeat) == (125.0, (100.0, 125.0), 3)
    assert point.phase_ms["wait_ms"] == 10.0


@pytest.mark.parametrize("limit", [0.1, 0.5, 0.9])
def test_the_planted_straggler_idles_its_peer_clearly_beyond_the_limit(limit: float) -> None:
    """The delay's share of the delayed step exceeds any limit that a policy can set, also beside the slowest world size's step."""
    delay_ms = straggler_delay_ms([scaling_point_of(10.0, 1), scaling_point_of(30.0, 2)], limit)

    assert delay_ms / (30.0 + delay_ms) > limit
