"""`seatrial train`: one run with progress for people, and its record."""

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from infra.settings import Settings
from trainer import ranks
from trainer.config import Reduction, TrainJob, parse_fault
from trainer.world import Progress as Step
from validation.errors import ConfigError


def train(
    settings: Settings, recipe: str, *, world_size: int, reduction: Reduction, steps: int | None, faults: Sequence[str]
) -> dict[str, Any]:
    """Train a recipe in a fresh folder under the home; returns the document of `seatrial train --json`."""
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps} trains nothing. Give at least 1.")
    planned = tuple(parse_fault(text) for text in faults)
    folder = Path(settings.home) / "runs" / f"train-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    job = TrainJob(
        recipe=recipe, folder=str(folder), world_size=world_size, reduction=reduction, steps=steps, faults=planned, warmup_steps=1,
        checkpoint_every=10 if planned else 100, max_restarts=max((fault.attempt for fault in planned), default=-1) + 1, evaluate=False,
    )  # fmt: skip
    with _bar() as bar:
        record = ranks.run_group(job, on_progress=_Shown(bar))
    document = {
        "recipe": record.recipe, "world_size": record.world_size, "parallel": record.parallel, "reduction": record.reduction,
        "steps": record.steps, "state_sha256": record.state_sha256, "ledger_sha256": record.ledger_sha256,
        "throughput_sps": record.throughput_sps, "recoveries": record.recoveries, "folder": str(folder),
    }  # fmt: skip
    _say(document)
    return document


def _bar() -> Progress:
    return Progress(
        TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip


class _Shown:
    """Moves the bar."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task: TaskID | None = None

    def __call__(self, step: Step) -> None:
        if self.task is None:
            self.task = self.bar.add_task("training", total=step.steps, rate="")
        rate = f"{step.throughput_sps:,.0f} samples/s  loss {step.loss:.4f}" + (f"  attempt {step.attempt + 1}" if step.attempt else "")
        self.bar.update(self.task, completed=step.step, rate=rate)


def _say(document: dict[str, Any]) -> None:
    console = Console(file=sys.stderr)
    console.print(f"{document['steps']} steps on {document['world_size']} ranks, {document['throughput_sps']:,.0f} samples/s")
    for recovery in document["recoveries"]:
        where = f"from step {recovery.resumed_from_step} on {recovery.resumed_world_size} ranks"
        console.print(f"  {recovery.fault}: back after {recovery.total_s:.2f} s {where}")
    console.print(f"state  {document['state_sha256']}\nledger {document['ledger_sha256']}\nfolder {document['folder']}", highlight=False)
