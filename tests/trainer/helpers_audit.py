"""An audit whose rows stay in memory, and updates by hand, for tests of the audit without a loop."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from helpers_loop import tiny_job
from tiny_recipe import TinyData, recipe
from torch import Tensor, nn

from trainer.audit import Audit
from trainer.config import TrainJob
from trainer.recipe import Batch
from trainer.world import World


@dataclass
class Kept:
    """Rows by table, as they come."""

    folder: Path
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=lambda: defaultdict(list))
    flushed: int = 0

    def add_line(self, table: str, row: Mapping[str, Any]) -> None:
        self.tables[table].append(dict(row))

    def flush(self) -> None:
        self.flushed += 1


@dataclass(kw_only=True)
class Bench:
    """One rank that is trained by hand."""

    job: TrainJob
    world: World
    parts: Kept
    audit: Audit
    model: nn.Module
    optimizer: torch.optim.Optimizer
    data: TinyData
    loss: Callable[[nn.Module, Batch], tuple[Tensor, Tensor]] = recipe.loss
    between: Callable[["Bench"], None] = lambda _: None  # after the backward pass, before the gradient counts as reduced
    clip_norm: float | None = None

    def rows(self, table: str) -> list[dict[str, Any]]:
        return self.parts.tables[table]

    def step(self, step: int, *micro_batches: Sequence[int]) -> None:
        self.audit.begin(step)
        for parameter in self.model.parameters():
            parameter.grad = None
        for micro, rows in enumerate(np.array(rows, dtype=np.int64) for rows in micro_batches):
            batch = self.data.batch(rows)
            loss_sum, _ = self.audit.loss(step, micro, rows, batch, lambda batch=batch: self.loss(self.model, batch))
            loss_sum.backward()
        self.between(self)
        self.audit.reduced(step)
        if self.clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_norm)
        self.optimizer.step()
        self.audit.end(step)


def bench(folder: Path, world: World | None = None, *, model: nn.Module | None = None, data: Any = None, **options: Any) -> Bench:
    """A rank with the tiny recipe, or another model or split. Options of Bench are taken, others are the job's."""
    own = {name: options.pop(name) for name in ("loss", "between", "clip_norm") if name in options}
    job = replace(tiny_job(folder), **({"audit": True} | options))
    parts = Kept(folder)
    torch.manual_seed(0)
    model = recipe.model() if model is None else model
    world = World(rank=0, world_size=1) if world is None else world
    audit = Audit.of(job, world, parts)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    audit.watch(model, optimizer, limit=own.get("clip_norm"))
    split = audit.data(recipe.data("train") if data is None else data)
    return Bench(job=job, world=world, parts=parts, audit=audit, model=model, optimizer=optimizer, data=split, **own)  # type: ignore[arg-type]
