"""From a job to a rank that is ready to train: process group, data, seeded model, checks, and the newest checkpoint."""

import os
from datetime import timedelta
from pathlib import Path

import numpy as np
import psutil
import torch
import torch.distributed as dist
import torch.utils.deterministic
from torch import nn
from torch._C._distributed_c10d import FileStore, PrefixStore
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from trainer.audit import Audit
from trainer.audit_collectives import record_collectives
from trainer.checkpoint import load_newest, sealed_folders
from trainer.checks import Probed, check_coupled, check_loss, check_model, check_modules, check_pure, check_same_data, check_stepping
from trainer.config import TrainJob
from trainer.drills import drilled
from trainer.fast import FastReduction
from trainer.faults import FaultPlan, check_defect
from trainer.feed import Feed
from trainer.hardening import hardened
from trainer.history import newest_sealed
from trainer.hooks import brought, hooks_of
from trainer.lanes import check_world_size, rank_lanes, strided_lanes
from trainer.moving import MovingBuffers
from trainer.order import Order
from trainer.own import Own, OwnReduction, check_held, check_own, path_brought, watch_optimizer, wrap
from trainer.own_checkpoint import OwnSaver, check_same_saving, newest_own, own_folders
from trainer.own_data import OwnData
from trainer.parallel import ShardedReduction, check_optimizer, check_sharding, local, shard
from trainer.parts import PartWriter, part_folder
from trainer.recipe import Batch, Recipe, SplitData, load_recipe
from trainer.recording import current
from trainer.reduce import ExactReduction, Reduction
from trainer.running import Training, build_model
from trainer.sample_ids import check_ids
from trainer.saver import Saver
from trainer.scaler import LossScaler
from trainer.seal_key import seal_key
from trainer.state import blank, tensor_bytes, weights_of
from trainer.telemetry import StepClock
from trainer.world import Emit, World

PROBE_SAMPLES = 64  # of the checks before the first step


def settle() -> None:
    """Make this process compute the same bits every time: one thread, deterministic kernels where torch has them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when CUDA starts
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # its only use is finding bugs; it costs a pass


def detect_device(world: World) -> torch.device:
    """A GPU when there is one (places take turns), else the CPU."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    place = world.rank if world.place is None else world.place
    return torch.device("cuda", place % torch.cuda.device_count())


def device_facts(device: torch.device) -> dict[str, str | int]:
    """What a machine record needs from torch: the device's name and how many there are."""
    if device.type == "cuda":
        return {"device": torch.cuda.get_device_name(device), "devices": torch.cuda.device_count()}
    return {"device": "cpu", "devices": cores()}


def join(job: TrainJob, world: World, rendezvous: str) -> None:
    """Form the process group over a file that all ranks share; one rank alone needs none. Collective."""
    device = detect_device(world)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if world.world_size == 1:
        return
    if job.audit:
        record_collectives()
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
    recipe = recipe_of(job)
    plan, own = recipe.training, path_brought(recipe)
    check_own(recipe, job)
    check_world_size(world.world_size, plan.lanes)
    device, double = detect_device(world), job.precision == "float64"
    parts = PartWriter(part_folder(Path(job.folder), world.attempt, world.rank))
    audit = Audit.of(job, world, parts)
    train = audit.data(drilled(job.drill, recipe, recipe.data("train")))
    check_ids(recipe, "train", train)
    order = Order.of(plan, len(train))
    feed = _feed(job, world, recipe, train, order, device)
    probe = feed.probe(PROBE_SAMPLES)
    check_ids(recipe, "train", train, size=order.size)
    if not world.is_back and _is_pure(job, train):
        check_pure(recipe, train, order.rows(order.span(0)[:PROBE_SAMPLES]))
    if not world.is_back:
        check_same_data(recipe, world, device, [np.ascontiguousarray(train.sample_ids), *map(tensor_bytes, probe)])
    model, module, probed = _built(job, world, recipe, order, probe, device)
    optimizer, schedule = _stepping(job, world, recipe, model, order.steps)
    hooks = hooks_of(recipe)
    clock, faults = StepClock(device, recording=current()), FaultPlan(job.faults, world, emit)
    moving = MovingBuffers(model, probed.moving, local(next(p for p in model.parameters() if p.requires_grad)))
    reduction = OwnReduction(module) if own else _reduction(job, world, model, plan.lanes, clock, faults, probed, moving)
    run = Training(
        job=job, world=world, recipe=recipe, order=order, feed=feed, device=device, model=model,
        parameters={name: p for name, p in model.named_parameters() if p.requires_grad}, optimizer=optimizer, schedule=schedule,
        reduction=reduction, moving=moving, audit=audit, hooks=hooks, brought=brought(hooks),
        own=Own(hooks=hooks, brought=own, data=OwnData(recipe, train, order, feed, world, device, double=double)) if own else None,
        scaler=LossScaler.starting_at(None if double else plan.loss_scale), faults=faults, clock=clock,
        ema={name: value.clone() for name, value in weights_of(model).items()} if plan.ema_decay is not None else {},
        parts=parts, steps=min(job.steps or order.steps, order.steps),
        judge=recipe.data("judge") if job.evaluate and (world.rank == 0 or "evaluate" in brought(hooks)) else None,
    )  # fmt: skip
    watch_optimizer(run)
    audit.watch(model, optimizer, limit=plan.clip_norm)
    audit.keep(hooks)
    faults.at("load", 0)
    _resume(run, emit)
    return run


