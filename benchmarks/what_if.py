"""The what-if figures of two published production traces, against the figures that their authors published.

    python benchmarks/what_if.py [--json] [--quick]

Traces AR (64 ranks, 44 steps) and ST (8 ranks, 32 steps) of "Understanding Stragglers in Large Model Training Using What-if Analysis" (Lin
et al., OSDI 2025; ByteDance-Seed/StragglerAnalysis, Apache-2.0), read from ../shared/cases/whatif. Compared are S, S by step, S_t by
operation type, S by data-parallel rank and by pipeline stage (whole job and by step), recorded, replayed and ideal step times, M_W and M_S:
`ratio` is the largest relative deviation, and the goal 1 %. Samples: the largest deviation of each group of figures, and the seconds that
the replay took. A share close to 0 (M_S of AR is -0.001) is compared with 1.

Limits: two traces, both without interleaved model chunks; schedules with them are replayed against simulated ones in
tests/validation/test_what_if.py. Where the traces are not there, a made-up data-parallel timeline takes their place, and its replayed steps
are compared with its own; that says less. Lower is better.
"""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml
from support.output import Document, Sample, parser, progress, publish

from validation.records import TIMELINE_COLUMNS
from validation.what_if import Decomposition, WhatIf, what_if

FOLDER = Path(__file__).parents[2] / "shared" / "cases" / "whatif"
NAMES = ("AR", "ST")
GOAL = 0.01
RANKS_AND_STEPS = (4, 50)  # of the made-up timeline
KEYS = {"type": "optype", "dp rank": "dp_rank", "stage": "stage"}  # ours -> theirs
SOURCE = "the authors' published figures (ByteDance-Seed/StragglerAnalysis)"


def deviations(found: WhatIf, result: Mapping[str, Any], worker: float, stage: float) -> Iterator[tuple[str, float]]:
    """Group of figures -> its largest relative deviation."""
    yield "S", _relative(found.slowdown, result["blocking_slowdown"])
    yield "M_W", abs(found.slowest_workers_share - worker) / max(1.0, abs(worker))
    yield "M_S", abs(found.last_stage_share - stage) / max(1.0, abs(stage))
    by_step = {
        "S by step": (found.by_step, "blocking_step_slowdown"), "recorded step": (found.recorded_s, "step_t_base"),
        "replayed step": (found.replayed_s, "step_t_nodelay"), "ideal step": (found.ideal_s, "step_t_noblk"),
    }  # fmt: skip
    for name, (mine, theirs) in by_step.items():
        yield name, max(_relative(mine[int(step)], value) for step, value in result[theirs].items())
    groups = {"type": found.by_type, "dp rank": found.by_dp_rank, "stage": found.by_stage}
    for name, decomposed in groups.items():
        published = f"blocking_decompose_by_{KEYS[name]}"
        yield f"S by {name}", _largest(decomposed, result[published])
        yield f"S by {name} and step", _largest_by_step(decomposed, result[f"{published}_per_step"])


def _relative(mine: float, theirs: float) -> float:
    return abs(mine / theirs - 1)


def _largest(mine: Decomposition, theirs: Mapping[str, float]) -> float:
    return max(_relative(mine.overall[key], value) for key, value in theirs.items())


def _largest_by_step(mine: Decomposition, theirs: Mapping[str, Mapping[str, float]]) -> float:
    return max(_relative(mine.by_step[int(step)][key], value) for step, values in theirs.items() for key, value in values.items())


def published(name: str) -> list[Sample]:
    """One trace against its published figures."""
    table = pd.read_parquet(FOLDER / f"trace-{name}.parquet")
    sizes = yaml.safe_load((FOLDER / f"meta-{name}.yaml").read_text())
    result, worker, stage = (json.loads((FOLDER / f"{kind}-{name}.json").read_text()) for kind in ("result", "mw", "ms"))
    started = time.perf_counter()
    found = what_if(table, sizes)
    seconds = time.perf_counter() - started
    progress(
        f"{name}: {len(table)} operations replayed in {seconds:.2f} s; S {found.slowdown:.6f}, published {result['blocking_slowdown']:.6f}"
    )
    return [
        {"trace": name, "figures": group, "deviation": deviation, "seconds": seconds}
        for group, deviation in deviations(found, result, worker["Mw"], stage["Ms"])
    ]


def simulated() -> list[Sample]:
    """Replayed steps of a made-up timeline against its own, where there is no trace."""
    rng = np.random.default_rng(11)
    busy = rng.uniform(80, 120, (RANKS_AND_STEPS[1], RANKS_AND_STEPS[0]))
    last = busy.max(axis=1, keepdims=True)
    columns = {name: np.zeros(busy.shape) for name in TIMELINE_COLUMNS} | {
        "rank": np.broadcast_to(np.arange(busy.shape[1]), busy.shape), "step": np.broadcast_to(np.arange(len(busy))[:, None], busy.shape),
        "forward_ms": busy, "wait_ms": last - busy, "transfer_ms": np.full(busy.shape, 8.0), "step_ms": last + np.full(busy.shape, 8.0),
    }  # fmt: skip
    timeline = pd.DataFrame({name: values.reshape(-1) for name, values in columns.items()})
    started = time.perf_counter()
    found = what_if(timeline)
    seconds = time.perf_counter() - started
    deviation = max(_relative(found.replayed_s[step], value) for step, value in found.recorded_s.items())
    return [{"trace": "made up", "figures": "replayed step", "deviation": max(deviation, 1e-15), "seconds": seconds}]


def main() -> int:
    """Compare, print."""
    arguments = parser(__doc__ or "").parse_args()
    there = [name for name in NAMES if (FOLDER / f"trace-{name}.parquet").exists()]
    if not there:
        progress(f"{FOLDER} is not there: the published traces are skipped")
    names = there[-1:] if arguments.quick else there
    samples = [sample for name in names for sample in published(name)] or simulated()
    ratio = max(sample["deviation"] for sample in samples)
    document = Document(
        name="what_if", peer=SOURCE if there else "a made-up timeline's own steps (published traces not there)", ratio=ratio, goal=GOAL,
        met=ratio < GOAL, unit="largest relative deviation (lower is better)", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
