"""Further publicly reported faults of classes A to F, by other mechanisms; each is a right part with one wrong line, and its right twin."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from mutants.contrastive import WHOLE, SumOverRanks, world_size
from mutants.coupled import Normed, Unbroadcast
from mutants.decoder import IGNORED, PAD, WIDTH, Decoder, Language
from mutants.plain import two_groups
from mutants.randomness import LayerNormed
from mutants.right import Ahead, Replicas, Sampling, SharedNorm, Shuffled, SumReduction, Workers, as_it_is
from mutants.tabular import CLASSES, Network, Tabular
from trainer.hooks import Hooks, Rows, Step, StepData
from trainer.recipe import Batch, SplitData
from trainer.world import World

EXPERTS, BALANCE = 4, 0.01  # of the routed decoder; what its balance counts for


class TokensCounted(Replicas):
    def weight(self, batch: Batch) -> Tensor:
        return ((batch.inputs != PAD).sum(dim=1) * batch.weights).sum()  # wrong: the first token of a sequence is nobody's target


class ShortTail(Shuffled):
    """A sampler whose epochs end in an update of fewer micro-batches; what does not fill one is left out."""

    def take(self) -> Sequence[Rows]:
        size, parts = self.training.global_batch_size, self.training.accumulation
        unit = size // parts
        left = self.size - self.position % self.size
        count = min(size, left // unit * unit)
        if not count:
            self.position += left
            return self.take()
        if self.position + count > self.end:
            return ()
        wanted = np.arange(self.position, self.position + count)
        self.position += count
        return np.array_split(self.share(self.rows(wanted)), count // unit)


class Tailed(Replicas, Sampling):
    kind = ShortTail


class FullWindow(Tailed):
    most = 0

    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        self.most = max(self.most, len(step.micro_batches))
        share = len(step.micro_batches) / self.most  # wrong: a short window is divided by a full one's micro-batches
        return super().scaled(loss_sum, weight, window, step) * share


class ClearedEveryOther(SumReduction):
    left: list[Tensor] | None = None

    def gradients(self, step: Step) -> None:
        super().gradients(step)
        fresh = [parameter.grad for parameter in step.parameters if parameter.grad is not None]
        if self.left is not None:
            torch._foreach_add_(fresh, self.left)  # wrong: nobody cleared what the update before was made of
            self.left = None
        else:
            self.left = [gradient.clone() for gradient in fresh]


class Dice(Tabular):
    """The share of each class that is found, over the batch of all ranks: a quotient of sums."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__(hooks, WHOLE)

    def model(self) -> nn.Module:
        return Network(nn.LayerNorm)

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        chances = torch.softmax(model(batch.inputs), dim=1)
        truth = nn.functional.one_hot(batch.labels, CLASSES).to(chances.dtype)
        weights = batch.weights[:, None]
        both, guessed, true = self.everywhere(torch.stack([(part * weights).sum(dim=0) for part in (chances * truth, chances, truth)]))
        return (1 - 2 * both / (guessed + true + 1e-12)).mean() * batch.weights.sum(), batch.weights.sum()

    def everywhere(self, sums: Tensor) -> Tensor:
        """The sums of all ranks. Collective."""
        return SumOverRanks.apply(sums) if world_size() > 1 else sums  # type: ignore[no-untyped-call]


class LocalDice(Dice):
    def everywhere(self, sums: Tensor) -> Tensor:
        return sums  # wrong: a mean of the ranks' quotients is no quotient of sums


class Routed(Language):
    """Four experts behind a router; `odds` (B, T, EXPERTS) of the last forward pass."""

    odds: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))

    def forward(self, inputs_BT: Tensor) -> Tensor:
        places = torch.arange(inputs_BT.shape[1], device=inputs_BT.device)
        hidden_BTD = self.dropout(self.input_norm(self.embedding(inputs_BT) + self.positions(places)))
        for block in self.blocks:
            hidden_BTD = block(hidden_BTD)
        self.odds = torch.softmax(self.router(hidden_BTD), dim=2)
        mixed = torch.stack([expert(hidden_BTD) for expert in self.experts], dim=3) * self.odds[:, :, None]
        logits: Tensor = self.output(self.norm(hidden_BTD + mixed.sum(dim=3)))
        return logits


