"""What of the trainer a team may bring itself. Each hook has a default that is ours; override a method and the gates judge yours.

    class OurTrainer(Hooks):
        def wrap(self, model, world): return DistributedDataParallel(model)
        def gradients(self, step): ...

    class OurRecipe: hooks = OurTrainer()

A recipe without hooks trains with the exact reduction (trainer/reduce.py). One that brings anything of PATH trains its own way on every
world size (trainer/own.py): it is then compared with one process by float noise, and not bit by bit. A hooks object is made once in
every rank process and may keep state in itself. Where the known kinds of silent errors live among these hooks: docs/gates/hooks.md.

B = samples of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor, nn

from validation.errors import RankError, ReleaseError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from trainer.recipe import Batch, SplitData, Training
    from trainer.world import World

Rows = npt.NDArray[np.int64]  # of the split

PATH = ("wrap", "sampler", "loader", "streams", "step", "gradients", "reduce", "clip", "update")  # what decides the weights
OTHERS = ("evaluate", "save", "load")


class Sampler(Protocol):
    """Which rows a rank trains on. Its state is saved by `save` and put back by `load`; it is the same on every rank."""

    def take(self) -> Sequence[Rows]:
        """Rows of this rank's micro-batches of the next step, each (B,); an empty list when the data is used up, on all ranks at once.

        A rank that has no samples in a step gives one empty array.
        """

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, as plain values, counting steps that were trained on and not those that a loader has read ahead."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there; the world size may be another one."""


class StepData(NamedTuple):
    """What a loader yields for one step of one rank; one entry a micro-batch."""

    rows: Sequence[Rows]  # (B,) each: what the rank's ledger says
    batches: Sequence[Batch]


