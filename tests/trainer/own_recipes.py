"""Recipes that bring parts of the trainer, each built on the tiny one; most are right, some cannot work."""

# ruff: noqa: ARG002  (a hook has the arguments that it has)

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tiny_recipe import FEATURES, TinyData, TinyRecipe, recipe
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from trainer.dataset import MapSplit
from trainer.hooks import Evaluated, Hooks, Living, Rows, Sampler, Step, StepData
from trainer.order import permute
from trainer.recipe import Batch, SplitData, Training
from trainer.world import World

TRAINING = replace(recipe.training, accumulation=2)


class Clipper(Hooks):
    """Clipping by hand; all else is the default."""

    def clip(self, step: Step) -> None:
        assert step.clip_norm is not None
        norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in step.parameters if p.grad is not None]))
        for parameter in step.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(torch.clamp(step.clip_norm / (norm + 1e-6), max=1.0))


class Wrapped(Hooks):
    """A wrapper that takes the mean over ranks, and a step that makes of it the mean over samples."""

    def gradients(self, step: Step) -> None:
        step.optimizer.zero_grad()
        weight = torch.zeros((), dtype=torch.float64)
        for number, batch in enumerate(step.micro_batches):
            with self.quiet(step, is_last=number + 1 == len(step.micro_batches)):
                loss_sum, loss_weight = step.loss(step.module, batch)
                loss_sum.backward()
            weight += loss_weight.detach().double()
        if step.world.world_size > 1:
            dist.all_reduce(weight)
        for parameter in step.parameters:
            assert parameter.grad is not None
            parameter.grad.mul_(step.world.world_size / weight.item())

    def quiet(self, step: Step, *, is_last: bool) -> Any:
        return nullcontext()


class Ddp(Wrapped):
    """DistributedDataParallel."""

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        return DistributedDataParallel(model) if world.world_size > 1 else model

    def quiet(self, step: Step, *, is_last: bool) -> Any:
        return nullcontext() if is_last or step.world.world_size == 1 else step.module.no_sync()  # type: ignore[operator]


class Fsdp(Wrapped):
    """fully_shard, in place."""

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        if world.world_size > 1:
            mesh = init_device_mesh("cpu", (world.world_size,))
            fully_shard(model[0], mesh=mesh)  # type: ignore[index]
            fully_shard(model, mesh=mesh)
        return model

    def quiet(self, step: Step, *, is_last: bool) -> Any:
        if step.world.world_size > 1:
            step.module.set_requires_gradient_sync(is_last)  # type: ignore[operator]
        return nullcontext()


