"""Exceptions, clean-up, death, and processes that stand still."""

import ctypes
import os
import signal
import time

import torch.distributed as dist

from hangs.scene import Scene, hold_interpreter, ones

CLEANUP_S = 20.0


def h30(rank: int, W: int, world: Scene) -> None:
    """Rank 1 runs out of memory in backward after bucket 1 of 3, skips the batch and goes on."""
    for step in range(3):
        world.step(step)
        world.phase("data")
        try:
            world.phase("backward")
            for bucket in range(3):
                dist.all_reduce(ones(10 + bucket))
                if (rank, step, bucket) == (1, 1, 0):
                    raise RuntimeError("out of memory: tried to allocate 2.00 GiB")
            world.phase("optimizer")
        except RuntimeError as error:
            if "out of memory" not in str(error):
                raise


def h32(rank: int, W: int, world: Scene) -> None:
    """Rank 3's loss is not finite at step 2, and its clean-up takes its time before anybody hears of it."""
    try:
        for step in range(4):
            world.step(step)
            world.phase("forward")
            if (rank, step) == (3, 2):
                raise ValueError("loss is nan at step 2")
            world.phase("backward")
            dist.all_reduce(ones(16))
            world.phase("optimizer")
    finally:
        if rank == 3:
            time.sleep(CLEANUP_S)


def h33(rank: int, W: int, world: Scene) -> None:
    """Rank 2 raises, and its finally block waits for the others."""
    try:
        for step in range(4):
            world.step(step)
            world.phase("forward")
            if (rank, step) == (2, 1):
                raise ValueError("label 11 is out of range")
            world.phase("backward")
            dist.all_reduce(ones(16))
            world.phase("optimizer")
    finally:
        dist.barrier()


def h36(rank: int, W: int, world: Scene) -> None:
    """Rank 2 is killed."""
    world.step(0)
    world.phase("backward")
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.all_reduce(ones(16))


def h37(rank: int, W: int, world: Scene) -> None:
    """Rank 0 is in a C call that keeps the interpreter's lock."""
    world.step(0)
    world.phase("forward")
    if rank == 0:
        hold_interpreter(20.0)
    world.phase("backward")
    dist.all_reduce(ones(16))


def stopped(rank: int, W: int, world: Scene) -> None:
    """Rank 2 is stopped by a signal at step 1."""
    for step in range(3):
        world.step(step)
        world.phase("forward")
        if (rank, step) == (2, 1):
            os.kill(os.getpid(), signal.SIGSTOP)
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")


def bad_address(rank: int, W: int, world: Scene) -> None:
    """Rank 4 reads where there is nothing at step 1."""
    for step in range(3):
        world.step(step)
        world.phase("forward")
        if (rank, step) == (4, 1):
            ctypes.string_at(0)
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")


def leaves_without_a_word(rank: int, W: int, world: Scene) -> None:
    """Rank 1 of two leaves with exit code 3 and no exception."""
    world.step(0)
    world.phase("forward")
    if rank == 1:
        os._exit(3)
    world.phase("backward")
    dist.all_reduce(ones(16))


def swallowed(rank: int, W: int, world: Scene) -> None:
    """Rank 0 cannot decode a sample at step 1 and skips the batch; sizes are equal, so nothing stops until the end."""
    for step in range(4):
        world.step(step)
        world.phase("data")
        try:
            if (rank, step) == (0, 1):
                raise OSError("cannot decode image 17")
        except OSError as error:
            world.note(f"skipped a batch: {error}")
            continue
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")
    world.phase("checkpoint")
    dist.barrier()


def raises(rank: int, W: int, world: Scene) -> None:
    """Rank 2 divides by zero at step 1 and ends at once."""
    for step in range(3):
        world.step(step)
        world.phase("forward")
        scale = 1 / (step - 1) if rank == 2 else 1.0
        world.phase("backward")
        dist.all_reduce(ones(16) * scale)
        world.phase("optimizer")


def cleans_up_together(rank: int, W: int, world: Scene) -> None:
    """Rank 1 of three raises, and on its way out saves a last checkpoint, which needs the others."""
    try:
        for step in range(4):
            world.step(step)
            world.phase("forward")
            if (rank, step) == (1, 2):
                raise KeyError("speaker_id")
            world.phase("backward")
            dist.all_reduce(ones(16))
            world.phase("optimizer")
    finally:
        world.phase("checkpoint")
        dist.all_gather([ones(4) for _ in range(W)], ones(4))


def killed_in_collective(rank: int, W: int, world: Scene) -> None:
    """Rank 0 is killed for memory while it gathers, at step 1 of a world of eight."""
    for step in range(3):
        world.step(step)
        world.phase("backward")
        if (rank, step) == (0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        dist.reduce(ones(16), 0)
        dist.broadcast(ones(16), 0)
        world.phase("optimizer")
