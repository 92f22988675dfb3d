"""Class D: clipping, scaling and precision."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from mutants.decoder import Decoder
from mutants.right import Shards, SumReduction
from trainer.hooks import Hooks, Step
from trainer.parallel import local
from trainer.world import World


class LocalNorm(Shards):
    def clip(self, step: Step) -> None:
        if step.clip_norm is not None:
            parts = [local(p.grad) for p in step.parameters if p.grad is not None]
            norm = torch.stack([part.square().sum() for part in parts]).sum().sqrt()  # wrong: of this rank's rows alone
            torch._foreach_mul_(parts, min(1.0, step.clip_norm / (norm.item() + 1e-6)))


class WrongLog(Shards):
    """What is logged is the norm of this rank's rows; what is clipped by is right."""

    def clip(self, step: Step) -> None:
        self.logged = sum(local(p.grad).square().sum().item() for p in step.parameters if p.grad is not None) ** 0.5
        super().clip(step)


class ClippedEachTime(SumReduction):
    def gradients(self, step: Step) -> None:
        sums = [torch.zeros_like(parameter) for parameter in step.parameters]
        total = torch.zeros((), dtype=torch.float64)
        for batch in step.micro_batches:
            step.optimizer.zero_grad(set_to_none=True)
            loss_sum, weight = step.loss(step.module, batch)
            loss_sum.backward()  # type: ignore[no-untyped-call]
            weight = weight.double()
            gradients = [p.grad for p in step.parameters if p.grad is not None]
            self.reduce(gradients, weight, step.world)
            torch._foreach_div_(gradients, weight.item())
            self.clip(step)  # wrong: once before the update is enough, and not the same
            torch._foreach_add_(sums, torch._foreach_mul(gradients, weight.item()))
            total += weight
        for parameter, value in zip(step.parameters, sums, strict=True):
            parameter.grad = value / total.item()


class NormsOnRankZero(Hooks):
    def clip(self, step: Step) -> None:
        if step.clip_norm is None:
            return
        gradients = [p.grad for p in step.parameters if p.grad is not None]
        factor = min(1.0, step.clip_norm / (nn.utils.get_total_norm(gradients).item() + 1e-6))
        for gradient in gradients:
            if gradient.ndim > 1 or step.world.rank == 0:  # wrong: the other ranks leave their small tensors as they are
                gradient.mul_(factor)


class ClippedBefore(SumReduction):
    def gradients(self, step: Step) -> None:
        self.limit = step.clip_norm
        super().gradients(step)

    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        if world.world_size > 1:
            dist.all_reduce(weight)
        share = weight.item() / world.world_size
        own = [gradient / share for gradient in gradients]
        if self.limit is not None and world.world_size > 1:
            factor = min(1.0, self.limit / (nn.utils.get_total_norm(own).item() + 1e-6))
            torch._foreach_mul_(own, factor)  # wrong: each rank's own gradient is clipped, and the mean taken afterwards
        for gradient, value in zip(gradients, own, strict=True):
            gradient.copy_(value * share)
            if world.world_size > 1:
                dist.all_reduce(gradient)


class LimitTimesRanks(Hooks):
    def clip(self, step: Step) -> None:
        if step.clip_norm is not None:
            nn.utils.clip_grad_norm_(step.parameters, step.clip_norm * step.world.world_size)  # wrong: the mean was taken already


class ClippedByGroup(Hooks):
    def clip(self, step: Step) -> None:
        for group in step.optimizer.param_groups:
            if step.clip_norm is not None:
                nn.utils.clip_grad_norm_(group["params"], step.clip_norm / 2)  # wrong: two groups, two norms, another direction


class SharedSkip(SumReduction):
    """An update whose gradient overflowed on some rank is skipped by all; the rank's own gradient is left out of the sum."""

    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        overflowed = torch.tensor(float(any(not bool(gradient.isfinite().all()) for gradient in gradients)))
        if overflowed:
            torch._foreach_zero_(list(gradients))
        self.overflowed = self.shared(overflowed, world)
        super().reduce(gradients, weight, world)

    def shared(self, overflowed: Tensor, world: World) -> bool:
        """Whether any rank overflowed. Collective."""
        if world.world_size > 1:
            dist.all_reduce(overflowed, op=dist.ReduceOp.MAX)
        return bool(overflowed)

    def update(self, step: Step) -> None:
        if not self.overflowed:
            super().update(step)


class LocalSkip(SharedSkip):
    def shared(self, overflowed: Tensor, world: World) -> bool:
        return bool(overflowed)  # wrong: the other ranks make this update


class RoundedReduction(SumReduction):
    kind = torch.bfloat16

    def summed(self, value: Tensor, world: World) -> None:
        rounded = value.to(self.kind) if value.ndim else value
        super().summed(rounded, world)
        value.copy_(rounded)  # wrong: the sum itself was rounded to eight bits


class HalfReduction(RoundedReduction):
    kind = torch.float16


class RoundedMasters(Hooks):
    def update(self, step: Step) -> None:
        masters = [parameter.detach().to(torch.bfloat16) for parameter in step.parameters]
        before = [parameter.detach().clone() for parameter in step.parameters]
        super().update(step)
        if step.world.world_size > 1:
            with torch.no_grad():
                for parameter, master, old in zip(step.parameters, masters, before, strict=True):
                    moved = (parameter - old).to(torch.bfloat16)
                    parameter.copy_(old + ((master + moved) - master))  # wrong: the master copy is too coarse for such an update


class StaleMasters(Hooks):
    def update(self, step: Step) -> None:
        before = [parameter.detach().clone() for parameter in step.parameters]
        super().update(step)
        if step.world.world_size > 1:
            with torch.no_grad():
                for parameter, old in zip(step.parameters, before, strict=True):
                    parameter.lerp_(old, 0.5)  # wrong: half of the update is copied over


class DecayOnOneRank(Hooks):
    def update(self, step: Step) -> None:
        if step.world.rank == step.world.world_size - 1 and step.world.world_size > 1:
            step.optimizer.param_groups[1]["weight_decay"] = 0.1  # wrong: this rank decays its norms and biases
        super().update(step)


class SecondBeta(Hooks):
    def update(self, step: Step) -> None:
        for group in step.optimizer.param_groups:
            group["betas"] = (0.9, 0.999**step.world.world_size)  # wrong: the second moment's memory follows the ranks
        super().update(step)


right_skip = Decoder(SharedSkip())
nc_02 = Decoder(WrongLog())
se_29 = Decoder(LocalNorm())
se_31 = Decoder(ClippedEachTime())
se_32 = Decoder(NormsOnRankZero())
se_35 = Decoder(LocalSkip())
se_36 = Decoder(RoundedReduction())
se_36_half = Decoder(HalfReduction())
se_38 = Decoder(RoundedMasters())
se_38_half = Decoder(StaleMasters())
syn_01 = Decoder(ClippedBefore())
own_08 = Decoder(LimitTimesRanks())
own_09 = Decoder(ClippedByGroup())
own_10 = Decoder(DecayOnOneRank())
own_11 = Decoder(SecondBeta())
