"""A release as a value: what was asked, checked before anything is written."""

import contextlib
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

from flows.allowed import check_allowed
from flows.code_digests import all_sources
from flows.ownership import known_entries
from infra.journal import Journal, new_release_id
from infra.settings import Settings
from trainer import ranks
from trainer.config import DRILLS
from trainer.describe import RecipeFacts
from trainer.lanes import check_world_size
from trainer.runlog import machine
from validation.canonical import digest
from validation.errors import ConfigError
from validation.policy import GATES, Policy, parse_policy
from validation.records import Machine

Sources = Mapping[str, Mapping[str, str]]

DESCRIBE_DEADLINE_S = 300.0  # a recipe may prepare its data cache on first use
LEFT_S = 86_400.0  # frames that nobody took for a day were left by a process that was killed
_PLANNING = "planning-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseRequest:
    """What a person or a schedule asks for; the same request can be run again years later."""

    recipe: str
    policy_text: str = ""  # overlay on the default policy; "" = defaults
    world_sizes: tuple[int, ...] = ()  # () = the policy's
    drill: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePlan:
    """A request that was found possible, and the digests that bind its evidence."""

    release_id: str
    request: ReleaseRequest
    facts: RecipeFacts
    policy: Policy
    world_sizes: tuple[int, ...]
    folder: Path  # local scratch: runs, frames, report
    machine: Machine
    digests: dict[str, str]  # code, data, config, policy, machine
    prepared_s: float = 0.0  # describing the recipe and preparing its data
    sources: Sources  # gate or "candidate" -> file -> sha256 of all code that its evidence depends on

    @property
    def model(self) -> str:
        """Name of the registered model."""
        return self.facts.name

    @property
    def home(self) -> Path:
        """The folder that holds local state."""
        return self.folder.parent.parent

    @property
    def frames(self) -> dict[str, Path]:
        """Split -> its contract frame on disk."""
        return {split: self.folder / "frames" / f"{split}.parquet" for split in ("train", "judge")}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Study:
    """What was found out about a recipe; its frames lie in a temporary folder."""

    facts: RecipeFacts
    frames: "tempfile.TemporaryDirectory[str]"
    machine: Machine
    sources: Sources
    seconds: float


_studied: dict[ReleaseRequest, _Study] = {}


def prepare(request: ReleaseRequest, settings: Settings) -> Callable[[], None]:
    """Begin to check a request, behind a server that starts and imports; `make_plan` of the same request then uses what was found.

    Returns: waits for the end of it. Raises InputError, now or then.
    """
    _, world_sizes = _checked(request, settings, None)
    found: Future[_Study] = Future()

    def study() -> None:
        try:
            found.set_result(_study(request, settings, world_sizes))
        except BaseException as error:
            found.set_exception(error)

    def wait() -> None:
        _studied[request] = found.result()

    threading.Thread(target=study, daemon=True, name="prepare").start()
    return wait


def make_plan(request: ReleaseRequest, settings: Settings, *, release_id: str = "", gates: Sequence[str] | None = None) -> ReleasePlan:
    """Check a request whole: recipe, data, policy, world sizes, drill. Raises InputError; leaves no trace of a release then.

    Args: gates, those that will be held (None: those that the policy requires).
    """
    policy, world_sizes = _checked(request, settings, gates)
    found = _studied.pop(request, None) or _study(request, settings, world_sizes)
    with found.frames as frames:
        release_id = release_id or new_release_id(found.facts.name, datetime.now(UTC), uuid4().hex[:4])
        folder = _scratch(settings) / release_id
        target = folder / "frames"
        target.mkdir(parents=True, exist_ok=True)
        for split in ("train", "judge"):
            (Path(frames) / f"{split}.parquet").replace(target / f"{split}.parquet")
    return ReleasePlan(
        release_id=release_id, request=request, facts=found.facts, policy=policy, world_sizes=world_sizes, folder=folder,
        machine=found.machine, digests=_digests(found, policy, world_sizes, request), sources=found.sources, prepared_s=found.seconds,
    )  # fmt: skip


def _checked(request: ReleaseRequest, settings: Settings, gates: Sequence[str] | None) -> tuple[Policy, tuple[int, ...]]:
    """The policy and the world sizes of a request that can be held."""
    check_allowed(request.recipe, settings)
    policy = parse_policy(request.policy_text or None, name="the policy file")
    if request.drill and request.drill not in DRILLS:
        raise ConfigError(f"drill '{request.drill}' is unknown, so nothing was started. Choose one of: {', '.join(DRILLS)}.")
    world_sizes = tuple(sorted(set(request.world_sizes or policy.world_sizes)))
    if "scaling" in (policy.required if gates is None else gates) and (1 not in world_sizes or max(world_sizes) == 1):
        raise ConfigError(
            f"world sizes {', '.join(map(str, world_sizes))} cannot be judged: efficiency compares a larger world size with world size 1. "
            "Nothing was started. Give 1 and at least one more, e.g. 1,2."
        )
    return policy, world_sizes


def _study(request: ReleaseRequest, settings: Settings, world_sizes: tuple[int, ...]) -> _Study:
    """Describe the recipe, preparing its data, and digest all code that evidence will depend on."""
    began = time.monotonic()
    _sweep(_scratch(settings))
    frames = tempfile.TemporaryDirectory(dir=_scratch(settings), prefix=_PLANNING)
    with ThreadPoolExecutor(1) as pool:
        sources = pool.submit(all_sources, request.recipe)
        asked = (request.recipe, frames.name)
        facts: RecipeFacts = ranks.call("trainer.describe:describe", *asked, deadline_s=DESCRIBE_DEADLINE_S, early=True)
        for world_size in world_sizes:
            check_world_size(world_size, facts.training.lanes)
        seconds = time.monotonic() - began
        return _Study(facts=facts, frames=frames, machine=machine(), sources=sources.result(), seconds=seconds)


def _sweep(scratch: Path) -> None:
    """Remove what processes that were killed while they prepared have left."""
    for folder in scratch.glob(f"{_PLANNING}*"):
        with contextlib.suppress(FileNotFoundError):  # its process, or another one that sweeps
            if time.time() - folder.stat().st_mtime > LEFT_S:
                shutil.rmtree(folder, ignore_errors=True)


def _scratch(settings: Settings) -> Path:
    folder = Path(settings.home) / "runs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def request_of(journal: Journal, gate: str = "") -> ReleaseRequest:
    """What an earlier release was asked for. Args: gate, "" = none. Raises ConfigError for an unknown gate, and as `known_entries`."""
    if gate and gate not in GATES:
        raise ConfigError(f"there is no gate '{gate}', so nothing was run. Choose one of: {', '.join(GATES)}.")
    given = known_entries(journal)[0].payload["request"]
    return ReleaseRequest(**{**given, "world_sizes": tuple(given["world_sizes"])})


def _digests(found: _Study, policy: Policy, world_sizes: tuple[int, ...], request: ReleaseRequest) -> dict[str, str]:
    facts = found.facts
    config: dict[str, Any] = {"training": facts.training, "world_sizes": world_sizes, "drill": request.drill, "recipe": facts.path}
    return {
        "code": digest(found.sources),
        "data": facts.data_sha256,
        "config": digest(config),
        "policy": digest(policy.model_dump(mode="json")),
        "machine": digest(found.machine),
    }
