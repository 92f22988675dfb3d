"""Programs in which nothing is wrong, whatever their dumps look like."""

import random

import torch
import torch.distributed as dist

from hangs.scene import Scene, ones


def n1(rank: int, W: int, world: Scene) -> None:
    """Ranks 0 and 1 are also busy in a group of their own, so their rings wrap earlier."""
    pair = world.group((0, 1))
    for step in range(60):
        world.step(step)
        world.phase("forward", 0.01)
        if rank < 2:
            for _ in range(6):
                dist.all_reduce(ones(4), group=pair)
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")


def n2(rank: int, W: int, world: Scene) -> None:
    """Scatter and gather: root and others hand in other sizes by nature."""
    for step in range(40):
        world.step(step)
        world.phase("data")
        part = torch.empty(4)
        dist.scatter(part, [ones(4) for _ in range(W)] if rank == 0 else None, 0)
        world.phase("forward", 0.02)
        dist.gather(part, [torch.empty(4) for _ in range(W)] if rank == 0 else None, 0)
        world.phase("optimizer")


def n4(rank: int, W: int, world: Scene) -> None:
    """4 x 4 against 2 x 8: as many elements."""
    for step in range(40):
        world.step(step)
        world.phase("backward", 0.02)
        dist.all_reduce(torch.ones(2, 8) if rank == 1 else torch.ones(4, 4))
        world.phase("optimizer")


def training(rank: int, W: int, world: Scene) -> None:
    """A plain training loop, for a few seconds."""
    for step in range(60):
        world.step(step)
        world.phase("data", 0.002)
        world.phase("forward", 0.01)
        world.phase("backward", 0.01)
        dist.all_reduce(ones(32))
        dist.all_reduce(ones(48))
        world.phase("optimizer", 0.001)


def n9(rank: int, W: int, world: Scene) -> None:
    """Ordinary jitter: everybody is last now and then."""
    chance = random.Random(17 + rank)
    for step in range(60):
        world.step(step)
        world.phase("data", chance.uniform(0.001, 0.003))
        world.phase("forward", chance.uniform(0.012, 0.016))
        world.phase("backward", chance.uniform(0.012, 0.016))
        dist.all_reduce(ones(32))
        world.phase("optimizer")


def ping_pong(rank: int, W: int, world: Scene) -> None:
    """Two ranks that send to and fro, and reduce."""
    for step in range(60):
        world.step(step)
        world.phase("forward", 0.015)
        if rank == 0:
            dist.send(ones(4), 1)
            dist.recv(torch.empty(4), 1)
        else:
            dist.recv(torch.empty(4), 0)
            dist.send(ones(4), 0)
        world.phase("backward", 0.01)
        dist.all_reduce(ones(16))


def pipeline(rank: int, W: int, world: Scene) -> None:
    """A pipeline of four stages, three micro-batches in flight: every stage stands elsewhere by nature."""
    for step in range(30):
        world.step(step)
        world.phase("forward")
        for micro in range(3):
            world.micro(micro)
            if rank > 0:
                dist.recv(torch.empty(8), rank - 1)
            world.phase("forward", 0.006)
            if rank < W - 1:
                dist.send(ones(8), rank + 1)
        world.phase("optimizer")
        dist.barrier()


def turning_root(rank: int, W: int, world: Scene) -> None:
    """The source of the broadcast turns from step to step, on all ranks alike."""
    for step in range(60):
        world.step(step)
        world.phase("forward", 0.02)
        dist.broadcast(ones(8), step % W)
        world.phase("backward")
        dist.reduce(ones(8), (step + 1) % W)


def uneven_objects(rank: int, W: int, world: Scene) -> None:
    """Objects of another size on every rank, which torch pads by itself."""
    for step in range(40):
        world.step(step)
        world.phase("forward", 0.02)
        world.phase("evaluate")
        dist.all_gather_object([None] * W, "x" * (10 * rank + step))
        world.phase("backward")
        dist.all_reduce(ones(8))


def slow_start(rank: int, W: int, world: Scene) -> None:
    """The first step compiles for 0.8 s on all ranks."""
    for step in range(50):
        world.step(step)
        world.phase("forward", 0.02 if step else 0.8)
        world.phase("backward", 0.01)
        dist.all_reduce(ones(16))
        world.phase("optimizer")


def saving_together(rank: int, W: int, world: Scene) -> None:
    """All ranks save together every tenth step, for 300 ms."""
    for step in range(40):
        world.step(step)
        world.phase("forward", 0.02)
        world.phase("backward", 0.01)
        dist.all_reduce(ones(16))
        world.phase("optimizer")
        if step % 10 == 9:
            world.phase("checkpoint", 0.3)
            dist.barrier()


def shadowing(rank: int, W: int, world: Scene) -> None:
    """Ranks whose data is over go on with empty batches until everybody's is: nobody is missed."""
    mine = 40 - 5 * rank
    for step in range(60):
        world.step(step)
        world.phase("data", 0.002)
        has_data = torch.tensor([float(step < mine)])
        dist.all_reduce(has_data)
        if not has_data.item():
            break
        world.phase("forward", 0.02)
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")


def asynchronous(rank: int, W: int, world: Scene) -> None:
    """Three reductions in flight, waited for at the end of the step."""
    for step in range(60):
        world.step(step)
        world.phase("backward", 0.02)
        pending = [dist.all_reduce(ones(16), async_op=True) for _ in range(3)]
        world.phase("collective")
        for work in pending:
            work.wait()
        world.phase("optimizer")


def odd_groups(rank: int, W: int, world: Scene) -> None:
    """Tensor and data groups over six ranks; some ranks have more to do in theirs."""
    tensor = [world.group(range(low, low + 2)) for low in range(0, W, 2)]
    data = [world.group(range(low, W, 2)) for low in range(2)]
    for step in range(40):
        world.step(step)
        world.phase("forward", 0.02)
        for _ in range(1 + rank // 2):
            dist.all_reduce(ones(4), group=tensor[rank // 2])
        world.phase("backward")
        dist.all_reduce(ones(16), group=data[rank % 2])
        world.phase("optimizer")


def n8(rank: int, W: int, world: Scene) -> None:
    """Rank 1 is late for more than the time-out; whoever looks, looks too late."""
    world.step(0)
    world.phase("forward", 2.5 * world.timeout_s if rank == 1 else 0.0)
    world.phase("backward")
    dist.all_reduce(ones(16))
