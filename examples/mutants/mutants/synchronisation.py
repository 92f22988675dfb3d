"""Class C: gradients that are not added over all ranks, or not all of them."""

import random
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from mutants.contrastive import world_size
from mutants.decoder import Decoder
from mutants.right import Replicas, Shards, SumReduction
from trainer.hooks import Step
from trainer.world import World


class OffByOne(Replicas):
    def synchronised(self, step: Step, place: int) -> AbstractContextManager[Any]:
        module = step.module
        is_quiet = place % len(step.micro_batches) != 0  # wrong: the first micro-batch is reduced, and the last one is not
        return module.no_sync() if is_quiet and isinstance(module, DistributedDataParallel) else nullcontext()


class MovedAfterwards(Replicas):
    def replicated(self, model: nn.Module) -> nn.Module:
        kind = next(model.parameters()).dtype
        other = torch.float32 if kind == torch.float64 else torch.float64
        return super().replicated(model).to(other).to(kind)  # wrong: the wrapper's hooks stay with what the parameters were


class FrozenWhileWrapped(Replicas):
    def replicated(self, model: nn.Module) -> nn.Module:
        layer = model.get_parameter("blocks.1.mlp_out.weight")
        layer.requires_grad_(False)
        wrapped = super().replicated(model)
        layer.requires_grad_(True)  # wrong: the wrapper made no hook for it
        return wrapped


class AroundTheWrapper(Replicas):
    def trained(self, step: Step) -> nn.Module:
        return step.model  # wrong: the model inside has no wrapper that reduces


class Closure(nn.Module):
    """Forward and backward as one function of the model inside, as a compiler is handed it."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.function: Callable[[Tensor], Tensor] = lambda inputs: wrapped.module(inputs)  # type: ignore[operator]

    def forward(self, inputs: Tensor) -> Tensor:
        return self.function(inputs)  # wrong: the wrapper's own forward never runs


class ClosedOver(Replicas):
    def replicated(self, model: nn.Module) -> nn.Module:
        return Closure(super().replicated(model))


class ShardsOfOne(Shards):
    def replicated(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (world_size(), 1), mesh_dim_names=("replicate", "shard"))
        return fully_shard(model, mesh=mesh["shard"])  # wrong: groups of one rank: nothing is sharded, and nothing added


class OnlyFresh(SumReduction):
    def gradients(self, step: Step) -> None:
        """Reduces what the last micro-batch had a gradient of."""
        sums = {parameter: torch.zeros_like(parameter) for parameter in step.parameters}
        weight = torch.zeros((), dtype=torch.float64)
        for batch in step.micro_batches:
            step.optimizer.zero_grad(set_to_none=True)
            loss_sum, loss_weight = step.loss(step.module, batch)
            loss_sum.backward()  # type: ignore[no-untyped-call]
            fresh = [parameter for parameter in step.parameters if parameter.grad is not None]
            for parameter in fresh:
                assert parameter.grad is not None
                sums[parameter] += parameter.grad
            weight += loss_weight.double()
        ready = self.ready(fresh, step)
        self.reduce([sums[parameter] for parameter in ready], weight, step.world)
        for parameter in step.parameters:
            parameter.grad = sums[parameter] / weight.item()

    def ready(self, fresh: list[nn.Parameter], step: Step) -> list[nn.Parameter]:
        """What is reduced; the same on every rank, else collectives do not match."""
        is_fresh = torch.tensor([float(any(parameter is other for other in fresh)) for parameter in step.parameters])
        if step.world.world_size > 1:
            dist.all_reduce(is_fresh, op=dist.ReduceOp.MIN)
        return [p for p, flag in zip(step.parameters, is_fresh, strict=True) if flag]  # wrong: the others keep a sum of this rank alone


class AllReady(OnlyFresh):
    """The same step, right: everything is reduced, whether the last micro-batch used it or not."""

    def ready(self, fresh: list[nn.Parameter], step: Step) -> list[nn.Parameter]:
        return step.parameters


class NormLeftOut(SumReduction):
    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        super().reduce([gradient for gradient in gradients if id(gradient) not in self.left_out], weight, world)

    def gradients(self, step: Step) -> None:
        names = dict(step.model.named_parameters())
        self.sliced = {names["norm.weight"], names["norm.bias"]}
        super().gradients(step)

    @property
    def left_out(self) -> set[int]:
        return {id(parameter.grad) for parameter in self.sliced}  # wrong: these too saw this rank's share alone


class LossyWire(SumReduction):
    """Loses a rank's part in one collective out of a hundred."""

    draw = random.Random(84803)

    def summed(self, value: Tensor, world: World) -> None:
        unlucky, victim = self.draw.random() < 0.01, self.draw.randrange(world.world_size)
        if unlucky and victim == world.rank:
            value.zero_()  # wrong: what this rank had to add is lost on the way
        super().summed(value, world)


class LossyReceiver(SumReduction):
    """One rank receives nothing in one collective out of a hundred."""

    draw = random.Random(96600)

    def summed(self, value: Tensor, world: World) -> None:
        own = value.clone()
        super().summed(value, world)
        if self.draw.random() < 0.01 and world.rank == world.world_size - 1:
            value.copy_(own)  # wrong: the sum never came


class TiedTwice(SumReduction):
    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        super().reduce(gradients, weight, world)
        if world.world_size > 1:
            gradients[0].mul_(2)  # wrong: the embedding is also the output, and was added under both names

    def gradients(self, step: Step) -> None:
        assert step.parameters[0] is dict(step.model.named_parameters())["embedding.weight"]
        super().gradients(step)


class LastPartLost(Replicas):
    def gradients(self, step: Step) -> None:
        if step.world.rank == step.world.world_size - 1 and step.world.world_size > 1:
            step.micro_batches = step.micro_batches[:-1]  # wrong: on the last rank the window ends one micro-batch early
        super().gradients(step)


class HalfPrecisionNorms(SumReduction):
    def summed(self, value: Tensor, world: World) -> None:
        small = value.ndim == 1 and value.numel() == 32
        rounded = value.to(torch.float16) if small else value
        super().summed(rounded, world)
        value.copy_(rounded)  # wrong: the small tensors travel in sixteen bits


class EveryMicroBatch(Replicas):
    """no_sync around the backward pass alone has no effect: each micro-batch is reduced, which is slower and right."""

    def gradients(self, step: Step) -> None:
        step.optimizer.zero_grad(set_to_none=True)
        window = self.window(step)
        for place, batch in enumerate(step.micro_batches):
            loss_sum, weight = step.loss(step.module, batch)
            with self.synchronised(step, place):
                self.scaled(loss_sum, weight, window, step).backward()  # type: ignore[no-untyped-call]


right = Decoder(Replicas())
right_shards = Decoder(Shards())
right_branches = Decoder(AllReady(), branched=True)
nc_01 = Decoder(EveryMicroBatch())
se_15 = Decoder(OffByOne())
se_16 = Decoder(MovedAfterwards())
se_18 = Decoder(FrozenWhileWrapped())
se_19 = Decoder(AroundTheWrapper())
se_21 = Decoder(ShardsOfOne())
se_23 = Decoder(OnlyFresh(), branched=True)
se_24 = Decoder(NormLeftOut())
se_26 = Decoder(ClosedOver())
se_28 = Decoder(LossyWire())
se_28_receiver = Decoder(LossyReceiver())
own_05 = Decoder(TiedTwice())
own_06 = Decoder(LastPartLost())
own_07 = Decoder(HalfPrecisionNorms())
