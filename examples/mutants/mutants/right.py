"""Own parts of a trainer, written as they ought to be; each mutant is one of these with a wrong line.

W = ranks, B = samples of a micro-batch.
"""

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from mutants.contrastive import SumOverRanks, world_size
from mutants.decoder import target_weight
from trainer.hooks import Evaluated, Hooks, Living, Rows, Step, StepData
from trainer.recipe import Batch, SplitData, Training
from trainer.streams import hash64, sample_keys
from trainer.world import World


class Replicas(Hooks):
    """DDP: each rank's micro-batches but the last without synchronisation, every loss divided by the weight of the whole window."""

    find_unused = False

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        return model if world.world_size == 1 else self.replicated(model)

    def replicated(self, model: nn.Module) -> nn.Module:
        """The wrapper, on two ranks and more."""
        return DistributedDataParallel(model, find_unused_parameters=self.find_unused)

    def gradients(self, step: Step) -> None:
        step.optimizer.zero_grad(set_to_none=True)
        window = self.window(step)
        for place, batch in enumerate(step.micro_batches):
            with self.synchronised(step, place):
                loss_sum, weight = step.loss(self.trained(step), batch)
                self.scaled(loss_sum, weight, window, step).backward()  # type: ignore[no-untyped-call]

    def trained(self, step: Step) -> nn.Module:
        """What the loss is called with."""
        return step.module

    def window(self, step: Step) -> Tensor:
        """Weight of all micro-batches of all ranks. Collective."""
        own = torch.stack([self.weight(batch) for batch in step.micro_batches]).sum().double()
        if step.world.world_size > 1:
            dist.all_reduce(own)
        return own

    def weight(self, batch: Batch) -> Tensor:
        """What a batch counts for, known before its forward pass."""
        return target_weight(batch) if batch.labels.ndim > 1 else batch.weights.sum()

    def scaled(self, loss_sum: Tensor, weight: Tensor, window: Tensor, step: Step) -> Tensor:
        """What is differentiated: DDP takes the mean over ranks, so W undoes its division."""
        del weight
        return loss_sum * step.world.world_size / window

    def synchronised(self, step: Step, place: int) -> AbstractContextManager[Any]:
        """Only the last micro-batch's backward pass reduces."""
        module, is_last = step.module, place == len(step.micro_batches) - 1
        return nullcontext() if is_last or not isinstance(module, DistributedDataParallel) else module.no_sync()


class Shards(Replicas):
    """FSDP2: blocks and the rest sharded by rows over all ranks."""

    def replicated(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (world_size(),))
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    def synchronised(self, step: Step, place: int) -> AbstractContextManager[Any]:
        if isinstance(step.module, FSDPModule):
            step.module.set_requires_gradient_sync(place == len(step.micro_batches) - 1)
        return nullcontext()


class SumReduction(Hooks):
    """The trainer's own step with a reduction tensor by tensor."""

    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        if world.world_size == 1:
            return
        for value in (*gradients, weight):
            self.summed(value, world)

    def summed(self, value: Tensor, world: World) -> None:
        """Sum one tensor over all ranks, in place. Collective."""
        del world
        dist.all_reduce(value)


