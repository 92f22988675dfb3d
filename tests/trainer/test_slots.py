"""Batches through shared memory come out as they went in, and the memory has no name."""

import os
from pathlib import Path

import pytest
import torch

from trainer.recipe import Batch
from trainer.slots import Slots


def batch(rows: int) -> Batch:
    """Inputs in another order of dimensions, labels of one byte, weights of eight."""
    inputs = torch.arange(rows * 12, dtype=torch.bfloat16).view(rows, 3, 4).permute(0, 2, 1)
    return Batch(inputs, torch.arange(rows) % 2 == 0, torch.linspace(0, 1, rows, dtype=torch.float64))


def through(slots: Slots, slot: int, sent: Batch) -> Batch:
    return slots.read(slot, slots.write(slot, sent))


@pytest.mark.parametrize("rows", [0, 1, 7, 5000], ids=["empty", "one", "odd", "many"])
def test_a_batch_comes_out_as_it_went_in(rows: int) -> None:
    """Values, types, shapes and the order of dimensions stay, whatever the slot held before."""
    slots, sent = Slots(2), batch(rows)
    through(slots, 1, batch(900))
    got = through(slots, 1, sent)
    slots.close()

    assert all(torch.equal(a, b) and (a.dtype, a.shape) == (b.dtype, b.shape) for a, b in zip(got, sent, strict=True))
    assert rows < 2 or [part.stride() for part in got] == [part.stride() for part in sent]


def test_what_was_read_stays() -> None:
    """The next batch in the same slot, also a larger one, does not change the one that was taken."""
    slots = Slots(1)
    taken = through(slots, 0, batch(10))
    through(slots, 0, batch(4000))
    slots.close()

    assert torch.equal(taken.inputs, batch(10).inputs)


def test_slots_grow_across_processes_and_leave_nothing() -> None:
    """A forked process writes more than the slot held; the parent reads it; afterwards no descriptor is open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    slots = Slots(3)
    through(slots, 0, batch(5))
    places = slots.write(1, batch(2000))
    pid = os.fork()
    if pid == 0:
        slots.write(0, batch(2000))
        os._exit(0)
    os.waitpid(pid, 0)
    got = slots.read(0, places)
    slots.close()

    assert torch.equal(got.inputs, batch(2000).inputs)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
