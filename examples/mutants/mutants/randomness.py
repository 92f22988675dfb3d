"""Class F: which samples, in which order, and which random numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mutants.decoder import Decoder
from mutants.plain import log_of
from mutants.right import Ahead, Evaluating, OwnStreams, Sampling, Share, Shuffled, SumReduction, Workers
from mutants.tabular import Network, Points, Tabular
from trainer.hooks import Evaluated, Hooks, Rows, Step, StepData
from trainer.recipe import Batch, SplitData
from trainer.streams import hash64, sample_keys
from trainer.world import World

LIMIT = 50.0  # of a loss that is worth an update


class SameOrder(Shuffled):
    def permuted(self, epoch: int) -> Rows:
        return super().permuted(0)  # wrong: nobody says which epoch it is


class SeededByRank(Shuffled):
    def permuted(self, epoch: int) -> Rows:
        return np.random.default_rng([self.training.seed + self.world.rank, epoch]).permutation(self.size)  # wrong: slices of unlike orders


class OneStream(Shuffled):
    def share(self, values: Rows) -> Rows:
        return values[: len(values) // self.world.world_size]  # wrong: every rank reads the same part


class Padded(Shuffled):
    def permuted(self, epoch: int) -> Rows:
        order = super().permuted(epoch)
        spare = -self.size % (2 * self.world.world_size) if self.world.world_size > 1 else 0
        return np.concatenate([order, order[:spare]])[spare:]  # wrong: the first rows fill up the end, and others fall out


class SamplingInOrder(Sampling):
    kind = SameOrder


class SamplingByRank(Sampling):
    kind = SeededByRank


class SamplingOneStream(Sampling):
    kind = OneStream


class SamplingPadded(Sampling):
    kind = Padded


class PaddedEvaluation(Evaluating):
    def share(self, size: int, world: World) -> Rows:
        padded = np.arange(size + -size % world.world_size, dtype=np.int64) % size  # wrong: the first rows again, and never dropped
        return padded[world.rank :: world.world_size]


class OneShareEvaluated(Evaluating):
    def collected(self, own: Evaluated, world: World) -> Evaluated:
        return own  # wrong: rank 0's share stands for the whole


class ShortEvaluation(Evaluating):
    def share(self, size: int, world: World) -> Rows:
        return super().share(size // 4 * 4, world)  # wrong: the last, smaller batch is left out


class Unkeyed:
    """Points that draw their noise from numpy's one stream, whoever asks."""

    def __init__(self, split: str) -> None:
        points = Points(split, noisy=False)
        self.inputs, self.labels, self.noisy = points.inputs, torch.from_numpy(points.labels), split == "train"
        self.sample_ids = np.arange(len(points), dtype=np.int64)
        self.frame = log_of(split, points.labels, self.sample_ids)

    def __len__(self) -> int:
        return len(self.inputs)

    def batch(self, rows: Rows) -> Batch:
        noise = np.random.normal(scale=0.1, size=(len(rows), self.inputs.shape[1])) if self.noisy else 0.0
        return Batch((self.inputs[rows] + noise).float(), self.labels[rows], torch.ones(len(rows)))


class LayerNormed(Tabular):
    """Points without BatchNorm, for hooks that cut a batch by ranks."""

    def model(self) -> nn.Module:
        return Network(nn.LayerNorm)


class Noisy(LayerNormed):
    """Points whose noise is not drawn by sample."""

    def data(self, split: str) -> Any:
        return Unkeyed(split)


class CopiedStreams(Workers):
    def start_worker(self, worker: int, seed: int, world: World) -> None:
        np.random.seed(seed)  # wrong: every worker of every rank draws the same


class StreamsOfRanksAlike(Workers):
    def start_worker(self, worker: int, seed: int, world: World) -> None:
        np.random.seed(hash64(seed, worker) & 0xFFFFFFFF)  # wrong: the workers differ, the ranks do not


class FirstEpochsKeys(Ahead):
    def __iter__(self) -> Iterator[Share]:
        for rows, _ in super().__iter__():
            ids = [self.data.sample_ids[part] for part in rows]
            yield rows, [sample_keys(self.sampler.training.seed, np.zeros_like(part), part) for part in ids]  # wrong: epoch 0 for ever


class SameNoise(Workers):
    def ahead(self, data: SplitData, sampler: Shuffled) -> Ahead:
        return FirstEpochsKeys(data, sampler)


class SameMasks(Hooks):
    def streams(self, seed: int, step: int, world: World) -> None:
        torch.manual_seed(hash64(seed, step) >> 1)  # wrong: without the rank all ranks drop the same places


