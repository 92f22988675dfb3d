"""Reading along with a training: what gates judge it by, left by every rank. Off, every call here does nothing.

The calls of one rank, in their order; the loop (trainer/loop.py) and an own path (trainer/own.py) make the same ones:

    audit = Audit.of(job, world, parts)
    train = audit.data(recipe.data("train"))                # the split, read along
    audit.watch(model, optimizer, limit=clip_norm)          # the recipe's own model, also where something wraps it; once, when both stand
    audit.state("loaded", run.state())                      # after a load
    while ...:
        audit.begin(step)                                   # before the step's samples are fetched
        for micro, (rows, batch) in enumerate(...):
            loss_sum, weight = audit.loss(step, micro, rows, batch, lambda: recipe.loss(module, batch))
            loss_sum.backward()
        audit.reduced(step)                                 # .grad is the mean gradient, not yet clipped
        optimizer.step(); schedule.step()                   # "clipped" is read in the optimizer's own hook
        audit.end(step)
        audit.state("saved", run.state())                   # before it is handed to a save
    audit.state("end", run.state())
    audit.close()                                           # before the last flush of the parts

Everything but `loss`, `data`, `watch` and `close` is collective when tensors are sharded: call it on all ranks alike. A soak of the last
update (trainer/soak.py) comes before that update.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainer.audit_collectives import Collectives
from trainer.audit_data import DrawLog, audited, watch_loaders
from trainer.audit_samples import content_digests as content_digests
from trainer.audit_state import kept_averages, kept_digests, state_digests
from trainer.audit_streams import Draw, watch_backward, watched
from trainer.audit_tensors import gradients_of, handed_to, norm_of, rates_of, whole_copy
from trainer.config import SPIKE, TrainJob
from trainer.hooks import Hooks
from trainer.order import Rows
from trainer.parallel import whole
from trainer.recipe import Batch, SplitData
from trainer.state import State, save_weights, tensor_sha256, weights_of
from trainer.world import World
from validation.canonical import canonical_json

Loss = tuple[Tensor, Tensor]  # (sum, weight)
Moment = Literal["saved", "loaded", "end"]
FACTORS = {"spike": SPIKE, "overflow": math.inf}


class Lines(Protocol):
    """Where rows go: trainer.parts.PartWriter."""

    folder: Path

    def add_line(self, table: str, row: Mapping[str, Any]) -> None: ...

    def flush(self) -> None: ...


class Audit:
    """Nothing is left: the training of a job that nobody audits."""

    @staticmethod
    def of(job: TrainJob, world: World, parts: Lines) -> "Audit":
        """What a job asks for: everything (job.audit), the first steps' gradients (job.keep_gradients), a poison, or nothing."""
        if job.audit:
            return Recording(job, world, parts)
        if job.keep_gradients or job.poison:
            return Keeping(job, world, parts)
        return Audit()

    def data(self, split: SplitData) -> SplitData:
        """The split to train on; its fetches are read along, in loader workers too."""
        return split

    def watch(self, model: nn.Module, optimizer: Optimizer, *, limit: float | None) -> None:
        """Learn what is trained. Args: limit, of the global gradient norm, None without clipping."""

    def keep(self, hooks: Hooks) -> None:
        """Learn which hooks train: what they keep in themselves is part of the state."""

    def begin(self, step: int) -> None:
        """A step begins; its samples are not fetched yet. Collective when sharded."""

    def loss(self, step: int, micro: int, rows: Rows | None, batch: Batch, compute: Callable[[], Loss]) -> Loss:  # noqa: ARG002 - for others
        """Compute a micro-batch's loss.

        Args: micro, number of the micro-batch in this rank's step; rows, (B,) of the split, None when nobody knows them, () when the
            samples only stand in for none; compute, the loss of `batch`.
        """
        return compute()

    def reduced(self, step: int) -> None:
        """.grad is the mean gradient over the global batch, before clipping. Collective when sharded."""

    def end(self, step: int) -> None:
        """The update is done, or was skipped. Collective when sharded."""

    @contextmanager
    def again(self, repeat: int) -> Iterator[None]:  # noqa: ARG002 - for others
        """What happens inside is a repeat of an update: of it only the handed gradient is noted."""
        yield

    def state(self, moment: Moment, state: State, *, streams: bool = False) -> None:
        """Note a whole state by name. Args: streams, the team decides where random numbers start. Collective when sharded."""

    def close(self) -> None:
        """Leave what comes last."""


