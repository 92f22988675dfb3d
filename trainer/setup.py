"""From a job to a rank that is ready to train: process group, data, seeded model, checks, and the newest checkpoint."""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.checkpoint import load_newest, sealed_folders
from trainer.checks import (
    Probed,
    check_coupled,
    check_loss,
    check_model,
    check_modules,
    check_same_data,
    check_stepping,
    switch_off_dropout,
)
from trainer.config import TrainJob
from trainer.drills import drilled
from trainer.fast import FastReduction
from trainer.faults import FaultPlan, check_defect
from trainer.feed import Feed
from trainer.history import newest_sealed
from trainer.lanes import check_world_size, rank_lanes, strided_lanes
from trainer.moving import MovingBuffers
from trainer.order import Order
from trainer.parallel import ShardedReduction, check_optimizer, check_sharding, local, shard
from trainer.parts import PartWriter, part_folder
from trainer.recipe import Recipe, SplitData, load_recipe
from trainer.reduce import ExactReduction, Reduction
from trainer.saver import Saver
from trainer.scaler import LossScaler
from trainer.seal_key import seal_key
from trainer.state import State, blank, restore, served_weights, snapshot, tensor_bytes, weights_of
from trainer.telemetry import StepClock
from trainer.world import Emit, World

PROBE_SAMPLES = 64  # of the checks before the first step


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
    steps: int  # updates in all
    step: int = 0  # updates done
    position: int = 0  # samples consumed
    refused: tuple[str, ...] = ()  # damaged checkpoints that were passed over
    saver: Saver | None = None  # of a run that makes checkpoints
    judge: SplitData | None = None  # on rank 0 of a run that measures its quality
    kept: dict[str, Tensor] = field(default_factory=dict)  # gradients and weights to be left behind
    ema: dict[str, Tensor] = field(default_factory=dict)  # averaged weights by name, empty unless the recipe asks for them
    serving: nn.Module | None = None  # what serves, when it is not the model itself

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return Path(self.job.folder)

    def autocast(self) -> AbstractContextManager[Any]:
        """What the loss is computed in: the recipe's smaller type, but not in the float64 legs."""
        name = self.recipe.training.autocast
        if not name or self.job.precision == "float64":
            return nullcontext()
        return torch.autocast(self.device.type, getattr(torch, name))

    def average(self) -> None:
        """Move the averaged weights a little towards the new ones."""
        decay = self.recipe.training.ema_decay
        if decay is not None:
            weights = weights_of(self.model)
            torch._foreach_lerp_([local(self.ema[name]) for name in weights], [local(value) for value in weights.values()], 1.0 - decay)

    def state(self) -> State:
        """Everything that the next update depends on."""
        extra: dict[str, Any] = {"scaler": self.scaler.state_dict()}
        if hasattr(self.recipe, "state_dict"):
            extra["recipe"] = self.recipe.state_dict()
        return snapshot(
            self.model, self.optimizer, self.schedule, step=self.step, position=self.position, seed=self.order.seed, ema=self.ema,
            extra=extra,
        )  # fmt: skip

    def put_back(self, state: State) -> None:
        """Go on from a state."""
        moments = self.job.defect != "stale_moments_on_resume"
        extra = restore(state, self.model, self.optimizer, self.schedule, ema=self.ema, moments=moments)
        self.scaler.load_state_dict(extra["scaler"])
        if "recipe" in extra:
            self.recipe.load_state_dict(extra["recipe"])  # type: ignore[attr-defined]  # an optional member
        self.moving.note_start()
        self.step, self.position = state.step, state.position

    def serving_model(self) -> nn.Module:
        """The model with the weights that serve; on ranks that do not judge it may be any. Collective when sharded."""
        if not self.ema and not isinstance(self.reduction, ShardedReduction):
            return self.model
        weights = served_weights(self.model, self.ema)
        if self.judge is None:
            return self.model
        if self.serving is None:
            self.serving = build_model(self.recipe, self.device, double=self.job.precision == "float64", dropout=False)
        self.serving.load_state_dict(weights)
        return self.serving


def settle() -> None:
    """Make this process compute the same bits every time: one thread, deterministic kernels where torch has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # its only use is finding bugs; it costs a pass


def detect_device(world: World) -> torch.device:
    """A GPU when there is one (ranks take turns), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", world.rank % torch.cuda.device_count())


