"""How long training stands still for a checkpoint of 200 MB of state.

    python benchmarks/checkpoint_stall.py [--json] [--quick]

Compared, in turn, on one rank and on two (plain state, the same on both, as under DDP): a plain memory copy of the whole state into tensors
that exist already; the time that Saver.save keeps its caller (the copy into its buffers; DCP files, sha256, MAC, sync, seal, reading back
go on behind it and are waited for here before the next round); and a blocking torch.save with fsync of the same state. `ratio` is the
median stall over the median copy on one rank; `met` also asks that the stall is at most a tenth of torch.save. On two ranks a sample is the
slower rank's, and each copies its half.

Limits: wall clock, file system and page cache of this machine; the first save, which makes the buffers, is shown and not counted; between
saves nothing trains, so the cost of the work behind (cores, memory bandwidth) is not in the stall: see `background_s`.
"""

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from support.output import Document, Sample, parser, progress, publish
from torch import Tensor

from trainer.config import TrainJob
from trainer.saver import Saver
from trainer.setup import join, leave, meet, settle
from trainer.state import State
from trainer.world import World

STATE_BYTES = 200 * 10**6
GOAL, OF_TORCH_SAVE = 2.0, 0.1
COPY, SAVE, TORCH_SAVE, FIRST = "plain copy", "Saver.save", "torch.save + fsync", "Saver.save, first"
SHARES = (16, 8, 8, 4, 4, 2, 2, 2, 1, 1)  # of one layer's tensors: weights, moments and small ones
FORK = multiprocessing.get_context("fork")


def make_state(total: int) -> dict[str, Tensor]:
    """float32 tensors of several sizes, about `total` bytes."""
    unit = total // 4 // (sum(SHARES) * 3)
    kinds = ("weight/{}", "optimizer/{}/exp_avg", "optimizer/{}/exp_avg_sq")
    return {kind.format(f"layer{i}"): torch.rand(share, unit) for kind in kinds for i, share in enumerate(SHARES)}


def seconds_of(work: Callable[[], object]) -> float:
    """Wall clock of one call."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def torch_save(tensors: dict[str, Tensor], path: Path) -> None:
    """What a loop without a saver does."""
    with path.open("wb") as file:
        torch.save(tensors, file)
        file.flush()
        os.fsync(file.fileno())


def measure(folder: Path, world: World, total: int, rounds: int) -> list[dict[str, Any]]:
    """One rank's samples; all ranks do the same at the same time."""
    tensors = make_state(total)
    copies = {name: torch.empty_like(value).fill_(1.0) for name, value in tensors.items()}
    saver = Saver(folder / "saved", world, key=bytes(32), run={}, at=lambda *_: None, emit=lambda *_, **__: None)
    step, samples = 0, []

    def copy() -> None:
        for name, value in tensors.items():
            copies[name].copy_(value)

    def save() -> None:
        saver.save(State(step=step, position=0, seed=0, tensors=tensors, plain={}))

    sides = {COPY: copy, SAVE: save, TORCH_SAVE: lambda: torch_save(tensors, folder / f"plain-{world.rank}.pt")}
    for number in range(-1, rounds):
        for side, work in sides.items() if number >= 0 else [(FIRST, save)]:
            step += 1
            meet()
            seconds = seconds_of(work)
            sample = {"side": side, "world_size": world.world_size, "round": max(number, 0), "blocked_s": seconds}
            samples.append(sample | {"background_s": seconds_of(saver.settle), "state_mb": total / 1e6})
            if work is save and saver.sealed_step != step:
                raise SystemExit("a checkpoint was not sealed: look for space on the disk, then run it again.")
    saver.close()
    return samples


def rank_main(folder: Path, world: World, total: int, rounds: int, outbox: Connection) -> None:
    """One rank's process."""
    settle()
    join(TrainJob(recipe="", folder=str(folder), world_size=world.world_size), world, str(folder / "rendezvous"))
    outbox.send(measure(folder, world, total, rounds))
    leave()


def measure_group(world_size: int, total: int, rounds: int) -> list[Sample]:
    """Samples of a group of ranks; each is that of the rank that was blocked longest."""
    with tempfile.TemporaryDirectory() as name:
        pipes = [FORK.Pipe(duplex=False) for _ in range(world_size)]
        worlds = [World(rank=rank, world_size=world_size) for rank in range(world_size)]
        ranks = [FORK.Process(target=rank_main, args=(Path(name), world, total, rounds, pipes[world.rank][1])) for world in worlds]
        for rank in ranks:
            rank.start()
        for _, outbox in pipes:
            outbox.close()
        by_rank = [inbox.recv() for inbox, _ in pipes]
        for rank in ranks:
            rank.join()
    return [max(alike, key=lambda sample: sample["blocked_s"]) for alike in zip(*by_rank, strict=True)]


def main() -> int:
    """Measure one rank, then two; print."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)  # before any operation: a forked rank must not inherit a thread pool
    total, rounds = (2 * 10**6, 2) if arguments.quick else (STATE_BYTES, 9)
    samples = [sample for world_size in (1, 2) for sample in measure_group(world_size, total, rounds)]
    median = {
        (world_size, side): statistics.median(
            item["blocked_s"] for item in samples if (item["world_size"], item["side"]) == (world_size, side)
        )
        for world_size in (1, 2)
        for side in (COPY, SAVE, TORCH_SAVE)
    }
    for (world_size, side), seconds in median.items():
        progress(f"W={world_size} {side:>20}: {seconds * 1e3:8.1f} ms")
    ratio, share = median[1, SAVE] / median[1, COPY], median[1, SAVE] / median[1, TORCH_SAVE]
    progress(f"W=1: the stall is {share:.3f} of torch.save + fsync (goal {OF_TORCH_SAVE})")
    document = Document(
        name="checkpoint_stall", peer="a plain memory copy (torch.save + fsync in the samples)", ratio=ratio, goal=GOAL,
        met=ratio <= GOAL and share <= OF_TORCH_SAVE, unit=f"stall / copy of {total / 1e6:g} MB", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
