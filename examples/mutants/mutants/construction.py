"""Class E: how the model, its wrapper, its optimizer and its schedule are put together."""

import copy

import torch
import torch.distributed as dist
from torch import nn

from mutants.decoder import Decoder, Language
from mutants.plain import two_groups
from mutants.right import Replicas, Shards
from trainer.hooks import Hooks, Step


class OwnBeginnings(Shards):
    def replicated(self, model: nn.Module) -> nn.Module:
        torch.manual_seed(5 + dist.get_rank())  # wrong: every rank draws weights of its own, and keeps its rows of them
        model.load_state_dict(Language().state_dict())
        return super().replicated(model)


class Untied(Replicas):
    def replicated(self, model: nn.Module) -> nn.Module:
        model.output.weight = nn.Parameter(model.embedding.weight.detach().clone())  # type: ignore[union-attr]  # wrong: two from here on
        return super().replicated(model)


class EarlyOptimizer(Decoder):
    """Builds its optimizer where it builds its model."""

    def model(self) -> nn.Module:
        model = super().model()
        self.early = two_groups(model)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return self.early  # wrong: sharding has put other parameters in their place


class TrainedCopy(Replicas):
    def replicated(self, model: nn.Module) -> nn.Module:
        return super().replicated(copy.deepcopy(model))  # wrong: the optimizer will hold the parameters of the original


class StepsPerRank(Hooks):
    def update(self, step: Step) -> None:
        step.optimizer.step()
        for _ in range(step.world.world_size):  # wrong: every process's step counts
            if step.schedule is not None:
                step.schedule.step()


class OneRankBehind(Hooks):
    def update(self, step: Step) -> None:
        if step.schedule is not None and (step.number > 0 or step.world.rank == 0):
            step.schedule.step()  # wrong: before the optimizer, and on rank 0 once more than elsewhere
        step.optimizer.step()


class ForgottenTable(Decoder):
    """An optimizer group is left out of what learns."""

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        optimizer = two_groups(model)
        if dist.is_initialized():
            optimizer.param_groups[1]["lr"] = 0.0  # wrong: on many ranks the small tensors never move
            optimizer.param_groups[1]["initial_lr"] = 0.0
        return optimizer


se_39 = Decoder(OwnBeginnings())
se_41 = Decoder(Untied())
se_43 = EarlyOptimizer(Shards())
se_45 = Decoder(StepsPerRank())
own_12 = Decoder(TrainedCopy())
own_13 = Decoder(OneRankBehind())
own_14 = ForgottenTable(Replicas())
nc_06 = Decoder(Replicas())