def device_facts(device: torch.device) -> dict[str, str | int]:
    """What a machine record needs from torch: the device's name and how many there are."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "devices": torch.cuda.device_count()}
    return {"device": "cpu", "devices": len(psutil.Process().cpu_affinity() or [0])}


def join(job: TrainJob, world: World, rendezvous: str) -> None:
    """Form the process group over a file that all ranks share; one rank alone needs none. Collective."""
    device = detect_device(world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.world_size == 1:
        return
    # nccl refuses two ranks on one GPU; gloo takes them, through host memory
    nccl = device.type == "cuda" and world.world_size <= torch.cuda.device_count()
    store = PrefixStore(f"attempt-{world.attempt}", FileStore(rendezvous))
    dist.init_process_group(
        "nccl" if nccl else "gloo", store=store, rank=world.rank, world_size=world.world_size, timeout=timedelta(seconds=job.stall_s)
    )


def meet() -> None:
    """Wait for all ranks. Collective."""
    if dist.is_initialized():
        dist.barrier()


def leave() -> None:
    """Dissolve the process group when every rank is done with it. Collective."""
    meet()
    if dist.is_initialized():
        dist.destroy_process_group()


def prepare(job: TrainJob, world: World, emit: Emit) -> Training:
    """Build and check everything, then load the newest sealed checkpoint if there is one.

    Raises: ConfigError, RecipeError or DataError, before the first step.
    """
    check_defect(job.defect)
    recipe = load_recipe(job.recipe)
    plan = recipe.training
    check_world_size(world.world_size, plan.lanes)
    device, double = detect_device(world), job.precision == "float64"
    train = drilled(job.drill, recipe, recipe.data("train"))
    order = Order.of(plan, len(train))
    feed = _feed(job, world, recipe, train, order, device)
    model = build_model(recipe, device, double=double, dropout=job.dropout)
    check_modules(recipe, model)
    probe = feed.probe(PROBE_SAMPLES)
    if not world.is_back:
        check_same_data(recipe, world, device, [np.ascontiguousarray(train.sample_ids), *map(tensor_bytes, probe)])
    probed = check_loss(recipe, model, probe, dropout=job.dropout, again=world.is_back)
    check_coupled(recipe, probed, order.smallest_batch // plan.lanes // plan.accumulation)
    if _is_sharded(job, world):
        check_sharding(recipe, model, world)
        shard(recipe, model, world, device)
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer, order.steps)
    check_model(recipe, model, optimizer)
    check_stepping(recipe, optimizer, schedule)
    if _is_sharded(job, world) and job.reduction == "exact":
        check_optimizer(recipe, optimizer)
    clock, faults = StepClock(device), FaultPlan(job.faults, world, emit)
    moving = MovingBuffers(model, probed.moving, local(next(p for p in model.parameters() if p.requires_grad)))
    run = Training(
        job=job, world=world, recipe=recipe, order=order, feed=feed, device=device, model=model,
        parameters={name: p for name, p in model.named_parameters() if p.requires_grad}, optimizer=optimizer, schedule=schedule,
        reduction=_reduction(job, world, model, plan.lanes, clock, faults, probed, moving), moving=moving,
        scaler=LossScaler.starting_at(None if double else plan.loss_scale), faults=faults, clock=clock,
        ema={name: value.clone() for name, value in weights_of(model).items()} if plan.ema_decay is not None else {},
        parts=PartWriter(part_folder(Path(job.folder), world.attempt, world.rank)), steps=min(job.steps or order.steps, order.steps),
        judge=recipe.data("judge") if job.evaluate and world.rank == 0 else None,
    )  # fmt: skip
    faults.at("load", 0)
    _resume(run, emit)
    return run


def build_model(recipe: Recipe, device: torch.device, *, double: bool, dropout: bool) -> nn.Module:
    """The untrained model in training mode; its weights depend on the recipe's seed alone."""
    torch.manual_seed(recipe.training.seed)
    model = recipe.model().to(device)  # drawn in float32 also for the float64 legs: the same starting point
    model = model.double() if double else model
    model.train()
    if not dropout:
        switch_off_dropout(model)
    return model


def _is_sharded(job: TrainJob, world: World) -> bool:
    """One rank has nothing to shard: it is the plain model, with the same bits."""
    return job.parallel == "fsdp2" and world.world_size > 1


def _feed(job: TrainJob, world: World, recipe: Recipe, train: SplitData, order: Order, device: torch.device) -> Feed:
    plan = recipe.training
    lanes_of = strided_lanes if _is_sharded(job, world) and job.reduction == "exact" else rank_lanes
    return Feed(
        train, order, lanes_of(world.rank, world.world_size, plan.lanes), plan.lanes, device, double=job.precision == "float64",
        drop_lane=job.defect == "drop_lane", accumulation=plan.accumulation, workers=plan.loader_workers,
        even=_is_sharded(job, world),
    )  # fmt: skip


def _reduction(
    job: TrainJob, world: World, model: nn.Module, lanes: int, clock: StepClock, faults: FaultPlan, probed: Probed, moving: MovingBuffers
) -> Reduction:
    exact = job.reduction == "exact"
    if _is_sharded(job, world):
        return ShardedReduction(model, world, lanes, clock, faults, moving, exact=exact, coupled=probed.coupled, calls=probed.calls)
    if exact:
        return ExactReduction(model, world, lanes, clock, faults, moving)
    return FastReduction(model, world, clock, faults, moving, has_unused=probed.has_unused, coupled=probed.coupled)


def _resume(run: Training, emit: Emit) -> None:
    """Load the newest checkpoint that verifies, and stand ready to make the next. Collective."""
    root = run.folder / "checkpoints"
    if not run.job.checkpoint_every and not sealed_folders(root):
        return
    key, facts = seal_key(), {"recipe": run.recipe.name, "seed": run.order.seed, "samples": run.order.size}
    state, run.refused, damaged = load_newest(
        root, key=key, run=facts, world=run.world, like=blank(run.model), newest_claimed=newest_sealed(run.folder)
    )  # fmt: skip
    if run.job.checkpoint_every:
        run.saver = Saver(
            root, run.world, key=key, run=facts, at=run.faults.at, emit=emit, timeout_s=run.job.stall_s, damaged=damaged,
            about={"parallel": run.job.parallel},
        )  # fmt: skip
        run.faults.settle = run.saver.settle
    if state is None:
        return
    run.put_back(state)
    if run.job.defect == "repeat_batch_on_resume":
        run.position -= run.order.global_batch_size
