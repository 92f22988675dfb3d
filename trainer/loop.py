"""One rank's training, read top to bottom. The same code for one rank and for many, on CPU (gloo) and on GPUs (nccl)."""

import math
import resource
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.clocks import estimate
from trainer.config import TrainJob
from trainer.dataset import kept_streams, seed_streams
from trainer.evaluate import measure_quality, own_quality
from trainer.norms import as_one, clip_, global_norm
from trainer.own import end_together, own_step
from trainer.parallel import local
from trainer.recording import recording_of
from trainer.reduce import Totals
from trainer.running import Training
from trainer.setup import device_facts, join, leave, meet, prepare, recipe_of, settle
from trainer.soak import soak
from trainer.state import save_weights, served_weights, state_digest
from trainer.streams import stream_seed
from trainer.world import Emit, World
from validation.canonical import canonical_json
from validation.errors import RankError


def run_rank(job: TrainJob, world: World, rendezvous: str, emit: Emit) -> None:
    """Train as one rank of one attempt, from the newest sealed checkpoint of the job's folder or from the start.

    Args: rendezvous, path of a file for torch's FileStore, shared by the attempt's ranks; emit, tells the leader (trainer/world.py).
        "step" events count updates done; their samples are those of the step's global batch.
    Raises: RecipeError, ConfigError, DataError before the first step; RankError when numbers are not finite or ranks are out of step;
        torch's own error when a peer dies or a collective takes longer than job.stall_s.
    """
    settle()
    recipe_of(job)
    emit("imported")
    with recording_of(Path(job.folder), world.rank, world.world_size, attempt=world.attempt):  # before groups are made
        join(job, world, rendezvous)
        clock = estimate(world, timeout_s=job.stall_s)
        emit("joined")
        run = prepare(job, world, emit)
        run.parts.write("start", _start_facts(run) | {"clock_offset_ns": clock.offset_ns, "clock_uncertainty_ns": clock.uncertainty_ns})
        emit("loaded", step=run.step, steps=run.steps, refused=run.refused)
        _train(run, emit)
        _finish(run)
        emit("finished")


def _start_facts(run: Training) -> dict[str, Any]:
    """What is known of this attempt before its first step."""
    facts = {"resumed_from_step": run.step, "world_size": run.world.world_size, "seed": run.order.seed, "t_ns": time.monotonic_ns()}
    own = {} if run.own is None else {"reduction": "own", "own_order": run.own.data.has_own_order}
    return facts | device_facts(run.device) | own


def _train(run: Training, emit: Emit) -> None:
    """All steps that are left, with what lies between them."""
    job, first_step, every = run.job, run.step, run.recipe.training.evaluate_every
    update = train_step if run.own is None else own_step
    totals = Totals(math.nan, 1.0, ())
    while run.step < run.steps:
        if job.soak and run.step == run.steps - 1:
            _soak(run, update)
        done = update(run)
        if done is None:  # an own sampler ends where it wants to
            end_together(run)
            run.steps = run.step
            if job.evaluate and run.step > first_step and run.step % every:
                _evaluate(run, totals)
            break
        totals, samples = done
        if run.world.rank == 0 or run.step == first_step + 1:
            emit("step", step=run.step, loss=totals.loss_sum / totals.weight, samples=samples)
        if job.checkpoint_every and run.step == first_step + 1:
            _prepare_saving(run)
        if job.evaluate and (run.step % every == 0 or run.step == run.steps):
            _evaluate(run, totals)
        if job.checkpoint_every and run.step % job.checkpoint_every == 0:
            _checkpoint(run)


def _soak(run: Training, update: Callable[[Training], object]) -> None:
    """Make the next update again and again, of samples that are fetched once."""
    with run.feed.holding(), nullcontext() if run.own is None else run.own.data.holding():
        soak(run, lambda: update(run))


