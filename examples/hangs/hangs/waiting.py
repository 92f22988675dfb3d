"""Ranks that wait for something that is no rank: a loader's queue, a lock, the network."""

import queue
import threading

import torch.distributed as dist

from hangs.scene import Scene, ones


def h38(rank: int, W: int, world: Scene) -> None:
    """Rank 0's loader waits at step 2 in a queue that nobody feeds."""
    batches: queue.Queue[int] = queue.Queue()
    for step in range(4):
        world.step(step)
        world.phase("data")
        if (rank, step) != (0, 2):
            batches.put(step)
        batches.get()
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")


def h47(rank: int, W: int, world: Scene) -> None:
    """All ranks are in the same operation, and what one pair sends does not arrive."""
    world.step(0)
    world.phase("backward")
    if rank == 1:
        world.drop_traffic()
    dist.all_reduce(ones(16))


def dead_lock(rank: int, W: int, world: Scene) -> None:
    """Rank 1 takes a lock twice in its forward at step 2."""
    lock = threading.Lock()
    for step in range(4):
        world.step(step)
        world.phase("forward")
        with lock:
            if (rank, step) == (1, 2):
                lock.acquire()
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")


def loader_of_last(rank: int, W: int, world: Scene) -> None:
    """The last rank's worker threads are gone, and its loader waits for the next batch."""
    ready = threading.Condition()
    for step in range(3):
        world.step(step)
        world.phase("data")
        if (rank, step) == (W - 1, 1):
            with ready:
                ready.wait()
        world.phase("backward")
        dist.reduce_scatter_tensor(ones(3), ones(3 * W))
        world.phase("optimizer")


def dropped_in_gather(rank: int, W: int, world: Scene) -> None:
    """All five ranks are in an all_gather at step 1, and rank 3 hears nothing any more."""
    for step in range(3):
        world.step(step)
        world.phase("forward")
        if (rank, step) == (3, 1):
            world.drop_traffic()
        dist.all_gather([ones(6) for _ in range(W)], ones(6))
        world.phase("optimizer")
