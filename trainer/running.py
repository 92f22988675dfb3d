"""Everything one rank trains with, and the model it starts from."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.audit import Audit
from trainer.checks import switch_off_dropout
from trainer.config import TrainJob
from trainer.dataset import kept_streams
from trainer.faults import FaultPlan
from trainer.feed import Feed
from trainer.hooks import Hooks, Living
from trainer.moving import MovingBuffers
from trainer.order import Order
from trainer.own import Own
from trainer.own_checkpoint import OwnResumed, OwnSaver, load_own
from trainer.parallel import local
from trainer.parts import PartWriter
from trainer.recipe import Recipe, SplitData
from trainer.reduce import Reduction
from trainer.saver import Saver
from trainer.scaler import LossScaler
from trainer.state import State, from_plain, restore, served_weights, snapshot, to_plain, weights_of
from trainer.telemetry import StepClock
from trainer.world import World


@dataclass(kw_only=True)
class Training:
    """Everything one rank trains with; `step` and `position` are the only counters."""

    job: TrainJob
    world: World
    recipe: Recipe
    order: Order
    feed: Feed
    device: torch.device
    model: nn.Module
    parameters: dict[str, nn.Parameter]  # trainable ones by name, in the order of the gradient buffers
    optimizer: Optimizer
    schedule: LRScheduler | None
    reduction: Reduction
    moving: MovingBuffers
    scaler: LossScaler
    faults: FaultPlan
    clock: StepClock
    parts: PartWriter
    audit: Audit
    steps: int  # updates in all
    step: int = 0  # updates done
    position: int = 0  # samples consumed; with an own sampler: full global batches
    refused: tuple[str, ...] = ()  # damaged checkpoints that were passed over
    saver: Saver | None = None  # of a run that makes checkpoints
    judge: SplitData | None = None  # of a run that measures its quality, on the ranks that score
    ema: dict[str, Tensor] = field(default_factory=dict)  # averaged weights by name, empty unless the recipe asks for them
    serving: nn.Module | None = None  # what serves, when it is not the model itself
    hooks: Hooks = field(default_factory=Hooks)  # the recipe's own parts of the trainer
    brought: tuple[str, ...] = ()  # which of them it brought
    own: Own | None = None  # where they decide the weights
    own_saver: OwnSaver | None = None  # of a run whose checkpoints the recipe writes

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.job.folder)

    @property
    def is_double(self) -> bool:
        """Whether all is computed in float64."""
        return self.job.precision == "float64"

    def autocast(self) -> AbstractContextManager[Any]:
        """What the loss is computed in: the recipe's smaller type, but not in the float64 legs."""
        name = self.recipe.training.autocast
        if not name or self.is_double:
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, name))

    def average(self) -> None:
        """Move the averaged weights a little towards the new ones."""
        decay = self.recipe.training.ema_decay
        if decay is not None:
            weights = weights_of(self.model)
            torch._foreach_lerp_([local(self.ema[name]) for name in weights], [local(value) for value in weights.values()], 1.0 - decay)

    def keep_times(self) -> None:
        """Note the step's times; once there are many, they are written."""
        self.clock.keep()
        if self.clock.full:
            self.parts.add_timeline(self.clock.take())
            with suppress(OSError):  # rows are kept: a disk that is full now may have room at the next checkpoint
                self.parts.flush()

    def extra(self) -> dict[str, Any]:
        """The part of the state that is neither the model's nor the optimizer's, by name: what has a state_dict of its own."""
        extra: dict[str, Any] = {"scaler": self.scaler.state_dict()}
        if hasattr(self.recipe, "state_dict"):
            extra["recipe"] = self.recipe.state_dict()
        return extra

    def state(self) -> State:
        """Everything that the next update depends on."""
        extra = self.extra()
        if self.own is not None and self.own.data.sampler is not None:
            extra["sampler"] = self.own.data.sampler.state_dict()
        return snapshot(
            self.model, self.optimizer, self.schedule, step=self.step, position=self.position, seed=self.order.seed, ema=self.ema,
            extra=extra,
        )  # fmt: skip

    def put_back(self, state: State) -> None:
        """Go on from a state."""
        moments = self.job.defect != "stale_moments_on_resume"
        extra = restore(state, self.model, self.optimizer, self.schedule, ema=self.ema, moments=moments)
        if self.own is not None:
            self.own.data.put_back(extra.get("sampler"))
        self._go_on(extra, state.step, state.position)

    def living(self) -> Living:
        """What an own save keeps and an own load brings back."""
        sampler = None if self.own is None else self.own.data.sampler
        return Living(
            world=self.world, step=self.step, module=self.reduction.module, model=self.model, optimizer=self.optimizer,
            schedule=self.schedule, ema=self.ema, sampler=sampler,
        )  # fmt: skip

    def save_own(self, *, refused: str) -> None:
        """Have the recipe save its own way. Collective. Args: refused, why this rank cannot vouch for what lies before the state."""
        assert self.own_saver is not None  # every run with checkpoints whose recipe brings save and load has one
        extra = {name: to_plain(value) for name, value in self.extra().items()}
        self.own_saver.save(self.living(), position=self.position, extra=extra, refused=refused)

    def load_own(self, found: OwnResumed) -> None:
        """Go on from a checkpoint that the recipe's own save wrote. Collective, as far as its load is."""
        self.step = found.step
        load_own(self.hooks, found, self.living())
        if self.job.defect == "stale_moments_on_resume":
            self.optimizer.state.clear()
        self._go_on({name: from_plain(value) for name, value in found.extra.items()}, found.step, found.position)

    def _go_on(self, extra: Mapping[str, Any], step: int, position: int) -> None:
        self.scaler.load_state_dict(extra["scaler"])
        if "recipe" in extra:
            self.recipe.load_state_dict(extra["recipe"])  # type: ignore[attr-defined]  # an optional member
        self.moving.note_start()
        self.step, self.position = step, position

    def serving_model(self) -> nn.Module:
        """The model with the weights that serve; on ranks that do not judge it may be any. Collective when sharded."""
        if not self.ema and not any(isinstance(parameter, DTensor) for parameter in self.model.parameters()):
            return self.model
        weights = served_weights(self.model, self.ema)
        if self.judge is None:
            return self.model
        if self.serving is None:
            with kept_streams():  # an own path may let them go on from step to step
                self.serving = build_model(self.recipe, self.device, double=self.is_double, dropout=False)
        self.serving.load_state_dict(weights)
        return self.serving


def build_model(recipe: Recipe, device: torch.device, *, double: bool, dropout: bool) -> nn.Module:
    """The untrained model in training mode; its weights depend on the recipe's seed alone."""
    torch.manual_seed(recipe.training.seed)
    model = recipe.model().to(device)  # drawn in float32 also for the float64 legs: the same starting point
    model = model.double() if double else model
    model.train()
    if not dropout:
        switch_off_dropout(model)
    return model
