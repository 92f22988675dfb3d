"""One update the team's own way: their hooks in the trainer's place, with the marks, faults and records of trainer/loop.py around them.

Nothing that a hook leaves behind is mended or judged here: a gradient that is missing or of one rank alone goes to the optimizer as it
is (the default `update` stops at one that is not finite). The gates read what came of it.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.hooks import PATH, Hooks, Rows, Step, brought, hooks_of, naming
from trainer.own_data import OwnData, Taken
from trainer.parallel import local
from trainer.recipe import Batch, Recipe
from trainer.recording import current
from trainer.reduce import Totals
from trainer.world import World
from validation.errors import ConfigError, RankError, RecipeError

if TYPE_CHECKING:
    from trainer.config import TrainJob
    from trainer.feed import MicroBatch
    from trainer.running import Training


def path_brought(recipe: Recipe) -> tuple[str, ...]:
    """Which of the hooks that decide the weights a recipe brought; () = the trainer's own path is taken."""
    return tuple(name for name in brought(hooks_of(recipe)) if name in PATH)


def check_own(recipe: Recipe, job: "TrainJob") -> None:
    """Refuse settings of the trainer's own path that an own one would silently leave out. Raises RecipeError or ConfigError."""
    own = path_brought(recipe)
    if own and recipe.training.loss_scale is not None and "step" not in own:
        raise RecipeError(
            f"recipe {recipe.name}: training.loss_scale scales the loss in the trainer's own step, and hooks.{own[0]} takes its place: the "
            "loss would go unscaled. Bring hooks.step with a scaler of your own (torch.amp.GradScaler), or set loss_scale to None."
        )
    if own and job.parallel == "fsdp2":
        raise ConfigError(
            f"--parallel fsdp2 shards the model for the trainer's own step, and recipe {recipe.name} brings hooks.{own[0]} in its place. "
            "Nothing was started. Shard in hooks.wrap (fully_shard) and leave out --parallel."
        )


def wrap(recipe: Recipe, hooks: Hooks, model: nn.Module, world: World) -> nn.Module:
    """What the loss is called with: the recipe's own wrapping of the model. Raises RecipeError when the model is not inside it."""
    with naming("wrap", world):
        module = hooks.wrap(model, world)
    if not isinstance(module, nn.Module):
        raise RecipeError(
            f"recipe {recipe.name}: hooks.wrap returned a {type(module).__name__}. The loss has to be called with a module. Return the "
            "wrapped model, or the model itself when it was changed in place."
        )
    inside = {id(parameter) for parameter in module.parameters()}
    if lost := [name for name, parameter in model.named_parameters() if id(parameter) not in inside]:
        raise RecipeError(
            f"recipe {recipe.name}: hooks.wrap returned a module without {len(lost)} of the model's parameters ({', '.join(lost[:3])}). "
            "What is trained would not be what is saved and served. Wrap the model that it is given, not a copy of it."
        )
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()) and not {"gradients", "step"} & set(brought(hooks)):
        raise RecipeError(
            f"recipe {recipe.name}: hooks.wrap shards the model, and the default hooks.gradients adds whole gradients over ranks. Bring "
            "hooks.gradients, too: backward alone leaves the ranks' mean in sharded parameters, the mean over samples is W times that over "
            "the weight of all ranks."
        )
    return module


