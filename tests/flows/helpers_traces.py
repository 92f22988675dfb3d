"""A trace and a timeline of four ranks, one of which is slow."""

import pandas as pd

from validation.records import TIMELINE_COLUMNS

COLUMNS = ["dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc"]


def trace(*, slow: int = 1, factor: float = 2.0, ranks: int = 4, steps: int = 4) -> pd.DataFrame:
    """Forward, backward (1 s each) and one reduction a step; the slow rank computes `factor` times as long, seconds."""
    rows = []
    for step in range(steps):
        began = step * 10.0
        for rank in range(ranks):
            own, longest = (factor if rank == slow else 1.0), max(factor, 1.0)
            rows.append((rank, 0, rank, step, "forward-compute", began, own, 0, 0, 0, 0))
            rows.append((rank, 0, rank, step, "backward-compute", began + own, own, 0, 0, 0, 0))
            rows.append((rank, 0, rank, step, "grads-reduce-scatter", began + 2 * own, 2 * longest + 0.1 - 2 * own, 0, 0, 0, 0))
    return pd.DataFrame(rows, columns=COLUMNS)


def timeline(*, slow: int = 2, extra_ms: float = 30.0, ranks: int = 4, steps: int = 40) -> pd.DataFrame:
    """Steps of 96 ms; the slow rank needs `extra_ms` more in its forward, and the others wait for it."""
    rows = [
        {
            "rank": rank, "step": step, "start_ns": step * 200_000_000, "data_ms": 2.0, "forward_ms": 50.0 + extra_ms * (rank == slow),
            "backward_ms": 40.0, "wait_ms": extra_ms * (rank != slow), "transfer_ms": 3.0, "optimizer_ms": 1.0, "checkpoint_ms": 0.0,
            "step_ms": 96.0 + extra_ms, "samples": 8,
        }
        for step in range(steps) for rank in range(ranks)
    ]  # fmt: skip
    return pd.DataFrame(rows)[list(TIMELINE_COLUMNS)]
