"""`seatrial train`: one run with progress for people, and its record."""

import shutil
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from infra.settings import Settings
from trainer import ranks
from trainer.config import Fault, Reduction, TrainJob, parse_fault
from trainer.world import Progress as Step
from validation.errors import ConfigError, InputError


def train(
    settings: Settings, recipe: str, *, world_size: int, reduction: Reduction, steps: int | None, faults: Sequence[str]
) -> dict[str, Any]:
    """Train a recipe in a fresh folder under the home; returns the document of `seatrial train --json`."""
    planned = tuple(parse_fault(text) for text in faults)
    _check(world_size, steps, planned)
    folder = Path(settings.home) / "runs" / f"train-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    folder.mkdir(parents=True)
    job = TrainJob(
        recipe=recipe, folder=str(folder), world_size=world_size, reduction=reduction, steps=steps, faults=planned, warmup_steps=1,
        checkpoint_every=10 if planned else 100, max_restarts=max((fault.attempt for fault in planned), default=-1) + 1, evaluate=False,
    )  # fmt: skip
    try:
        with _bar() as bar:
            record = ranks.run_group(job, on_progress=_Shown(bar))
    except InputError:
        shutil.rmtree(folder)
        raise
    if unfired := [str(fault) for fault in planned if str(fault) not in record.faults_fired]:
        raise ConfigError(
            f"the run ended after {record.steps} steps in attempt {record.attempts - 1}, and the planned {', '.join(unfired)} never fired. "
            f"Nothing was shown by it. Plan it within the run's ranks, steps and attempts. The run stands in {folder}."
        )
    document = {
        "recipe": record.recipe, "world_size": record.world_size, "parallel": record.parallel, "reduction": record.reduction,
        "steps": record.steps, "state_sha256": record.state_sha256, "ledger_sha256": record.ledger_sha256,
        "throughput_sps": record.throughput_sps, "recoveries": record.recoveries, "folder": str(folder),
    }  # fmt: skip
    _say(document)
    return document


def _check(world_size: int, steps: int | None, planned: Sequence[Fault]) -> None:
    if world_size < 1:
        raise ConfigError(f"--world-size {world_size} has no rank. Give at least 1.")
    if steps is not None and steps < 1:
        raise ConfigError(f"--steps {steps} trains nothing. Give at least 1.")
    for fault in planned:
        if fault.rank >= world_size or (steps is not None and fault.step >= steps):
            within = f"{steps or 'all'} steps of {world_size} ranks"
            raise ConfigError(f"the fault {fault} cannot fire in {within}. Plan another; ranks and steps count from 0.")


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