class Keeping(Audit):
    """The first steps' reduced gradients: digests on every rank, tensors and the weights they belong to on rank 0. And a poison."""

    def __init__(self, job: TrainJob, world: World, parts: Lines) -> None:
        self._rank = world.rank
        self._folder = Path(job.folder)
        self._keeps = job.keep_gradients
        self._poison = job.poison if job.poison is not None and job.poison.rank == world.rank else None
        self._poisoned = -1  # the step whose poison is spent
        self._parts = parts
        self._model = nn.Module()
        self._kept: dict[str, Tensor] = {}

    def watch(self, model: nn.Module, optimizer: Optimizer, *, limit: float | None) -> None:  # noqa: ARG002 - the signature of all
        self._model = model

    def begin(self, step: int) -> None:  # noqa: ARG002 - the signature of all
        self._poisoned = -1

    def loss(self, step: int, micro: int, rows: Rows | None, batch: Batch, compute: Callable[[], Loss]) -> Loss:  # noqa: ARG002
        loss_sum, weight = compute()
        return self._poisoned_loss(loss_sum, self._factor(step, rows)), weight

    @staticmethod
    def _poisoned_loss(loss_sum: Tensor, factor: float) -> Tensor:
        return loss_sum if factor == 1.0 else loss_sum * factor

    def _factor(self, step: int, rows: Rows | None) -> float:
        """What the loss of a micro-batch is multiplied by: 1, or a poison for the rank's first one that counts."""
        if self._poison is None or self._poison.step != step or self._poisoned == step or (rows is not None and not len(rows)):
            return 1.0
        self._poisoned = step
        return FACTORS[self._poison.kind]

    def reduced(self, step: int) -> None:
        if step >= self._keeps:
            return
        for name, gradient in gradients_of(self._model).items():
            self._digest(step, "reduced", name, gradient)
            self._keep(f"step{step}/{name}", gradient)
        for name, value in weights_of(self._model).items():
            self._keep(f"step{step}/weights/{name}", whole(value))

    def _digest(self, step: int, stage: str, name: str, value: Tensor) -> None:
        self._parts.add_line("digests", {"step": step, "stage": stage, "tensor": name, "sha256": tensor_sha256(value)})

    def _keep(self, name: str, value: Tensor, *, everywhere: bool = False) -> None:
        if self._rank == 0 or everywhere:
            self._kept[name] = value.detach().cpu().clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        if self._kept:
            save_weights(self._kept, self._folder / (f"gradients-rank-{self._rank}.safetensors" if self._rank else "gradients.safetensors"))


