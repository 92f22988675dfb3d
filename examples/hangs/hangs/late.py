"""Ranks that come late but come: by their data, their work, garbage collection, a checkpoint; and jobs that are slow as a whole."""

import time

import torch
import torch.distributed as dist

from hangs.scene import Scene, collect_garbage, ones

WORK_S = 0.02  # of a healthy rank: forward and backward each


def _step(world: Scene, step: int, *, data_s: float = 0.001, forward_s: float = WORK_S, backward_s: float = WORK_S) -> None:
    """A step with one all_reduce; the phases take so long."""
    world.step(step)
    world.phase("data", data_s)
    world.phase("forward", forward_s)
    world.phase("backward", backward_s)
    world.phase("collective")
    dist.all_reduce(ones(64))
    world.phase("optimizer", 0.001)


def h40(rank: int, W: int, world: Scene) -> None:
    """Rank 0 writes a checkpoint for six seconds while the others wait for it in the next all_reduce."""
    for step in range(5):
        _step(world, step)
        if step == 2 and rank == 0:
            world.phase("checkpoint", 6.0)


def h42(rank: int, W: int, world: Scene) -> None:
    """Every rank collects garbage for 250 ms with the interpreter's lock held, each in a step of its own of every twelve."""
    for step in range(36):
        world.step(step)
        world.phase("data")
        world.phase("forward", WORK_S)
        if step % 12 == 3 * rank:
            collect_garbage(0.25)
        world.phase("backward", WORK_S)
        world.phase("collective")
        dist.all_reduce(ones(64))
        world.phase("optimizer")


class _SlowBackward(torch.autograd.Function):
    """Passes a gradient on after a while."""

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, tensor: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds  # type: ignore[attr-defined]
        return tensor.clone()

    @staticmethod
    def backward(ctx: torch.autograd.function.FunctionCtx, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)  # type: ignore[attr-defined]
        return grads[0], None


def h43(rank: int, W: int, world: Scene) -> None:
    """Rank 1's backward takes 30 ms longer, and nobody's backward looks longer than another's, for it ends in the reduction."""
    weight = torch.ones(64, requires_grad=True)
    for step in range(30):
        world.step(step)
        world.phase("data")
        world.phase("forward")
        loss = _SlowBackward.apply(weight, 0.03 if rank == 1 else 0.0).sum()
        world.phase("backward")
        loss.backward()
        dist.all_reduce(weight.grad)
        world.phase("optimizer")
        weight.grad = None


def h44(rank: int, W: int, world: Scene) -> None:
    """Rank 3 computes 1.6 times as long, forward and backward, in every step."""
    factor = 1.6 if rank == 3 else 1.0
    for step in range(30):
        _step(world, step, forward_s=factor * WORK_S, backward_s=factor * WORK_S)


def h49(rank: int, W: int, world: Scene) -> None:
    """All ranks take 20 ms longer in steps 20 to 39."""
    for step in range(60):
        _step(world, step, forward_s=WORK_S + (0.02 if 20 <= step < 40 else 0.0))


def slow_loader(rank: int, W: int, world: Scene) -> None:
    """Rank 1 of three waits 25 ms longer for its batch."""
    for step in range(30):
        _step(world, step, data_s=0.026 if rank == 1 else 0.001)


def slow_forward(rank: int, W: int, world: Scene) -> None:
    """Rank 2's forward takes 12 ms longer from step 8 on: the step is a quarter longer."""
    for step in range(40):
        _step(world, step, forward_s=WORK_S + (0.012 if rank == 2 and step >= 8 else 0.0))


def long_collection(rank: int, W: int, world: Scene) -> None:
    """Rank 3 collects garbage for four seconds at step 6, longer than any threshold."""
    for step in range(10):
        if (rank, step) == (3, 6):
            world.step(step)
            collect_garbage(4.0)
        _step(world, step)


def slow_writes(rank: int, W: int, world: Scene) -> None:
    """Rank 4 of five writes the checkpoint every fourth step alone, 120 ms each time."""
    for step in range(32):
        _step(world, step)
        if rank == 4 and step % 4 == 3:
            world.phase("checkpoint", 0.12)


def slow_backward_of_eight(rank: int, W: int, world: Scene) -> None:
    """Rank 6 of eight has a backward that is 30 ms longer."""
    for step in range(24):
        _step(world, step, backward_s=WORK_S + (0.03 if rank == 6 else 0.0))


def all_slower(rank: int, W: int, world: Scene) -> None:
    """All three ranks wait 30 ms longer for data from step 12 to 23: a shared disk."""
    for step in range(36):
        _step(world, step, data_s=0.001 + (0.03 if 12 <= step < 24 else 0.0))
