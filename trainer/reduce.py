"""Adding gradients over ranks that hold the whole model: `exact` (the tree over lanes, one result at every world size), `fast` (torch's).

Both leave in every parameter's .grad the sum over the whole global batch, not yet divided by the total weight, and give that weight.
W = ranks, V = lanes, P = gradient elements of the model, C = ceil(P / W), a chunk.
"""

import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from trainer.faults import FaultPlan
from trainer.lanes import Node, TreeFold, aligned_subtrees, rank_lanes
from trainer.moving import MovingBuffers
from trainer.rows import SharedRows, share_rows
from trainer.telemetry import StepClock
from trainer.world import World
from validation.errors import RankError

if TYPE_CHECKING:
    from trainer.feed import MicroBatch

all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # renamed in torch 2.13


# What each rank receives in a step when nothing is cut into chunks. Interleaved whole steps of `flights` (1.9 MiB at W = 8) took 1 to 7 %
# less time at once than by chunks; at twice that size there was no difference, at three times and more chunks were faster (gloo, 2 cores).
AT_ONCE_BYTES = 2 << 20
SCALARS = 3  # of a lane or micro-batch: loss sum, weight, micro-batches that count


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

    def forward(self, micro: "MicroBatch") -> AbstractContextManager[Any]:
        """What one micro-batch's loss has to be computed in."""

    def backward(self, step: int, micro: "MicroBatch", loss_sum: Tensor, weight: Tensor, scale: float) -> None:
        """Take one micro-batch's loss; its gradient is taken `scale` times."""

    def finish(self, step: int) -> Totals:
        """Add over all ranks. Collective: all ranks, once a step."""


class Flat(NamedTuple):
    """All gradients of the model in one buffer, then its moving buffers, padded to a multiple of W; and views on it."""

    buffer: Tensor  # (W * C,)
    views: tuple[Tensor, ...]  # one a parameter
    moved: Tensor  # the moving buffers' values


