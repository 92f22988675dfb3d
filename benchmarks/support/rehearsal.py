"""A release rehearsed: the real machinery (journal, pointer, signatures, registry, pages), with hands that need no ranks and no torch.

What the machinery does when a process dies does not depend on what the gates measured, so their records are a line each and training
writes a few bytes. Everything else is real: canonical evidence, Ed25519, MLflow on SQLite, a folder or S3.
"""

import os
import shutil
import signal
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flows.candidate import Trained
from flows.plan import ReleasePlan, ReleaseRequest
from flows.probes import Bench
from flows.under_way import Hands, Release
from infra.attestations import open_notary
from infra.export import FILES_TAG, RegisteredVersion, files_sha256, version_uri
from infra.journal import Journal, new_release_id
from infra.pointer import Pointer
from infra.registry import Registry
from infra.settings import Settings
from infra.store import ObjectStore
from trainer.describe import RecipeFacts
from trainer.recipe import Card, DataContract, Training
from validation.canonical import sha256_hex
from validation.policy import GATES, parse_policy
from validation.records import FallbackCheck, Machine
from validation.verdict import GateVerdict, check, conclude

MODEL = "boat"
FACTS = RecipeFacts(
    path="boat:recipe", name=MODEL, 
    card=Card(question="Will it float?", action="launch", utility_unit="points", quality_name="accuracy", owner="crew"),
    training=Training(global_batch_size=8, epochs=1),
    contract=DataContract(columns={}, label="y", event_time="t", known_after_cutoff=(), min_rows={}, period={}, max_gap_days=1.0),
    slices=("s",), cluster="d", target_quality=0.5, steps=4, code_sha256="c", data_sha256="d", rows={"train": 8, "judge": 8},
)  # fmt: skip
MACHINE = Machine(device="a core", devices=2, memory_gib=4.0, system="Linux", python="3.11", torch="2.13.0")


@dataclass
class Fuse:
    """Counts the writes of a process, and kills it at one of them: before it, or right after it."""

    at: int = -1  # -1: only counts
    after: bool = False
    count: int = 0
    names: list[str] = field(default_factory=list)

    def around(self, name: str, act: Callable[[], Any]) -> Any:
        """Do one write."""
        number, self.count = self.count, self.count + 1
        self.names.append(name)
        if number == self.at and not self.after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = act()
        if number == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return result


class FusedStore:
    """A store whose writes burn a fuse."""

    def __init__(self, store: ObjectStore, fuse: Fuse) -> None:
        self._store, self._fuse = store, fuse

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def put_new(self, key: str, body: bytes) -> None:
        self._fuse.around(f"put {key}", lambda: self._store.put_new(key, body))

    def replace(self, key: str, body: bytes, etag: str | None) -> str:
        return str(self._fuse.around(f"replace {key}", lambda: self._store.replace(key, body, etag)))


class FusedRegistry:
    """A registry whose writes burn the same fuse."""

    WRITES = ("start_run", "log", "publish", "finish_run", "describe", "describe_baseline", "mirror", "mark", "tag")

    def __init__(self, registry: Registry, fuse: Fuse) -> None:
        self._registry, self._fuse = registry, fuse

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._registry, name)
        if name not in self.WRITES:
            return found
        return lambda *given, **named: self._fuse.around(f"mlflow {name}", lambda: found(*given, **named))


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """What one release is to be like."""

    floats: Mapping[str, float] = field(default_factory=dict)  # gate -> what it measures, against a floor of 0.5; others measure 1
    policy: str = ""
    weights: bytes = b"weights"
    loads: bool = True  # whether what served before still loads
    baseline_loads: bool = True
    drill: str = ""


def hands(part: Part) -> Hands:
    """Hands that measure, train, register and load what `part` says, at once."""

    def probe(_release: Release, gate: str, _bench: Bench) -> tuple[Any, GateVerdict]:
        measured = part.floats.get(gate, 1.0)
        verdict = conclude(gate, [check("measured", measured, ">=", 0.5, unit="", source="rehearsal")], passed_reason="it floats")
        return {"measured": measured}, verdict

    def train(_release: Release, bench: Bench) -> Trained:
        (bench.folder / "model.safetensors").write_bytes(part.weights)
        digest = sha256_hex(part.weights)
        return Trained(folder=bench.folder, weights_sha256=digest, state_sha256=digest, worker_seconds=1.0)

    def fallbacks(_plan: ReleasePlan, pointer: Pointer, own: str) -> tuple[FallbackCheck, ...]:
        wanted = [
            ("last_known_good", pointer.serving_version if pointer.serving_kind != "baseline" else ""),
            ("baseline", pointer.baseline),
        ]
        return tuple(
            FallbackCheck(
                kind=kind,
                version=version,
                loaded=part.baseline_loads if kind == "baseline" else part.loads,
                predicted=True,
                detail="rehearsed",
            )
            for kind, version in wanted
            if version and version != own
        )

    return Hands(probe=probe, train=train, register=register, devices=lambda _of, _say: nullcontext(0.0), check_fallbacks=fallbacks)


def register(plan: ReleasePlan, run_id: str, artifact: str, tags: Mapping[str, str], weights: Path | None) -> RegisteredVersion:
    """A version whose files are a few bytes."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    client = MlflowClient()
    source = plan.home / "rehearsed" / plan.release_id / artifact
    shutil.rmtree(source, ignore_errors=True)
    source.mkdir(parents=True)
    (source / "MLmodel").write_text(f"artifact_path: {artifact}\n")
    (source / "weights").write_bytes(weights.read_bytes() if weights else b"baseline")
    files = files_sha256(source.as_uri())
    try:
        client.create_registered_model(plan.model)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # by an earlier release, or by one that runs at the same time
            raise
    made = client.create_model_version(plan.model, source=source.as_uri(), run_id=run_id, tags={**tags, FILES_TAG: files})
    version = str(made.version)
    return RegisteredVersion(model=plan.model, version=version, run_id=run_id, model_uri=version_uri(plan.model, version), sha256=files)


def rehearse(settings: Settings, store: ObjectStore, registry: Registry, part: Part, *, release_id: str = "", number: int = 0) -> Release:
    """A release that is ready to be conducted; the journal says that it started."""
    policy = parse_policy(part.policy or None)
    release_id = release_id or new_release_id(MODEL, datetime(2026, 1, 1, tzinfo=UTC), f"{number:04d}")
    folder = Path(settings.home) / "runs" / release_id
    folder.mkdir(parents=True, exist_ok=True)
    request = ReleaseRequest(recipe=FACTS.path, policy_text=part.policy, drill=part.drill)
    digests = {name: sha256_hex(name.encode()) for name in ("code", "data", "config", "policy", "machine")}
    plan = ReleasePlan(
        release_id=release_id, request=request, facts=FACTS, policy=policy, world_sizes=(1, 2), folder=folder, machine=MACHINE,
        digests=digests, sources={gate: {} for gate in (*GATES, "candidate")},
    )  # fmt: skip
    return Release(
        plan=plan, store=store, journal=Journal(store, release_id), notary=open_notary(store, settings), registry=registry,
        hands=hands(part), say=lambda _: None,
    )  # fmt: skip


ALL_GATES = GATES
