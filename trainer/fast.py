"""Adding gradients over ranks torch's way (`fast`): its bits depend on the world size, and it is judged by its error against float64.

Both leave in every parameter's .grad the sum over the whole global batch, not yet divided by the total weight, as `exact` does.
"""

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from trainer.faults import FaultPlan
from trainer.moving import MovingBuffers
from trainer.reduce import SCALARS, Flat, Totals, counted, make_flat, out_of_step, scalars_of
from trainer.rows import SharedRows, share_rows
from trainer.telemetry import StepClock
from trainer.world import World
from validation.errors import RankError, RecipeError

if TYPE_CHECKING:
    from trainer.feed import MicroBatch

# DDP's first bucket. Gradients that fit into it leave together when the backward pass is over, so there is nothing to overlap, and
# DDP's hooks only cost (0.4 ms a step of a model of 14 tensors); they travel in one all-reduce of our own, scalars in the same buffer.
ONE_BUCKET_BYTES = 1 << 20
STEPS_MODULO = 1 << 16  # a step's number rides along in float32, which holds the sum of any ranks' exactly


class FastReduction:
    """All lanes of a rank in one micro-batch, gradients summed by torch's all-reduce.

    One rank: the plain module. Small models: one buffer, one all-reduce. Larger ones: DistributedDataParallel, bucket by bucket behind the
    backward pass, with the scalars' all-reduce beside it. Two ranks on CPUs read each other's small buffers in memory that they share
    (trainer/rows.py): two addends have one sum, whoever adds them. More than two add torch's way, since that is what is judged here.
    """

    def __init__(
        self, model: nn.Module, world: World, clock: StepClock, faults: FaultPlan, moving: MovingBuffers, *,
        has_unused: bool, coupled: bool,
    ) -> None:  # fmt: skip
        self._world = world
        self._moving = moving
        self._clock = clock
        self._faults = faults
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._coupled = coupled
        self._step = 0
        self._last_lane = 0  # of the rank's last group: its last part sends the gradients
        self._skipping = False
        self._scalars = torch.zeros(SCALARS + 1, dtype=torch.float64)  # and the step
        self._moved = torch.zeros(moving.size)
        self._fresh = True  # no micro-batch of the step yet
        self._pending: Any = None  # the scalars' all-reduce, on its way during the backward pass
        self._sums: Flat | None = None  # of all ranks, in .grad when a step's reduction is over
        self._own: tuple[Flat, ...] = ()  # what this rank adds to them, by turns
        self._shared: SharedRows | None = None  # where two ranks see each other's buffers
        self._wrapped: DistributedDataParallel | None = None
        elements = sum(p.numel() for p in self._parameters) + moving.size
        # scalars ride along in the gradients' type: a smaller one would round weights, and steps beyond 256
        rides = self._parameters[0].dtype in (torch.float32, torch.float64)
        if world.world_size > 1 and rides and elements * self._parameters[0].element_size() <= ONE_BUCKET_BYTES:
            size = elements + SCALARS + 1
            self._sums = make_flat(self._parameters, moving.size, size)
            if world.world_size == 2 and self._sums.buffer.device.type == "cpu":
                self._shared = share_rows(world, size, self._sums.buffer.dtype)
            rows = () if self._shared is None else self._shared.own
            self._own = tuple(make_flat(self._parameters, moving.size, size, row) for row in rows) or (self._sums,)
        elif world.world_size > 1:
            self._wrapped = self._wrap(model, has_unused=has_unused)
        self.module: nn.Module = self._wrapped or model

    def _wrap(self, model: nn.Module, *, has_unused: bool) -> DistributedDataParallel:
        with warnings.catch_warnings():  # torch 2.13 renames broadcast_buffers, 2.11 does not know the new name
            warnings.simplefilter("ignore", FutureWarning)
            wrapped = DistributedDataParallel(
                model, broadcast_buffers=False, find_unused_parameters=has_unused, gradient_as_bucket_view=True
            )  # fmt: skip
        wrapped.register_comm_hook(None, self._hook)
        return wrapped

    def groups(self, lanes: range) -> list[range]:
        """All lanes of the rank in one group; one by one where samples of a micro-batch are coupled."""
        groups = [range(lane, lane + 1) for lane in lanes] if self._coupled else [lanes]
        self._last_lane = groups[-1][0]
        return groups

    def forward(self, micro: "MicroBatch") -> AbstractContextManager[Any]:
        """Gradients travel with the rank's last micro-batch only."""
        self._moving.rewind()
        if self._wrapped is None:
            return nullcontext()
        return _explained(nullcontext() if self._is_last(micro) else self._wrapped.no_sync())

    def _is_last(self, micro: "MicroBatch") -> bool:
        return micro.is_last and micro.lane == self._last_lane

    def backward(self, step: int, micro: "MicroBatch", loss_sum: Tensor, weight: Tensor, scale: float) -> None:
        """Backward, with torch's overlapped all-reduce where there is one."""
        if self._fresh:
            self._begin(step)
        self._scalars[:SCALARS] += scalars_of(micro, loss_sum, weight)
        if self._moving.size and micro.counts:
            self._moved += self._moving.seen()
        if self._wrapped is None or not self._is_last(micro):
            counted(micro, loss_sum, scale * self._mean_of).backward()  # type: ignore[no-untyped-call]
            return
        self._pending = None if self._skipping else dist.all_reduce(self._scalars, async_op=True)
        counted(micro, loss_sum, scale * self._mean_of).backward()  # type: ignore[no-untyped-call]
        self._clock.lap("collective")

    @property
    def _mean_of(self) -> int:
        """DDP takes the mean over so many ranks; the loss times this makes it the sum."""
        return 1 if self._wrapped is None else self._world.world_size

    def _begin(self, step: int) -> None:
        if self._own:
            self._flat.buffer.zero_()
            self._attach(self._flat)
        else:
            for parameter in self._parameters:
                parameter.grad = None
        self._fresh = False
        self._step = step
        self._skipping = self._faults.skips(step)
        self._scalars = torch.zeros(SCALARS + 1, dtype=torch.float64, device=self._parameters[0].device)
        self._scalars[SCALARS] = step % STEPS_MODULO
        self._moved = self._parameters[0].new_zeros(self._moving.size, requires_grad=False)

    def finish(self, step: int) -> Totals:
        """Bring the sums to every rank. Collective."""
        self._fresh = True
        if self._wrapped is None:
            self._clock.arrive()
            self._faults.at("collective", step)
        if self._sums is not None and not self._skipping:
            self._add_flat(self._sums, step)
        if self._pending is not None:
            self._pending.wait()
            if self._moving.size:
                dist.all_reduce(self._moved)
        for parameter in self._parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        loss_sum, weight, micro_batches, steps = self._scalars.tolist()
        if steps != step % STEPS_MODULO * self._world.world_size and not self._skipping:
            raise RankError(out_of_step(self._world.rank, step, f"the sum of all {self._world.world_size} ranks' steps is {steps:g}"))
        self._moving.settle(self._moved, micro_batches)
        return Totals(loss_sum, weight, (loss_sum,))

    @property
    def _flat(self) -> Flat:
        """Where this rank's part of the sums is in this step."""
        return self._own[0 if self._shared is None else self._shared.turn]

    def _attach(self, flat: Flat) -> None:
        for parameter, view in zip(self._parameters, flat.views, strict=True):
            parameter.grad = view

    def _add_flat(self, sums: Flat, step: int) -> None:
        """Gradients, moving buffers and scalars in one collective; the scalars in the gradients' type, rounded."""
        flat = self._flat
        flat.moved.copy_(self._moved)
        flat.buffer[-(SCALARS + 1) :].copy_(self._scalars)
        if self._shared is None:
            dist.all_reduce(flat.buffer)
        else:
            torch.add(*self._shared.exchange(step), out=sums.buffer)
            self._attach(sums)
        self._moved, self._scalars = sums.moved.clone(), sums.buffer[-(SCALARS + 1) :].double()

    def _hook(self, state: object, bucket: GradBucket) -> torch.futures.Future[Tensor]:  # noqa: ARG002 - torch's signature
        if bucket.is_last():  # all of the backward pass is done; earlier buckets overlap with it
            self._clock.arrive()
            self._faults.at("collective", self._step)
        if self._skipping:
            future: torch.futures.Future[Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer())
            return future
        return allreduce_hook(dist.group.WORLD, bucket)  # type: ignore[arg-type]


@contextmanager
def _explained(window: AbstractContextManager[Any]) -> Iterator[None]:
    """DDP's forward pass, with its word about a parameter that the last batch did not use turned into something to act on."""
    try:
        with window:
            yield
    except RuntimeError as error:
        if "Expected to have finished reduction" not in str(error):
            raise
        raise RecipeError(
            "some parameter took no part in the loss of the last batch, though it did in the first samples, so torch's DDP waits for its "
            "gradient for ever. Train with --reduction exact, which takes any parameters, or let every batch use them all."
        ) from None
