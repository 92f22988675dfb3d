"""The whole stack of servers for tests: PostgreSQL, S3, Prefect, MLflow, a worker, and somebody who is told by webhook."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest
from helpers_deployment import REPOSITORY, Harbour

from flows import up
from infra import server_postgres, servers
from infra.server_process import LOOPBACK
from validation.errors import ConfigError

PATHS = (REPOSITORY, REPOSITORY / "examples" / "digits", REPOSITORY / "tests" / "flows")


@dataclass
class Told:
    """A server that keeps what it is told."""

    port: int = 0
    said: list[str] = field(default_factory=list)


@dataclass(kw_only=True)
class Fleet:
    """The stack, a way to ask its Prefect server, and what its webhook was told."""

    stack: servers.Stack
    prefect: Harbour
    told: Told

    def command(self, *arguments: str) -> dict[str, Any]:
        """The document of `seatrial ... --json` against the stack."""
        words = [sys.executable, "-m", "flows.cli", *arguments, "--json"]
        environment = up.worker_environment(self.stack)
        run = subprocess.run(words, cwd=self.stack.folder, env=environment, capture_output=True, text=True, timeout=120)
        assert run.stdout, run.stderr
        document: dict[str, Any] = json.loads(run.stdout)
        return document

    def python(self, code: str, **given: str) -> subprocess.Popen[str]:
        """Start some lines of Python in the worker's environment."""
        environment = up.worker_environment(self.stack) | given
        return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=self.stack.folder, stdout=subprocess.PIPE, text=True)

    def stall(self, name: str, seconds: float) -> None:
        """Stop a server's processes for a while: it is there, and does not answer."""
        processes = psutil.Process(self.stack.servers[name]._keeper.pid).children(recursive=True)
        for process in processes:
            process.suspend()
        time.sleep(seconds)
        for process in reversed(processes):
            process.resume()

    def worker_log(self) -> str:
        """All that the worker and its runs have said."""
        return (self.stack.folder / "worker.log").read_text(errors="replace")


@contextmanager
def listener() -> Iterator[Told]:
    """A webhook's other end, on a free port of loopback."""
    told = Told()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.said.append(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: tests read what was told."""

    server = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    told.port = server.server_address[1]
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield told
    server.shutdown()


@contextmanager
def open_folder(parent: Path) -> Iterator[Path]:
    """A folder that the database's user can reach: as root not pytest's own, which is closed to all others."""
    if os.geteuid() != 0:
        yield parent
        return
    folder = Path(tempfile.mkdtemp(prefix="sea-trial-"))
    folder.chmod(0o711)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def need_postgres() -> None:
    """Skip where no PostgreSQL server is installed."""
    try:
        server_postgres.find_binaries()
    except ConfigError:
        pytest.skip("no PostgreSQL server is installed")


@contextmanager
def fleet(parent: Path) -> Iterator[Fleet]:
    """What `seatrial up --postgres` starts, with the example recipes on the worker's path and a webhook of the test's own."""
    need_postgres()
    with open_folder(parent) as folder, listener() as told, servers.stack(folder / "the stack", postgres=True) as stack:
        extra = {
            "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
            "SEATRIAL_NOTIFY_WEBHOOK": f"http://{LOOPBACK}:{told.port}/secret-path",
            "PREFECT_WORKER_QUERY_SECONDS": "1",
        }
        stack.environment = {**stack.environment, **extra}
        up.set_up(stack, print)
        yield Fleet(stack=stack, prefect=Harbour(stack.folder, port=int(stack.prefect_url.rpartition(":")[2])), told=told)
