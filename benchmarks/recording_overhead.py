"""What recording costs: every rank's operations, steps, phases and heartbeats, against the step that they describe.

    python benchmarks/recording_overhead.py [--json] [--quick]

Direct: processor time of every call that one step of trainer/loop.py makes to a Recording (flights, fast, W = 1 and 2), of the operations
of that step (with the stand-ins and without, gloo with one rank, so that nobody is waited for), and of its part of the heartbeats, over the
median time of a real step with recording; the worse world size is `ratio`. Paired, in the samples: whole runs with recording and with
SEATRIAL_RECORDING=off, in turn; time on / time off - 1 of each pair, which on a shared machine is noise of a few percent around what the
direct number says.

Limits: CPU; collections of garbage are counted in the pairs only (two calls of half a microsecond each). Lower is better.
"""

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from support.output import Document, Sample, parser, progress, publish
from torch._C._distributed_c10d import HashStore

from trainer import ranks
from trainer.config import TrainJob
from trainer.recording import BEAT_S, SWITCH, Recording

GOAL = 0.004
WARM_UP_STEPS = 6
BLOCK = 2000  # calls that are timed together
OPERATIONS = {1: 0, 2: 2}  # of a step of flights, fast: two ranks send and receive once


def step_ms(recipe: str, world_size: int, steps: int, *, on: bool) -> float:
    """Median time between updates of one run."""
    os.environ[SWITCH] = "on" if on else "off"
    with tempfile.TemporaryDirectory() as folder:
        job = TrainJob(recipe=recipe, folder=folder, world_size=world_size, reduction="fast", steps=steps + WARM_UP_STEPS)
        moments = ranks.run_group(job, _entry="support.switched:run_on", _collect="support.switched:collect")
    return float(np.median(np.diff(np.array(moments)[WARM_UP_STEPS:])) / 1e6)


def run_pairs(recipe: str, world_size: int, pairs: int, steps: int) -> list[Sample]:
    """Runs with recording and without, one right after the other, the first one in turn."""
    samples: list[Sample] = []
    for pair in range(pairs):
        found = {on: step_ms(recipe, world_size, steps, on=on) for on in ((True, False) if pair % 2 else (False, True))}
        share = found[True] / found[False] - 1
        samples.append({"kind": "pair", "ranks": world_size, "on_ms": found[True], "off_ms": found[False], "share": share})
        progress(f"W = {world_size}, pair {pair + 1} of {pairs}: on {found[True]:.3f} ms, off {found[False]:.3f} ms ({share:+.2%})")
    return samples


def call_us(call: Callable[[], object], blocks: int) -> float:
    """Processor time of one call in this thread, the median of some blocks, microseconds."""
    costs = []
    for _ in range(blocks):
        started = time.thread_time()
        for _ in range(BLOCK):
            call()
        costs.append((time.thread_time() - started) / BLOCK * 1e6)
    return statistics.median(costs)


def direct_us(blocks: int) -> dict[str, float]:
    """Microseconds: of a step's own calls, of one operation with and without, of one heartbeat."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as group:
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        group.callback(dist.destroy_process_group)
        with Recording.start(Path(folder), 0, 1) as recording:
            on, off = _operation_us(recording, blocks)
            step = call_us(lambda: _calls_of_a_step(recording), blocks)
            return {"step": step, "with": on, "without": off, "beat": call_us(recording.beat, blocks)}


def _operation_us(recording: Recording, blocks: int) -> tuple[float, float]:
    """An all_reduce with the stand-ins and without, in turn."""
    tensor, found = torch.ones(1), []
    for _ in range(blocks):
        on = call_us(lambda: dist.all_reduce(tensor), 1)
        recording._calls.remove()
        found.append((on, call_us(lambda: dist.all_reduce(tensor), 1)))
        recording._calls.install()
    return statistics.median(on for on, _ in found), statistics.median(off for _, off in found)


def _calls_of_a_step(recording: Recording) -> None:
    """As StepClock makes them in trainer.loop.train_step with one micro-batch."""
    recording.step(7)
    recording.phase("forward")
    recording.micro(0)
    recording.phase("backward")
    recording.phase("collective")
    recording.phase("collective")
    recording.arrive()
    recording.phase("optimizer")
    recording.phase("")


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__).parse_args()
    recipe, pairs, steps, blocks = ("support.recipes:tiny", 1, 6, 2) if arguments.quick else ("flights", 6, 80, 15)
    step_ms(recipe, 1, 2, on=True)  # imports, prepared data and page cache are there before the first pair
    samples = [sample for world_size in OPERATIONS for sample in run_pairs(recipe, world_size, pairs, steps)]
    cost = direct_us(blocks)
    operation = cost["with"] - cost["without"]
    progress(f"a step's calls {cost['step']:.1f} us, an operation {operation:.1f} us, a heartbeat {cost['beat']:.1f} us")
    shares = {}
    for world_size, operations in OPERATIONS.items():
        step = statistics.median(sample["on_ms"] for sample in samples if sample["kind"] == "pair" and sample["ranks"] == world_size)
        own_us = cost["step"] + operations * operation + cost["beat"] * step / 1e3 / BEAT_S
        shares[world_size] = own_us / 1e3 / step
        samples.append({"kind": "direct", "ranks": world_size, "on_ms": step, "off_ms": step - own_us / 1e3, "share": shares[world_size]})
        progress(f"W = {world_size}: {own_us:.1f} us of a step of {step:.2f} ms, {shares[world_size]:.3%}")
    share = cost["with"] / cost["without"] - 1
    samples.append({"kind": "operation", "ranks": 1, "on_ms": cost["with"] / 1e3, "off_ms": cost["without"] / 1e3, "share": share})
    ratio = max(shares.values())
    document = Document(
        name="recording_overhead", peer="the same loop without it, flights at W = 1 and 2", ratio=ratio, goal=GOAL, met=ratio < GOAL,
        unit="share of a step's time (lower is better)", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
