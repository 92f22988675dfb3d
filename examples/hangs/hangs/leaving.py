"""Ranks that leave the common order of a group: by a decision of their own, or because they have more or less to do."""

import time

import torch
import torch.distributed as dist

from hangs.scene import Scene, gather_all, ones


def h01(rank: int, W: int, world: Scene) -> None:
    """A checkpoint save that ends in a barrier stands under "if rank zero"."""
    if rank == 0:
        world.phase("checkpoint")
        dist.barrier()
    world.phase("optimizer")
    dist.barrier()


def h02(rank: int, W: int, world: Scene) -> None:
    """The loss is known to rank 0 only, and each rank decides by its own whether it is the best so far."""
    world.step(0)
    world.phase("evaluate")
    loss = torch.tensor([0.5 + rank])
    dist.reduce(loss, 0)
    if rank == 0:
        gather_all(6, W)
    else:
        dist.all_reduce(ones(16))


def h03(rank: int, W: int, world: Scene) -> None:
    """Rank 2 meets its own stopping rule at step 3."""
    for step in range(6):
        world.step(step)
        world.phase("data")
        if rank == 2 and step == 3:
            break
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")
    world.phase("checkpoint")
    dist.barrier()


def h05(rank: int, W: int, world: Scene) -> None:
    """Checkpoints by the wall clock; rank 0's is 50 ms ahead."""
    began = time.monotonic() - (0.05 if rank == 0 else 0.0)
    for step in range(6):
        world.step(step)
        world.phase("backward")
        time.sleep(max(0.0, 0.02 * step - (time.monotonic() - began - (0.05 if rank == 0 else 0.0))))
        if time.monotonic() - began > 0.09:
            world.phase("checkpoint")
            dist.broadcast(ones(1, torch.int64), 0)
            return
        dist.all_reduce(ones(25))


def h08(rank: int, W: int, world: Scene) -> None:
    """Rank 2 skips micro-batch 2 of the first step; all sizes are equal."""
    for step in range(2):
        world.step(step)
        for micro in range(4):
            world.micro(micro)
            world.phase("data")
            if (rank, step, micro) == (2, 0, 2):
                continue
            world.phase("backward")
            dist.all_reduce(ones(16))
        world.phase("optimizer")
    world.phase("checkpoint")
    dist.barrier()


def h10(rank: int, W: int, world: Scene) -> None:
    """DDP over an iterable data set of unequal length: rank 1 has three batches, the others four."""
    _train_wrapped(world, 3 if rank == 1 else 4)
    world.note("data exhausted")
    if rank == 1:
        dist.destroy_process_group()


def _train_wrapped(world: Scene, steps: int) -> None:
    torch.manual_seed(0)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(steps):
        world.step(step)
        world.phase("data")
        batch = torch.ones(2, 4)
        world.phase("forward")
        loss = model(batch).sum()
        world.phase("backward")
        loss.backward()
        world.phase("optimizer")
        optimizer.step()
    world.phase("data")


def wrapped_model(rank: int, W: int, world: Scene) -> None:
    """The same with three ranks and rank 2 short of one batch; it keeps its group and goes on to something else."""
    _train_wrapped(world, 2 if rank == 2 else 3)


def h12(rank: int, W: int, world: Scene) -> None:
    """As many micro-batches as this rank's own tokens need."""
    world.step(0)
    for micro in range(5 if rank == 0 else 1):
        world.micro(micro)
        world.phase("data")
        world.phase("backward")
        dist.all_reduce(ones(16))
    world.phase("optimizer")
    dist.all_reduce(ones(3))


def h13(rank: int, W: int, world: Scene) -> None:
    """Decoding ends where this rank's own sentences end."""
    world.step(0)
    world.phase("forward")
    for micro in range(2 if rank == 2 else 5):
        world.micro(micro)
        gather_all(32, W)
    world.phase("evaluate")
    gather_all(48, W)


def h14(rank: int, W: int, world: Scene) -> None:
    """No token came to rank 3's experts: the first layer, which backward reaches last, is not in its graph."""
    world.step(0)
    world.phase("forward")
    world.phase("backward")
    dist.all_reduce(ones(12))
    if rank != 3:
        dist.all_reduce(ones(24))
    world.phase("optimizer")
    dist.barrier()


