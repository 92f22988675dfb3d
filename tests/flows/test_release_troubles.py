"""Releases that something else gets in the way of: another first release at the same moment, a registry that dies under it."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from helpers_release import COMMAND_S, POLICY, Yard, stopped_when

from infra.server_process import LOOPBACK, Command, Server, answers_http, free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * COMMAND_S)]


def a_yard(folder: Path, settings: dict[str, str] | None = None) -> Yard:
    """A home in which nothing was ever released."""
    home = folder / "the home"
    home.mkdir()
    (home / "policy.yaml").write_text(POLICY)
    return Yard(home, settings or {})


def the_release(yard: Yard) -> tuple[str, ...]:
    """The words of its command."""
    return ("release", "digits:recipe", "--policy", str(yard.home / "policy.yaml"))


def test_two_first_releases_at_once_make_one_champion(tmp_path: Path) -> None:
    """Both end; one baseline served first; one candidate serves, and the other release says which one was faster, or was compared."""
    yard = a_yard(tmp_path)
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    runs = [yard.start(*the_release(yard), log=log) for log in logs]
    codes = sorted(run.wait(2 * COMMAND_S) for run in runs)
    documents = [json.loads(log.with_suffix(".json").read_text()) for log in logs]
    pointer = yard.pointer()
    aliases = yard.client().get_registered_model("digits").aliases
    verified, proof, _ = yard.seatrial("verify", "digits")
    slower = [item for item in documents if pointer and item["release_id"] != pointer.release_id]

    assert codes in ([0, 0], [0, 3]), [log.read_text()[-2000:] for log in logs]
    assert not any("Traceback" in log.read_text() for log in logs)
    assert pointer is not None
    assert str(aliases["champion"]) == pointer.serving_version
    assert (verified, proof["problems"]) == (0, [])
    assert [item["decision"] for item in slower] == (["promoted"] if codes == [0, 0] else ["held"])
    assert codes == [0, 0] or pointer.release_id in slower[0]["reason"]


@contextmanager
def registry(folder: Path, port: int) -> Iterator[Server]:
    """An MLflow server of the test's own; a second one on the same folder goes on with what the first one kept."""
    words = [sys.executable, "-m", "mlflow", "server", "--host", LOOPBACK, "--port", str(port), "--workers", "1"]
    words += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db", "--artifacts-destination", str(folder / "artifacts")]
    quiet = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
    server = Server(Command(name="mlflow", words=words, environment={**os.environ, **quiet}, folder=folder))
    try:
        server.wait(lambda: answers_http(f"http://{LOOPBACK}:{port}/health"), COMMAND_S)
        yield server
    finally:
        server.end()


def test_a_registry_that_dies_in_mid_release_ends_it_and_it_is_finished_later(tmp_path: Path) -> None:
    """Exit 1 in words, nothing judged against the candidate, what serves stays; with the registry back `finish` promotes."""
    port, log = free_port(), tmp_path / "release.log"
    yard = a_yard(tmp_path, {"SEATRIAL_MLFLOW_TRACKING_URI": f"http://{LOOPBACK}:{port}"})
    with registry(tmp_path, port):
        run = yard.start(*the_release(yard), log=log)
        stopped_when(run, lambda: yard.releases() and "gate gradient_equivalence" in yard.kinds(yard.releases()[0]), log)
    run.send_signal(signal.SIGCONT)
    code = run.wait(2 * COMMAND_S)
    [release_id] = yard.releases()
    kinds, serves = yard.kinds(release_id), yard.pointer()

    assert code == 1, log.read_text()[-3000:]
    assert "StoreError: MLflow could not" in log.read_text()
    assert f"seatrial finish {release_id}" in log.read_text()
    assert (kinds[-1].split()[0], serves and serves.serving_kind) == ("intent", "baseline")
    with registry(tmp_path, port):
        after, document, shown = yard.seatrial("finish", release_id)
        assert (after, document["decision"]) == (0, "promoted"), shown[-3000:]
        kept = [gate["name"] for gate in document["gates"] if gate["reused"]]
        assert kept == ["data_contract", "gradient_equivalence", "kill_and_resume"]
