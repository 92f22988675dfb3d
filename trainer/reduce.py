"""Adding gradients over ranks: `exact` (the tree over lanes, same bits for every world size) and `fast` (torch's own DDP).

Both leave in every parameter's .grad the sum over the whole global batch, not yet divided by the total weight, and give that weight.
W = ranks, V = lanes, P = gradient elements of the model, C = ceil(P / W), a chunk.
"""

import functools
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.faults import FaultPlan
from trainer.lanes import Node, TreeFold, aligned_subtrees, rank_lanes
from trainer.telemetry import StepClock
from trainer.world import World
from validation.errors import RankError

_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


# What each rank receives in a step when nothing is cut into chunks. Interleaved whole steps of `flights` (1.9 MiB at W = 8) took 1 to 7 %
# less time at once than by chunks; at twice that size there was no difference, at three times and more chunks were faster (gloo, 2 cores).
AT_ONCE_BYTES = 2 << 20


class Totals(NamedTuple):
    """Over the whole global batch of one step, the same on every rank."""

    loss_sum: float
    weight: float
    losses: tuple[float, ...]  # by lane (exact), or the one sum (fast): to say which lane broke


class Reduction(Protocol):
    """One way of adding gradients over ranks."""

    module: nn.Module  # what the recipe's loss is called with

    def groups(self, lanes: range) -> list[range]:
        """Cut a rank's lanes into micro-batches."""

    def backward(self, step: int, lane: int, loss_sum: Tensor, weight: Tensor) -> None:
        """Take one micro-batch's loss; `lane` is its first lane."""

    def finish(self, step: int) -> Totals:
        """Add over all ranks. Collective: all ranks, once a step."""


class Flat(NamedTuple):
    """All gradients of the model in one buffer, padded to a multiple of W, and the views on it, one a parameter."""

    buffer: Tensor  # (W * C,)
    views: tuple[Tensor, ...]