def check_held(recipe: Recipe, model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that was built before the model was wrapped and holds what is no longer part of it. Raises RecipeError."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    missing = [name for name, parameter in model.named_parameters() if parameter.requires_grad and id(parameter) not in held]
    if missing and (strangers := len(held - own.keys())):
        raise RecipeError(
            f"recipe {recipe.name}: the optimizer holds {strangers} tensors that are not part of the wrapped model and misses "
            f"{len(missing)} of its parameters ({', '.join(missing[:3])}). It was built before hooks.wrap replaced them (sharding and "
            "moving do), so every update would change tensors that nothing is computed with. Build it in `optimizer(model)`, from the "
            "model given there."
        )


class OwnReduction:
    """All lanes of a rank in one piece. Adding over ranks is the work of the hooks, so only `groups` and `module` are ever asked for."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # what `wrap` returned

    def groups(self, lanes: range) -> list[range]:
        """One group: an own path cuts by `accumulation` alone."""
        return [lanes]

    def forward(self, micro: "MicroBatch") -> AbstractContextManager[Any]:  # noqa: ARG002 - the interface of a Reduction
        """Nothing is left to be done around a loss."""
        return nullcontext()

    def backward(self, step: int, micro: "MicroBatch", loss_sum: Tensor, weight: Tensor, scale: float) -> NoReturn:
        """Never called: hooks.gradients does it."""
        raise NotImplementedError

    def finish(self, step: int) -> NoReturn:
        """Never called: hooks.gradients does it."""
        raise NotImplementedError


@dataclass(kw_only=True)
class Own:
    """The recipe's own parts on one rank."""

    hooks: Hooks
    brought: tuple[str, ...]  # all of them, in the order of a run
    data: OwnData
    losses: "Losses | None" = None  # of the step in work


def watch_optimizer(run: "Training") -> None:
    """Before the optimizer's step: the lap of the collectives, planned faults, and the planted defect of an own step."""

    def before(*_: object) -> None:
        own = run.own
        if own is None or own.losses is None or own.losses.is_handed:
            return
        own.losses.is_handed = True
        if run.job.defect == "divide_twice" and "step" in own.brought:
            _divide_twice(run)
        run.clock.lap("collective")
        run.faults.at("collective", run.step)
        run.faults.at("optimizer", run.step)

    run.optimizer.register_step_pre_hook(before)


def own_step(run: "Training") -> tuple[Totals, int] | None:
    """Make one update the recipe's own way. Returns: totals of this rank's losses alone (no collective is spent on them) and the samples of
    all ranks (with an own order: this rank's, times the ranks); None when an own sampler's data is used up.
    """
    own, step, clock, faults = run.own, run.step, run.clock, run.faults
    assert own is not None  # the loop asks only where a hook of PATH was brought
    clock.start(step, 0)

    run.audit.begin(step)
    faults.at("data", step)
    taken = own.data.take(step, run.position, run.reduction)
    if taken is None:
        if (recording := current()) is not None:
            recording.note(f"data exhausted after {step} updates")
        return None
    clock.count(len(taken.ledger.ids))
    run.parts.add_ledger(taken.ledger)
    clock.lap("data")

    own.losses = Losses(run, taken)
    with _named(run, own, "streams"):
        own.hooks.streams(run.order.seed, step, run.world)
    _make(run, own, _step_of(run, taken, own.losses))
    for phase in ("forward", "backward", "collective", "optimizer"):  # of a step that went another way: each fires once
        faults.at(phase, step)
    run.average()
    run.audit.end(step)

    totals, own.losses = own.losses.totals(), None
    batch = run.order.span(run.position)
    run.step, run.position = step + 1, batch.stop
    clock.lap("optimizer")
    run.keep_times()
    return totals, len(taken.ledger.ids) * run.world.world_size if own.data.has_own_order else len(batch)


def end_together(run: "Training") -> None:
    """Every rank's own sampler has to end after the same step. Collective. Raises RankError when a peer does not come."""
    if not dist.is_initialized():
        return
    try:
        if dist.get_backend() == "gloo":  # before the peers, who wait for this rank in their step, give up
            dist.monitored_barrier(timeout=timedelta(seconds=run.job.stall_s / 2))
        else:
            dist.barrier()
    except RuntimeError as error:
        raise RankError(
            f"rank {run.world.rank}: its data was used up after {run.step} updates, and others went on, who wait for its gradients. The "
            "last sealed checkpoint is untouched. Let hooks.sampler and hooks.loader end after the same step on every rank: leave out what "
            "does not divide."
        ) from error


def _step_of(run: "Training", taken: Taken, losses: "Losses") -> Step:
    return Step(
        number=run.step, world=run.world, module=run.reduction.module, model=run.model, optimizer=run.optimizer, schedule=run.schedule,
        micro_batches=taken.batches, clip_norm=run.recipe.training.clip_norm, loss=losses,
    )  # fmt: skip


def _make(run: "Training", own: Own, step: Step) -> None:
    """The update itself; an own `step` makes all of it."""
    if "step" in own.brought:
        with naming("step", run.world, step.number):
            own.hooks.step(step)
        return
    with _named(run, own, "gradients", "reduce"):
        own.hooks.gradients(step)
    if run.job.defect == "divide_twice":
        _divide_twice(run)
    run.audit.reduced(step.number)
    with _named(run, own, "clip"):
        own.hooks.clip(step)
    with _named(run, own, "update"):
        own.hooks.update(step)


def _named(run: "Training", own: Own, *hooks: str) -> AbstractContextManager[None]:
    """Errors inside are named after the first of these hooks that was brought."""
    mine = [hook for hook in hooks if hook in own.brought]
    return naming(mine[0], run.world, run.step) if mine else nullcontext()


def _divide_twice(run: "Training") -> None:
    gradients = [local(parameter.grad) for parameter in run.parameters.values() if parameter.grad is not None]
    if gradients:
        torch._foreach_div_(gradients, float(run.world.world_size))


class Losses:
    """The recipe's loss as an own step calls it: in the recipe's smaller type, read along by the audit, timed, struck by planned faults."""

    def __init__(self, run: "Training", taken: Taken) -> None:
        self._run = run
        self._taken = taken
        self._seen: list[tuple[Tensor, Tensor]] = []
        self.is_handed = False  # the optimizer has been asked to step

    def __call__(self, module: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """(sum, weight) of a micro-batch."""
        run, step, number = self._run, self._run.step, len(self._seen)
        run.clock.lap("backward" if number else "data")
        run.clock.micro(number)
        run.faults.at("accumulation" if number else "forward", step)

        def compute() -> tuple[Tensor, Tensor]:
            with run.autocast():
                return run.recipe.loss(module, batch)

        loss_sum, weight = run.audit.loss(step, number, self._rows(batch), self._handed_over(batch), compute)
        self._seen.append((loss_sum.detach(), weight.detach()))
        run.clock.lap("forward")
        if number + 1 >= len(self._taken.batches):
            run.faults.at("backward", step)
            run.clock.arrive()
            run.clock.enter("backward")
            if loss_sum.requires_grad:
                loss_sum.register_hook(self._arrive_later)  # type: ignore[no-untyped-call]
        return loss_sum, weight

    def totals(self) -> Totals:
        """Of this rank's losses; NaN without any."""
        loss, weight = (sum(float(pair[place]) for pair in self._seen) for place in (0, 1))
        return Totals(loss, weight, ()) if weight > 0 else Totals(float("nan"), 1.0, ())

    def _arrive_later(self, _gradient: Tensor) -> None:
        """The backward pass has begun: this rank's own work is done when it is over, before anybody is waited for."""
        Variable._execution_engine.queue_callback(self._run.clock.arrive)  # as torch's own wrappers do

    def _handed_over(self, batch: Batch) -> Batch:
        """The same samples as they were handed over, where padding was trimmed off them; any other batch as it is."""
        for given in self._taken.batches:
            start = _offset(batch.inputs, given.inputs)
            if start is None or batch.inputs.shape[1:] == given.inputs.shape[1:]:
                continue
            whole = Batch(*(value[start : start + len(batch.inputs)] for value in given))
            if len(whole.inputs) == len(batch.inputs) and all(_offset(part, of) == start for part, of in zip(batch, given, strict=True)):
                return whole
        return batch

    def _rows(self, batch: Batch) -> Rows | None:
        """Rows of a micro-batch, or of a part of one that a step has cut out; None for samples that were not handed over."""
        pairs = list(zip(self._taken.rows, self._taken.batches, strict=True))
        pairs.sort(key=lambda pair: pair[1].inputs is not batch.inputs)  # micro-batches that share a buffer are views on one another
        for rows, given in pairs:
            start = _offset(batch.inputs, given.inputs)
            if start is not None and start + len(batch.inputs) <= len(rows):
                return rows[start : start + len(batch.inputs)]
        return None


def _offset(part: Tensor, of: Tensor) -> int | None:
    """Where in `of` a view on some of its rows starts; None when it is no such view."""
    if part is of:
        return 0
    if part.stride() != of.stride() or part.untyped_storage().data_ptr() != of.untyped_storage().data_ptr() or not of.stride(0):
        return None
    start, rest = divmod(int(part.storage_offset() - of.storage_offset()), of.stride(0))
    return start if rest == 0 and start >= 0 else None
