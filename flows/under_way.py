"""A release under way: the plan, where it writes, who does the work, and what it knows so far."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.plan import ReleasePlan
from infra.attestations import Notary
from infra.export import RegisteredVersion
from infra.journal import Journal
from infra.pointer import Pointer
from infra.registry import Registry
from infra.report import GateLine
from infra.store import ObjectStore
from validation.errors import EvidenceError, RankError
from validation.records import FallbackCheck
from validation.verdict import GateVerdict
from validation.waivers import Waiver

if TYPE_CHECKING:
    from flows.probes import Bench


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """What a training run left."""

    folder: Path
    weights_sha256: str
    state_sha256: str
    worker_seconds: float

    @property
    def weights(self) -> Path:
        """The trained weights."""
        return self.folder / "model.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A trained model that asks to serve, already a version in the registry without any alias."""

    version: str
    run_id: str
    model_uri: str
    files_sha256: str  # of the registered model's files
    folder: Path  # the training run's
    weights_sha256: str
    state_sha256: str
    worker_seconds: float
    baseline_uri: str
    last_known_good_uri: str  # "" when nothing was promoted before


@dataclass(frozen=True, slots=True, kw_only=True)
class Hands:
    """Who does the work that needs ranks, data and models. `flows.hands.REAL` is the real thing."""

    probe: Callable[["Release", str, "Bench"], tuple[Any, GateVerdict]]  # gate -> its records, and the verdict on them
    train: Callable[["Release", "Bench"], Trained]
    register: Callable[[ReleasePlan, str, str, Mapping[str, str], Path | None], RegisteredVersion]  # run id, artifact, tags, weights
    devices: Callable[[str, Callable[[str], None]], AbstractContextManager[float]]  # for whom, told who has them -> seconds waited
    check_fallbacks: Callable[[ReleasePlan, Pointer, str], tuple[FallbackCheck, ...]]  # own version -> what could serve instead


@dataclass(frozen=True, slots=True, kw_only=True)
class Desk:
    """Where a release writes, and what moves what serves."""

    journal: Journal
    store: ObjectStore
    notary: Notary
    registry: Registry
    folder: Path  # for the report
    say: Callable[[str], None]
    still_mine: Callable[[], None] = lambda: None  # raises when another process took the release over; asked before each effect

    @property
    def model(self) -> str:
        """The registered model that this release is of."""
        started = self.journal.latest("started")
        if started is None:
            raise EvidenceError(f"release {self.journal.release_id} has no 'started' record, so it is of no model. Release again.")
        return str(started.payload["model"])


class Release:
    """One release under way.

    Not a dataclass: Prefect copies the dataclasses that it finds among a task's arguments.
    """

    def __init__(
        self, *, plan: ReleasePlan, store: ObjectStore, journal: Journal, notary: Notary, registry: Registry, hands: Hands,
        say: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.plan = plan
        self.store = store
        self.journal = journal
        self.notary = notary
        self.registry = registry
        self.hands = hands
        self.say = say
        self.still_mine: Callable[[], None] = lambda: None  # as a desk's
        self.lines: dict[str, GateLine] = {}  # gate -> latest line
        self.attestations: dict[str, str] = {}  # gate -> sha256 of the signed statement over its evidence
        self.waivers: tuple[Waiver, ...] = ()
        self.candidate: Candidate | None = None
        self.fallbacks: tuple[FallbackCheck, ...] = ()
        self.run_id = ""  # MLflow's; "" before there is one
        self.pointer: Pointer | None = None  # what served when the judging began
        self.etag: str | None = None  # of it; None before anything served

    def judged_candidate(self) -> Candidate:
        """The trained candidate. Raises RankError when there is none."""
        if self.candidate is None:
            raise RankError("there is no trained candidate to judge. Run the release again, or see why its training stopped.")
        return self.candidate

    @property
    def desk(self) -> Desk:
        """Where it writes."""
        return Desk(
            journal=self.journal, store=self.store, notary=self.notary, registry=self.registry, folder=self.plan.folder, say=self.say,
            still_mine=self.still_mine,
        )  # fmt: skip
