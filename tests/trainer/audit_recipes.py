"""Recipes with hooks of their own that go wrong in ways that only an audit sees."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from tiny_recipe import TinyRecipe
from torch import Tensor
from torch.utils.data import DataLoader

from trainer.dataset import seed_streams
from trainer.hooks import Hooks, Sampler, Step, StepData
from trainer.recipe import Batch, SplitData
from trainer.world import World

MICRO = 8  # samples of a rank's micro-batch


class SameMasks(Hooks):
    """Every rank draws its dropout masks from the same seed."""

    def streams(self, seed: int, step: int, world: World) -> None:
        del world
        seed_streams(1000 * seed + step)


class RareFault(Hooks):
    """Now and then one rank's part of the gradient is lost on the way."""

    def __init__(self, every: int) -> None:
        self.every, self.calls = every, 0

    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        self.calls += 1
        if self.every and self.calls % self.every == 0 and world.rank == 1:
            torch._foreach_zero_(list(gradients))
        super().reduce(gradients, weight, world)


class HalfTheBits(Hooks):
    """Gradients travel as float16."""

    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        small = [gradient.half() for gradient in gradients]
        super().reduce(small, weight, world)
        for gradient, value in zip(gradients, small, strict=True):
            gradient.copy_(value)


class EachItsPart(Hooks):
    """Each rank updates its share of the tensors and sends them to the others; before that it forgets the other ranks' gradients."""

    def update(self, step: Step) -> None:
        for number, parameter in enumerate(step.parameters):
            if number % step.world.world_size != step.world.rank:
                parameter.grad = None
        super().update(step)
        if step.world.world_size > 1:
            for number, parameter in enumerate(step.parameters):
                dist.broadcast(parameter.data, number % step.world.world_size)


class Jittered:
    """The split as a map-style dataset with noise out of numpy's shared generator."""

    def __init__(self, data: SplitData) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, row: int) -> tuple[int, Batch]:
        batch = self.data.batch(np.array([row]))
        return row, batch._replace(inputs=batch.inputs + float(np.random.rand()))


def joined(samples: list[tuple[int, Batch]]) -> tuple[npt.NDArray[np.int64], Batch]:
    rows = np.array([row for row, _ in samples])
    return rows, Batch(*(torch.cat(parts) for parts in zip(*(batch for _, batch in samples), strict=True)))


def copied(_: int) -> None:
    """Each worker goes on with the generator that it was forked with."""
    np.random.seed(5)


@dataclass
class OwnLoader(Hooks):
    """A DataLoader with workers; `is_copied`: with one and the same numpy generator in each."""

    is_copied: bool = False

    def loader(self, data: SplitData, sampler: Sampler, world: World) -> Iterator[StepData]:
        del sampler
        rows = np.random.RandomState(0).permutation(len(data))[world.rank :: world.world_size].tolist()
        loader: DataLoader[Any] = DataLoader(
            Jittered(data), batch_size=MICRO, sampler=rows, drop_last=True, num_workers=2, collate_fn=joined,  # type: ignore[arg-type]
            worker_init_fn=copied if self.is_copied else None, generator=torch.Generator().manual_seed(world.rank),
            multiprocessing_context="fork",
        )  # fmt: skip
        for taken, batch in loader:
            yield StepData([taken], [batch])


@dataclass(frozen=True)
class OwnRecipe(TinyRecipe):
    """TinyRecipe with hooks."""

    hooks: Hooks = field(default_factory=Hooks)


same_masks = OwnRecipe(name="same-masks", hooks=SameMasks())
rare_fault, no_fault = (OwnRecipe(name="rare-fault", hooks=RareFault(every)) for every in (20, 0))
half = OwnRecipe(name="half", hooks=HalfTheBits())
copied_workers, own_workers = (OwnRecipe(name="workers", hooks=OwnLoader(is_copied)) for is_copied in (True, False))
each_its_part = OwnRecipe(name="each-its-part", hooks=EachItsPart())