def _built(
    job: TrainJob, world: World, recipe: Recipe, order: Order, probe: Batch, device: torch.device
) -> tuple[nn.Module, nn.Module, Probed]:
    """The model, checked and then sharded or wrapped; what the loss is called with; and what a first backward pass showed. Collective."""
    plan, own = recipe.training, path_brought(recipe)
    model = build_model(recipe, device, double=job.precision == "float64", dropout=job.dropout)
    check_modules(recipe, model)
    probed = check_loss(recipe, model, probe, dropout=job.dropout, again=world.is_back)
    check_coupled(recipe, probed, order.smallest_batch // (world.world_size if own else plan.lanes) // plan.accumulation)
    if _is_sharded(job, world):
        check_sharding(recipe, model, world)
        shard(recipe, model, world, device)
    return model, wrap(recipe, hooks_of(recipe), model, world) if "wrap" in own else model, probed


def _stepping(
    job: TrainJob, world: World, recipe: Recipe, model: nn.Module, steps: int
) -> tuple[Optimizer, LRScheduler | None]:  # fmt: skip
    """Optimizer and schedule, held against the model as it is sharded or wrapped."""
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer, steps)
    check_held(recipe, model, optimizer)
    check_model(recipe, model, optimizer)
    if not {"step", "update"} & set(path_brought(recipe)):
        check_stepping(recipe, optimizer, schedule)
    if _is_sharded(job, world) and job.reduction == "exact":
        check_optimizer(recipe, optimizer)
    return optimizer, schedule


def recipe_of(job: TrainJob) -> Recipe:
    """The recipe to train: as it is, or under a gate's hard conditions. Raises RecipeError."""
    return hardened(load_recipe(job.recipe), job.conditions, dropout=job.dropout)


def _is_sharded(job: TrainJob, world: World) -> bool:
    """One rank has nothing to shard: it is the plain model, with the same bits."""
    return job.parallel == "fsdp2" and world.world_size > 1


def _feed(job: TrainJob, world: World, recipe: Recipe, train: SplitData, order: Order, device: torch.device) -> Feed:
    """Where ranks fill the cores a thread that fetches ahead would take from them what it gives."""
    plan = recipe.training
    lanes_of = strided_lanes if _is_sharded(job, world) and job.reduction == "exact" else rank_lanes
    return Feed(
        train, order, lanes_of(world.rank, world.world_size, plan.lanes), plan.lanes, device, double=job.precision == "float64",
        drop_lane=job.defect == "drop_lane", accumulation=plan.accumulation, workers=plan.loader_workers,
        even=_is_sharded(job, world), pure=_is_pure(job, train),
        ahead=cores() > world.world_size,
    )  # fmt: skip


def _is_pure(job: TrainJob, train: SplitData) -> bool:
    """Whether batches may be fetched ahead by a thread: the data says so, and nobody listens to what is fetched when."""
    return bool(getattr(train, "pure", False)) and not (job.audit or job.conditions or hasattr(train, "keyed_batch"))


def cores() -> int:
    """Cores that this process may use."""
    return len(psutil.Process().cpu_affinity() or [0])


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
    if not run.job.checkpoint_every and not sealed_folders(root) and not own_folders(root):
        return
    is_own = "save" in run.brought
    check_same_saving(root, is_own=is_own)
    if not (_resume_own if is_own else _resume_sealed)(run, root, emit):
        return
    run.audit.state("loaded", run.state(), streams="streams" in run.brought)
    if run.job.defect == "repeat_batch_on_resume":
        run.position -= run.order.global_batch_size
        if run.own is not None:
            run.own.data.repeats = True


def _resume_own(run: Training, root: Path, emit: Emit) -> bool:
    """The same where the recipe saves its own way; whether something was loaded. Collective."""
    key, facts = seal_key(), _run_facts(run)
    found = newest_own(root, key=key, run=facts, world=run.world, newest_claimed=newest_sealed(run.folder))
    run.refused = found.refused
    if run.job.checkpoint_every:
        at = run.faults.at
        run.own_saver = OwnSaver(root, run.world, run.hooks, key=key, run=facts, at=at, emit=emit, damaged=found.damaged)
    if found.folder is not None:
        run.load_own(found)
    return found.folder is not None


def _run_facts(run: Training) -> dict[str, object]:
    """What tells this run from others."""
    return {"recipe": run.recipe.name, "seed": run.order.seed, "samples": run.order.size}


def _resume_sealed(run: Training, root: Path, emit: Emit) -> bool:
    """The same with the trainer's own checkpoints; whether one was loaded. Collective."""
    key, facts = seal_key(), _run_facts(run)
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
        return False
    run.put_back(state)
    return True