class SharedNorm(nn.BatchNorm1d):
    """BatchNorm over the samples of all ranks: torch's own SyncBatchNorm wants GPUs. Collective while training."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        sums = torch.cat([input.sum(dim=0), input.square().sum(dim=0), input.new_tensor([len(input)])])
        total = SumOverRanks.apply(sums) if world_size() > 1 else sums  # type: ignore[no-untyped-call]
        count = total[-1].detach()
        mean, square = total[:-1].view(2, -1) / count
        spread = square - mean.square()
        self.note(mean.detach(), (spread * count / (count - 1)).detach(), input.detach())
        normal: Tensor = (input - mean) / (spread + self.eps).sqrt() * self.weight + self.bias
        return normal

    @torch.no_grad()
    def note(self, mean: Tensor, spread: Tensor, input: Tensor) -> None:
        """Move the running statistics towards those of this batch."""
        del input
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.running_mean.lerp_(mean, 0.1)
        self.running_var.lerp_(spread, 0.1)
        self.num_batches_tracked += 1


class Shuffled:
    """A sampler: a new permutation every epoch, the same on every rank, of which each rank takes every W-th row."""

    def __init__(self, size: int, training: Training, world: World) -> None:
        self.size, self.training, self.world = size, training, world
        self.position = 0  # samples that all ranks together have taken
        self.end = size * training.epochs

    def take(self) -> Sequence[Rows]:
        found = self.at(self.position)
        self.position += self.training.global_batch_size
        return found

    def at(self, position: int) -> Sequence[Rows]:
        """This rank's micro-batches of the update that begins at a position; none when no whole one is left."""
        wanted = np.arange(position, position + self.training.global_batch_size)
        if wanted[-1] >= self.end:
            return ()
        return self.cut(self.rows(wanted))

    def cut(self, values: Rows) -> Sequence[Rows]:
        """What of a global batch is this rank's, as micro-batches."""
        return np.array_split(self.share(values), self.training.accumulation)

    def share(self, values: Rows) -> Rows:
        """This rank's part of a global batch."""
        return values[self.world.rank :: self.world.world_size]

    def rows(self, positions: Rows) -> Rows:
        """Rows at positions, which may lie in two epochs."""
        passes = {epoch: self.permuted(int(epoch)) for epoch in np.unique(positions // self.size)}
        return np.array([passes[position // self.size][position % self.size] for position in positions], dtype=np.int64)

    def permuted(self, epoch: int) -> Rows:
        """One epoch's order."""
        return np.random.default_rng([self.training.seed, epoch]).permutation(self.size)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


class Sampling(Hooks):
    """Own sampler."""

    kind: Callable[[int, Training, World], Shuffled] = Shuffled

    def sampler(self, size: int, training: Training, world: World) -> Shuffled:
        return type(self).kind(size, training, world)


Share = tuple[Sequence[Rows], Sequence[npt.NDArray[np.uint64]]]  # rows and keys of one update's micro-batches


class Fetching(Dataset[StepData]):
    """What a loader worker does: fetch the micro-batches of one update."""

    def __init__(self, data: SplitData) -> None:
        self.data = data

    def __getitem__(self, share: Any) -> StepData:
        rows, keys = share
        return StepData(rows, [self.fetched(*part) for part in zip(rows, keys, strict=True)])

    def fetched(self, rows: Rows, keys: npt.NDArray[np.uint64]) -> Batch:
        """One micro-batch; what is drawn for a sample depends on its own key."""
        keyed = getattr(self.data, "keyed_batch", None)
        batch: Batch = self.data.batch(rows) if keyed is None else keyed(rows, keys)
        return batch


class Ahead:
    """Shares of the updates to come, for a DataLoader that asks early; the sampler itself stays where training is."""

    def __init__(self, data: SplitData, sampler: Shuffled) -> None:
        self.data, self.sampler = data, sampler

    def __iter__(self) -> Iterator[Share]:
        position = self.sampler.position
        while len(rows := self.sampler.at(position)):
            plan = self.sampler.training
            epochs = self.sampler.cut(np.arange(position, position + plan.global_batch_size) // self.sampler.size)
            # of seed, epoch and sample, so that no rank or worker draws what another one draws
            yield rows, [sample_keys(plan.seed, *part) for part in zip(epochs, map(self.data.sample_ids.__getitem__, rows), strict=True)]
            position += plan.global_batch_size


class Workers(Sampling):
    """Own sampler, and a DataLoader with two worker processes a rank."""

    fetching: Callable[[SplitData], Fetching] = Fetching
    workers = 2

    def loader(self, data: SplitData, sampler: Any, world: World) -> Iterator[StepData]:
        loader = DataLoader(
            type(self).fetching(data), sampler=self.ahead(data, sampler), batch_size=None, num_workers=self.workers,  # type: ignore[arg-type]
            worker_init_fn=lambda worker: self.start_worker(worker, sampler.training.seed, world), collate_fn=as_it_is,
        )  # fmt: skip
        for fetched in loader:
            sampler.position += sampler.training.global_batch_size
            yield fetched

    def ahead(self, data: SplitData, sampler: Shuffled) -> Ahead:
        """What the workers are asked for."""
        return Ahead(data, sampler)

    def start_worker(self, worker: int, seed: int, world: World) -> None:
        """Streams of a worker's own, for data code that draws without a key."""
        np.random.seed(hash64(seed, world.rank, worker, os.getpid()) & 0xFFFFFFFF)


def as_it_is(fetched: StepData) -> StepData:
    return fetched


class OwnStreams(Hooks):
    """Dropout masks from a stream that is started once on every rank, and saved and loaded with the rest."""

    is_started = False

    def streams(self, seed: int, step: int, world: World) -> None:
        if not self.is_started:
            torch.manual_seed(self.first_seed(seed, step, world) >> 1)
        self.is_started = True

    def first_seed(self, seed: int, step: int, world: World) -> int:
        """Another one on every rank."""
        return hash64(seed, step, world.rank)


class StateFiles(Hooks):
    """Own checkpoints: rank 0 writes the training's state, every rank reads it."""

    def save(self, folder: Path, living: Living) -> None:
        if living.world.rank == 0:
            torch.save(self.held(living), folder / "state.pt")

    def load(self, folder: Path, living: Living) -> None:
        self.put_back(torch.load(folder / "state.pt"), living)

    def held(self, living: Living) -> dict[str, Any]:
        """The training's state, the same on every rank."""
        return {
            "model": living.model.state_dict(), "optimizer": living.optimizer.state_dict(), "ema": living.ema,
            "schedule": None if living.schedule is None else living.schedule.state_dict(),
            "sampler": None if living.sampler is None else living.sampler.state_dict(), "step": living.step,
        }  # fmt: skip

    def put_back(self, held: dict[str, Any], living: Living) -> None:
        """Into freshly built objects."""
        living.model.load_state_dict(held["model"])
        living.optimizer.load_state_dict(held["optimizer"])
        if living.schedule is not None:
            living.schedule.load_state_dict(held["schedule"])
        if living.sampler is not None:
            living.sampler.load_state_dict(held["sampler"])
        self.put_back_average(held, living)

    def put_back_average(self, held: dict[str, Any], living: Living) -> None:
        """Into the averaged weights."""
        with torch.no_grad():
            for name, value in living.ema.items():
                value.copy_(held["ema"][name])


class Files(StateFiles, OwnStreams):
    """Own checkpoints with every rank's random stream."""

    def save(self, folder: Path, living: Living) -> None:
        torch.save(torch.get_rng_state(), folder / f"rank{living.world.rank}.pt")
        super().save(folder, living)

    def load(self, folder: Path, living: Living) -> None:
        super().load(folder, living)
        path = self.stream_file(folder, living.world)
        if path.exists():
            torch.set_rng_state(torch.load(path))
            self.is_started = True

    def stream_file(self, folder: Path, world: World) -> Path:
        """Where a rank's stream is kept; a rank that was not there before starts one of its own."""
        return folder / f"rank{world.rank}.pt"


class Evaluating(Hooks):
    """Every rank scores its share of the judge split; rank 0 puts the shares together."""

    def evaluate(
        self, model: nn.Module, data: SplitData, score: Callable[[nn.Module, Rows], npt.NDArray[np.float64]], world: World
    ) -> Evaluated:
        rows = self.share(len(data), world)
        return self.collected(Evaluated(rows, score(model, rows)), world)

    def share(self, size: int, world: World) -> Rows:
        """This rank's rows."""
        return np.arange(world.rank, size, world.world_size, dtype=np.int64)

    def collected(self, own: Evaluated, world: World) -> Evaluated:
        """All ranks' rows, in order. Collective."""
        if world.world_size == 1:
            return own
        parts: list[Any] = [None] * world.world_size
        dist.all_gather_object(parts, tuple(own))
        rows, scores = (np.concatenate([part[place] for part in parts]) for place in (0, 1))
        order = np.argsort(rows, kind="stable")
        return Evaluated(rows[order], scores[order])


class Everything(Replicas, Sampling, Files, Evaluating):
    """All of it together: the team that brings its whole trainer."""
