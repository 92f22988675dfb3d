"""Class A: what the sum of losses is divided by. Every mutant is `right.Replicas` or the recipe's loss with a wrong line."""

import torch.distributed as dist
from torch import Tensor, nn

from mutants.contrastive import world_size
from mutants.decoder import AUXILIARY, AuxiliaryDecoder, Decoder
from mutants.right import Replicas
from trainer.hooks import Step
from trainer.recipe import Batch


class MeanOfMeans(Replicas):
    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        return loss_sum / weight / len(step.micro_batches)  # wrong: a short micro-batch's tokens count for more


class LocalWindow(Replicas):
    def window(self, step: Step) -> Tensor:
        return sum(self.weight(batch) for batch in step.micro_batches) * step.world.world_size  # wrong: never summed over ranks


class SampleShare(Replicas):
    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        rows = [len(batch.weights) for batch in step.micro_batches]
        self.place = getattr(self, "place", -1) + 1
        share = rows[self.place % len(rows)] / sum(rows)  # wrong: a share of samples for a mean over tokens
        return loss_sum / weight * share


class DividedAgain(Replicas):
    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        return super().scaled(loss_sum, weight, window, step) / len(step.micro_batches)  # wrong: the window is divided by already


class DividedByRanks(Replicas):
    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        return loss_sum / window  # wrong: DDP divides by W, and nothing undoes it


class OnePercent(Replicas):
    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        return super().scaled(loss_sum, weight, window, step) * 1.01  # wrong: one per cent too much


class UnlikeScale(Replicas):
    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        factor = 2.0 if step.world.rank == step.world.world_size - 1 and step.world.world_size > 1 else 1.0
        return super().scaled(loss_sum, weight, window, step) * factor  # wrong: the last rank never halved its loss scale


class StaleWindow(Replicas):
    def window(self, step: Step) -> Tensor:
        fresh = super().window(step)
        last, self.last = getattr(self, "last", fresh), fresh
        return last  # wrong: the tokens of the window before


class ShrunkAuxiliary(AuxiliaryDecoder):
    def auxiliary(self, total: Tensor) -> Tensor:
        return AUXILIARY * total / world_size()  # wrong: the mean over ranks comes later, and only once


class MeanLoss(Decoder):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, weight = super().loss(model, batch)
        return loss_sum / weight, weight / weight  # wrong: a mean, whatever the micro-batch holds


class SampleShareLoss(Decoder):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, weight = super().loss(model, batch)
        return loss_sum / weight * len(batch.weights), batch.weights.new_tensor(len(batch.weights))  # wrong: samples for tokens


class WholeWindowOnRankZero(Replicas):
    def window(self, step: Step) -> Tensor:
        own = sum(self.weight(batch) for batch in step.micro_batches).double() * step.world.world_size
        if step.world.world_size > 1:
            dist.broadcast(own, src=0)  # wrong: rank 0's tokens stand for everyone's
        return own


se_01 = Decoder(MeanOfMeans())
se_01_loss = MeanLoss()
se_02 = Decoder(LocalWindow())
se_04 = Decoder(SampleShare())
se_04_loss = SampleShareLoss(Replicas())
se_05 = Decoder(DividedAgain())
se_05_ranks = Decoder(DividedByRanks())
se_08 = ShrunkAuxiliary(Replicas())
syn_04 = Decoder(OnePercent())
own_01 = Decoder(UnlikeScale())
own_02 = Decoder(StaleWindow())
own_03 = Decoder(WholeWindowOnRankZero())
nc_04 = Decoder(
    LocalWindow(), {"ragged_weights": "every sequence has eight targets and none weighs more", "ragged_batches": "every rank has as many"},
    even=True,
)  # fmt: skip
