"""A model that serves, made without a release: versions with real files in MLflow, signed admissions, a pointer, mirrored aliases."""

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor, nn

from flows.acts import Desk
from infra.attestations import open_notary
from infra.export import FILES_TAG, files_sha256, log_model
from infra.journal import Journal
from infra.pointer import Pointer, admit, move_pointer, read_pointer
from infra.registry import Registry
from infra.settings import Settings, embedded_environment, load_settings
from infra.store import ObjectStore, open_store, put_evidence
from validation.statements import BASELINE, DECISION, GATE, model_subject
from validation.verdict import Control, GateVerdict, Outcome

RELEASE = "boat-20260131-181542-3f9c"
NOW = "2026-01-31T18:15:42+00:00"


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


def admitted(desk: Desk, model: str, version: str, *, kind: str = "decision", gates: Sequence[str] = ("scaling",)) -> str:
    """Let a version through: signed gates and decision, or the baseline's statement; returns its sha256."""
    sha256 = desk.registry.files(model, version)
    subjects = {model_subject(model, version): sha256}
    facts = {"release_id": RELEASE, "model": model, "version": version, "digests": {"code": "c"}, "made_at": NOW}
    if kind == "baseline":
        statement = desk.notary.attest(BASELINE, subjects, facts)
    else:
        links = gate_links(desk, gates)
        statement = desk.notary.attest(
            DECISION, subjects,
            facts | {"decision": "promoted", "reason": "all pass", "gates": links, "required": list(gates), "waivers": [], "approval": ""},
        )  # fmt: skip
    status = "baseline" if kind == "baseline" else "promoted"
    desk.registry.describe(model, version, description=f"{status.capitalize()}: version {version}.", tags={"status": status})
    return admit(desk.store, model, version, statement)


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


def gate_links(desk: Desk, gates: Sequence[str], release_id: str = RELEASE) -> dict[str, dict[str, str]]:
    """Gates that passed, as a decision names them: evidence and statement of each."""
    links = {}
    for gate in gates:
        control = Control(planted="a defect", expected="check", caught=True)
        verdict = GateVerdict(gate=gate, outcome=Outcome.PASS, reason="fine", action="", control=control)
        digests = {"code": "c"}
        facts = {"release_id": release_id, "gate": gate, "attempt": 1, "digests": digests}
        evidence = put_evidence(desk.store, {"kind": "gate", **facts, "verdict": verdict})
        said = facts | {"outcome": "pass", "evidence": evidence, "made_at": NOW}
        statement = desk.notary.attest(GATE, {"evidence": evidence}, said)
        links[gate] = {"evidence": evidence, "attestation": statement, "outcome": "pass"}
    return links


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