class ExactReduction:
    """Adds lane gradients in the canonical tree: the same bits for every world size from 1 to V.

    Each rank folds its lanes to its maximal aligned subtrees. `all_to_all_single` brings every node's chunk c to rank c, which finishes
    the tree on it; then the results are spread. The volume equals a ring all-reduce's when W divides V. Small gradients wait for their
    peers longer than they travel: below AT_ONCE_BYTES every rank gets all nodes in one collective and finishes the whole tree by itself.
    Each lane's scalars (SCALARS) and the step number ride along as float64, bit-cast to the gradients' type.
    """

    def __init__(self, model: nn.Module, world: World, lanes: int, clock: StepClock, faults: FaultPlan, moving: MovingBuffers) -> None:
        self.module = model
        self._moving = moving
        self._world = world
        self._clock = clock
        self._faults = faults
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._chunk = -(-(sum(p.numel() for p in self._parameters) + moving.size) // world.world_size)
        self._lanes = [rank_lanes(rank, world.world_size, lanes) for rank in range(world.world_size)]
        self._nodes = [aligned_subtrees(lanes) for lanes in self._lanes]
        self._most_nodes = max(map(len, self._nodes))
        self._flat_size = self._chunk * world.world_size
        element = self._parameters[0].element_size()
        is_small = world.world_size * self._most_nodes * self._flat_size * element <= AT_ONCE_BYTES
        self._exchange = self._at_once if is_small else self._by_chunks
        self._shared: SharedRows | None = None  # where ranks on CPUs see each other's nodes
        if world.world_size > 1 and is_small and self._parameters[0].device.type == "cpu":
            tail = (1 + SCALARS * max(map(len, self._lanes))) * torch.float64.itemsize // element
            self._shared = share_rows(world, self._most_nodes * self._flat_size + tail, self._parameters[0].dtype)
        self._spare: list[Flat] = []
        self._fold = TreeFold(self._add)
        self._scalars: list[Tensor] = []  # SCALARS of each own lane, float64
        self._lane: Flat | None = None  # of the lane in work
        self._result: Flat | None = None  # the last step's root, in .grad until the next backward

    def groups(self, lanes: range) -> list[range]:
        """One micro-batch a lane."""
        return [range(lane, lane + 1) for lane in lanes]

    def forward(self, micro: "MicroBatch") -> AbstractContextManager[Any]:  # noqa: ARG002 - the same for every micro-batch
        """Every micro-batch sees the moving buffers of the step's beginning."""
        self._moving.rewind()
        return nullcontext()

    def backward(self, step: int, micro: "MicroBatch", loss_sum: Tensor, weight: Tensor, scale: float) -> None:  # noqa: ARG002 - the step is asked in `finish`
        """Accumulate the lane's gradient, part by part, straight into a flat buffer; fold it after its last part."""
        scalars = scalars_of(micro, loss_sum, weight)
        if self._lane is None:
            self._lane = self._start_lane()
            self._scalars.append(scalars)
        else:
            self._scalars[-1] += scalars
        if self._moving.size and micro.counts:
            self._lane.moved.add_(self._moving.seen())
        counted(micro, loss_sum, scale).backward()  # type: ignore[no-untyped-call]
        if micro.is_last:
            self._fold.push(Node(0, micro.lane), self._lane)
            self._lane = None

    def _start_lane(self) -> Flat:
        if self._result is not None:
            self._spare.append(self._result)
            self._result = None
        flat = self._take()
        flat.buffer.zero_()
        self._attach(flat)
        return flat

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
        parts = [*(flat.buffer for flat in nodes), *padding, self._tail(step, own, nodes[0].buffer)]
        if self._shared is None:
            gathered = self._spread(torch.cat(parts))
        else:
            torch.cat(parts, out=self._shared.own[self._shared.turn])
            gathered = self._shared.exchange(step).clone()  # added up in place
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
            all_gather(gathered.view(-1), row)
        return gathered

    def _tail(self, step: int, own: Tensor, like: Tensor) -> Tensor:
        """The step and SCALARS of each own lane, as long as the longest of all ranks, in the type of `like`."""
        tail = own.new_zeros(1 + SCALARS * max(map(len, self._lanes)))
        tail[0], tail[1 : 1 + own.numel()] = step, own.reshape(-1)
        return tail.view(like.dtype)

    def _all_scalars(self, tails: Tensor, step: int) -> Tensor:
        """SCALARS by lane, (V, SCALARS), out of the ranks' tails. Raises RankError when a rank is at another step."""
        tails = tails.contiguous().view(torch.float64)
        check_steps(tails[:, 0], self._world.rank, step)
        return torch.cat([row[1 : 1 + SCALARS * len(lanes)].view(-1, SCALARS) for row, lanes in zip(tails, self._lanes, strict=True)])

    def _keep(self, result: Flat, scalars: Tensor) -> Totals:
        self._result = result
        self._attach(result)
        totals, micro_batches = totals_of(scalars)
        self._moving.settle(result.moved, micro_batches)
        return totals

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
        return make_flat(self._parameters, self._moving.size, self._flat_size)


def make_flat(parameters: Sequence[nn.Parameter], moving: int, size: int, buffer: Tensor | None = None) -> Flat:
    """A buffer of `size` elements, zeroed when it is made here, for the parameters' gradients and `moving` buffer values."""
    buffer = parameters[0].new_zeros(size, requires_grad=False) if buffer is None else buffer
    sizes = [*(p.numel() for p in parameters), moving]
    *pieces, moved = torch.split(buffer[: sum(sizes)], sizes)
    return Flat(buffer, tuple(piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=True)), moved)


def scalars_of(micro: "MicroBatch", loss_sum: Tensor, weight: Tensor) -> Tensor:
    """SCALARS of one micro-batch, float64; zeros when its samples only stand in."""
    three = torch.stack((loss_sum.detach().double(), weight.detach().double(), loss_sum.new_ones((), dtype=torch.float64)))
    return three if micro.counts else torch.zeros_like(three)


def counted(micro: "MicroBatch", loss_sum: Tensor, scale: float) -> Tensor:
    """The loss whose gradient is taken: `scale` times, or not at all when its samples only stand in."""
    factor = scale * micro.counts
    return loss_sum if factor == 1.0 else loss_sum * factor


def totals_of(scalars: Tensor) -> tuple[Totals, float]:
    """Sums of SCALARS by lane, (V, SCALARS), in lane order (the same bits for every world size); and how many micro-batches counted."""
    losses, weights, micro_batches = scalars.T.tolist()
    return Totals(sum(losses), sum(weights), tuple(losses)), sum(micro_batches)


def check_steps(steps: Tensor, rank: int, step: int) -> None:
    """Every rank has to be at this step. Raises RankError."""
    seen = [int(value) for value in steps.tolist()]
    if any(value != step for value in seen):
        raise RankError(out_of_step(rank, step, f"the ranks' steps are {seen} (by rank)"))


def out_of_step(rank: int, step: int, seen: str) -> str:
    """What a rank says that meets others at another step."""
    return (
        f"rank {rank} is at step {step}, but {seen}: a rank left out a collective, so gradients of different steps were about to be "
        "added. The update was not made. Look at the rank that is ahead: code that skips a step on one rank only (an empty batch, an "
        "early exit, a caught exception) is the usual cause."
    )
