"""The lamps model in service, made without a release: four real versions in MLflow, signed admissions, a journal, a pointer."""

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from helpers_serving import NOW as DECIDED
from helpers_serving import altered, based, decided, gate_links

from flows.acts import Desk, open_desk
from flows.plan import ReleaseRequest
from flows.surroundings import WHEN_IDLE
from infra.export import RegisteredVersion, log_model
from infra.journal import Journal
from infra.pointer import Pointer, admit, move_pointer
from infra.registry import Registry
from infra.serving_log import ServingLog
from infra.settings import Settings, embedded_environment, load_settings
from trainer import ranks
from validation.statements import WAIVER
from validation.verdict import Outcome

MODEL, RELEASE, NOW = "lamps", "lamps-20260101-000000-3f9c", "2026-01-01T00:00:00+00:00"
BASE, GOOD, NEW, BAD, HOLED = "1", "2", "3", "4", "5"
SLOPES = {BASE: (0.5, 99.0), GOOD: (1.0, 99.0), NEW: (2.0, 99.0), BAD: (-1.0, 99.0), HOLED: (1.0, 1.0)}
# two bad days are enough to be sure; a clean model would often be rolled back, which is not what these tests are about
POLICY = "monitoring: {alpha: 0.5, min_n: 20, latency_p95_ms: 5000}"
REQUEST = ReleaseRequest(recipe="lamps:recipe", policy_text=POLICY)


@dataclass(frozen=True, slots=True)
class Watched:
    """A store of its own over versions that all tests share."""

    settings: Settings
    said: list[str]

    @property
    def desk(self) -> Desk:
        return open_desk(self.settings, self.said.append)

    @property
    def log(self) -> ServingLog:
        return ServingLog(self.desk.store, MODEL)

    def serve(self, version: str, *, good: str = GOOD, baseline: str = BASE) -> None:
        """Put a version in service, last known-good and baseline behind it."""
        desk = self.desk
        Journal(desk.store, RELEASE).append("started", {"request": REQUEST}, time_utc=NOW)
        for each in dict.fromkeys(filter(None, (version, good, baseline))):
            admitted(desk, each)
        kind: Literal["baseline", "candidate"] = "baseline" if version == baseline else "candidate"
        pointer = Pointer(
            model=MODEL, serving_version=version, serving_kind=kind, last_known_good=good, baseline=baseline, release_id=RELEASE, sequence=1
        )  # fmt: skip
        move_pointer(desk.store, pointer, None)

    def files(self, version: str) -> Path:
        """The folder of a version's files."""
        source = self.desk.registry._client.get_model_version_download_uri(MODEL, version)
        return Path(source.removeprefix("file://").replace("%20", " "))


def admitted(desk: Desk, version: str) -> None:
    """Let a version through: the baseline as such, the others by a release that every gate passed."""
    if version == BASE:
        admit(desk.store, MODEL, version, based(desk, MODEL, version, RELEASE))
    else:
        admit(desk.store, MODEL, version, decided(desk, MODEL, version, RELEASE, policy=POLICY))


def waived(desk: Desk, version: str, expires_at: str) -> None:
    """Let a version through whose scaling did not pass and was waived until then."""
    links = gate_links(desk, RELEASE, {"scaling": Outcome.FAIL})
    evidence = links["scaling"]["evidence"]
    word = {"release_id": RELEASE, "gate": "scaling", "by": "Ada", "reason": "a known leak", "made_at": DECIDED, "expires_at": expires_at}
    waiver = desk.notary.attest(WAIVER, {"evidence": evidence}, word | {"evidence": evidence})
    Journal(desk.store, RELEASE).append("started", {"request": REQUEST}, time_utc=NOW)
    Journal(desk.store, RELEASE).append("waiver", {"attestation": waiver}, time_utc=NOW)
    admit(desk.store, MODEL, version, decided(desk, MODEL, version, RELEASE, policy=POLICY, gates=links, waivers=[waiver]))


def made_versions(settings: Settings) -> list[RegisteredVersion]:
    """Versions 1 to 5."""
    registry = Registry(settings)
    run = registry.start_run(MODEL, RELEASE)
    return [
        log_model(
            name=MODEL, run_id=run, artifact=f"version-{number}", builder="lamps:reader", arguments={"slope": slope, "hole": hole},
            example="lamps:rows", example_arguments={}, tracking_uri=registry.tracking_uri,
        )
        for number, (slope, hole) in SLOPES.items()
    ]  # fmt: skip


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Settings]:
    """A home with a registry that holds the versions."""
    settings = load_settings(home=tmp_path_factory.mktemp("watched") / "a home")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in embedded_environment(settings, {}).items():
            patch.setenv(name, value)
        ranks.shut_down()
        ranks.warm_up(when_idle=WHEN_IDLE)  # else every call pays for importing MLflow
        made_versions(settings)
        yield settings


@pytest.fixture
def watched(yard: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Watched:
    """A fresh store over them; the environment that the versions were made in."""
    settings = load_settings(home=yard.home, store=str(tmp_path / "store"))
    for name, value in embedded_environment(settings, {}).items():
        monkeypatch.setenv(name, value)
    return Watched(settings, [])


@pytest.fixture
def broken(watched: Watched, tmp_path: Path) -> Iterator[str]:
    """Version 3 with one altered byte in its files, mended afterwards."""
    folder = watched.files(NEW)
    shutil.copytree(folder, tmp_path / "whole")
    altered(max(folder.rglob("*.pt2"), key=lambda path: path.stat().st_size))
    yield NEW
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "whole", folder)
