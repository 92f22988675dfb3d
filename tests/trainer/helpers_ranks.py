"""Entries that rank groups run in these tests, and a collect that keeps what the leader saw. Imported in warm processes and in pytest."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from trainer.config import TrainJob
from trainer.faults import FaultPlan
from trainer.ranks import run_group
from trainer.world import Emit, World
from validation.errors import DataError, EvidenceError
from validation.records import Machine, Recovery, RunRecord

COLLECT = "helpers_ranks:keep"


def job(folder: Path, **changes: object) -> TrainJob:
    """Two ranks, three steps."""
    usual = {"recipe": "none", "folder": str(folder), "world_size": 2, "steps": 3, "deadline_s": 60.0, "stall_s": 20.0}
    return TrainJob(**(usual | changes))


def run(entry: str, given: TrainJob, **more: object) -> RunRecord:
    """Run one of this module's entries as a rank group."""
    return run_group(given, _entry=f"helpers_ranks:{entry}", _collect=COLLECT, **more)


def keep(
    job: TrainJob,
    *,
    attempts: int,
    recoveries: tuple[Recovery, ...],
    faults_fired: tuple[str, ...],
    seconds: float,
    world_sizes: tuple[int, ...],
    unsaved: tuple[str, ...],
    refused: tuple[str, ...],
) -> RunRecord:
    """A RunRecord of what the leader reports; the ranks' sums stand where their states would."""
    sums = tuple(path.read_text() for path in sorted(Path(job.folder).glob("sum-*")))
    return RunRecord(
        recipe=job.recipe, world_size=world_sizes[0], parallel="ddp", reduction=job.reduction, precision=job.precision, seed=0,
        steps=job.steps or 0, state_sha256="", state_sha256_by_rank=sums, ledger_sha256="", throughput_sps=1.0, seconds=seconds,
        worker_seconds=seconds * world_sizes[0], attempts=attempts, faults_fired=faults_fired, recoveries=recoveries,
        peak_memory_mib=1.0, machine=Machine(device="cpu", devices=1, memory_gib=1.0, system="", python="", torch=""),
        unsaved=unsaved, refused=refused,
    )  # fmt: skip


def train(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """All-reduce ones at each step; die where a fault is planned; go on from the step that is on disk."""
    import torch
    import torch.distributed as dist

    emit("imported")
    store = dist.FileStore(rendezvous, world.world_size)
    dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size, timeout=timedelta(seconds=job.stall_s))
    emit("joined")
    saved = Path(job.folder) / "saved"
    start = int(saved.read_text()) if saved.exists() else 0
    dist.barrier()
    emit("loaded", step=start)
    total = torch.zeros(1)
    for step in range(start, job.steps or 3):
        fire(job, world, step, emit)
        total = torch.ones(1)
        dist.all_reduce(total)
        if world.rank == 0:
            saved.with_suffix(".new").write_text(str(step + 1))
            saved.with_suffix(".new").replace(saved)  # a kill may come at any time
        if world.rank == 0 or step == start:
            emit("step", step=step + 1, loss=1.0, samples=8)
    dist.destroy_process_group()
    Path(job.folder, f"sum-{world.rank}").write_text(str(total.item()))
    emit("finished")


def fire(job: TrainJob, world: World, step: int, emit: Emit) -> None:
    """The planned faults of this step, and skip in its least form: it stands still."""
    plan = FaultPlan(job.faults, world, emit)
    plan.at("backward", step)
    if plan.skips(step):
        stand_still()


def stand_still() -> None:
    time.sleep(600)


