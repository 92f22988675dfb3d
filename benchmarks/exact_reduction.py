"""What the same bits at every world size cost: `exact` reduction against `fast` (torch's own all-reduce).

    python benchmarks/exact_reduction.py [--json] [--quick]

Both sides are whole training runs of the flights recipe through trainer.ranks.run_group at W = 4 and W = 8, 40 timed steps after 6 of
warm-up, in turn (exact first in one pair, fast first in the next). `ratio` is throughput exact / fast, the median over the pairs of
one world size, of the worse world size; `met` also asks that the largest resident set of a rank is at most 1.3 times as large.

Limits: one machine, gloo, ranks that share cores. A rank of `exact` runs V / W micro-batches a step, `fast` one; W = 4 shows that cost,
W = 8 has one each. The resident set counts the libraries' pages that all ranks share, so it dampens the memory's ratio.
"""

import statistics
import sys
import tempfile
from pathlib import Path
from typing import Literal

import numpy as np
from support.output import Document, Sample, parser, progress, publish

from trainer import ranks
from trainer.config import TrainJob
from trainer.runlog import load_timeline

GOAL = 0.95
MEMORY_GOAL = 1.3
WARM_UP_STEPS = 6
Side = Literal["exact", "fast"]


def measured(recipe: str, world_size: int, reduction: Side, pair: int, steps: int) -> Sample:
    """One run."""
    with tempfile.TemporaryDirectory() as folder:
        job = TrainJob(
            recipe=recipe, folder=folder, world_size=world_size, reduction=reduction, steps=steps + WARM_UP_STEPS,
            warmup_steps=WARM_UP_STEPS,
        )  # fmt: skip
        record = ranks.run_group(job)
        return {
            "world_size": world_size, "pair": pair, "reduction": reduction, "throughput_sps": record.throughput_sps,
            "step_ms_p50": step_ms_p50(folder), "peak_memory_mib": record.peak_memory_mib,
        }  # fmt: skip


def step_ms_p50(folder: str | Path) -> float:
    """Median time from one timed step's start to the next one's, rank 0, ms."""
    timeline = load_timeline(folder)
    starts = timeline[(timeline["rank"] == 0) & (timeline["step"] >= WARM_UP_STEPS)]["start_ns"].to_numpy()
    return float(np.median(np.diff(starts)) / 1e6)


def run_pairs(recipe: str, world_sizes: tuple[int, ...], pairs: int, steps: int) -> list[Sample]:
    """All runs, both sides of a pair one right after the other."""
    samples = []
    for pair in range(pairs):
        order: tuple[Side, Side] = ("fast", "exact") if pair % 2 else ("exact", "fast")
        for world_size in world_sizes:
            for reduction in order:
                samples.append(measured(recipe, world_size, reduction, pair, steps))
                progress(f"pair {pair + 1} of {pairs}, W={world_size} {reduction}: {samples[-1]['throughput_sps']:.0f} samples/s")
    return samples


def pair_ratios(samples: list[Sample], world_size: int, key: str) -> list[float]:
    """exact / fast of one quantity, a value a pair."""
    own = [sample for sample in samples if sample["world_size"] == world_size]
    sides = {(sample["pair"], sample["reduction"]): sample[key] for sample in own}
    return [sides[pair, "exact"] / sides[pair, "fast"] for pair in sorted({sample["pair"] for sample in own})]


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__).parse_args()
    recipe, world_sizes, pairs, steps = ("support.recipes:tiny", (2,), 1, 4) if arguments.quick else ("flights", (4, 8), 6, 40)
    measured(recipe, max(world_sizes), "fast", -1, 1)  # imports, prepared data and page cache are there before the first pair
    samples = run_pairs(recipe, world_sizes, pairs, steps)
    ratios, memory = [], []
    for world_size in world_sizes:
        own = pair_ratios(samples, world_size, "throughput_sps")
        ratios.append(statistics.median(own))
        memory.append(statistics.median(pair_ratios(samples, world_size, "peak_memory_mib")))
        spread = ", ".join(f"{ratio:.2f}" for ratio in sorted(own))
        progress(f"W={world_size}: throughput exact / fast {ratios[-1]:.3f} (pairs: {spread}), peak memory {memory[-1]:.3f}")
    document = Document(
        name="exact_reduction", peer="fast (torch's all-reduce on gloo), flights at W = 4 and 8", ratio=min(ratios), goal=GOAL,
        met=min(ratios) >= GOAL and max(memory) <= MEMORY_GOAL, unit="throughput exact / fast, worse world size", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
