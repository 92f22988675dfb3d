"""A suspended flow run waits for its form in the server, not in a process: the worker may be killed and started again meanwhile."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from helpers_approving import ASKS, held, own_settings, release_of
from helpers_deployment import REPOSITORY, Harbour, harbour, until

from infra.attestations import open_notary
from infra.journal import Entry, Journal
from infra.settings import Settings
from infra.store import open_store

POOL, RUN_S = "asking", 120.0

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    """A server with a flow that only asks, deployed."""
    with harbour(tmp_path_factory.mktemp("harbour")) as own:
        own.prefect("work-pool", "create", POOL, "--type", "process")
        entrypoint = f"{Path(__file__).with_name('asking_flow.py').relative_to(REPOSITORY)}:asking"
        own.prefect("deploy", entrypoint, "--name", "ask", "--pool", POOL)
        yield own


def settings_of(port: Harbour) -> Settings:
    """Those of the worker's runs."""
    return own_settings(port.folder).model_copy(update={"home": port.home, "store": str(port.home / "store")})


def work(port: Harbour) -> subprocess.Popen[bytes]:
    """A worker of the pool."""
    return port.start("worker", "worker", "start", "--pool", POOL, "--type", "process", "--limit", "1")


def ask(port: Harbour, release_id: str) -> str:
    """A release that waits for a person, and a flow run that asks about it; returns the run's id."""
    release_of(settings_of(port), policy=ASKS, release_id=release_id)
    return port.schedule("asking/ask", {"release_id": release_id, "policy": ASKS})


def suspended(port: Harbour, run_id: str, *, after: str = "") -> dict[str, Any]:
    """The run's state, once it waits for a form. Args: after, the id of the state that is not meant."""
    found: dict[str, Any] = until(
        lambda: (state := port.ask(f"flow_runs/{run_id}")["state"])["name"] == "Suspended" and state["id"] != after and state,
        RUN_S,
        f"a suspended run; the worker said:\n{port.log('worker')}",
    )
    return found


def resume(port: Harbour, run_id: str, **form: object) -> str:
    """Send the form, as the server's page does; returns whether it was accepted."""
    answer = httpx.post(f"http://127.0.0.1:{port.port}/api/flow_runs/{run_id}/resume", json={"run_input": form}, timeout=30)
    return str(answer.json()["status"])


def said(port: Harbour, release_id: str) -> list[Entry]:
    """What the journal has of the question and its answer."""
    entries = Journal(open_store(settings_of(port)), release_id).records()
    return [entry for entry in entries if entry.kind.startswith("approval")]


def test_the_form_outlives_the_worker(port: Harbour) -> None:
    """The run's process ends, the form stands in the server, the worker is killed and started again, and the answer goes on."""
    release_id = "digits-20260310-110000-aa11"
    worker, run_id = work(port), ask(port, release_id)
    keys = suspended(port, run_id)["state_details"]["run_input_keyset"]
    schema, description = (port.ask(f"flow_runs/{run_id}/input/{keys[part]}") for part in ("schema", "description"))
    until(lambda: {item.pid for item in port.processes()} == {port.started[0].pid, worker.pid}, 30, "the end of the run's process")
    os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    time.sleep(3)  # the person thinks
    work(port)

    assert (schema["required"], schema["properties"]["days"]["maximum"]) == (["name", "reason"], 7.0)
    assert description == "**five of six gates pass**"
    assert resume(port, run_id, name="", reason="x", approve=True, days=1) == "REJECT"
    assert resume(port, run_id, name="Ada", reason="x", approve=True, days=7.5) == "REJECT"
    assert resume(port, run_id, name="Ada", reason="read the report", approve=True, days=2) == "ACCEPT"
    assert port.ended(run_id, RUN_S)["state_type"] == "COMPLETED", port.log("worker")
    asked, answer = said(port, release_id)
    assert (asked.kind, answer.payload["by"], answer.payload["approved"]) == ("approval_requested", "Ada", True)
    assert 3 <= answer.payload["human_review_s"] < RUN_S


def test_a_yes_to_other_evidence_asks_anew(port: Harbour) -> None:
    """What changes while the run is suspended takes the answer away: the run that goes on is suspended with a new form."""
    release_id, settings = "digits-20260310-110000-bb22", settings_of(port)
    work(port)
    run_id = ask(port, release_id)
    first = suspended(port, run_id)
    store = open_store(settings)
    held(Journal(store, release_id), store, open_notary(store, settings), "readiness", again=True)

    assert resume(port, run_id, name="Ada", reason="of the old evidence", approve=True, days=1) == "ACCEPT"
    second = suspended(port, run_id, after=first["id"])
    assert second["state_details"]["pause_key"] != first["state_details"]["pause_key"]
    assert resume(port, run_id, name="Grace", reason="a freeze", approve=False, days=1) == "ACCEPT"
    assert port.ended(run_id, RUN_S)["state_type"] == "COMPLETED", port.log("worker")
    entries = said(port, release_id)
    assert [entry.kind for entry in entries] == ["approval_requested", "approval_requested", "approval"]
    assert (entries[-1].payload["by"], entries[-1].payload["approved"]) == ("Grace", False)