class SameMasksEachStep(Hooks):
    def streams(self, seed: int, step: int, world: World) -> None:
        torch.manual_seed(hash64(seed, world.rank) >> 1)  # wrong: without the step every update drops the same places


class Guarded(SumReduction):
    """Leaves out an update whose loss is out of all proportion on some rank: all ranks do, or none."""

    def gradients(self, step: Step) -> None:
        self.losses: list[float] = []
        inner = step.loss

        def watched(module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
            loss_sum, weight = inner(module, batch)
            self.losses.append((loss_sum / weight).item())
            return loss_sum, weight

        step.loss = watched
        super().gradients(step)
        self.is_bad = self.decided(torch.tensor(float(max(self.losses, default=0.0) > LIMIT)), step.world)

    def decided(self, is_bad: Tensor, world: World) -> bool:
        """Whether the update is left out. Collective."""
        if world.world_size > 1:
            dist.all_reduce(is_bad, op=dist.ReduceOp.MAX)
        return bool(is_bad)

    def update(self, step: Step) -> None:
        if not self.is_bad:
            super().update(step)


class RankZeroDecides(Guarded):
    def decided(self, is_bad: Tensor, world: World) -> bool:
        if world.world_size > 1:
            dist.broadcast(is_bad, src=0)  # wrong: the other ranks' losses are never looked at
        return bool(is_bad)


class EachDecides(Guarded):
    def decided(self, is_bad: Tensor, world: World) -> bool:
        return bool(is_bad)  # wrong: this rank stands still while the others go on


class LeavesItselfOut(Guarded):
    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        if max(self.losses, default=0.0) > LIMIT:
            torch._foreach_zero_(list(gradients))  # wrong: nothing instead of its share, at the full weight
        super().reduce(gradients, weight, world)

    def decided(self, is_bad: Tensor, world: World) -> bool:
        return False


class FromHere(Hooks):
    """A loader that fetches in this process."""

    def loader(self, data: SplitData, sampler: Any, world: World) -> Iterator[StepData]:
        while len(rows := sampler.take()):
            kept = self.kept(rows, world)
            yield StepData(kept, [self.changed(data.batch(part), world) for part in kept])

    def kept(self, rows: Sequence[Rows], world: World) -> Sequence[Rows]:
        """What is fetched of what the sampler chose."""
        return rows

    def changed(self, batch: Batch, world: World) -> Batch:
        """What is handed on of what was fetched."""
        return batch


class DropsOnLastRank(FromHere):
    def kept(self, rows: Sequence[Rows], world: World) -> Sequence[Rows]:
        is_last = world.rank == world.world_size - 1 > 0
        return [*rows[:-1], rows[-1][:-1]] if is_last else rows  # wrong: this rank drops what does not fill its batch


class LabelsOfNeighbours(FromHere):
    def changed(self, batch: Batch, world: World) -> Batch:
        return batch._replace(labels=batch.labels.roll(1, 0)) if world.rank else batch  # wrong: each sample with another one's label


class SaysOtherRows(FromHere):
    def loader(self, data: SplitData, sampler: Any, world: World) -> Iterator[StepData]:
        for share in super().loader(data, sampler, world):
            again = [data.batch(np.full_like(rows, rows[0])) for rows in share.rows]
            yield StepData(share.rows, again if world.rank else share.batches)  # wrong: the ledger is right, and one sample is all there is


right_sampler = Decoder(Sampling())
right_workers = LayerNormed(Workers())
right_streams = Decoder(OwnStreams())
right_evaluation = Decoder(Evaluating())
right_guard = Decoder(Guarded())
right_loader = Decoder(FromHere())
se_46 = Decoder(SamplingInOrder())
se_47 = Decoder(SamplingByRank())
se_49 = Decoder(SamplingOneStream())
se_52 = Decoder(PaddedEvaluation())
se_53 = Noisy(CopiedStreams())
se_53_ranks = Noisy(StreamsOfRanksAlike())
se_55 = Decoder(SameMasks())
se_55_steps = Decoder(SameMasksEachStep())
se_56 = Decoder(RankZeroDecides())
se_56_each = Decoder(EachDecides())
se_56_zero = Decoder(LeavesItselfOut())
own_15 = Decoder(SamplingPadded())
own_16 = Decoder(OneShareEvaluated())
own_17 = Decoder(ShortEvaluation())
own_18 = LayerNormed(SameNoise())
own_19 = Decoder(DropsOnLastRank())
own_20 = Decoder(LabelsOfNeighbours())
own_21 = Decoder(SaysOtherRows())
