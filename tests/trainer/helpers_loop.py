"""Rank groups for tests of the loop: real processes, forked, joined through a file; a restart is a second call."""

import multiprocessing
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # the first optimizer asks for it; imported once here, not once in every forked rank

from trainer import runlog
from trainer.config import TrainJob
from trainer.loop import run_rank
from trainer.setup import join, leave, settle
from trainer.world import World
from validation.records import RunRecord

torch.set_num_threads(1)  # before any operation: a forked child must not inherit a thread pool
FORK = multiprocessing.get_context("fork")


@dataclass
class Attempt:
    """What one attempt's processes said and how they ended."""

    exitcodes: list[int | None]
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    errors: dict[int, str] = field(default_factory=dict)

    def said(self, name: str) -> list[dict[str, Any]]:
        return [fields for event, fields in self.events if event == name]


def tiny_job(folder: Path, **options: Any) -> TrainJob:
    """A job of the tiny recipe in a fresh folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return TrainJob(**{"recipe": "tiny_recipe:recipe", "folder": str(folder), "world_size": 1, "stall_s": 20.0} | options)


def run_attempt(job: TrainJob, attempt: int = 0) -> Attempt:
    """Run one attempt to its end; the rest is killed once a rank has died, as the leader does."""
    world_size = job.world_size_of(attempt)
    pipes = [FORK.Pipe(duplex=False) for _ in range(world_size)]
    file = str(Path(job.folder) / f"rendezvous-{attempt}")
    worlds = [World(rank=rank, world_size=world_size, attempt=attempt) for rank in range(world_size)]
    ranks = [FORK.Process(target=_run, args=(job, world, file, pipes[world.rank][1])) for world in worlds]
    for rank in ranks:
        rank.start()
    while any(rank.is_alive() for rank in ranks) and not any(rank.exitcode for rank in ranks):
        time.sleep(0.005)
    if any(rank.exitcode for rank in ranks):
        time.sleep(0.3)  # let the other ranks say why they fail, too
    done = Attempt([])
    for rank, (inbox, outbox) in zip(ranks, pipes, strict=True):
        rank.kill()
        rank.join()
        outbox.close()
        done.exitcodes.append(rank.exitcode)
        _read(inbox, done)
    return done


def _read(inbox: Connection, done: Attempt) -> None:
    while inbox.poll():
        try:
            name, fields = inbox.recv()
        except EOFError:
            return
        if name == "error":
            done.errors[fields["rank"]] = fields["text"]
        done.events.append((name, fields))


def _run(job: TrainJob, world: World, file: str, outbox: Connection) -> None:
    def emit(name: str, **fields: Any) -> None:
        outbox.send((name, {"rank": world.rank, **fields}))

    try:
        run_rank(job, world, file, emit)
    except Exception as error:
        emit("error", text="\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ()))))
        raise SystemExit(1) from None


def run_job(job: TrainJob) -> RunRecord:
    """All attempts of a job, then its record."""
    attempts = [run_attempt(job)]
    while any(attempts[-1].exitcodes) and len(attempts) <= job.max_restarts:
        attempts.append(run_attempt(job, len(attempts)))
    assert not any(attempts[-1].exitcodes), attempts[-1].errors
    return runlog.collect(
        job, attempts=len(attempts), recoveries=(), faults_fired=tuple(item["fault"] for a in attempts for item in a.said("fault")),
        seconds=1.0, world_sizes=tuple(job.world_size_of(i) for i in range(len(attempts))),
    )  # fmt: skip


def run_ranks(job: TrainJob, function: Callable[[World], Any]) -> list[Any]:
    """Call `function(world)` on every rank of a joined group; its values by rank."""
    pipes = [FORK.Pipe(duplex=False) for _ in range(job.world_size)]
    worlds = [World(rank=rank, world_size=job.world_size) for rank in range(job.world_size)]
    ranks = [FORK.Process(target=_call, args=(job, world, function, pipes[world.rank][1])) for world in worlds]
    for rank in ranks:
        rank.start()
    for _, outbox in pipes:
        outbox.close()
    try:
        return [inbox.recv() for inbox, _ in pipes]
    finally:
        for rank in ranks:
            rank.join(20)
            rank.kill()


def _call(job: TrainJob, world: World, function: Callable[[World], Any], outbox: Connection) -> None:
    settle()
    join(job, world, str(Path(job.folder) / "rendezvous"))
    outbox.send(function(world))
    leave()