class Recording(Keeping):
    """Everything that validation/records.py names of an audited run."""

    def __init__(self, job: TrainJob, world: World, parts: Lines) -> None:
        super().__init__(job, world, parts)
        self._log = DrawLog(parts.folder, lambda draw: self._drew(self._log.step, "data", draw))
        self._collectives = Collectives()
        self._sample_ids: Rows | None = None
        self._optimizer: Optimizer | None = None
        self._limit = math.nan
        self._before: dict[str, Tensor] = {}  # weights, whole
        self._handed: dict[str, Tensor] | None = None  # gradients that the optimizer was stepped with, whole; None before that
        self._rates: list[float] = []
        self._begun: list[float] = []  # rates when the step began: those of an update that is made without the optimizer
        self._sums = [0.0, 0.0]  # loss, weight
        self._repeat = -1  # of a soak; -1 outside
        self._hooks: Hooks | None = None

    def data(self, split: SplitData) -> SplitData:
        self._sample_ids = np.asarray(split.sample_ids)
        watch_loaders(self._log)
        return audited(split, self._log)

    def watch(self, model: nn.Module, optimizer: Optimizer, *, limit: float | None) -> None:
        self._model, self._optimizer = model, optimizer
        self._limit = math.nan if limit is None else limit
        optimizer.register_step_pre_hook(lambda *_: self._stepping())

    def keep(self, hooks: Hooks) -> None:
        self._hooks = hooks

    def begin(self, step: int) -> None:
        super().begin(step)
        self._handed, self._rates, self._sums = None, [], [0.0, 0.0]
        if self._repeat < 0:
            self._log.step = step
            self._before = {name: whole_copy(value) for name, value in weights_of(self._model).items()}
            self._begun = [] if self._optimizer is None else rates_of(self._optimizer)
            self._collectives.start()

    def loss(self, step: int, micro: int, rows: Rows | None, batch: Batch, compute: Callable[[], Loss]) -> Loss:
        if self._repeat >= 0:
            return super().loss(step, micro, rows, batch, compute)
        draws: list[Draw] = []
        contents = content_digests(batch)  # before the loss, which may work in place
        with watched(draws):  # around the whole loss: draws outside of the model's forward pass are seen, too
            loss_sum, weight = compute()
        factor = self._factor(step, rows)
        loss_sum = self._poisoned_loss(loss_sum, factor)
        for draw in draws:
            self._drew(step, "model", draw)
        watch_backward(loss_sum, partial(self._drew, step, "backward"))
        if rows is None or len(rows):
            self._consumed(step, micro, rows, contents, is_poisoned=factor != 1.0)
            self._sums = [self._sums[0] + loss_sum.item(), self._sums[1] + weight.item()]
        return loss_sum, weight

    def _drew(self, step: int, drawer: str, draw: Draw) -> None:
        self._parts.add_line("streams", {"step": step, "drawer": drawer, **draw._asdict()})

    def _consumed(self, step: int, micro: int, rows: Rows | None, contents: list[str], *, is_poisoned: bool) -> None:
        """One line a micro-batch, in words: JSON takes long over lists. Samples whose rows nobody knows have the id -1."""
        is_known = rows is not None and self._sample_ids is not None and len(rows) == len(contents)
        ids = self._sample_ids[rows].tolist() if is_known else [-1] * len(contents)  # type: ignore[index]  # known
        self._parts.add_line("consumed", {
            "step": step, "micro": micro, "sample_ids": " ".join(map(str, ids)), "contents": " ".join(contents), "poisoned": is_poisoned,
        })  # fmt: skip

    def reduced(self, step: int) -> None:
        if self._repeat >= 0:
            return
        with self._collectives.paused():
            gradients = gradients_of(self._model)
        for name, gradient in gradients.items():
            self._digest(step, "reduced", name, gradient)
            if step < self._keeps:
                self._keep(f"step{step}/{name}", gradient)

    def _stepping(self) -> None:
        """The optimizer's own hook: what it is handed, and at which rates. Of several calls in an update the last one counts."""
        assert self._optimizer is not None
        with self._collectives.paused():
            self._handed = handed_to(self._optimizer, self._model)
        self._rates = rates_of(self._optimizer)

    def end(self, step: int) -> None:
        self._collectives.stop()
        if self._repeat >= 0:
            for name, gradient in (gradients_of(self._model) if self._handed is None else self._handed).items():
                self._digest(self._repeat, "again", name, gradient)
            return
        after = {name: whole(value) for name, value in weights_of(self._model).items()}
        if self._handed is None and self._is_by_hand(after):
            self._handed = gradients_of(self._model)
        for name, gradient in (self._handed or {}).items():
            self._digest(step, "clipped", name, gradient)
        for name, value in after.items():
            self._digest(step, "weight", name, value)
        for name, value in self._model.named_buffers():
            self._digest(step, "buffer", name, whole(value.detach()))
        if step < self._keeps:
            self._keep_all(step, after)
        self._update(step, after)
        self._before, self._handed = {}, None
        self._collectives.step_done()

    def _is_by_hand(self, after: Mapping[str, Tensor]) -> bool:
        """Whether weights moved without the optimizer: an own update, which leaves .grad as it used it. Never asked of sharded ones."""
        if any(isinstance(parameter, DTensor) for parameter in self._model.parameters()):
            return False
        return any(not torch.equal(value, self._before[name]) for name, value in after.items() if name in self._before)

    def _keep_all(self, step: int, after: Mapping[str, Tensor]) -> None:
        handed = self._handed or {}
        is_part = len(handed) < sum(
            parameter.requires_grad for parameter in self._model.parameters()
        )  # the rest is another rank's to update
        for part, tensors in (("weights", self._before), ("clipped", handed), ("after", after)):
            for name, value in tensors.items():
                self._keep(f"step{step}/{part}/{name}", value, everywhere=is_part and part == "clipped")
        if step == 0:  # the weights that these come of are everybody's; later ones have grown apart by rounding
            for name, value in self._model.named_buffers():
                if value.is_floating_point():
                    self._keep(f"step0/buffers/{name}", whole(value.detach()))
            for name, value in kept_averages(self._hooks, self._model).items():
                if value.is_floating_point():
                    self._keep(f"step0/averages/{name}", whole(value.detach()))

    def _update(self, step: int, after: Mapping[str, Tensor]) -> None:
        assert self._optimizer is not None
        changes = {name: value.double() - self._before[name].double() for name, value in after.items() if name in self._before}
        wanted = [name for name, parameter in self._model.named_parameters() if parameter.requires_grad and name in changes]
        loss, weight = self._sums
        self._parts.add_line("updates", {
            "step": step, "rates": canonical_json(self._rates or self._begun).decode(),
            "norm": math.nan if self._handed is None else norm_of(self._handed), "limit": self._limit, "moved": norm_of(changes),
            "still": canonical_json([name for name in wanted if torch.equal(after[name], self._before[name])]).decode(),
            "weight": weight, "loss": loss / weight if weight else math.nan,
        })  # fmt: skip

    @contextmanager
    def again(self, repeat: int) -> Iterator[None]:
        self._repeat, self._log.silent, self._log.is_soaked = repeat, True, True
        try:
            yield
        finally:
            self._repeat, self._log.silent = -1, False

    def state(self, moment: Moment, state: State, *, streams: bool = False) -> None:
        with self._collectives.paused():
            names = state_digests(state, streams=streams) | ({} if self._hooks is None else kept_digests(self._hooks, self._model))
            self._parts.add_line("states", {"step": state.step, "moment": moment, "names": names})
        with suppress(OSError):  # kept: a disk that is full now may have room later. A death must not take the row along
            self._parts.flush()

    def close(self) -> None:
        super().close()
        self._collectives.read()
        for row in self._collectives.rows():
            self._parts.add_line("collectives", row)
