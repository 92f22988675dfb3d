"""What telemetry alone costs: timeline and ledger of every step, against the step that they describe.

    python benchmarks/telemetry.py [--json] [--quick]

Direct: every call that a step of trainer/loop.py makes to StepClock, PartWriter and Feed.ledger, made in the same order without the
training between them (flights, W = 1, global batch 4096, rows flushed to disk whenever the clock is full), in blocks of 508 steps; the
median block's time a step over the median time of a real step is `ratio`. Paired, in the samples: whole runs with telemetry on and with a
clock and writer that do nothing, in turn; time on / time off - 1 of each pair, which on a shared machine is noise of a few percent around
what the direct number says.

Limits: CPU (on a GPU a mark is a CUDA event, some microseconds more each); the wait for the disk before a checkpoint is sealed belongs to
the checkpoint and is measured there. Lower is better.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from support.output import Document, Sample, parser, progress, publish

from trainer import ranks
from trainer.config import TrainJob
from trainer.feed import Feed
from trainer.lanes import rank_lanes
from trainer.order import Order
from trainer.parts import PartWriter, part_folder
from trainer.recipe import load_recipe
from trainer.telemetry import ROWS, StepClock

GOAL = 0.01
WARM_UP_STEPS = 6


def step_ms(recipe: str, steps: int, entry: str) -> float:
    """Median time between updates of one run at W = 1."""
    with tempfile.TemporaryDirectory() as folder:
        job = TrainJob(recipe=recipe, folder=folder, world_size=1, reduction="fast", steps=steps + WARM_UP_STEPS)
        moments = ranks.run_group(job, _entry=f"support.switched:{entry}", _collect="support.switched:collect")
    return float(np.median(np.diff(np.array(moments)[WARM_UP_STEPS:])) / 1e6)


def run_pairs(recipe: str, pairs: int, steps: int) -> list[Sample]:
    """Runs with telemetry on and off, one right after the other, the first one in turn."""
    samples = []
    for pair in range(pairs):
        order = ("run_on", "run_off") if pair % 2 else ("run_off", "run_on")
        found = {entry: step_ms(recipe, steps, entry) for entry in order}
        share = found["run_on"] / found["run_off"] - 1
        samples.append({"kind": "pair", "on_ms": found["run_on"], "off_ms": found["run_off"], "share": share})
        progress(f"pair {pair + 1} of {pairs}: on {found['run_on']:.3f} ms, off {found['run_off']:.3f} ms")
    return samples


def direct_us(recipe: str, blocks: int, block_steps: int) -> list[float]:
    """Time of a step's telemetry calls, a value a block of steps, microseconds."""
    torch.set_num_threads(1)
    loaded = load_recipe(recipe)
    plan, data = loaded.training, loaded.data("train")
    order = Order.of(plan, len(data))
    feed = Feed(data, order, rank_lanes(0, 1, plan.lanes), plan.lanes, torch.device("cpu"), double=False, drop_lane=False)
    with tempfile.TemporaryDirectory() as folder:
        clock, parts = StepClock(torch.device("cpu")), PartWriter(part_folder(Path(folder), 0, 0))
        return [_block_us(clock, parts, feed, order, block_steps) for _ in range(blocks)]


def _block_us(clock: StepClock, parts: PartWriter, feed: Feed, order: Order, steps: int) -> float:
    batch = order.span(0)
    feed.ledger(0, batch)  # its rows are there: training needs them anyway, so they are no cost of telemetry
    started = time.perf_counter()
    for step in range(steps):
        _telemetry_of_a_step(clock, parts, feed, step, batch)
    return (time.perf_counter() - started) / steps * 1e6


def _telemetry_of_a_step(clock: StepClock, parts: PartWriter, feed: Feed, step: int, batch: range) -> None:
    """As trainer.loop.train_step and FastReduction call it at W = 1."""
    clock.start(step, len(batch))
    parts.add_ledger(feed.ledger(step, batch))
    clock.lap("data")
    clock.lap("forward")
    clock.lap("backward")
    clock.arrive()
    clock.lap("collective")
    clock.lap("optimizer")
    clock.keep()
    if clock.full:
        parts.add_timeline(clock.take())
        parts.flush()


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__).parse_args()
    quick = ("support.recipes:tiny", 1, 6, 2, 20)
    recipe, pairs, steps, blocks, block_steps = quick if arguments.quick else ("flights", 6, 80, 9, 2 * (ROWS - 2))
    step_ms(recipe, 2, "run_on")  # imports, prepared data and page cache are there before the first pair
    samples = run_pairs(recipe, pairs, steps)
    costs = direct_us(recipe, blocks, block_steps)
    step = statistics.median(sample["on_ms"] for sample in samples)
    shares = [cost / 1e3 / step for cost in costs]
    progress(f"telemetry {statistics.median(costs):.1f} us of a step of {step:.2f} ms; paired: {_paired(samples):+.4f}")
    samples += [{"kind": "direct", "on_ms": step, "off_ms": step - cost / 1e3, "share": cost / 1e3 / step} for cost in costs]
    ratio = statistics.median(shares)
    document = Document(
        name="telemetry", peer="the same loop without it, flights at W = 1", ratio=ratio, goal=GOAL, met=ratio < GOAL,
        unit="share of a step's time (lower is better)", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


def _paired(samples: list[Sample]) -> float:
    return statistics.median(sample["share"] for sample in samples)


if __name__ == "__main__":
    sys.exit(main())