def train_step(run: Training) -> tuple[Totals, int] | None:
    """Make one optimizer update. Returns: the step's totals and its samples, over all ranks."""
    step, batch, clock, faults = run.step, run.order.span(run.position), run.clock, run.faults
    clock.start(step, 0)
    clock.count(len(run.feed.positions(batch)))

    run.audit.begin(step)
    faults.at("data", step)
    micro_batches = run.feed.micro_batches(batch, run.reduction)
    rows = run.feed.rows(batch, run.reduction) if run.job.audit or run.job.poison else [None] * len(micro_batches)
    run.parts.add_ledger(run.feed.ledger(step, batch))
    clock.lap("data")

    for number, (micro, asked) in enumerate(zip(micro_batches, rows, strict=True)):
        clock.micro(number)
        if number:
            faults.at("accumulation", step)
        _seed(run, stream_seed(run.order.seed, step, micro.lane, micro.part))
        faults.at("forward", step)
        with run.reduction.forward(micro), run.autocast():
            compute = partial(run.recipe.loss, run.reduction.module, micro.batch)
            loss_sum, weight = run.audit.loss(step, number, asked, micro.batch, compute)
        clock.lap("forward")
        faults.at("backward", step)
        if number == 0 and step + 1 < run.steps:
            run.feed.fetch_ahead(run.order.span(batch.stop), run.reduction)
        run.reduction.backward(step, micro, loss_sum, weight, run.scaler.scale)
        clock.lap("backward")

    totals = run.reduction.finish(step)  # collective: all ranks, also those whose lanes are empty
    clock.lap("collective")

    faults.at("optimizer", step)
    gradients = [parameter.grad for parameter in run.parameters.values() if parameter.grad is not None]
    whole = as_one(gradients)
    torch._foreach_div_([local(gradient) for gradient in whole], totals.weight * run.scaler.scale)
    if run.job.defect == "divide_twice":
        torch._foreach_div_([local(gradient) for gradient in whole], float(run.world.world_size))
    # collective when sharded; the same number on every rank, so all take the same way from here
    by_rows = run.job.reduction == "exact"
    norm = global_norm(gradients if by_rows else whole, by_rows=by_rows)
    overflowed = run.scaler.absorbs(norm)
    if not overflowed:
        _check_finite(run, totals, norm)
        run.audit.reduced(step)
        if run.recipe.training.clip_norm is not None:
            clip_(whole, norm, run.recipe.training.clip_norm)
        run.optimizer.step()
        if run.schedule is not None:
            run.schedule.step()
        run.average()
    run.scaler.note(overflowed=overflowed)
    run.audit.end(step)
    run.step, run.position = step + 1, batch.stop
    clock.lap("optimizer")
    run.keep_times()
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


def _evaluate(run: Training, totals: Totals) -> None:
    """Measure a point of the quality curve; ranks that do not score wait, so that no step's clock is charged for it. Collective."""
    run.clock.enter("evaluate")
    with kept_streams():
        quality = _quality(run)
    if run.world.rank == 0:
        loss = totals.loss_sum / totals.weight
        run.parts.add_line("curve", {"step": run.step, "samples": run.position, "train_loss": loss, "quality": quality})
    meet()


def _quality(run: Training) -> float:
    """By rank 0 alone, or the recipe's own way by all ranks; NaN on the others. An audited own evaluation leaves what it counted."""
    model, double = run.serving_model(), run.is_double
    if run.judge is None:
        return math.nan
    if "evaluate" not in run.brought:
        return measure_quality(run.recipe, model, run.judge, run.device, double=double)
    counted = own_quality(run.recipe, run.hooks, model, run.judge, run.device, run.world, step=run.step, double=double)
    if counted is None:
        return math.nan
    if run.job.audit:
        plain = measure_quality(run.recipe, model, run.judge, run.device, double=double)
        facts = {"sample_ids": counted.sample_ids, "quality": counted.quality, "plain_quality": plain}
        (run.folder / "evaluation.json").write_bytes(canonical_json(facts))
    return counted.quality


def _prepare_saving(run: Training) -> None:
    """After the first update; an optimizer that keeps what no checkpoint can hold is told now, and not hours later."""
    state = run.state()
    if run.saver is not None:
        run.saver.prepare(state)


def _checkpoint(run: Training) -> None:
    """Save the state after this update. This rank's rows are on disk before it is sealed: the seal says that nothing before it is lost."""
    run.clock.resume()
    run.clock.enter("checkpoint")
    run.parts.add_timeline(run.clock.take())
    refused = ""
    try:
        run.parts.flush()
        if run.saver is None:
            run.parts.sync()
    except OSError as error:
        refused = f"its rows cannot be written ({error})"
    state = run.state()
    run.audit.state("saved", state, streams="streams" in run.brought)
    if run.saver is None:
        run.save_own(refused=refused)
    else:
        run.saver.save(state, rows=run.parts.sync, refused=refused)
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
    state = run.state()
    run.audit.state("end", state, streams="streams" in run.brought)
    run.audit.close()
    run.parts.add_timeline(run.clock.take())
    try:
        run.parts.flush()
    except OSError as error:
        raise RankError(
            f"rank {run.world.rank}: the rows of this run cannot be written ({error}), so nothing could show what it trained on. Its "
            "sealed checkpoints stand. Make room on the disk, then give the same command again: a named run goes on from there."
        ) from None
    end = {"steps": run.step, "state_sha256": state_digest(state), "peak_memory_mib": peak_memory_mib(), "t_ns": time.monotonic_ns()}
    run.parts.write("end", end)
    leave()


def peak_memory_mib() -> float:
    """Largest resident set of this process so far, 2**20 bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