def die_unplanned(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Rank 1's first attempt ends with exit code 7, without a word."""
    if world.rank == 1 and world.attempt == 0:
        os._exit(7)
    train(job, world, rendezvous, emit)


def refuse(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Rank 1 finds an input file missing, while its peers wait for it."""
    if world.rank == 1:
        raise DataError("flights.csv is gone. Put it back.")
    train(job, world, rendezvous, emit)


def nested(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Every rank has a process of its own, in a session of its own, and both sleep."""
    own = subprocess.Popen(["sleep", "600"], start_new_session=world.rank == 1)
    for pid in (os.getpid(), own.pid, os.getppid()):
        note(job.folder, pid)
    emit("step", step=1, loss=0.0, samples=1)
    stand_still()


def chat(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Write on both streams and tell where this process stands."""
    print("spoken by rank", world.rank, flush=True)  # noqa: T201
    os.write(2, b"and an error\n")
    Path(job.folder, f"sum-{world.rank}").write_text(surroundings("SEATRIAL_TEST"))


def imported(names: tuple[str, ...]) -> list[bool]:
    """Which modules this process has loaded."""
    return [name in sys.modules for name in names]


def surroundings(variable: str) -> str:
    """Pids, folder and a variable of this process, and whether torch was there before anybody asked for it."""
    return json.dumps({
        "pid": os.getpid(), "sid": os.getsid(0), "leader": os.getppid(), "cwd": str(Path.cwd()), "value": os.environ.get(variable),
        "torch": "torch" in sys.modules, "dynamo": "torch._dynamo" in sys.modules, "pandas": "pandas" in sys.modules,
        "server": int(Path(f"/proc/{os.getppid()}/stat").read_text().rpartition(")")[2].split()[1]),
    })  # fmt: skip


def add(a: int, *, b: int) -> int:
    return a + b


def complain(name: str) -> None:
    """Raise one of several errors."""
    raise {"data": DataError("no file"), "evidence": EvidenceError("altered"), "value": ValueError("boom")}[name]


def nested_call(folder: str) -> None:
    """A call with a process of its own, both standing still."""
    note(folder, os.getpid())
    note(folder, subprocess.Popen(["sleep", "600"], start_new_session=True).pid)
    note(folder, os.getppid())
    stand_still()


def crash() -> None:
    print("about to crash", flush=True)  # noqa: T201
    os.kill(os.getpid(), 11)


def tensor() -> object:
    import torch

    return torch.ones(2)


def big(megabytes: int) -> bytes:
    return b"x" * (megabytes << 20)


def note(folder: str | Path, pid: int) -> None:
    """Write down a process, so that a test can ask for it."""
    Path(folder, f"pid-{pid}").touch()


def noted(folder: Path) -> list[int]:
    """The processes that were written down."""
    return [int(path.name.removeprefix("pid-")) for path in folder.glob("pid-*")]


def alive(folder: Path) -> list[int]:
    """The noted processes that still run; a zombie does not."""
    return [pid for pid in noted(folder) if state(pid) not in ("", "Z")]


def state(pid: int) -> str:
    """A process's state letter, "" when there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def wait_until(fact: Callable[[], bool], seconds: float) -> bool:
    """Whether a fact comes true in time."""
    until = time.monotonic() + seconds
    while not fact() and time.monotonic() < until:
        time.sleep(0.01)
    return fact()


def stop_oneself(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Rank 1 stops itself, as a debugger or a frozen node would."""
    note(job.folder, os.getpid())
    if world.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    stand_still()


def blink(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Rank 1 is stopped once, in its first attempt; whoever watches may continue it."""
    if (world.rank, world.attempt) == (1, 0):
        os.kill(os.getpid(), signal.SIGSTOP)
    train(job, world, rendezvous, emit)


def nested_once(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """`nested` in the first attempt; the next one notes who of it is still alive, and finishes."""
    if world.attempt == 0:
        nested(job, world, rendezvous, emit)
    if world.rank == 0:
        Path(job.folder, "alive-at-start").write_text(str(alive(Path(job.folder))))
    emit("step", step=3, loss=0.0, samples=1)
    emit("finished")


def die_at_two(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Every attempt comes to update 2, whose checkpoint stands, and no further."""
    for step in (1, 2):
        emit("step", step=step, loss=0.0, samples=1)
    emit("sealed", step=2, bytes=1, seconds=0.0)
    if world.rank == 1:
        raise ValueError("always here")
    stand_still()


def full_disk(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """No checkpoint but the third one can be written."""
    for step in range(3 * world.attempt, job.steps or 4):
        emit("step", step=step + 1, loss=0.0, samples=1)
        fire(job, world, step, emit)
        if step == 2:
            emit("sealed", step=3, bytes=1, seconds=0.0)
        else:
            emit("unsaved", step=step + 1, reason="No space left on device")
    emit("finished")
