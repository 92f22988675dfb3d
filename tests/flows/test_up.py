"""`seatrial up`: both UIs answer, Ctrl-C ends them all, nothing it prints is a secret; what prefect.yaml deploys can be run."""

import importlib
import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from prefect import Flow

from flows import up
from flows.automations import CHANGES_WHAT_SERVES, OWNER_TAG
from flows.registering import POOL, QUEUE
from infra.server_process import LOOPBACK, Command, Server, free_port
from infra.servers import Ports, Stack
from infra.settings import load_settings

Patch = pytest.MonkeyPatch
DEPLOYMENTS = yaml.safe_load((Path(up.__file__).parents[1] / "prefect.yaml").read_text())["deployments"]
ENDED: dict[str, Any] = {"ok": True, "ended": "", "prefect": "", "mlflow": "", "s3": "", "folder": "/f"}


def a_stack(folder: Path, **environment: str) -> Stack:
    """A stack without servers."""
    return Stack(folder=folder, environment=environment, prefect_url="http://127.0.0.1:1", mlflow_url="http://127.0.0.1:2")


@pytest.fixture
def started(tmp_path: Path, monkeypatch: Patch) -> Iterator[tuple[subprocess.Popen[str], Ports]]:
    """`up` in a process of its own, with both UIs answering on free ports."""
    ports = Ports(prefect=free_port(), mlflow=free_port())
    code = (
        "import json, sys; from flows.surroundings import make_quiet_place; from flows.up import up; from infra.servers import Ports; "
        f"print(json.dumps(up(make_quiet_place(), say=lambda line: print(line, file=sys.stderr), ports=Ports(prefect={ports.prefect}, "
        f"mlflow={ports.mlflow}))))"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_API", "MLFLOW_TRACKING"))}
    environment |= {"SEATRIAL_HOME": str(tmp_path / "a home")}
    with (tmp_path / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=said, text=True, env=environment)
    yield process, ports
    process.kill()
    process.wait()


def until_said(folder: Path, word: str, process: subprocess.Popen[str]) -> str:
    """What it has said, once `word` is in it."""
    deadline = time.monotonic() + 180
    while word not in (said := (folder / "said").read_text()) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    assert word in said
    return said


@pytest.mark.slow
def test_both_uis_answer_until_it_is_stopped(started: tuple[subprocess.Popen[str], Ports], tmp_path: Path) -> None:
    """The addresses are said when both answer; a signal ends every process, and the document says that it went well."""
    process, ports = started
    said = until_said(tmp_path, "Ctrl-C ends them all", process)
    below = psutil.Process(process.pid).children(recursive=True)
    pages = [httpx.get(f"http://{LOOPBACK}:{port}/", follow_redirects=True) for port in (ports.prefect, ports.mlflow)]

    process.send_signal(signal.SIGTERM)  # as a service manager does; Ctrl-C takes the same way
    document = json.loads(process.communicate(timeout=60)[0])

    assert [page.status_code for page in pages] == [200, 200]
    assert f"Prefect  http://{LOOPBACK}:{ports.prefect}" in said
    assert (process.returncode, document["ok"], document["ended"]) == (0, True, "")
    assert len(below) >= 4
    assert not [left for left in below if left.is_running()]


@pytest.mark.slow
def test_a_server_that_ends_by_itself_ends_the_rest(started: tuple[subprocess.Popen[str], Ports], tmp_path: Path) -> None:
    """MLflow's server dies: everything ends, and the document names it."""
    process, _ = started
    until_said(tmp_path, "Ctrl-C ends them all", process)
    [server] = [one for one in psutil.Process(process.pid).children(recursive=True) if "mlflow" in " ".join(one.cmdline()[1:3])]

    server.kill()
    document = json.loads(process.communicate(timeout=60)[0])

    assert (document["ok"], document["ended"]) == (False, "mlflow")
    assert (tmp_path / "a home" / "servers" / "mlflow.log").exists()


def test_addresses_hold_no_key(tmp_path: Path) -> None:
    """What a person copies into a shell is shown; keys are not, since screens and logs are read by others."""
    own = a_stack(tmp_path, SEATRIAL_STORE="s3://b/p", AWS_SECRET_ACCESS_KEY="hush", PREFECT_API_URL="http://127.0.0.1:1/api")

    said = "\n".join(up.addresses(own, postgres=True))

    assert "export SEATRIAL_STORE=s3://b/p" in said
    assert "export PREFECT_API_URL=http://127.0.0.1:1/api" in said
    assert "hush" not in said


def test_the_worker_finds_the_packages(tmp_path: Path, monkeypatch: Patch) -> None:
    """The packages come first on PYTHONPATH once, and a team's own folders stay on it."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["/a/team", str(Path(up.__file__).parents[1])]))

    environment = up.worker_environment(a_stack(tmp_path))

    assert environment["PYTHONPATH"] == os.pathsep.join([str(Path(up.__file__).parents[1]), "/a/team"])


@pytest.mark.parametrize(
    ("document", "says"),
    [
        pytest.param(ENDED, "all servers have ended", id="stopped"),
        pytest.param({**ENDED, "ok": False, "ended": "postgres"}, "postgres ended by itself.*/f/postgres.log", id="died"),
    ],
)
def test_what_became_of_them_is_one_line(document: dict[str, Any], says: str) -> None:
    """For people: how it ended, and where to look."""
    [line] = up.lines(document)

    assert re.search(says, line)


def test_an_ended_server_is_named(tmp_path: Path) -> None:
    """The first server that is gone, by its name."""
    own = a_stack(tmp_path)
    own.servers["thing"] = Server(Command(name="thing", words=["true"], environment=dict(os.environ), folder=tmp_path))
    own.servers["thing"]._keeper.wait(20)

    assert own.ended() == "thing"


def test_its_folder_lies_in_the_home(tmp_path: Path, monkeypatch: Patch) -> None:
    """Without --into the servers keep their logs under SEATRIAL_HOME; the same SQLite files as a release's."""
    seen: dict[str, Any] = {}

    def fake(folder: Path, **given: Any) -> Any:
        seen.update(given, folder=folder)
        raise KeyboardInterrupt

    monkeypatch.setattr(up, "stack", fake)
    settings = load_settings(home=tmp_path / "home")
    with pytest.raises(KeyboardInterrupt):
        up.up(settings, say=print)

    assert (seen["folder"], seen["postgres"], seen["settings"]) == (tmp_path / "home" / "servers", False, settings)


@pytest.mark.parametrize("deployment", DEPLOYMENTS, ids=lambda item: item["name"])
def test_every_deployment_can_be_run(deployment: dict[str, Any]) -> None:
    """Its entry point is a flow, what it is given is what the flow takes, and a schedule leaves nothing to be asked for."""
    file, _, name = deployment["entrypoint"].partition(":")
    flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
    needed = {item.name for item in inspect.signature(flow.fn).parameters.values() if item.default is inspect.Parameter.empty}

    assert isinstance(flow, Flow)
    assert set(deployment["parameters"]) <= set(inspect.signature(flow.fn).parameters)
    assert not deployment["schedules"] or needed <= set(deployment["parameters"])


def test_only_what_holds_the_devices_waits_for_them() -> None:
    """A release and a gate held again go through the queue of one; a rollback and monitoring wait for no release."""
    queues = {item["name"]: item["work_pool"]["work_queue_name"] for item in DEPLOYMENTS}

    assert {item["work_pool"]["name"] for item in DEPLOYMENTS} == {POOL, up.POOL}
    assert {name for name, queue in queues.items() if queue == QUEUE} == {"daily-flights", "rerun-gate"}
    assert all(item["tags"][0] == OWNER_TAG for item in DEPLOYMENTS)
    assert set(CHANGES_WHAT_SERVES) <= {tag for item in DEPLOYMENTS for tag in item["tags"]}
