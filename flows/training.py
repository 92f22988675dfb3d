"""`seatrial train`: one run with progress for people, and its record. A named run goes on where it stopped, here or from the store."""

import json
import shutil
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.allowed import check_allowed
from flows.incident_desk import READ, Desk
from flows.second_tier import SecondTier
from flows.training_view import Shown, bar_say, make_bar, say, say_mirror
from infra.mirror_layout import checked_run
from infra.settings import Settings
from infra.store import open_store
from trainer import ranks
from trainer.config import GENTLE_KINDS, SAVE_PHASES, Fault, Parallel, Precision, Reduction, TrainJob, parse_fault
from trainer.lanes import check_world_size
from trainer.recipe import Training
from trainer.runlog import checkpoint_bytes
from validation.canonical import canonical_json
from validation.errors import ConfigError, EvidenceError, InputError, ReleaseError
from validation.policy import parse_policy
from validation.records import Recovery, RunRecord
from validation.recovery_projection import projection_lines

DESCRIBE_S = 300.0  # the first import of a recipe on a busy machine
LONGEST_S = 7 * 86400.0  # a person watches this run and may end it; hung collectives end by themselves
RESTARTS = 3  # unplanned deaths that a run survives unless told otherwise
OFTEN, SELDOM = 10, 100  # updates between checkpoints: with planned faults, and without
JOB = "job.json"
PRECISION: Precision = "float32"


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainRequest:
    """What a person asks for; None and "" stand for the defaults."""

    recipe: str
    world_size: int = 1
    parallel: Parallel = "ddp"
    reduction: Reduction = "exact"
    steps: int | None = None
    faults: tuple[Fault, ...] = ()
    checkpoint_every: int | None = None  # updates; 0 = never
    max_restarts: int | None = None
    resume_world_sizes: tuple[int, ...] = ()  # after the first death, the second, ...
    run: str = ""  # name of a run that can be continued
    mirror: bool = False

    @property
    def every(self) -> int:
        """Updates between checkpoints."""
        return (OFTEN if self.faults else SELDOM) if self.checkpoint_every is None else self.checkpoint_every

    @property
    def restarts(self) -> int:
        """Deaths to survive."""
        return max(RESTARTS, _deaths(self.faults)) if self.max_restarts is None else self.max_restarts


def parse_faults(texts: Sequence[str]) -> tuple[Fault, ...]:
    """Planned faults from their text form. Raises ConfigError."""
    return tuple(parse_fault(text) for text in texts)


def train(settings: Settings, request: TrainRequest) -> dict[str, Any]:
    """Train a recipe in its run's folder under the home; returns the document of `seatrial train --json`.

    Raises: InputError before anything is written when the request cannot work; RankError when the run's restarts are spent.
    """
    _check(request)
    check_allowed(request.recipe, settings)
    training: Training = ranks.call("trainer.describe:training_of", request.recipe, deadline_s=DESCRIBE_S)
    _check_ranks(request, training.lanes)
    run = checked_run(request.run) if request.run else f"train-{datetime.now(UTC):%Y%m%d-%H%M%S-%f}"
    folder = Path(settings.home) / "runs" / run
    tier = SecondTier(settings, run, folder) if request.mirror else None
    is_new = _take_up(folder, _identity(request, training), tier)
    job = TrainJob(
        recipe=request.recipe, folder=str(folder), world_size=request.world_size, reduction=request.reduction, precision=PRECISION,
        parallel=request.parallel, steps=request.steps, faults=request.faults, warmup_steps=1, checkpoint_every=request.every,
        max_restarts=request.restarts, resume_world_sizes=request.resume_world_sizes, deadline_s=LONGEST_S,
    )  # fmt: skip
    try:
        with tier or nullcontext(), make_bar() as bar:
            desk = Desk(bar_say(bar), owner=run, store=lambda: open_store(settings), with_planned=True)
            record = ranks.run_group(job, on_progress=Shown(bar), on_incident=desk, read=READ)
    except InputError:
        if is_new and not list(folder.glob("checkpoints/step-*")):
            shutil.rmtree(folder)
        raise
    except ReleaseError:
        say_mirror(tier.document() if tier else None)  # what a fresh node would find
        raise
    _check_fired(record, request.faults, folder)
    document = _document(record, folder, tier)
    say(document, _projection(record.recoveries, folder))
    return document


# Before the first step


def _check(request: TrainRequest) -> None:
    """What can be told without the recipe. Raises ConfigError."""
    for option, value, least in (
        ("--world-size", request.world_size, 1), ("--steps", request.steps, 1), ("--checkpoint-every", request.checkpoint_every, 0),
        ("--max-restarts", request.max_restarts, 0), *(("--resume-world-sizes", size, 1) for size in request.resume_world_sizes),
    ):  # fmt: skip
        if value is not None and value < least:
            raise ConfigError(f"{option} {value} is out of range, so nothing was started. Give at least {least}.")
    if request.mirror and request.every == 0:
        raise ConfigError("--mirror has nothing to copy with --checkpoint-every 0, so nothing was started. Give 1 or more.")
    for fault in request.faults:
        _check_fault(fault, request)
    if request.max_restarts is not None and request.max_restarts < (deaths := _deaths(request.faults)):
        raise ConfigError(
            f"the planned faults end {deaths} attempts, and --max-restarts {request.max_restarts} would end the run before its last step. "
            f"Nothing was started. Allow {deaths}, or leave --max-restarts out."
        )


