"""One rank's training, read top to bottom. The same code for one rank and for many, on CPU (gloo) and on GPUs (nccl)."""

import contextlib
import math
import resource
import time

import torch
from torch import Tensor

from trainer.clocks import estimate
from trainer.config import TrainJob
from trainer.dataset import seed_streams
from trainer.evaluate import measure_quality
from trainer.norms import clip_, global_norm
from trainer.parallel import local, whole
from trainer.recipe import load_recipe
from trainer.reduce import Totals
from trainer.setup import Training, device_facts, join, leave, meet, prepare, settle
from trainer.state import save_weights, served_weights, state_digest, tensor_sha256, weights_of
from trainer.streams import stream_seed
from trainer.world import Emit, World
from validation.errors import RankError


def run_rank(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Train as one rank of one attempt, from the newest sealed checkpoint of the job's folder or from the start.

    Args: rendezvous, path of a file for torch's FileStore, shared by the attempt's ranks; emit, tells the leader (trainer/world.py).
        "step" events count updates done; their samples are those of the step's global batch.
    Raises: RecipeError, ConfigError, DataError before the first step; RankError when numbers are not finite or ranks are out of step;
        torch's own error when a peer dies or a collective takes longer than job.stall_s.
    """
    settle()
    load_recipe(job.recipe)
    emit("imported")
    join(job, world, rendezvous)
    clock = estimate(world, timeout_s=job.stall_s)
    emit("joined")
    run = prepare(job, world, emit)
    first_step = run.step
    start = {"resumed_from_step": first_step, "world_size": world.world_size, "seed": run.order.seed, "t_ns": time.monotonic_ns()}
    clock_facts = {"clock_offset_ns": clock.offset_ns, "clock_uncertainty_ns": clock.uncertainty_ns}
    run.parts.write("start", start | clock_facts | device_facts(run.device))
    emit("loaded", step=run.step, steps=run.steps, refused=run.refused)
    while run.step < run.steps:
        totals, samples = train_step(run)
        if world.rank == 0 or run.step == first_step + 1:
            emit("step", step=run.step, loss=totals.loss_sum / totals.weight, samples=samples)
        if job.checkpoint_every and run.step == first_step + 1:
            run.state()  # an optimizer that keeps what no checkpoint can hold is told now, and not hours later
        if job.evaluate and (run.step % run.recipe.training.evaluate_every == 0 or run.step == run.steps):
            _evaluate(run, totals)
        if job.checkpoint_every and run.step % job.checkpoint_every == 0:
            _checkpoint(run)
    _finish(run)
    emit("finished")


def train_step(run: Training) -> tuple[Totals, int]:
    """Make one optimizer update. Returns: the step's totals and its samples, over all ranks."""
    step, batch, clock, faults = run.step, run.order.span(run.position), run.clock, run.faults
    clock.start(step, len(run.feed.positions(batch)))

    faults.at("data", step)
    micro_batches = run.feed.micro_batches(batch, run.reduction)
    run.parts.add_ledger(run.feed.ledger(step, batch))
    clock.lap("data")

    for micro in micro_batches:
        _seed(run, stream_seed(run.order.seed, step, micro.lane, micro.part))
        faults.at("forward", step)
        with run.reduction.forward(micro), run.autocast():
            loss_sum, weight = run.recipe.loss(run.reduction.module, micro.batch)
        clock.lap("forward")
        faults.at("backward", step)
        run.reduction.backward(step, micro, loss_sum, weight, run.scaler.scale)
        clock.lap("backward")

    totals = run.reduction.finish(step)  # collective: all ranks, also those whose lanes are empty
    clock.lap("collective")

    faults.at("optimizer", step)
    gradients = [parameter.grad for parameter in run.parameters.values() if parameter.grad is not None]
    torch._foreach_div_([local(gradient) for gradient in gradients], totals.weight * run.scaler.scale)
    if run.job.defect == "divide_twice":
        torch._foreach_div_([local(gradient) for gradient in gradients], float(run.world.world_size))
    # collective when sharded; the same number on every rank, so all take the same way from here
    norm = global_norm(gradients, by_rows=run.job.reduction == "exact")
    overflowed = run.scaler.absorbs(norm)
    if not overflowed:
        _check_finite(run, totals, norm)
        _keep_gradients(run)
        if run.recipe.training.clip_norm is not None:
            clip_(gradients, norm, run.recipe.training.clip_norm)
        run.optimizer.step()
        if run.schedule is not None:
            run.schedule.step()
        run.average()
    run.scaler.note(overflowed=overflowed)
    run.step, run.position = step + 1, batch.stop
    clock.lap("optimizer")

    clock.keep()
    if clock.full:
        run.parts.add_timeline(clock.take())
        with contextlib.suppress(OSError):  # rows are kept: a disk that is full now may have room at the next checkpoint
            run.parts.flush()
    return totals, len(batch)


def _seed(run: Training, seed: int) -> None:
    """Start the micro-batch's random streams, also those that only a recipe's own code may draw from."""
    seed_streams(seed)
    if run.device.type == "cuda":
        torch.cuda.manual_seed(seed)


def _check_finite(run: Training, totals: Totals, norm: float) -> None:
    """Stop every rank at the first number that is not finite; totals and norm are the same on all, so all stop here."""
    broken = [f"the loss sum of lane {lane} is {loss}" for lane, loss in enumerate(totals.losses) if not math.isfinite(loss)]
    if not (math.isfinite(totals.weight) and totals.weight > 0):
        broken.append(f"the weight of the global batch is {totals.weight}")
    if not math.isfinite(norm):
        broken += [f"the gradient of {name} is not finite" for name, p in run.parameters.items() if not _is_finite(p.grad)]
        broken += [f"the norm of the gradient is {norm}"]
    if broken:
        more = f" (and {len(broken) - 1} more)" if len(broken) > 1 else ""
        raise RankError(
            f"rank {run.world.rank}, step {run.step}: {broken[0]}{more}. The update was not made, the last sealed checkpoint is untouched. "
            "Look at the samples of this step in the ledger, then lower the learning rate, clip gradients or mend the loss."
        )


def _is_finite(gradient: Tensor | None) -> bool:
    return gradient is None or bool(local(gradient).isfinite().all())


def _keep_gradients(run: Training) -> None:
    """Leave the first steps' reduced gradients behind: digests on every rank, tensors and the weights they belong to on rank 0."""
    if run.step >= run.job.keep_gradients:
        return
    for name, parameter in run.parameters.items():
        if parameter.grad is not None:
            gradient = whole(parameter.grad.detach()).cpu()
            run.parts.add_line("digests", {"step": run.step, "stage": "reduced", "tensor": name, "sha256": tensor_sha256(gradient)})
            run.kept[f"step{run.step}/{name}"] = gradient.clone()
    run.kept |= {f"step{run.step}/weights/{name}": whole(value).cpu().clone() for name, value in weights_of(run.model).items()}
    if run.world.rank > 0:
        run.kept.clear()


def _evaluate(run: Training, totals: Totals) -> None:
    """Rank 0 measures a point of the quality curve; the others wait, so that no step's clock is charged for it."""
    model = run.serving_model()
    if run.judge is not None:
        quality = measure_quality(run.recipe, model, run.judge, run.device, double=run.job.precision == "float64")
        loss = totals.loss_sum / totals.weight
        run.parts.add_line("curve", {"step": run.step, "samples": run.position, "train_loss": loss, "quality": quality})
    meet()


def _checkpoint(run: Training) -> None:
    """Save the state after this update; first this rank's rows are on disk, since the seal says that nothing before it is lost."""
    assert run.saver is not None  # every run with checkpoint_every has one
    run.clock.resume()
    run.parts.add_timeline(run.clock.take())
    refused = ""
    try:
        run.parts.flush(durable=True)
    except OSError as error:
        refused = f"its rows cannot be written ({error})"
    run.saver.save(run.state(), refused=refused)
    run.clock.lap("checkpoint")
    run.clock.keep()


def _finish(run: Training) -> None:
    """Leave the model, the digest of the whole state and what the run cost on this rank; the last checkpoint is sealed when it is over."""
    if run.saver is not None:
        run.saver.close()
    run.feed.close()
    weights = served_weights(run.model, run.ema)
    if run.world.rank == 0:
        save_weights(weights, run.folder / "model.safetensors")
        if run.kept:
            save_weights(run.kept, run.folder / "gradients.safetensors")
    run.parts.add_timeline(run.clock.take())
    try:
        run.parts.flush()
    except OSError as error:
        raise RankError(
            f"rank {run.world.rank}: the rows of this run cannot be written ({error}), so nothing could show what it trained on. Its "
            "sealed checkpoints stand. Make room on the disk, then give the same command again: a named run goes on from there."
        ) from None
    end = {"steps": run.step, "state_sha256": state_digest(run.state()), "peak_memory_mib": peak_memory_mib(), "t_ns": time.monotonic_ns()}
    run.parts.write("end", end)
    leave()


def peak_memory_mib() -> float:
    """Largest resident set of this process so far, 2**20 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
