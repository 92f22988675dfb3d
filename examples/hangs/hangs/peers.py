"""Point to point: sends and receives that do not meet."""

import torch
import torch.distributed as dist

from hangs.scene import Scene, ones


def h26(rank: int, W: int, world: Scene) -> None:
    """Both send first."""
    world.step(0)
    world.phase("forward")
    dist.send(ones(4), 1 - rank)
    dist.recv(torch.empty(4), 1 - rank)


def h29(rank: int, W: int, world: Scene) -> None:
    """Rank 0 sends to 1 while rank 1 receives from 2."""
    world.step(0)
    world.phase("forward")
    if rank == 0:
        dist.send(ones(4), 1)
    if rank == 1:
        dist.recv(torch.empty(4), 2)
    dist.barrier()


def ring(rank: int, W: int, world: Scene) -> None:
    """Everybody sends to the next one first."""
    world.step(0)
    world.phase("forward")
    dist.send(ones(4), (rank + 1) % W)
    dist.recv(torch.empty(4), (rank - 1) % W)


def other_tag(rank: int, W: int, world: Scene) -> None:
    """Rank 0 sends to 3 with tag 1, rank 3 waits for tag 2."""
    world.step(0)
    world.phase("forward")
    if rank == 0:
        dist.send(ones(4), 3, tag=1)
    if rank == 3:
        dist.recv(torch.empty(4), 0, tag=2)
    dist.barrier()


def receive_ring(rank: int, W: int, world: Scene) -> None:
    """Four pipeline stages of five ranks that each wait to receive before they send; rank 4 has no part in it."""
    world.step(0)
    world.phase("forward")
    if rank < 4:
        dist.recv(torch.empty(4), (rank - 1) % 4)
        dist.send(ones(4), (rank + 1) % 4)
    dist.barrier()
