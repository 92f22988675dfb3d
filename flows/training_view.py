"""What people see of `seatrial train`: a bar while it runs, a few lines when it is over. All on stderr."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from trainer.world import Progress as Step
from validation.records import Recovery
from validation.recovery_projection import SEGMENTS


def make_bar() -> Progress:
    """Steps done of all, throughput and loss, time left."""
    return Progress(
        TextColumn("[bold]{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[rate]}"), TimeRemainingColumn(),
        console=Console(stderr=True),
    )  # fmt: skip


class Shown:
    """Moves the bar."""

    def __init__(self, bar: Progress) -> None:
        self.bar = bar
        self.task: TaskID | None = None

    def __call__(self, step: Step) -> None:
        """Take in how far the run is."""
        if self.task is None:
            self.task = self.bar.add_task("training", total=step.steps, rate="")
        rate = f"{step.throughput_sps:,.0f} samples/s  loss {step.loss:.4f}" + (f"  attempt {step.attempt + 1}" if step.attempt else "")
        self.bar.update(self.task, completed=step.step, rate=rate)


def bar_say(bar: Progress) -> Callable[[str], None]:
    """Says a line above the bar while it moves."""
    return lambda line: bar.console.print(line, markup=False, highlight=False, soft_wrap=True)


def say(document: Mapping[str, Any], projection: Sequence[str]) -> None:
    """Tell what became of a run; `projection` are lines about its recoveries on a larger machine."""
    console = _console()
    ranks, sps = document["world_size"], document["throughput_sps"]
    console.print(f"{document['steps']} steps on {ranks} rank{'s' * (ranks != 1)} ({document['parallel']}), {sps:,.0f} samples/s")
    for recovery in document["recoveries"]:
        console.print(f"  {_recovered(recovery)}", markup=False)
    for line in projection:
        console.print(f"  {line}", markup=False)
    for problem in document["refused"]:
        console.print(f"  {problem}", markup=False)
    for problem in document["unsaved"]:
        console.print(f"  checkpoint not written: {problem}", markup=False)
    say_mirror(document["mirror"])
    console.print(f"state  {document['state_sha256']}\nledger {document['ledger_sha256']}\nfolder {document['folder']}", markup=False)


def _recovered(recovery: Recovery) -> str:
    parts = ", ".join(f"{name.removesuffix('_s').replace('_', ' ')} {getattr(recovery, name):.2f}" for name in SEGMENTS)
    where = f"from step {recovery.resumed_from_step} on {recovery.resumed_world_size} ranks"
    return f"{recovery.fault}: back after {recovery.total_s:.2f} s ({parts}) {where}"


def say_mirror(mirror: Mapping[str, Any] | None) -> None:
    """Tell what is in the store now, and what could not be brought there; nothing without a mirror."""
    if mirror is None:
        return
    console = _console()
    for message in mirror["messages"]:
        console.print(f"  mirror: {message}", markup=False)
    steps = ", ".join(map(str, mirror["uploaded"])) or "none"
    console.print(f"  mirror: steps that this command completed in the store: {steps}", markup=False)
    for problem in mirror["problems"]:
        console.print(f"  mirror: {problem}", markup=False)


def _console() -> Console:
    return Console(file=sys.stderr, soft_wrap=True, highlight=False)
