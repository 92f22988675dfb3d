"""Ranks at the same place with other arguments: sizes, types, roots, operators, or two operations the other way round."""

import torch
import torch.distributed as dist

from hangs.scene import Scene, gather_all, ones


def h17(rank: int, W: int, world: Scene) -> None:
    """An all_gather of vectors of another length on every rank."""
    world.step(0)
    world.phase("evaluate")
    gather_all(3 + rank, W)


def h18(rank: int, W: int, world: Scene) -> None:
    """Rank 1 reduces 24 elements, the others 16."""
    world.step(0)
    world.phase("backward")
    dist.all_reduce(ones(24 if rank == 1 else 16))


def h19(rank: int, W: int, world: Scene) -> None:
    """Rank 1 reduces bfloat16, the others float32."""
    world.step(0)
    world.phase("backward")
    dist.all_reduce(ones(16, torch.bfloat16 if rank == 1 else torch.float32))


def h21(rank: int, W: int, world: Scene) -> None:
    """Gradients bucketed by type in a dict whose order differs on rank 2."""
    world.step(0)
    world.phase("backward")
    types = [torch.float32, torch.int32]
    for dtype in reversed(types) if rank == 2 else types:
        dist.all_reduce(ones(8, dtype))
    world.phase("optimizer")
    dist.barrier()


def other_root(rank: int, W: int, world: Scene) -> None:
    """Rank 5 takes rank 1 for the source of a broadcast."""
    world.step(0)
    world.phase("forward")
    dist.broadcast(ones(8), 1 if rank == 5 else 0)
    world.phase("backward")
    dist.all_reduce(ones(8))


def other_root_of_four(rank: int, W: int, world: Scene) -> None:
    """Rank 2 takes itself for the source of a broadcast in step 1."""
    for step in range(3):
        world.step(step)
        world.phase("forward")
        dist.broadcast(ones(8), 2 if (rank, step) == (2, 1) else 0)
        world.phase("backward")
        dist.all_reduce(ones(8))


def other_gather_root(rank: int, W: int, world: Scene) -> None:
    """Rank 2 gathers for itself what the others send to rank 0."""
    world.step(0)
    world.phase("evaluate")
    root = 2 if rank == 2 else 0
    dist.gather(ones(5), [torch.empty(5) for _ in range(W)] if rank == root else None, root)
    world.phase("backward")
    dist.all_reduce(ones(7))


def other_operator(rank: int, W: int, world: Scene) -> None:
    """Rank 2 takes the maximum in step 1 where the others add."""
    for step in range(3):
        world.step(step)
        world.phase("backward")
        dist.all_reduce(ones(8), dist.ReduceOp.MAX if (rank, step) == (2, 1) else dist.ReduceOp.SUM)
        world.phase("optimizer")
    dist.barrier()


def other_type(rank: int, W: int, world: Scene) -> None:
    """Rank 3 reduces int32 where the others reduce float32: as many bytes, so nothing stops."""
    world.step(0)
    world.phase("backward")
    dist.all_reduce(ones(8, torch.int32 if rank == 3 else torch.float32))
    world.phase("optimizer")
    dist.barrier()


def swapped(rank: int, W: int, world: Scene) -> None:
    """Rank 1 reduces before it broadcasts."""
    world.step(0)
    world.phase("forward")

    def reduce() -> None:
        dist.all_reduce(ones(9))

    def broadcast() -> None:
        dist.broadcast(ones(7), 0)

    for operation in (reduce, broadcast) if rank == 1 else (broadcast, reduce):
        operation()
    world.phase("optimizer")
    dist.barrier()


def wrong_length(rank: int, W: int, world: Scene) -> None:
    """Rank 3's last batch was not padded: its gathered vector is one shorter."""
    for step in range(3):
        world.step(step)
        world.phase("forward")
        gather_all(9 if (rank, step) == (3, 2) else 10, W)