class ExactReduction:
    """Adds lane gradients in the canonical tree: the same bits for every world size from 1 to V.

    Each rank folds its lanes to its maximal aligned subtrees. `all_to_all_single` brings every node's chunk c to rank c, which finishes
    the tree on it; then the results are spread. The volume equals a ring all-reduce's when W divides V. Small gradients wait for their
    peers longer than they travel: below AT_ONCE_BYTES every rank gets all nodes in one collective and finishes the whole tree by itself.
    Each lane's (loss sum, weight) and the step number ride along as float64, bit-cast to the gradients' type.
    """

    def __init__(self, model: nn.Module, world: World, lanes: int, clock: StepClock, faults: FaultPlan) -> None:
        self.module = model
        self._world = world
        self._clock = clock
        self._faults = faults
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._chunk = -(-sum(p.numel() for p in self._parameters) // world.world_size)
        self._lanes = [rank_lanes(rank, world.world_size, lanes) for rank in range(world.world_size)]
        self._nodes = [aligned_subtrees(lanes) for lanes in self._lanes]
        self._most_nodes = max(map(len, self._nodes))
        self._flat_size = self._chunk * world.world_size
        all_bytes = world.world_size * self._most_nodes * self._flat_size * self._parameters[0].element_size()
        self._exchange = self._at_once if all_bytes <= AT_ONCE_BYTES else self._by_chunks
        self._spare: list[Flat] = []
        self._fold = TreeFold(self._add)
        self._scalars: list[Tensor] = []  # (loss sum, weight) of each own lane, float64
        self._result: Flat | None = None  # the last step's root, in .grad until the next backward

    def groups(self, lanes: range) -> list[range]:
        """One micro-batch a lane."""
        return [range(lane, lane + 1) for lane in lanes]

    def backward(self, step: int, lane: int, loss_sum: Tensor, weight: Tensor) -> None:  # noqa: ARG002 - the step is asked in `finish`
        """Accumulate the lane's gradient straight into a flat buffer and fold it."""
        if self._result is not None:
            self._spare.append(self._result)
            self._result = None
        flat = self._take()
        flat.buffer.zero_()
        self._attach(flat)
        self._scalars.append(torch.stack((loss_sum.detach().double(), weight.detach().double())))
        loss_sum.backward()  # type: ignore[no-untyped-call]
        self._fold.push(Node(0, lane), flat)

    def finish(self, step: int) -> Totals:
        """Finish the tree over all ranks; every rank ends with the root in .grad."""
        own, nodes = torch.stack(self._scalars), [flat for _, flat in self._fold.held]
        self._scalars.clear()
        self._fold.held.clear()
        self._clock.arrive()
        if self._world.world_size == 1 or self._faults.skips(step):
            self._faults.at("collective", step)
            return self._keep(functools.reduce(self._add, nodes), own)
        root, tails = self._exchange(step, own, nodes)
        self._spare.extend(nodes)
        result = self._take()
        result.buffer.view(self._world.world_size, self._chunk).copy_(root)
        return self._keep(result, self._all_scalars(tails, step))

    def _at_once(self, step: int, own: Tensor, nodes: Sequence[Flat]) -> tuple[Tensor, Tensor]:
        """Every node to every rank. Collective. Returns: root (W, C) and the ranks' tails (W, T)."""
        self._faults.at("collective", step)
        padding = [nodes[0].buffer] * (self._most_nodes - len(nodes))  # rows of one length; nobody reads it
        gathered = self._spread(torch.cat([*(flat.buffer for flat in nodes), *padding, self._tail(step, own, nodes[0].buffer)]))
        fold = TreeFold(Tensor.add_)
        for held, row in zip(self._nodes, gathered, strict=True):
            for place, node in enumerate(held):
                fold.push(node, row[place * self._flat_size : (place + 1) * self._flat_size])
        return fold.held[0][1].view(-1, self._chunk), gathered[:, self._most_nodes * self._flat_size :]

    def _by_chunks(self, step: int, own: Tensor, nodes: Sequence[Flat]) -> tuple[Tensor, Tensor]:
        """Chunk c of every node to rank c, then its root to every rank. Two collectives. Returns: as `_at_once`."""
        world_size, chunk, counts = self._world.world_size, self._chunk, [len(nodes) for nodes in self._nodes]
        rows = [flat.buffer.view(world_size, chunk) for flat in nodes]
        outgoing = rows[0] if len(rows) == 1 else torch.stack(rows, dim=1)  # (W, own nodes, C): chunk c of all nodes goes to rank c
        incoming = outgoing.new_empty((sum(counts), chunk))
        splits = [chunk * count for count in counts]
        dist.all_to_all_single(incoming.view(-1), outgoing.reshape(-1), splits, [chunk * len(rows)] * world_size)
        self._faults.at("collective", step)
        fold = TreeFold(Tensor.add_)
        for node, row in zip((node for nodes in self._nodes for node in nodes), incoming, strict=True):
            fold.push(node, row)
        gathered = self._spread(torch.cat((fold.held[0][1], self._tail(step, own, incoming))))
        return gathered[:, :chunk], gathered[:, chunk:]

    def _spread(self, row: Tensor) -> Tensor:
        """Every rank's row (n,) to every rank: (W, n). Collective."""
        gathered = row.new_empty((self._world.world_size, row.numel()))
        if (
            dist.get_backend() == "gloo"
        ):  # its all_gather is a ring: W - 1 rounds, each of which waits for the slowest process to be scheduled
            dist.all_to_all_single(gathered.view(-1), row.repeat(self._world.world_size))
        else:
            _all_gather(gathered.view(-1), row)
        return gathered

    def _tail(self, step: int, own: Tensor, like: Tensor) -> Tensor:
        """The step and (loss sum, weight) of each own lane, as long as the longest of all ranks, in the type of `like`."""
        tail = own.new_zeros(1 + 2 * max(map(len, self._lanes)))
        tail[0], tail[1 : 1 + own.numel()] = step, own.reshape(-1)
        return tail.view(like.dtype)

    def _all_scalars(self, tails: Tensor, step: int) -> Tensor:
        """(loss sum, weight) by lane, (V, 2), out of the ranks' tails. Raises RankError when a rank is at another step."""
        tails = tails.contiguous().view(torch.float64)
        steps = [int(value) for value in tails[:, 0].tolist()]
        if any(value != step for value in steps):
            raise RankError(_out_of_step(self._world.rank, step, f"the ranks' steps are {steps} (by rank)"))
        return torch.cat([row[1 : 1 + 2 * len(lanes)].view(-1, 2) for row, lanes in zip(tails, self._lanes, strict=True)])

    def _keep(self, result: Flat, scalars: Tensor) -> Totals:
        self._result = result
        self._attach(result)
        losses, weights = scalars.T.tolist()
        return Totals(sum(losses), sum(weights), tuple(losses))  # in lane order: the same bits for every world size

    def _add(self, left: Flat, right: Flat) -> Flat:
        left.buffer.add_(right.buffer)
        self._spare.append(right)
        return left

    def _attach(self, flat: Flat) -> None:
        for parameter, view in zip(self._parameters, flat.views, strict=True):
            parameter.grad = view

    def _take(self) -> Flat:
        if self._spare:
            return self._spare.pop()
        first = self._parameters[0]
        buffer = first.new_zeros(self._flat_size, requires_grad=False)
        pieces = torch.split(buffer[: sum(p.numel() for p in self._parameters)], [p.numel() for p in self._parameters])
        return Flat(buffer, tuple(piece.view(p.shape) for piece, p in zip(pieces, self._parameters, strict=True)))


class FastReduction:
    """torch's DistributedDataParallel: one micro-batch a rank, gradients all-reduced bucket by bucket behind the backward pass.

    Its bits depend on the world size; it is judged by its error against a float64 reference. At W = 1 it is the plain module.
    """

    def __init__(self, model: nn.Module, world: World, clock: StepClock, faults: FaultPlan, *, has_unused: bool) -> None:
        self._world = world
        self._clock = clock
        self._faults = faults
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._step = 0
        self._skipping = False
        self._scalars = torch.zeros(3, dtype=torch.float64)
        self._pending: Any = None  # the scalars' all-reduce, on its way during the backward pass
        self.module = model
        if world.world_size > 1:
            with warnings.catch_warnings():  # torch 2.13 renames broadcast_buffers, 2.11 does not know the new name
                warnings.simplefilter("ignore", FutureWarning)
                wrapped = DistributedDataParallel(
                    model, broadcast_buffers=False, find_unused_parameters=has_unused, gradient_as_bucket_view=True
                )
            wrapped.register_comm_hook(None, self._hook)
            self.module = wrapped

    def groups(self, lanes: range) -> list[range]:
        """All lanes of the rank in one micro-batch."""
        return [lanes]

    def backward(self, step: int, lane: int, loss_sum: Tensor, weight: Tensor) -> None:  # noqa: ARG002 - one micro-batch, from its first lane
        """Backward with torch's overlapped all-reduce; the scalars' all-reduce runs beside it."""
        for parameter in self._parameters:
            parameter.grad = None
        self._step = step
        self._skipping = self._faults.skips(step)
        self._scalars = torch.stack((loss_sum.detach().double(), weight.detach().double(), weight.new_tensor(step, dtype=torch.float64)))
        if self._world.world_size == 1:
            loss_sum.backward()  # type: ignore[no-untyped-call]
            return
        self._pending = None if self._skipping else dist.all_reduce(self._scalars, async_op=True)
        (loss_sum * self._world.world_size).backward()  # type: ignore[no-untyped-call]  # DDP takes the mean; this makes it the sum
        self._clock.lap("collective")

    def finish(self, step: int) -> Totals:
        """Wait for the scalars; the gradients are summed already."""
        if self._world.world_size == 1:
            self._clock.arrive()
            self._faults.at("collective", step)
        if self._pending is not None:
            self._pending.wait()
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        loss_sum, weight, steps = self._scalars.tolist()
        if steps != step * self._world.world_size and not self._skipping:
            raise RankError(_out_of_step(self._world.rank, step, f"the sum of all {self._world.world_size} ranks' steps is {steps:g}"))
        return Totals(loss_sum, weight, (loss_sum,))

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: ARG002 - torch's signature
        if bucket.is_last():  # all of the backward pass is done; earlier buckets overlap with it
            self._clock.arrive()
            self._faults.at("collective", self._step)
        if self._skipping:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


def _out_of_step(rank: int, step: int, seen: str) -> str:
    return (
        f"rank {rank} is at step {step}, but {seen}: a rank left out a collective, so gradients of different steps were about to be "
        "added. The update was not made. Look at the rank that is ahead: code that skips a step on one rank only (an empty batch, an "
        "early exit, a caught exception) is the usual cause."
    )
