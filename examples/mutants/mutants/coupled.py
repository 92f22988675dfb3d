"""Class B: losses and statistics that couple the samples of all ranks."""

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mutants.contrastive import TEMPERATURE, WHOLE, Contrastive, gathered
from mutants.decoder import Decoder
from mutants.right import Replicas, SharedNorm, SumReduction
from mutants.tabular import Network, Tabular
from trainer.hooks import Step
from trainer.recipe import Batch


def detached(own: Tensor) -> tuple[Tensor, int]:
    """All ranks' rows, the own slice put back: no gradient flows to the others'."""
    everywhere, start = gathered(own.detach())
    return torch.cat([everywhere[:start], own, everywhere[start + len(own) :]]), start


class GatheredWithoutGradient(Contrastive):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        own = model(batch.inputs)
        everywhere, _ = detached(own)  # wrong: the whole matrix on every rank needs a factor W against the mean over ranks
        weights, _ = gathered(batch.weights)
        logits_NN = everywhere[:, 0] @ everywhere[:, 1].T / TEMPERATURE
        each = nn.functional.cross_entropy(logits_NN, torch.arange(len(everywhere)), reduction="none")
        return (each * weights).sum(), weights.sum()


class OwnRowsOnly(Contrastive):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        own = model(batch.inputs)
        everywhere, start = detached(own[:, 1])  # wrong: nobody tells the other ranks' views that they were too near
        logits_BN = own[:, 0] @ everywhere.T / TEMPERATURE
        each = nn.functional.cross_entropy(logits_BN, start + torch.arange(len(own)), reduction="none")
        return (each * batch.weights).sum(), batch.weights.sum()


class OwnSamplesOnly(Contrastive):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        own = model(batch.inputs)  # wrong: the other ranks' samples are no negatives at all
        each = nn.functional.cross_entropy(own[:, 0] @ own[:, 1].T / TEMPERATURE, torch.arange(len(own)), reduction="none")
        return (each * batch.weights).sum(), batch.weights.sum()


class TimesRanks(Replicas):
    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        return super().scaled(loss_sum, weight, window, step) * step.world.world_size  # wrong: nothing was gathered


class LocalNorm(SharedNorm):
    def forward(self, input: Tensor) -> Tensor:
        return nn.BatchNorm1d.forward(self, input)  # wrong: each rank normalises by its own samples


class DriftingNorm(SharedNorm):
    def note(self, mean: Tensor, spread: Tensor, input: Tensor) -> None:
        super().note(input.mean(dim=0), input.var(dim=0), input)  # wrong: the running statistics are each rank's own


class Unbroadcast(Replicas):
    def replicated(self, model: nn.Module) -> nn.Module:
        return DistributedDataParallel(model, broadcast_buffers=False)


class Normed(Tabular):
    """Points through BatchNorm over all ranks: right, with right hooks."""

    norm: type[nn.Module] = SharedNorm

    def __init__(self, norm: type[nn.Module], hooks: Replicas) -> None:
        super().__init__(hooks, WHOLE)
        self.norm = norm

    def model(self) -> nn.Module:
        return Network(self.norm)


class ShiftedTargets(Contrastive):
    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        own = model(batch.inputs)
        everywhere, _ = gathered(own[:, 1])
        targets = torch.arange(len(own))  # wrong: right on rank 0 alone, the other ranks' samples begin further on
        each = nn.functional.cross_entropy(own[:, 0] @ everywhere.T / TEMPERATURE, targets, reduction="none")
        return (each * batch.weights).sum(), batch.weights.sum()


right = Contrastive(Replicas())
right_norm = Normed(SharedNorm, Unbroadcast())
se_10 = GatheredWithoutGradient(SumReduction())
se_10_rows = OwnRowsOnly(SumReduction())
se_10_local = OwnSamplesOnly(SumReduction())
se_12 = Decoder(TimesRanks())
se_13 = Normed(LocalNorm, Replicas())
se_13_buffers = Normed(DriftingNorm, Unbroadcast())
own_04 = ShiftedTargets(SumReduction())
