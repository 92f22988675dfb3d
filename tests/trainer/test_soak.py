"""A soak makes one update again and again: rare faults of a collective show, and the run is left as it was."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from helpers_audit import Bench, bench
from helpers_loop import run_ranks, tiny_job
from helpers_parts import ledger_of

from trainer.dataset import seed_streams
from trainer.parts import TIMELINE_PART, PartWriter
from trainer.soak import soak
from trainer.state import State, restore, snapshot, state_digest
from trainer.telemetry import StepClock
from trainer.world import World


@dataclass
class Run:
    """What a soak needs of a run, around a bench."""

    bench: Bench
    parts: PartWriter
    clock: StepClock
    done: int = 5

    def __post_init__(self) -> None:
        self.job, self.audit = self.bench.job, self.bench.audit

    def state(self) -> State:
        return snapshot(self.bench.model, self.bench.optimizer, None, step=self.done, position=self.done * 10, seed=0)

    def put_back(self, state: State) -> None:
        restore(state, self.bench.model, self.bench.optimizer, None)
        self.done = state.step

    def update(self) -> None:
        self.clock.start(self.done, 3)
        self.parts.add_ledger(ledger_of(np.array([(self.done, 0, 0, 7)])))
        self.bench.step(self.done, [1, 2, 3], [4, 5])
        self.done += 1
        self.clock.lap("optimizer")
        self.clock.keep()

    def again(self) -> list[tuple[Any, ...]]:
        return [(row["step"], row["tensor"], row["sha256"]) for row in self.bench.rows("digests") if row["stage"] == "again"]


def made(folder: Path, world: World | None = None, **options: Any) -> Run:
    run = bench(folder, world, **options)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.01)
    run.audit.watch(run.model, run.optimizer, limit=None)
    return Run(run, PartWriter(folder / "part"), StepClock(torch.device("cpu")))


def test_a_soak_leaves_no_trace_but_its_digests(tmp_path: Path) -> None:
    """Weights, moments, counters and random streams are as before; no ledger, timeline or other row; every repeat has one gradient."""
    run = made(tmp_path, soak=4)
    run.update()
    before, stream = state_digest(run.state()), torch.default_generator.get_state()
    tables = {name: len(rows) for name, rows in run.bench.parts.tables.items() if name != "digests"}
    soak(run, run.update)
    names = [name for name, _ in run.bench.model.named_parameters()]

    assert state_digest(run.state()) == before
    assert torch.equal(torch.default_generator.get_state(), stream)
    assert {name: len(rows) for name, rows in run.bench.parts.tables.items() if name != "digests"} == tables
    assert [row[:2] for row in run.again()] == [(repeat, name) for repeat in range(4) for name in names]
    assert len({row[1:] for row in run.again()}) == len(names)
    run.parts.add_timeline(run.clock.take())
    run.parts.flush()
    assert (run.parts.folder / "timeline.bin").stat().st_size == TIMELINE_PART.itemsize
    assert len(np.fromfile(run.parts.folder / "ids.bin", dtype="<i8")) == 1


def test_the_update_after_a_soak_is_the_repeated_one(tmp_path: Path) -> None:
    """What is handed to the optimizer afterwards has the bits of every repeat, and the run ends where it would have without a soak."""
    ends = []
    for repeats in (3, 0):
        run = made(tmp_path / str(repeats), soak=repeats)
        seed_streams(9)
        run.update()
        soak(run, run.update)
        run.update()
        ends.append(state_digest(run.state()))
        clipped = {(row["tensor"], row["sha256"]) for row in run.bench.rows("digests") if row["stage"] == "clipped" and row["step"] == 6}
        assert not repeats or {row[1:] for row in run.again()} == clipped

    assert ends[0] == ends[1]


def test_a_soak_starts_from_the_first_step_too(tmp_path: Path) -> None:
    """An optimizer without moments gets none put back."""
    run = made(tmp_path, soak=2)
    soak(run, run.update)

    assert not run.bench.optimizer.state
    assert len({row[1:] for row in run.again()}) == len(list(run.bench.model.parameters()))


class RareFault:
    """An all-reduce that adds up gradients, of which one in fifty leaves out rank 1's part."""

    def __init__(self, world: World, every: int) -> None:
        self.world, self.every, self.calls = world, every, 0

    def __call__(self, run: Bench) -> None:
        self.calls += 1
        flat = torch.cat([p.grad.ravel() for p in run.model.parameters() if p.grad is not None])
        if self.every and self.calls % self.every == 0 and self.world.rank == 1:
            flat.zero_()
        dist.all_reduce(flat)
        place = 0
        for parameter in run.model.parameters():
            parameter.grad = flat[place : place + parameter.numel()].view_as(parameter).clone()
            place += parameter.numel()


@pytest.mark.parametrize("every", [50, 0], ids=["1 in 50", "sound"])
def test_a_rare_fault_of_a_collective_is_found(every: int, tmp_path: Path) -> None:
    """Of sixty repeats one is struck, and has another gradient than all the others; six steps alone would have passed."""

    def repeats(world: World) -> list[Any]:
        run = made(tmp_path / str(world.rank), world, soak=60)
        run.bench.between = RareFault(world, every)
        run.bench.model.eval()
        for _ in range(6):
            run.update()
        soak(run, run.update)
        return run.again()

    for rows in run_ranks(tiny_job(tmp_path / "ranks", world_size=2), repeats):
        kinds = [{sha256 for step, tensor, sha256 in rows if (step, tensor) == (repeat, "0.weight")} for repeat in range(60)]
        odd = [repeat for repeat, kind in enumerate(kinds) if kind != kinds[0]]
        assert odd == ([50 - 6 - 1] if every else [])


def test_nothing_is_done_unless_asked(tmp_path: Path) -> None:
    """A job without a soak makes no update more, nor does one without an audit, that could tell nobody."""
    for options in ({}, {"audit": False, "soak": 3}):
        run = made(tmp_path, **options)
        before = state_digest(run.state())
        soak(run, lambda: pytest.fail("an update was made"))
        assert state_digest(run.state()) == before