def h16(rank: int, W: int, world: Scene) -> None:
    """Rank 1's sample has audio, so its forward broadcasts one more buffer."""
    world.step(0)
    world.phase("forward")
    if rank == 1:
        dist.broadcast(ones(64), 0)
    dist.broadcast(ones(2400), 0)
    world.phase("backward")
    dist.all_reduce(ones(8))


def fewer_scatters(rank: int, W: int, world: Scene) -> None:
    """Rank 1 makes one reduce_scatter fewer in step 1; all have one shape."""
    for step in range(3):
        world.step(step)
        world.phase("backward")
        for bucket in range(2):
            if (rank, step, bucket) == (1, 1, 1):
                continue
            dist.reduce_scatter_tensor(torch.empty(4), ones(4 * W))
        world.phase("optimizer")
    world.phase("checkpoint")
    dist.barrier()


def no_gather(rank: int, W: int, world: Scene) -> None:
    """Rank 3 leaves out the gather of metrics to rank 0."""
    world.step(0)
    world.phase("evaluate")
    if rank != 3:
        dist.gather(ones(5), [torch.empty(5) for _ in range(W)] if rank == 0 else None, 0)
    world.phase("backward")
    dist.all_reduce(ones(7))
    world.phase("optimizer")
    dist.barrier()


def fewer_exchanges(rank: int, W: int, world: Scene) -> None:
    """The last rank leaves out the second of two all_to_alls: it has no token to send."""
    world.step(0)
    world.phase("forward")
    dist.all_to_all_single(torch.empty(W), ones(W))
    if rank != W - 1:
        dist.all_to_all_single(torch.empty(W), ones(W))
    world.phase("optimizer")
    dist.barrier()


def one_more(rank: int, W: int, world: Scene) -> None:
    """Rank 2 reduces a metric once more in step 2 of 4; all sizes are equal."""
    for step in range(4):
        world.step(step)
        world.phase("backward")
        dist.all_reduce(ones(16))
        if (rank, step) == (2, 2):
            world.phase("evaluate")
            dist.all_reduce(ones(16))
        world.phase("optimizer")
    world.phase("checkpoint")
    dist.barrier()


def two_run_dry(rank: int, W: int, world: Scene) -> None:
    """Ranks 0 and 2 have two batches, the others four."""
    for step in range(2 if rank in (0, 2) else 4):
        world.step(step)
        world.phase("data")
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")
    if rank in (0, 2):
        world.phase("data")
        world.note("data exhausted")
        return
    world.phase("checkpoint")
    dist.barrier()


def one_of_two_stops(rank: int, W: int, world: Scene) -> None:
    """One of two ranks has had enough after two steps."""
    for step in range(2 if rank == 1 else 4):
        world.step(step)
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")


def one_of_eight_stops(rank: int, W: int, world: Scene) -> None:
    """Rank 3 of eight has reached its own number of samples after two steps."""
    for step in range(5):
        world.step(step)
        world.phase("data")
        if (rank, step) == (3, 2):
            break
        world.phase("forward")
        world.phase("backward")
        dist.all_reduce(ones(16))
        world.phase("optimizer")
    world.phase("checkpoint")
    dist.barrier()


def dropped_layer(rank: int, W: int, world: Scene) -> None:
    """Rank 4 does not reduce the first layer's bucket in step 1, and meets the others' with the first bucket of step 2."""
    for step in range(3):
        world.step(step)
        world.phase("backward")
        dist.all_reduce(ones(12))
        if (rank, step) != (4, 1):
            dist.all_reduce(ones(24))
        world.phase("optimizer")


def evaluates_alone(rank: int, W: int, world: Scene) -> None:
    """Rank 0 evaluates after step 1, and the evaluation reduces its score; nobody else does."""
    for step in range(4):
        world.step(step)
        world.phase("backward")
        dist.all_reduce(ones(20))
        world.phase("optimizer")
        if rank == 0 and step == 1:
            world.phase("evaluate")
            dist.all_reduce(ones(2, torch.float64))
