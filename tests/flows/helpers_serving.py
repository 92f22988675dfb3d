"""A model that serves, made without a release: versions with real files in MLflow, signed admissions, a pointer, mirrored aliases."""

import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from flows.acts import Desk
from flows.evidence import keep_gate_evidence
from infra.attestations import open_notary
from infra.export import FILES_TAG, files_sha256, log_model
from infra.journal import Journal
from infra.pointer import Pointer, admit, move_pointer, read_pointer
from infra.registry import Registry
from infra.settings import Settings, embedded_environment, load_settings
from infra.store import ObjectStore, open_store
from validation.canonical import digest
from validation.policy import GATES, parse_policy
from validation.statements import BASELINE, DECISION, GATE, model_subject
from validation.verdict import Control, GateVerdict, Outcome

RELEASE = "boat-20260131-181542-3f9c"
NOW = "2026-01-31T18:15:42+00:00"
WEIGHTS = "8" * 64


class Sum(nn.Module):
    """Adds a row up."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs.sum(-1)


def summing() -> nn.Module:
    """The builder that `log_model` is given."""
    return Sum()


def rows() -> Any:
    """Its example."""
    return np.ones((2, 3), np.float32)


def exported(settings: Settings, folder: Path) -> Path:
    """The files of one real exported model; every version of these tests has a copy of its own."""
    registry = Registry(settings)
    log_model(
        name="template", run_id=registry.start_run("template", "template-20260131-181542-3f9c"), artifact="template",
        builder="helpers_serving:summing", arguments={}, example="helpers_serving:rows", example_arguments={},
        tracking_uri=registry.tracking_uri,
    )  # fmt: skip
    files = next((settings.home / "mlartifacts").rglob("MLmodel")).parent
    shutil.copytree(files, folder)
    return folder


@dataclass(frozen=True, slots=True)
class Harbour:
    """Store, registry, notary and the files of a model, for tests to make worlds in."""

    settings: Settings
    template: Path

    def desk(self, store: ObjectStore | None = None, said: list[str] | None = None) -> Desk:
        """What acts are done with."""
        store = store or open_store(self.settings)
        return Desk(store, Registry(self.settings), open_notary(store, self.settings), (said if said is not None else []).append)

    def version(self, desk: Desk, model: str, *, run_id: str | None = None, text: str = "") -> str:
        """Register a version with files of its own; returns it."""
        client = desk.registry._client
        if not client.search_registered_models(f"name = '{model}'"):
            client.create_registered_model(model)
        place = self.files(model, "")
        number = str(len(list(place.iterdir())) + 1 if place.exists() else 1)
        folder = place / number
        shutil.copytree(self.template, folder)
        (folder / "requirements.txt").write_text(f"# version {number} {text}\n")  # so that no two versions have the same digest
        made = client.create_model_version(model, source=str(folder), run_id=run_id)
        sha256 = files_sha256(f"models:/{model}/{made.version}", tracking_uri=desk.registry.tracking_uri)
        client.set_model_version_tag(model, str(made.version), FILES_TAG, sha256)
        return str(made.version)

    def files(self, model: str, version: str) -> Path:
        """Where a version's files lie."""
        return self.settings.home / "versions" / model / version


def admitted(desk: Desk, model: str, version: str, *, kind: str = "decision") -> str:
    """Let a version through: signed gates and decision, or the baseline's statement; returns its sha256."""
    statement = based(desk, model, version, RELEASE) if kind == "baseline" else decided(desk, model, version, RELEASE)
    status = "baseline" if kind == "baseline" else "promoted"
    desk.registry.describe(model, version, description=f"{status.capitalize()}: version {version}.", tags={"status": status})
    return admit(desk.store, model, version, statement)


def based(desk: Desk, model: str, version: str, release_id: str) -> str:
    """Sign for a baseline."""
    said = {"release_id": release_id, "model": model, "version": version, "digests": {"code": "c"}, "made_at": NOW}
    return desk.notary.attest(BASELINE, {model_subject(model, version): desk.registry.version(model, version).sha256}, said)


