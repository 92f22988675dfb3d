"""The straggler report over the timeline of a large job, from Parquet to findings: seconds, and how many times the peer's.

    python benchmarks/straggler_report.py [--json] [--quick]

1,024 ranks x 10,000 steps (10.2 million rows, the file as a run leaves it), one rank late by a quarter of a step for 3,000 steps. Ours:
read the file and find the straggler, in a process of its own, median of 3; `ratio` is its seconds and the goal is 10. The peer is what one
writes with pandas in an hour: the same arrival lags by `groupby("step")`, last arrivals counted by rank, mean lag by rank; it judges
nothing and finds no steps, phase or cause. The samples show both, the peak memory of each process, and the peer's time over ours.

Limits: one core does it all; times are of this machine, and the file is in the page cache. Lower is better.
"""

import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
from support.output import Document, Sample, parser, progress, publish

from infra.timelines import read_timeline
from validation.records import TIMELINE_COLUMNS
from validation.straggling import find_stragglers

GOAL_S = 10.0
BLOCK_STEPS = 500  # written at a time
RANK_OF_8 = 3  # of 8 parts of the ranks: the late one is the first of it
REPORT = "report"
PEER = "peer"


def write(path: Path, ranks: int, steps: int, late_rank: int, late_steps: range) -> None:
    """A timeline as trainer.merge writes it: sorted by step and rank, a row group a block."""
    rng, now, writer = np.random.default_rng(7), 0.0, None
    for first in range(0, steps, BLOCK_STEPS):
        shape = (min(BLOCK_STEPS, steps - first), ranks)
        own = {name: ms * rng.normal(1, 0.04, shape) for name, ms in (("data", 4.0), ("forward", 30.0), ("backward", 60.0))}
        own["forward"][[step in late_steps for step in range(first, first + shape[0])], late_rank] += 25.0
        arrival = sum(own.values())
        wait = arrival.max(axis=1, keepdims=True) - arrival
        step_ms = arrival.max(axis=1, keepdims=True) + 13.0 + np.zeros(shape)
        start = now + np.concatenate(([0.0], np.cumsum(step_ms[:-1, 0])))
        now = float(start[-1] + step_ms[-1, 0])
        columns = {
            "rank": np.broadcast_to(np.arange(ranks), shape),
            "step": np.broadcast_to(np.arange(first, first + shape[0])[:, None], shape),
            "start_ns": np.broadcast_to((start * 1e6).astype(np.int64)[:, None], shape),
            "wait_ms": wait, "transfer_ms": np.full(shape, 8.0),
            "optimizer_ms": np.full(shape, 5.0), "checkpoint_ms": np.zeros(shape), "step_ms": step_ms, "samples": np.full(shape, 32),
        } | {f"{name}_ms": values for name, values in own.items()}  # fmt: skip
        table = pa.table({name: np.ascontiguousarray(columns[name]).reshape(-1) for name in TIMELINE_COLUMNS})
        writer = writer or pq.ParquetWriter(path, table.schema)
        writer.write_table(table)
    assert writer is not None
    writer.close()


def report(path: Path) -> str:
    """Ours, from the file to what is said."""
    return "; ".join(finding.explanation for finding in find_stragglers(read_timeline(path)))


def plain_pandas(path: Path) -> str:
    """The peer: arrival lags with groupby."""
    table = pd.read_parquet(path)
    table["lag_ms"] = table.groupby("step")["wait_ms"].transform("max") - table["wait_ms"]
    last = table.loc[table.groupby("step")["lag_ms"].idxmax(), "rank"].value_counts()
    mean = table.groupby("rank")["lag_ms"].mean()
    return f"rank {last.index[0]} was last in {last.iloc[0]} steps, {mean.loc[last.index[0]]:.1f} ms behind the first on average"


def measure(kind: str, path: Path) -> Sample:
    """One run in a process of its own."""
    done = subprocess.run([sys.executable, __file__, "--child", kind, str(path)], capture_output=True, text=True, check=True)
    found: Sample = json.loads(done.stdout)
    progress(f"{kind}: {found['seconds']:.2f} s, {found['peak_memory_mib']:.0f} MiB: {found['said']}")
    return found


def child(kind: str, path: Path) -> None:
    """Measure one kind here; imports are not counted."""
    started = time.perf_counter()
    said = report(path) if kind == REPORT else plain_pandas(path)
    seconds = time.perf_counter() - started
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"kind": kind, "seconds": seconds, "peak_memory_mib": peak, "said": said}))


def main() -> int:
    """Write, measure both, print."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]))
        return 0
    arguments = parser(__doc__ or "").parse_args()
    ranks, steps, repeats = (16, 200, 1) if arguments.quick else (1024, 10_000, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "timeline.parquet"
        write(path, ranks, steps, ranks * RANK_OF_8 // 8, range(steps // 2, steps // 2 + steps * 3 // 10))
        progress(f"{ranks} ranks x {steps} steps: {path.stat().st_size / 2**20:.0f} MiB of Parquet")
        ours = [measure(REPORT, path) for _ in range(repeats)]
        peer = measure(PEER, path)
    seconds = statistics.median(sample["seconds"] for sample in ours)
    progress(f"the peer takes {peer['seconds'] / seconds:.2f} times as long")
    times = peer["seconds"] / seconds
    document = Document(
        name="straggler_report", peer=f"the goal; plain pandas groupby of the same lags takes {times:.2f} times as long",
        ratio=seconds, goal=GOAL_S, met=seconds < GOAL_S and all(sample["said"] for sample in ours), unit="seconds (lower is better)",
        samples=[*ours, peer],
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