@dataclass(kw_only=True)
class Step:
    """One optimizer update, as a training step sees it on one rank."""

    number: int  # 0-based
    world: World
    module: nn.Module  # what `wrap` returned: the loss is called with it
    model: nn.Module  # the recipe's model inside it
    optimizer: Optimizer
    schedule: LRScheduler | None
    micro_batches: Sequence[Batch]  # this rank's samples; none when its share is empty
    clip_norm: float | None  # limit of the global gradient norm; None = no clipping. A gate may set another one than the recipe
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]]  # the recipe's loss: (sum, weight); a gate reads along, so call this one

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters that the optimizer holds and that want a gradient."""
        return [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]


@dataclass(kw_only=True)
class Living:
    """What a save has to keep and a load has to bring back: living objects, on every rank."""

    world: World
    step: int  # updates done
    module: nn.Module  # what `wrap` returned
    model: nn.Module
    optimizer: Optimizer
    schedule: LRScheduler | None
    ema: dict[str, Tensor] = field(default_factory=dict)  # averaged weights by name; the tensors stay, `load` copies into them
    sampler: Sampler | None = None  # None: the trainer's own order, which needs no state


class Evaluated(NamedTuple):
    """What an evaluation counted, as its metric sees it: on rank 0 of all ranks together; other ranks may return anything."""

    rows: Rows  # (M,) of the split, repeated if counted twice
    scores: npt.NDArray[np.float64]  # (M,) or (M, C)


class Hooks:
    """The trainer's parts, in the order in which a run comes to them."""

    def wrap(self, model: nn.Module, world: World) -> nn.Module:
        """Make of the model what the loss is called with: DDP, FSDP, a moved, frozen or tied one. Called on every rank, once.

        The optimizer is built afterwards, by recipe.optimizer(model). A wrapper that reduces by itself needs `gradients` or `step` too.
        """
        del world
        return model

    def sampler(self, size: int, training: Training, world: World) -> Sampler:
        """Choose rows out of [0, size). Default: the trainer's order, the same at every world size (trainer/order.py)."""
        raise NotImplementedError  # trainer.own asks only those that were brought

    def loader(self, data: SplitData, sampler: Sampler, world: World) -> Iterator[StepData]:
        """Fetch each step's rows. Default: `data.batch`, or `data.keyed_batch` where the split has it, in this process."""
        raise NotImplementedError  # trainer.own asks only those that were brought

    def streams(self, seed: int, step: int, world: World) -> None:
        """Start the random streams that the step draws dropout masks from. Default: by (seed, step, rank), never the same twice."""
        from trainer.dataset import seed_streams
        from trainer.streams import stream_seed

        seed_streams(stream_seed(seed, step, world.rank))
        if torch.cuda.is_available():
            torch.cuda.manual_seed(stream_seed(seed, step, world.rank))

    def step(self, step: Step) -> None:
        """Make one update. Default: `gradients`, `clip`, `update`."""
        self.gradients(step)
        self.clip(step)
        self.update(step)

    def gradients(self, step: Step) -> None:
        """Leave in every parameter's .grad the mean gradient over the global batch: sum of all ranks' losses / sum of their weights."""
        for parameter in step.parameters:
            parameter.grad = None
        weight = torch.zeros((), dtype=torch.float64, device=step.parameters[0].device)
        for batch in step.micro_batches:
            loss_sum, loss_weight = step.loss(step.module, batch)
            loss_sum.backward()  # type: ignore[no-untyped-call]
            weight += loss_weight.detach().double()
        for parameter in step.parameters:
            parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        gradients = [parameter.grad for parameter in step.parameters if parameter.grad is not None]
        self.reduce(gradients, weight, step.world)
        torch._foreach_div_(gradients, weight.item())

    def reduce(self, gradients: Sequence[Tensor], weight: Tensor, world: World) -> None:
        """Sum gradients and weight over all ranks, in place. Collective."""
        if world.world_size == 1:
            return
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        dist.all_reduce(flat)
        dist.all_reduce(weight)
        for gradient, piece in zip(gradients, torch.split(flat, [gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(piece.view_as(gradient))

    def clip(self, step: Step) -> None:
        """Bring the global norm of the mean gradient below step.clip_norm."""
        if step.clip_norm is not None:
            nn.utils.clip_grad_norm_(step.parameters, step.clip_norm)

    def update(self, step: Step) -> None:
        """Step the optimizer and the schedule. Default: only with finite gradients; the run stops at any other."""
        from trainer.parallel import local

        whole = [local(parameter.grad).isfinite().all() for parameter in step.parameters if parameter.grad is not None]
        if whole and not bool(torch.stack(whole).all()):
            raise RankError(
                f"rank {step.world.rank}, step {step.number}: the gradient handed to the optimizer is not finite. The update was not made, "
                "the last sealed checkpoint is untouched. Look at the samples of this step in the ledger, then lower the learning rate, "
                "clip gradients or mend the loss; to skip such steps instead, on all ranks alike, bring hooks.update."
            )
        step.optimizer.step()
        if step.schedule is not None:
            step.schedule.step()

    def evaluate(
        self, model: nn.Module, data: SplitData, score: Callable[[nn.Module, Rows], npt.NDArray[np.float64]], world: World
    ) -> Evaluated:
        """Score the judge split on all ranks; `score(model, rows)` gives scores of rows, (B, ...).

        Default: rank 0 scores every row once.
        """
        rows = np.arange(len(data), dtype=np.int64) if world.rank == 0 else np.empty(0, dtype=np.int64)
        return Evaluated(rows, score(model, rows) if len(rows) else np.empty(0))

    def save(self, folder: Path, living: Living) -> None:
        """Write everything that the future depends on into a fresh folder. Called on every rank. Default: trainer/saver.py, sealed."""
        raise NotImplementedError  # trainer.own_checkpoint asks only those that were brought

    def load(self, folder: Path, living: Living) -> None:
        """Put back what `save` wrote, perhaps at another world size. Called on every rank."""
        raise NotImplementedError  # trainer.own_checkpoint asks only those that were brought


def hooks_of(recipe: object) -> Hooks:
    """A recipe's own parts; the defaults where it brings none."""
    found: Hooks | None = getattr(recipe, "hooks", None)
    return Hooks() if found is None else found


def brought(hooks: object | None) -> tuple[str, ...]:
    """Names of the hooks that a team brought itself, in the order of a run; () for None."""
    names = (*PATH, *OTHERS)
    return tuple(name for name in names if hooks is not None and getattr(type(hooks), name, None) is not getattr(Hooks, name))


@contextmanager
def naming(hook: str, world: World, step: int | None = None) -> Iterator[None]:
    """Note on whatever is raised inside which hook it came from; the error stays what it is, so that a lost peer is told from a cause."""
    try:
        yield
    except ReleaseError:
        raise
    except Exception as error:
        when = "before the first step" if step is None else f"at step {step}"
        error.add_note(f"raised in the recipe's own hooks.{hook} on rank {world.rank}, {when}; trainer/hooks.py says what it is to do")
        raise
