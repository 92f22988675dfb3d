"""Whole releases as a user makes them: the command in a process of its own, the example recipe, embedded defaults.

One story in order, because each chapter needs what the one before left: first release, second over it, drill, re-run, refusal.
"""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import boto3
import psutil
import pytest
from mlflow import MlflowClient
from moto.server import ThreadedMotoServer

from infra.journal import Journal
from infra.pointer import read_pointer
from infra.settings import load_settings
from infra.store import get_evidence, open_store

REPOSITORY = Path(__file__).parents[2]
EXAMPLE = REPOSITORY / "examples" / "digits"
# Small and honest: every gate really runs. The floor is low because a step of this model takes a millisecond.
POLICY = """
world_sizes: [1, 2]
scaling: {efficiency_floor: 0.01, oversubscribed_floor: 0.01, confidence: 0.5, repeats: 4, steps: 8, warmup_steps: 2, idle_share_max: 0.7}
kill_and_resume: {steps: 20}
slice_quality: {min_n: 60, min_coverage: 0.7, latency_p95_ms: 500}
"""


@dataclass
class Yard:
    """A home with a space in its path, and the command run in it."""

    home: Path
    settings: dict[str, str] = field(default_factory=dict)  # SEATRIAL_* and credentials beside the home

    def seatrial(self, *arguments: str) -> tuple[int, Any, str]:
        """Exit code, JSON document and stderr of one command."""
        command = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
        run = subprocess.run(command, cwd=EXAMPLE, env=self.environment(), capture_output=True, text=True, timeout=280, check=False)
        return run.returncode, json.loads(run.stdout) if run.stdout.strip() else None, run.stderr

    def environment(self) -> dict[str, str]:
        """This process's, without what would lead the command elsewhere."""
        environment = {**os.environ, "SEATRIAL_HOME": str(self.home), "PYTHONPATH": str(Path(__file__).parent)}
        for name in ("SEATRIAL_STORE", "SEATRIAL_CACHE", "PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"):
            environment.pop(name, None)
        return environment | self.settings

    def release(self, *options: str, recipe: str = "digits:recipe") -> tuple[int, Any, str]:
        """One release of the example recipe."""
        return self.seatrial("release", recipe, "--policy", str(self.home / "policy.yaml"), *options)

    def store(self) -> Any:
        """The object store that the command wrote."""
        return open_store(load_settings(home=self.home))

    def client(self) -> MlflowClient:
        """The registry that the command wrote."""
        return MlflowClient(tracking_uri=load_settings(home=self.home).mlflow_tracking_uri)


@pytest.fixture(scope="module")
def yard(tmp_path_factory: pytest.TempPathFactory) -> Yard:
    home = tmp_path_factory.mktemp("a yard") / "the home"
    home.mkdir()
    (home / "policy.yaml").write_text(POLICY)
    return Yard(home)


@pytest.fixture(scope="module")
def first(yard: Yard) -> Any:
    code, document, shown = yard.release()
    assert code == 0, shown[-3000:]
    return document


@pytest.fixture(scope="module")
def second(yard: Yard, first: Any) -> Any:
    code, document, shown = yard.release()
    assert code == 0, shown[-3000:]
    return document


@pytest.fixture(scope="module")
def drill(yard: Yard, second: Any) -> Any:
    code, document, shown = yard.release("--drill", "slice-regression")
    assert code == 3, shown[-3000:]
    return document


def test_the_first_release_is_promoted_on_six_passed_gates(first: Any) -> None:
    """Each gate passed, and caught the defect that was planted in it."""
    assert first["decision"] == "promoted"
    assert [gate["outcome"] for gate in first["gates"]] == ["pass"] * 6
    assert all(gate["control"]["caught"] for gate in first["gates"])


def test_every_gates_evidence_is_in_the_store_and_verifies(yard: Yard, first: Any) -> None:
    """The evidence is addressed by its own sha256, and says what the document says."""
    store = yard.store()
    for gate in first["gates"]:
        assert get_evidence(store, gate["sha256"])["verdict"]["outcome"] == gate["outcome"]


def test_the_report_is_one_file_that_loads_nothing(first: Any) -> None:
    """The report stands on its own: pictures inline, no address outside it."""
    page = Path(first["report"]).read_text()

    assert "data:image/png;base64," in page
    assert 'src="http' not in page
    assert "<script" not in page


def test_the_second_release_takes_over_from_the_first(yard: Yard, first: Any, second: Any) -> None:
    """The new version is champion, the version before is last known-good, the baseline stays."""
    pointer, _ = read_pointer(yard.store(), "digits")
    aliases = yard.client().get_registered_model("digits").aliases

    assert pointer is not None
    assert pointer.serving_version == second["serving"]["version"]
    assert {alias: str(version) for alias, version in aliases.items()} == {
        "champion": second["serving"]["version"],
        "last-known-good": first["serving"]["version"],
        "baseline": "1",
    }


def test_the_drill_falls_back_and_names_the_slice(yard: Yard, second: Any, drill: Any) -> None:
    """A candidate that is really worse on one slice is refused by slice_quality, and what served goes on serving."""
    failed = {gate["name"]: gate for gate in drill["gates"]}["slice_quality"]

    assert (drill["decision"], failed["outcome"]) == ("fell_back", "fail")
    assert drill["serving"] == {"kind": "last_known_good", "version": second["serving"]["version"]}
    assert any(check["passed"] is False and "=" in check["where"] for check in failed["checks"])
    assert failed["reason"] in drill["reason"]