def _check_fault(fault: Fault, request: TrainRequest) -> None:
    sizes = (request.world_size, *request.resume_world_sizes)
    world_size = sizes[min(fault.attempt, len(sizes) - 1)]
    is_late = request.steps is not None and fault.step >= request.steps and fault.phase != "load"
    if fault.phase in SAVE_PHASES:  # after update number k * every, for as many as there are
        is_late = request.every == 0 or (request.steps is not None and fault.step >= request.steps // request.every * request.every)
    if fault.rank >= world_size or is_late:
        within = f"{request.steps or 'all'} steps of {world_size} ranks with a checkpoint every {request.every} steps"
        raise ConfigError(f"the fault {fault} cannot fire in {within}. Plan another; ranks and steps count from 0.")


def _deaths(faults: Sequence[Fault]) -> int:
    """Attempts that planned faults end; a straggler ends none, and yet needs those before its own."""
    return max((fault.attempt + (fault.kind not in GENTLE_KINDS) for fault in faults), default=0)


def _check_ranks(request: TrainRequest, lanes: int) -> None:
    """Every attempt's number of ranks, also of those after a death. Raises ConfigError."""
    for world_size in (request.world_size, *request.resume_world_sizes):
        check_world_size(world_size, lanes)
        if request.parallel == "fsdp2" and world_size & (world_size - 1):
            raise ConfigError(
                f"--parallel fsdp2 cannot shard over {world_size} ranks in the order of the exact reduction, so nothing was started. Use "
                "1, 2, 4, ... ranks, or --parallel ddp, which takes any number."
            )


def _identity(request: TrainRequest, training: Training) -> bytes:
    """job.json: what every continuation of a run has to share; ranks, parallelism and steps may change."""
    return canonical_json(
        {"recipe": request.recipe, "seed": training.seed, "precision": PRECISION, "reduction": request.reduction}
    )  # fmt: skip


def _take_up(folder: Path, identity: bytes, tier: SecondTier | None) -> bool:
    """Make the run's folder ready, from the store if it is only there; True when the run is new. Raises ConfigError, DataError."""
    if folder.exists():
        _check_same(folder.name, _read_job(folder), identity)
        if tier is not None:
            tier.check_newest()
        return False
    if tier is not None and (stored := tier.job()) is not None:
        _check_same(folder.name, stored, identity)
        tier.fetch()
        return False
    folder.mkdir(parents=True)
    (folder / JOB).write_bytes(identity)
    return True


def _read_job(folder: Path) -> bytes:
    try:
        return (folder / JOB).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"{folder} is there and is no run of `seatrial train` ({JOB}: {type(error).__name__}), so nothing was started. "
            "Give the run another name, or move the folder away."
        ) from None


def _check_same(run: str, standing: bytes, identity: bytes) -> None:
    wanted: Mapping[str, Any] = json.loads(identity)
    try:
        found: Mapping[str, Any] = dict(json.loads(standing))
    except (ValueError, TypeError):
        found = {}
    differ = [f"{name} {found.get(name)!r} there, {value!r} asked for" for name, value in wanted.items() if found.get(name) != value]
    if differ:
        raise ConfigError(
            f"run {run} is another training: {'; '.join(differ)}. Going on would mix two trainings in one ledger, so nothing was started. "
            "Repeat its own settings, or give this one another --run name."
        )


# After the last step


def _check_fired(record: RunRecord, planned: Sequence[Fault], folder: Path) -> None:
    if unfired := [str(fault) for fault in planned if str(fault) not in record.faults_fired]:
        raise ConfigError(
            f"the run ended after {record.steps} steps in attempt {record.attempts - 1}, and the planned {', '.join(unfired)} never fired. "
            f"Nothing was shown by it. Plan it within the run's ranks, steps and attempts. The run stands in {folder}."
        )


def _document(record: RunRecord, folder: Path, tier: SecondTier | None) -> dict[str, Any]:
    return {
        "recipe": record.recipe, "world_size": record.world_size, "parallel": record.parallel, "reduction": record.reduction,
        "steps": record.steps, "attempts": record.attempts, "state_sha256": record.state_sha256, "ledger_sha256": record.ledger_sha256,
        "throughput_sps": record.throughput_sps, "recoveries": record.recoveries, "unsaved": record.unsaved,
        "refused": record.refused,
        "mirror": tier.document() if tier else None, "folder": str(folder),
    }  # fmt: skip


def _projection(recoveries: Sequence[Recovery], folder: Path) -> list[str]:
    """The slowest recovery carried over to a larger machine, with what that assumes."""
    if not recoveries:
        return []
    budget_s = parse_policy(None, name="the default policy").kill_and_resume.budget_s.value
    worst = max(recoveries, key=lambda recovery: recovery.total_s)
    try:
        return projection_lines(worst, checkpoint_bytes(folder) / 2**20, budget_s)
    except EvidenceError as error:  # a broken clock costs the projection, not the run
        return [str(error)]