class Strided:
    """Every W-th sample of a permuted epoch, the rest of an epoch left out; stands at a number of samples, whatever W is."""

    def __init__(self, size: int, training: Training, world: World) -> None:
        self._size, self._training, self._world = size, training, world
        self.consumed = 0

    def take(self) -> list[Rows]:
        plan, batch = self._training, 2 * (self._training.global_batch_size // 2)
        steps = self._size // batch
        epoch, step = divmod(self.consumed // batch, steps)
        if epoch >= plan.epochs:
            return []
        self.consumed += batch
        rows = permute(plan.seed + 1, epoch, self._size, np.arange(step * batch, (step + 1) * batch))
        return np.array_split(rows[self._world.rank :: self._world.world_size], plan.accumulation)

    def state_dict(self) -> dict[str, Any]:
        return {"consumed": self.consumed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.consumed = state["consumed"]


class Sampled(Hooks):
    """An own order."""

    def sampler(self, size: int, training: Training, world: World) -> Sampler:
        return Strided(size, training, world)


class Loaded(Sampled):
    """An own order and an own way to fetch it."""

    def loader(self, data: SplitData, sampler: Sampler, world: World) -> Iterator[StepData]:
        while rows := sampler.take():
            yield StepData(rows, [data.batch(part) for part in rows])


class LoadedInOrder(Hooks):
    """An own way to fetch the trainer's order."""

    def loader(self, data: SplitData, sampler: Sampler, world: World) -> Iterator[StepData]:
        while rows := sampler.take():
            yield StepData(rows, [data.batch(part) for part in rows])


class Saved(Hooks):
    """One file by rank 0, in a folder of its own."""

    def save(self, folder: Path, living: Living) -> None:
        if living.world.rank > 0:
            return
        (folder / "state").mkdir()
        state = {"model": living.model.state_dict(), "optimizer": living.optimizer.state_dict(), "ema": living.ema}
        state["sampler"] = None if living.sampler is None else living.sampler.state_dict()
        state["schedule"] = None if living.schedule is None else living.schedule.state_dict()
        torch.save(state, folder / "state" / "all.pt")

    def load(self, folder: Path, living: Living) -> None:
        state = torch.load(folder / "state" / "all.pt")
        living.model.load_state_dict(state["model"])
        living.optimizer.load_state_dict(state["optimizer"])
        if living.schedule is not None:
            living.schedule.load_state_dict(state["schedule"])
        if living.sampler is not None:
            living.sampler.load_state_dict(state["sampler"])
        for name, value in living.ema.items():
            value.copy_(state["ema"][name])


class SavedSampled(Saved, Sampled):
    """An own order, kept by own checkpoints."""


class Continuing(Saved):
    """Random streams that go on from step to step; each rank's are in its own file."""

    has_begun = False

    def streams(self, seed: int, step: int, world: World) -> None:
        if not self.has_begun:
            torch.manual_seed(seed * 100 + world.rank)
            self.has_begun = True

    def save(self, folder: Path, living: Living) -> None:
        super().save(folder, living)
        torch.save(torch.get_rng_state(), folder / f"stream-{living.world.rank}.pt")

    def load(self, folder: Path, living: Living) -> None:
        super().load(folder, living)
        torch.set_rng_state(torch.load(folder / f"stream-{living.world.rank}.pt"))
        self.has_begun = True


class Padded(Hooks):
    """An evaluation that gives every rank the same number of rows, some of them twice, as DistributedSampler does."""

    def evaluate(
        self, model: nn.Module, data: SplitData, score: Callable[[nn.Module, Rows], Any], world: World
    ) -> Evaluated:  # fmt: skip
        rows = np.resize(np.arange(len(data)), -(-len(data) // world.world_size) * world.world_size)[world.rank :: world.world_size]
        mine = Evaluated(rows, score(model, rows))
        parts: list[Any] = [mine] * world.world_size
        if world.world_size > 1:
            dist.all_gather_object(parts, mine)
        return Evaluated(np.concatenate([part.rows for part in parts]), np.concatenate([part.scores for part in parts]))


@dataclass(frozen=True)
class OwnRecipe(TinyRecipe):
    """The tiny recipe with parts of the trainer."""

    hooks: Any = None
    excludes: Mapping[str, str] = field(default_factory=dict)
    training: Training = TRAINING


plain = OwnRecipe()
plain_averaged = OwnRecipe(training=replace(TRAINING, ema_decay=0.9))
clipper = OwnRecipe(hooks=Clipper())
averaged = OwnRecipe(hooks=Clipper(), training=replace(TRAINING, ema_decay=0.9, autocast="bfloat16"))
ddp = OwnRecipe(hooks=Ddp())
fsdp = OwnRecipe(hooks=Fsdp(), training=replace(TRAINING, ema_decay=0.9))
sampled = OwnRecipe(hooks=Sampled())
short = OwnRecipe(hooks=Sampled(), training=replace(TRAINING, evaluate_every=3))
loaded = OwnRecipe(hooks=Loaded())
in_order = OwnRecipe(hooks=LoadedInOrder())
saved = OwnRecipe(hooks=Saved(), training=replace(TRAINING, ema_decay=0.9))
saved_sampled = OwnRecipe(hooks=SavedSampled())
continuing = OwnRecipe(hooks=Continuing(), training=replace(TRAINING, evaluate_every=1, ema_decay=0.9))
padded = OwnRecipe(hooks=Padded())


class Keyed(MapSplit):
    """Samples that are augmented by their keys."""

    def __init__(self) -> None:
        self.tiny = TinyData(96, 1)
        super().__init__(self, self.tiny.frame, self.tiny.sample_ids)  # type: ignore[arg-type]  # a dataset, too

    def __len__(self) -> int:
        return 96

    def __getitem__(self, row: int) -> tuple[Tensor, ...]:
        noise = torch.randn(FEATURES)
        return torch.from_numpy(self.tiny.inputs[row]) + noise, torch.tensor(self.tiny.labels[row]), torch.tensor(self.tiny.weights[row])


class KeyedRecipe(OwnRecipe):
    """Trains on Keyed."""

    def data(self, split: str) -> Any:
        return Keyed() if split == "train" else super().data(split)


keyed = KeyedRecipe(hooks=Sampled(), training=replace(TRAINING, global_batch_size=24))


# what cannot work, or does not


class Copied(Hooks):
    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        return nn.Sequential(*(nn.Linear(3, 3) for _ in range(2)))


class Nothing(Hooks):
    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        return None  # type: ignore[return-value]


class Unreduced(Hooks):
    """Shards, and leaves the reduction to the default."""

    wrap = Fsdp.wrap


class Failing(Hooks):
    """A clip that fails on one rank at one step."""

    def clip(self, step: Step) -> None:
        if step.number == 2 and step.world.rank == step.world.world_size - 1:
            raise ValueError("no such norm")


class Idle(Hooks):
    """A step that does nothing at all."""

    def step(self, step: Step) -> None:
        return


class Outside(Hooks):
    """A sampler with a row that is not there."""

    def sampler(self, size: int, training: Training, world: World) -> Sampler:
        made = Strided(size, training, world)
        made.take = lambda: [np.array([size])]  # type: ignore[method-assign]
        return made


class Uneven(Hooks):
    """A sampler that ends sooner on rank 1."""

    def sampler(self, size: int, training: Training, world: World) -> Sampler:
        return Strided(size, replace(training, epochs=2 - world.rank), world)


class Stateless(Hooks):
    def sampler(self, size: int, training: Training, world: World) -> Sampler:
        return iter(())  # type: ignore[return-value]


class Empty(Saved):
    """A save that writes nothing."""

    def save(self, folder: Path, living: Living) -> None:
        return


class Cutting(Hooks):
    """A step that cuts its micro-batches into halves of its own."""

    def gradients(self, step: Step) -> None:
        step.optimizer.zero_grad()
        weight = torch.zeros((), dtype=torch.float64)
        for batch in step.micro_batches:
            size = len(batch.weights)
            for part in (slice(0, size // 2), slice(size // 2, size)):
                loss_sum, loss_weight = step.loss(step.module, Batch(*(value[part] for value in batch)))
                loss_sum.backward()
                weight += loss_weight.detach().double()
        gradients = [parameter.grad for parameter in step.parameters if parameter.grad is not None]
        self.reduce(gradients, weight, step.world)
        torch._foreach_div_(gradients, weight.item())


EARLY: dict[str, torch.optim.Optimizer] = {}


class EarlyRecipe(OwnRecipe):
    """Builds its optimizer with the model, before it is sharded."""

    def model(self) -> nn.Module:
        model = super().model()
        EARLY["optimizer"] = super().optimizer(model)
        return model

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        return EARLY["optimizer"]


copied, nothing, unreduced, failing, idle = (OwnRecipe(hooks=kind()) for kind in (Copied, Nothing, Unreduced, Failing, Idle))
outside, stateless, uneven, empty, cutting = (OwnRecipe(hooks=kind()) for kind in (Outside, Stateless, Uneven, Empty, Cutting))
early = EarlyRecipe(hooks=Fsdp())
scaled = OwnRecipe(hooks=Clipper(), training=replace(TRAINING, autocast="float16", loss_scale=1024.0))