def test_the_refused_version_says_why_on_its_page(yard: Yard, drill: Any) -> None:
    """The registry has the refused version, tagged, described in words, without an alias, its model without pickle."""
    version = yard.client().get_model_version("digits", drill["candidate_version"])
    paths = [path.name for path in (yard.home / "mlartifacts").rglob("*") if path.is_file()]

    assert version.tags["status"] == "refused"
    assert version.description.startswith("Refused: ")
    assert "slice_quality failed" in version.description.splitlines()[0]
    assert not version.aliases
    assert any(name.endswith(".pt2") for name in paths)
    assert not any(name.endswith((".pkl", ".pth", ".pickle")) for name in paths)


def test_a_gate_is_held_again_alone_and_decided_again(yard: Yard, second: Any, drill: Any) -> None:
    """Scaling runs a second time, visibly; the other gates keep their evidence and say why; the decision stands on all six."""
    code, document, shown = yard.seatrial("gate", "scaling", "--release", second["release_id"])

    gates = {gate["name"]: gate for gate in document["gates"]}
    assert code == 0, shown[-3000:]
    assert (gates["scaling"]["attempt"], gates["scaling"]["reused"]) == (2, False)
    assert all(gate["reused"] and "all match" in gate["reuse_reason"] for name, gate in gates.items() if name != "scaling")
    assert document["candidate_version"] == second["candidate_version"]


def test_show_tells_the_same_story(yard: Yard, drill: Any) -> None:
    """`show ID --json` is the release's own document; `show --json` lists what serves and all releases."""
    code, document, _ = yard.seatrial("show", drill["release_id"])
    _, overview, _ = yard.seatrial("show")

    assert (code, document) == (0, drill)
    assert [row["decision"] for row in overview["releases"]] == ["fell_back", "promoted", "promoted"]


def test_data_that_breaks_its_contract_holds_back_everything_after_it(yard: Yard, drill: Any) -> None:
    """A release whose data contract fails trains nothing, says which gates were not run, and leaves the serving version alone."""
    before, _ = read_pointer(yard.store(), "digits")

    code, document, shown = yard.release(recipe="late_digits:recipe")

    assert code == 3, shown[-3000:]
    assert [gate["outcome"] for gate in document["gates"]] == ["fail"] + ["inconclusive"] * 5
    assert read_pointer(yard.store(), "digits")[0] == before
    assert (document["decision"], document["serving"]["version"]) == ("fell_back", before.serving_version if before else "")


def test_a_candidate_that_cannot_be_registered_is_refused_with_the_reason(tmp_path: Path) -> None:
    """Its serving module answers NaN: the gates that need it are inconclusive and say why, the baseline serves, exit 3."""
    (tmp_path / "policy.yaml").write_text(POLICY)

    code, document, shown = Yard(tmp_path).release(recipe="nan_digits:recipe")

    gates = {gate["name"]: gate for gate in document["gates"]} if document else {}
    assert code == 3, shown[-3000:]
    assert (document["decision"], document["serving"]["kind"]) == ("fell_back", "baseline")
    assert "the candidate could not be made" in gates["slice_quality"]["reason"]
    assert gates["gradient_equivalence"]["outcome"] == "pass"


def test_an_interrupt_ends_a_release_at_once_and_leaves_no_process(tmp_path: Path) -> None:
    """Ctrl-C at a terminal reaches the whole group: exit 1 within seconds, said in words; ranks, servers and helpers are gone."""
    (tmp_path / "policy.yaml").write_text(POLICY)
    yard = Yard(tmp_path)
    with (tmp_path / "err").open("w+") as err:
        command = [sys.executable, "-m", "flows.cli", "release", "digits:recipe", "--policy", str(tmp_path / "policy.yaml")]
        run = subprocess.Popen(command, cwd=EXAMPLE, env=yard.environment(), stdout=err, stderr=err, start_new_session=True)
        until = time.monotonic() + 120
        while "data_contract: PASS" not in (tmp_path / "err").read_text():
            assert run.poll() is None, (tmp_path / "err").read_text()[-3000:]
            assert time.monotonic() < until
            time.sleep(0.2)
        os.killpg(run.pid, signal.SIGINT)

        assert run.wait(timeout=20) == 1
    assert "stopped by hand" in (tmp_path / "err").read_text()
    _, alive = psutil.wait_procs([p for p in psutil.process_iter() if str(tmp_path) in _environment_of(p)], timeout=5)
    assert alive == []


def _environment_of(process: psutil.Process) -> str:
    try:
        return str(process.environ().get("SEATRIAL_HOME", ""))
    except psutil.Error:
        return ""


def test_a_first_release_that_is_refused_at_once_is_held_and_leaves_its_history_in_s3(
    yard: Yard, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the store in a bucket, and nothing verified that could serve: held, exit 3, journal and evidence in the bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        settings = {
            "SEATRIAL_STORE": "s3://trial/a/prefix",
            "SEATRIAL_STORE_ENDPOINT": f"http://{host}:{port}",
            "SEATRIAL_STORE_REGION": "us-east-1",
        }
        credentials = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
        for name, value in (settings | credentials).items():
            monkeypatch.setenv(name, value)
        boto3.client("s3", endpoint_url=settings["SEATRIAL_STORE_ENDPOINT"], region_name="us-east-1").create_bucket(Bucket="trial")
        (tmp_path / "policy.yaml").write_text(POLICY)

        code, document, shown = Yard(tmp_path, settings | credentials).release(recipe="late_digits:recipe")

        store = open_store(load_settings(home=tmp_path))
        assert (code, document["decision"]) == (3, "held"), shown[-3000:]
        assert [entry.kind for entry in Journal(store, document["release_id"]).records()] == ["started", *["gate"] * 6, "intent", "decided"]
        assert get_evidence(store, document["gates"][0]["sha256"])["verdict"]["outcome"] == "fail"
    finally:
        server.stop()