def decided(desk: Desk, model: str, version: str, release_id: str, *, policy: str = "", **changed: Any) -> str:
    """Sign the promotion of a version by every gate; policy is the text that the release was asked with."""
    digests = {"code": "c", "data": "d", "policy": digest(parse_policy(policy or None).model_dump(mode="json"))}
    said = {
        "release_id": release_id, "model": model, "version": version, "decision": "promoted", "reason": "six of six gates pass",
        "digests": digests, "gates": gate_links(desk, release_id), "required": list(GATES), "waivers": [], "approval": "", "made_at": NOW,
    }  # fmt: skip
    return desk.notary.attest(DECISION, {model_subject(model, version): desk.registry.version(model, version).sha256}, said | changed)


def serving(harbour: Harbour, desk: Desk, model: str, *, promoted: int = 2, mirrored: bool = True) -> Pointer:
    """A model whose version 1 is the baseline and whose later versions were promoted one after the other; the newest serves."""
    count = 1 + promoted
    statements = [
        admitted(desk, model, harbour.version(desk, model), kind="baseline" if number == 1 else "decision")
        for number in range(1, count + 1)
    ]
    pointer = Pointer(
        model=model, serving_version=str(count), serving_kind="candidate" if promoted else "baseline",
        last_known_good=str(count - 1) if promoted > 1 else "", baseline="1", release_id=RELEASE, sequence=count,
        attestation=statements[-1],
    )  # fmt: skip
    move_pointer(desk.store, pointer, None)
    if mirrored:
        desk.registry.mirror(pointer)
    return pointer


def serves(desk: Desk, model: str) -> tuple[str, str, str]:
    """Serving version, its kind, last known-good."""
    pointer, _ = read_pointer(desk.store, model)
    assert pointer is not None
    return pointer.serving_version, pointer.serving_kind, pointer.last_known_good


def acts(desk: Desk, model: str) -> list[list[str]]:
    """The kinds of records of every act on a model."""
    ids = sorted({key.split("/")[1] for key in desk.store.list(f"acts/{model}-2")})
    return [[entry.kind for entry in Journal(desk.store, act_id, root="acts").records()] for act_id in ids]


def gate_links(desk: Desk, release_id: str, outcomes: Mapping[str, Outcome] = MappingProxyType({})) -> dict[str, dict[str, str]]:
    """Every gate held, as a decision names it: its evidence and the statement about that. All pass unless said otherwise."""
    return {gate: _held(desk, release_id, gate, outcomes.get(gate, Outcome.PASS)) for gate in GATES}


def _held(desk: Desk, release_id: str, gate: str, outcome: Outcome) -> dict[str, str]:
    control = Control(planted="a defect", expected="check", caught=True)
    verdict = GateVerdict(gate=gate, outcome=outcome, reason=f"{gate} said so", action="mend it", control=control)
    digests = {"code": gate, "data": "d"}
    evidence = keep_gate_evidence(desk.store, verdict, None, release_id=release_id, attempt=1, digests=digests, made_at=NOW)
    subjects = {"evidence": evidence} | ({"weights": WEIGHTS} if gate in ("scaling", "slice_quality") else {})
    said = {"release_id": release_id, "gate": gate, "attempt": 1, "outcome": outcome, "evidence": evidence, "digests": digests}
    statement = desk.notary.attest(GATE, subjects, {**said, "made_at": NOW})
    return {"evidence": evidence, "attestation": statement, "outcome": outcome.value}


def altered(path: Path) -> None:
    """Change one byte of a file."""
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


@pytest.fixture(scope="module")
def harbour(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    """A home with a migrated registry, a folder store, a development key and one real exported model."""
    home = tmp_path_factory.mktemp("harbour") / "a home"
    settings = load_settings(home=home)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in embedded_environment(settings, {}).items():
            patch.setenv(name, value)
        yield Harbour(settings, exported(settings, home / "template"))


@pytest.fixture
def model(request: pytest.FixtureRequest) -> str:
    """A model's name that no other test uses."""
    return "boat-" + re.sub(r"[^a-z0-9]+", "-", request.node.name.removeprefix("test_").lower()).strip("-")