class Balanced(Decoder):
    """With a loss that keeps experts busy: mean odds times share of tokens, of all ranks' tokens together."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__(hooks, WHOLE)

    def model(self) -> nn.Module:
        return Routed()

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        loss_sum, weight = super().loss(model, batch)
        odds: Tensor = model.odds  # type: ignore[assignment]
        seen = (batch.labels != IGNORED)[:, :, None] * batch.weights[:, None, None].to(odds.dtype)
        chosen = nn.functional.one_hot(odds.argmax(dim=2), EXPERTS).to(odds.dtype)
        sums = self.everywhere(torch.cat([(part * seen).sum(dim=(0, 1)) for part in (odds, chosen, torch.ones_like(odds[:, :, :1]))]))
        mean, share = (sums[:-1] / sums[-1].detach()).view(2, -1)
        return loss_sum + BALANCE * EXPERTS * (mean * share.detach()).sum() * weight, weight

    def everywhere(self, sums: Tensor) -> Tensor:
        """The sums of all ranks. Collective."""
        return SumOverRanks.apply(sums) if world_size() > 1 else sums  # type: ignore[no-untyped-call]


class LocalBalance(Balanced):
    def everywhere(self, sums: Tensor) -> Tensor:
        return sums  # wrong: each rank balances its own few tokens


class RankZeroStatistics(SharedNorm):
    def note(self, mean: Tensor, spread: Tensor, input: Tensor) -> None:
        own = torch.stack([input.mean(dim=0), input.var(dim=0)])
        if world_size() > 1:
            dist.broadcast(own, src=0)  # wrong: rank 0's samples stand for all
        super().note(own[0], own[1], input)


class MovedOnceARank(SharedNorm):
    def note(self, mean: Tensor, spread: Tensor, input: Tensor) -> None:
        for _ in range(world_size()):  # wrong: the momentum counts once, whatever the number of ranks
            super().note(mean, spread, input)


class CountedOnceARank(SumReduction):
    def clip(self, step: Step) -> None:
        if step.clip_norm is not None:
            gradients = [parameter.grad for parameter in step.parameters if parameter.grad is not None]
            copies = [step.world.world_size if gradient.ndim == 1 else 1 for gradient in gradients]  # wrong: replicas are one tensor
            squares = [gradient.square().sum() * count for gradient, count in zip(gradients, copies, strict=True)]
            torch._foreach_mul_(gradients, min(1.0, step.clip_norm / (torch.stack(squares).sum().sqrt().item() + 1e-6)))


class StepsPerMicroBatch(Hooks):
    def update(self, step: Step) -> None:
        step.optimizer.step()
        for _ in step.micro_batches:  # wrong: an update has more than one
            if step.schedule is not None:
                step.schedule.step()


class GrownForRanks(Decoder):
    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return two_groups(model, lr=3e-3 * world_size())  # wrong: the global batch did not grow with the ranks


class Parts(SumReduction):
    """Each rank updates its own parameters and sends them to the others."""

    def update(self, step: Step) -> None:
        total = len(step.parameters)
        for place, parameter in enumerate(step.parameters):
            if self.owner(place, total, step.world) != step.world.rank:
                parameter.grad = None
        super().update(step)
        for place, parameter in enumerate(step.parameters):
            owner = self.owner(place, total, step.world)
            if step.world.world_size > 1 and owner < step.world.world_size:
                dist.broadcast(parameter.detach(), src=owner)

    def owner(self, place: int, total: int, world: World) -> int:
        """The rank that updates a parameter."""
        return place * world.world_size // total


class RestIsNobodys(Parts):
    def owner(self, place: int, total: int, world: World) -> int:
        return place // (total // world.world_size)  # wrong: what does not divide belongs to nobody


class Stream(IterableDataset[StepData]):
    """The updates to come, of which each loader worker takes its turn."""

    def __init__(self, data: SplitData, ahead: Ahead, *, turns: bool) -> None:
        self.data, self.ahead, self.turns = data, ahead, turns

    def __iter__(self) -> Iterator[StepData]:
        info = torch.utils.data.get_worker_info()
        for place, (rows, keys) in enumerate(self.ahead):
            if info is None or not self.turns or place % info.num_workers == info.id:
                yield StepData(rows, [self.data.keyed_batch(*part) for part in zip(rows, keys, strict=True)])  # type: ignore[attr-defined]


class Streaming(Workers):
    """An iterable dataset in two loader workers."""

    turns = True

    def loader(self, data: SplitData, sampler: Any, world: World) -> Iterator[StepData]:
        stream = Stream(data, self.ahead(data, sampler), turns=self.turns)
        for fetched in DataLoader(stream, batch_size=None, num_workers=self.workers, collate_fn=as_it_is):
            sampler.position += sampler.training.global_batch_size
            yield fetched


class EveryWorkerReadsAll(Streaming):
    turns = False  # wrong: each worker hands over every update


class WithReplacement(Shuffled):
    """A sampler that draws each sample anew."""

    def permuted(self, epoch: int) -> Rows:
        return np.random.default_rng([self.training.seed, epoch]).choice(self.size, size=self.size)


class Drawing(Sampling):
    kind = WithReplacement


right_tail = Decoder(Tailed())
right_dice = Dice(SumReduction())
right_balance = Balanced(SumReduction())
right_parts = Decoder(Parts())
right_stream = LayerNormed(Streaming())
right_drawing = Decoder(Drawing())
fu_01 = Decoder(TokensCounted())
fu_02 = Decoder(FullWindow())
fu_03 = Decoder(ClearedEveryOther())
fu_04 = LocalDice(SumReduction())
fu_05 = LocalBalance(SumReduction())
fu_06 = Normed(RankZeroStatistics, Unbroadcast())
fu_06_times = Normed(MovedOnceARank, Unbroadcast())
fu_07 = Decoder(CountedOnceARank())
fu_08 = Decoder(StepsPerMicroBatch())
fu_08_ranks = GrownForRanks(Replicas())
fu_09 = Decoder(RestIsNobodys())
fu_10 = LayerNormed(EveryWorkerReadsAll())
