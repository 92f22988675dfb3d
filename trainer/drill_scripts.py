"""Small programs over torch.distributed that fail in ways no recipe can: misused groups, sends that cross, a hanging cleanup, deaf sockets.

Run by `trainer.ranks.run_group` in a recipe's place: `run` is the entry, and the job's recipe is "script:NAME". In every step the ranks
add their numbers; the call's first attempt fails at FAULT_STEP, later ones go through.
"""

import contextlib
import os
import re
import select
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.config import TrainJob
from trainer.drill_plan import FAULT_STEP, PREFIX, STEPS
from trainer.recording import Recording
from trainer.runlog import machine
from trainer.setup import join, leave, settle
from trainer.world import Emit, World
from validation.canonical import digest
from validation.records import Recovery, RunRecord

FOREVER_S = 3600.0
STEP_S = 0.02  # a step's own work
UNRECORDED = "undiagnosed"  # the script that records nothing
_SOCKET, _POLL = re.compile(r"socket:\["), re.compile(r"anon_inode:\[eventpoll\]")


def run(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """One rank of a script. Args and events: as of trainer.loop.run_rank."""
    script = job.recipe.removeprefix(PREFIX)
    settle()
    emit("imported")
    recording = None if script == UNRECORDED else Recording.start(job.folder, world.rank, world.world_size, attempt=world.attempt)
    join(job, world, rendezvous)
    emit("joined")
    groups = [dist.new_group(timeout=timedelta(seconds=job.stall_s)) for _ in range(2)]
    emit("loaded", step=0, steps=STEPS, refused=())
    total = torch.zeros(1, dtype=torch.float64)
    for step in range(STEPS):
        if recording is not None:
            recording.step(step)
            recording.phase("collective")
        if step == FAULT_STEP and not world.is_back:
            emit("fault", fault=job.recipe)
            SCRIPTS[script](world, groups)
        time.sleep(STEP_S)
        added = torch.full((1,), float(world.rank + step), dtype=torch.float64)
        dist.all_reduce(added)
        total += added / world.world_size
        if world.rank == 0 or step == 0:
            emit("step", step=step + 1, loss=float(total), samples=1)
    Path(job.folder, f"sum-{world.rank}").write_text(str(total.item()))
    if recording is not None:
        recording.close()
    leave()
    emit("finished")


def cross_groups(world: World, groups: list[Any]) -> None:
    """The last rank uses two groups in the other order."""
    for group in groups if world.rank < world.world_size - 1 else groups[::-1]:
        dist.all_reduce(torch.ones(4), group=group)


def send_both(world: World, _: list[Any]) -> None:
    """Two ranks send to each other before either receives."""
    dist.send(torch.ones(4), 1 - world.rank)
    dist.recv(torch.ones(4), 1 - world.rank)


def fail_and_clean_up(world: World, _: list[Any]) -> None:
    """Rank 1 fails, and its cleanup waits for ranks that are somewhere else."""
    if world.rank != 1:
        return
    try:
        raise ValueError("the loss of this batch is not a number")
    finally:
        dist.barrier()


def go_deaf(*_: Any) -> None:
    """Nothing that arrives at this process is read any more, as if the network had lost it: every socket leaves its poll."""
    opened = {int(name): _target(name) for name in os.listdir("/proc/self/fd")}  # noqa: PTH208
    sockets = [number for number, target in opened.items() if _SOCKET.match(target)]
    for poll in (select.epoll.fromfd(os.dup(number)) for number, target in opened.items() if _POLL.match(target)):
        for number in sockets:
            with contextlib.suppress(OSError):  # of another poll
                poll.unregister(number)


def stay_away(world: World, _: list[Any]) -> None:
    """Rank 1 never comes back from its own code."""
    if world.rank == 1:
        time.sleep(FOREVER_S)


def _target(name: str) -> str:
    with contextlib.suppress(OSError):  # closed meanwhile
        return os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
    return ""


SCRIPTS: Mapping[str, Callable[[World, list[Any]], None]] = {
    "group_misuse": cross_groups, "point_to_point": send_both, "teardown_deadlock": fail_and_clean_up, "fabric": go_deaf,
    UNRECORDED: stay_away,
}  # fmt: skip


def collect(
    job: TrainJob, *, attempts: int, recoveries: tuple[Recovery, ...], faults_fired: tuple[str, ...], seconds: float,
    world_sizes: tuple[int, ...], unsaved: tuple[str, ...], refused: tuple[str, ...],
) -> RunRecord:  # fmt: skip
    """A script's RunRecord: the digest of its sum stands where a state's would."""
    sums = tuple(path.read_text() for path in sorted(Path(job.folder).glob("sum-*")))
    return RunRecord(
        recipe=job.recipe, world_size=world_sizes[-1], parallel="ddp", reduction=job.reduction, precision=job.precision, seed=0,
        steps=STEPS, state_sha256=digest(sums[0]), state_sha256_by_rank=tuple(map(digest, sums)), ledger_sha256="", throughput_sps=0.0,
        seconds=seconds, worker_seconds=seconds * world_sizes[-1], attempts=attempts, faults_fired=faults_fired, recoveries=recoveries,
        peak_memory_mib=0.0, machine=machine(), unsaved=unsaved, refused=refused,
    )  # fmt: skip
