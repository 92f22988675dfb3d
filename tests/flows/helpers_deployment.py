"""A Prefect server and a worker of the tests' own: on loopback, everything under one folder, ended as process groups."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import psutil

REPOSITORY = Path(__file__).parents[2]
PREFECT = Path(sys.executable).with_name("prefect")
START_S, COMMAND_S, END_S = 120.0, 120.0, 15.0  # an overloaded machine's, not a healthy one's
FOREIGN = ("SEATRIAL_STORE", "SEATRIAL_CACHE", "MLFLOW_TRACKING_URI", "PREFECT_PROFILE", "PREFECT_API_KEY")


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def until(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """The condition's first true value. Fails with `what` after the time-out."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if (value := condition()) not in (None, False):
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {timeout_s:.0f} s: {what}")


@dataclass
class Harbour:
    """One server, its address, and the processes started beside it."""

    folder: Path
    port: int = field(default_factory=free_port)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def home(self) -> Path:
        """SEATRIAL_HOME of the worker, with a space in its path."""
        return self.folder / "the home"

    @property
    def environment(self) -> dict[str, str]:
        """Of every process here; PREFECT_HOME marks them, since children inherit it."""
        own = {
            "PREFECT_HOME": str(self.folder / "prefect"),
            "PREFECT_API_URL": f"http://127.0.0.1:{self.port}/api",
            "PREFECT_SERVER_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{self.folder}/prefect.db",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_CLOUD_ENABLE_ORCHESTRATION_TELEMETRY": "false",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
            "DO_NOT_TRACK": "1",
            "SEATRIAL_HOME": str(self.home),
            "PYTHONPATH": os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "examples" / "digits"), str(REPOSITORY / "tests" / "flows"))),
        }
        return {name: value for name, value in os.environ.items() if name not in FOREIGN} | own

    def prefect(self, *arguments: str) -> str:
        """Run one command of Prefect's to its end, from the repository's root; returns what it printed."""
        command = [str(PREFECT), "--no-prompt", *arguments]
        run = subprocess.run(command, cwd=REPOSITORY, env=self.environment, capture_output=True, text=True, timeout=COMMAND_S)
        assert run.returncode == 0, run.stdout + run.stderr
        return run.stdout

    def start(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Start a command of Prefect's in a process group of its own, its output in <name>.log."""
        with (self.folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [str(PREFECT), *arguments], cwd=self.folder, env=self.environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        self.started.append(process)
        return process

    def log(self, name: str) -> str:
        """The end of a started command's output."""
        return (self.folder / f"{name}.log").read_text(errors="replace")[-4000:]

    def ask(self, path: str, body: Any = None) -> Any:
        """What the server's API answers: GET without a body, else POST. SQLite is busy at times: 503 means ask again."""
        method, url = "GET" if body is None else "POST", f"http://127.0.0.1:{self.port}/api/{path}"
        answer = until(lambda: _unless_busy(httpx.request(method, url, json=body, timeout=30)), END_S, f"an answer to {path}")
        assert answer.is_success, f"{path}: {answer.status_code} {answer.text[:500]}"
        return answer.json()

    def is_serving(self, server: subprocess.Popen[bytes]) -> bool:
        """This server answers, and not another that took the port first."""
        assert server.poll() is None, self.log("server")
        with suppress(httpx.TransportError):
            return bool(self.ask("health")) and self.port in listening(server.pid)
        return False

    def schedule(self, deployment: str, parameters: dict[str, Any]) -> str:
        """Schedule one run of FLOW/NAME a second from now, for a worker to pick up; returns its id."""
        found = self.ask(f"deployments/name/{deployment}")
        when = (datetime.now(UTC) + timedelta(seconds=1)).isoformat()
        state = {"type": "SCHEDULED", "state_details": {"scheduled_time": when}}
        return str(self.ask(f"deployments/{found['id']}/create_flow_run", {"parameters": parameters, "state": state})["id"])

    def ended(self, run_id: str, timeout_s: float) -> dict[str, Any]:
        """The flow run, once its state is terminal."""
        final = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")
        what = f"the end of flow run {run_id}; the worker said:\n{self.log('worker')}"
        run: dict[str, Any] = until(lambda: (run := self.ask(f"flow_runs/{run_id}"))["state_type"] in final and run, timeout_s, what)
        return run

    def task_runs(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Task runs of a flow run by name; the server records them a moment after they ended."""
        wanted = {"flow_runs": {"id": {"any_": [run_id]}}}
        until(lambda: all(task["end_time"] for task in self.ask("task_runs/filter", wanted)), END_S, "the end of every task run")
        return {task["name"]: task for task in self.ask("task_runs/filter", wanted)}

    def artifacts(self, run_id: str) -> dict[str, dict[str, Any]]:
        """Artifacts of a flow run and its tasks by key."""
        return {item["key"]: item for item in self.ask("artifacts/filter", {"artifacts": {"flow_run_id": {"any_": [run_id]}}})}

    def lines(self, run_id: str, last: str) -> list[str]:
        """The log of a flow run and its tasks; the last line arrives a moment after the run ended, in a batch."""
        wanted = {"logs": {"flow_run_id": {"any_": [run_id]}}, "limit": 200}
        found: list[str] = until(
            lambda: last in (lines := [item["message"] for item in self.ask("logs/filter", wanted)]) and lines,
            END_S,
            f"'{last}' in the log",
        )
        return found

    def processes(self) -> list[psutil.Process]:
        """Everything alive that was started from here, its children and theirs, whatever their process group."""
        return [process for process in psutil.process_iter() if _home_of(process) == self.environment["PREFECT_HOME"]]


def _unless_busy(answer: httpx.Response) -> httpx.Response | None:
    return None if answer.status_code == httpx.codes.SERVICE_UNAVAILABLE else answer


def _home_of(process: psutil.Process) -> str:
    with suppress(psutil.Error):
        return process.environ().get("PREFECT_HOME", "") if process.status() != psutil.STATUS_ZOMBIE else ""
    return ""


def listening(pid: int) -> set[int]:
    """Ports that a process listens on."""
    return {link.laddr.port for link in psutil.Process(pid).net_connections("tcp") if link.status == psutil.CONN_LISTEN}


def end(process: subprocess.Popen[bytes]) -> None:
    """End a process group: asked first, killed if it will not."""
    for signum in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signum)
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
            return


@contextmanager
def harbour(folder: Path) -> Iterator[Harbour]:
    """A server that answers; afterwards nothing that was started from it is alive, and that is asserted."""
    own = Harbour(folder)
    own.home.mkdir()
    try:
        server = own.start("server", "server", "start", "--no-ui", "--host", "127.0.0.1", "--port", str(own.port))
        until(lambda: own.is_serving(server), START_S, "an answer of the server")
        yield own
    finally:
        for process in reversed(own.started):
            end(process)
        try:
            until(lambda: not own.processes(), END_S, f"the end of {own.processes()}")
        finally:
            for left in own.processes():
                left.kill()
