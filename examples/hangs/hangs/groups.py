"""Several groups: made with other members, left by one rank, or waiting for one another in a cycle."""

import torch.distributed as dist

from hangs.scene import Scene, ones


def h23(rank: int, W: int, world: Scene) -> None:
    """Each pair makes only its own group, though making one is collective over the world."""
    world.phase("setup")
    group = world.group([0, 3] if rank in (0, 3) else [1, 2])
    dist.barrier(group=group)


def h24(rank: int, W: int, world: Scene) -> None:
    """Two groups over all ranks; rank 3 uses them the other way round."""
    first, second = world.group(range(W)), world.group(range(W))
    world.step(0)
    world.phase("backward")
    for group in (second, first) if rank == 3 else (first, second):
        dist.all_reduce(ones(8), group=group)


def pair_left_out(rank: int, W: int, world: Scene) -> None:
    """Halves of the world, and pairs in them; rank 6 leaves out its pair's reduction."""
    halves = [world.group(range(low, low + W // 2)) for low in (0, W // 2)]
    pairs = [world.group((low, low + 1)) for low in range(0, W, 2)]
    for step in range(3):
        world.step(step)
        world.phase("backward")
        dist.all_reduce(ones(6), group=halves[rank // (W // 2)])
        if (rank, step) != (6, 2):
            dist.all_reduce(ones(4), group=pairs[rank // 2])
        world.phase("optimizer")
        dist.all_reduce(ones(2))


def three_groups(rank: int, W: int, world: Scene) -> None:
    """Three ranks, a group for every two of them, and each rank begins with another one."""
    groups = [world.group((0, 1)), world.group((1, 2)), world.group((0, 2))]
    world.step(0)
    world.phase("backward")
    order = {0: (0, 2), 1: (1, 0), 2: (2, 1)}[rank]
    for which in order:
        dist.all_reduce(ones(8), group=groups[which])


def half_swapped(rank: int, W: int, world: Scene) -> None:
    """Rank 1 first reduces over the world, the others first over their half."""
    halves = [world.group(range(low, low + W // 2)) for low in (0, W // 2)]
    world.step(0)
    world.phase("backward")
    mine = halves[rank // (W // 2)]
    for group in (None, mine) if rank == 1 else (mine, None):
        dist.all_reduce(ones(5), group=group)


def one_makes_no_group(rank: int, W: int, world: Scene) -> None:
    """Rank 7 is not in the first new group, so it does not call new_group for it: from then on its groups have other names."""
    world.phase("setup")
    if rank != 7:
        world.group(range(4))
    everybody = world.group(range(W))
    world.step(0)
    world.phase("backward")
    dist.all_reduce(ones(8), group=everybody)
