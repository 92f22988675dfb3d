"""A refused release taken up again by Prefect: its own retry of the flow run, and the deployment that holds one gate again."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_deployment import REPOSITORY, Harbour, harbour
from helpers_release import COMMAND_S, STRICT

from validation.policy import GATES

POOL = "sea-trial"
POLICY = STRICT.replace("decision: {approval: true}\n", "")  # scaling cannot pass, and nobody is asked

pytestmark = [pytest.mark.slow, pytest.mark.timeout(4 * COMMAND_S)]


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    """A server with everything deployed, and a worker."""
    with harbour(tmp_path_factory.mktemp("harbour")) as own:
        own.prefect("work-pool", "create", POOL, "--type", "process")
        own.prefect("deploy", "--all")
        own.start("worker", "worker", "start", "--pool", POOL, "--type", "process", "--limit", "1")
        yield own


@pytest.fixture(scope="module")
def refused(port: Harbour) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flow run of a release whose scaling did not pass, and its document."""
    run = port.ended(port.schedule("release/daily-flights", {"recipe": "digits:recipe", "policy": POLICY}), COMMAND_S)
    return run, show(port)


@pytest.fixture(scope="module")
def retried(port: Harbour, refused: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same flow run, once Prefect retried it."""
    run_id = refused[0]["id"]
    port.prefect("flow-run", "retry", run_id)
    return port.ended(run_id, COMMAND_S), show(port)


@pytest.fixture(scope="module")
def regated(port: Harbour, retried: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """The flow run that held another gate of it again."""
    release_id = retried[1]["release_id"]
    run = port.ended(port.schedule("rerun-gate/rerun-gate", {"gate": "data_contract", "release_id": release_id}), COMMAND_S)
    return run, show(port)


def show(port: Harbour) -> dict[str, Any]:
    """The document of the one release in the worker's home."""
    [row] = _seatrial(port, "show")["releases"]
    return _seatrial(port, "show", row["release_id"])


def _seatrial(port: Harbour, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "flows.cli", *words, "--json"]
    run = subprocess.run(command, cwd=REPOSITORY, env=port.environment, capture_output=True, text=True, timeout=COMMAND_S)
    assert run.returncode == 0, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return document


def attempts(document: dict[str, Any]) -> dict[str, int]:
    """Gate -> the attempt that counts."""
    return {gate["name"]: gate["attempt"] for gate in document["gates"]}


def test_a_release_that_failed_one_gate_is_a_failed_run(port: Harbour, refused: Any) -> None:
    """Red in a list of runs, and the gate is named."""
    run, document = refused

    assert (run["state_name"], document["decision"]) == ("Fell back", "fell_back"), port.log("worker")
    assert run["state"]["message"] == "scaling did not pass"


def test_a_retry_goes_on_with_the_same_release(refused: Any, retried: Any) -> None:
    """One flow run, one release, two runs of it."""
    assert retried[1]["release_id"] == refused[1]["release_id"]
    assert (retried[0]["run_count"], retried[0]["state_name"]) == (2, "Fell back")


def test_a_retry_holds_exactly_what_did_not_pass(port: Harbour, retried: Any) -> None:
    """Scaling has a second attempt; the others are kept, and say why, and so is the candidate."""
    document = retried[1]
    kept = [gate for gate in document["gates"] if gate["name"] != "scaling"]

    assert attempts(document) == dict.fromkeys(GATES, 1) | {"scaling": 2}, port.log("worker")
    assert all(gate["reused"] and "all match" in gate["reuse_reason"] for gate in kept)
    assert document["candidate_version"] == "2"


def test_both_attempts_are_shown(retried: Any) -> None:
    """Nothing is overwritten: each attempt with its outcome and its evidence."""
    held = retried[1]["attempts"]["scaling"]

    assert [item["attempt"] for item in held] == [1, 2]
    assert len({item["sha256"] for item in held}) == 2


def test_the_deployment_holds_the_gate_that_it_is_asked_for_and_what_did_not_pass(port: Harbour, regated: Any) -> None:
    """A flow run of its own, in which two gates are tasks; the release is the same."""
    run, document = regated

    assert attempts(document) == dict.fromkeys(GATES, 1) | {"data_contract": 2, "scaling": 3}, port.log("worker")
    assert set(port.task_runs(run["id"])) & set(GATES) == {"data_contract", "scaling"}
    assert run["state_name"] == "Fell back"
