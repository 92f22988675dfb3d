"""The Prefect server of one command: ours to start and to end, and never in the way of one that is named."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from flows import embedded_server
from infra.settings import load_settings

HOLDER = """
import os, sys
from pathlib import Path
from flows.embedded_server import start_early, wait_until_ready
from flows.surroundings import make_quiet_place
settings = make_quiet_place()
start_early(settings)
wait_until_ready()
print(os.environ["PREFECT_API_URL"], flush=True)
sys.stdin.read()
"""


def test_a_named_server_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An address in the environment, or a PREFECT_HOME that is not ours, starts nothing."""
    settings = load_settings(home=tmp_path)
    monkeypatch.setattr(embedded_server, "_started", [])
    monkeypatch.delitem(sys.modules, "prefect", raising=False)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:1/api")
    embedded_server.start_early(settings)
    monkeypatch.delenv("PREFECT_API_URL")
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "another"))
    embedded_server.start_early(settings)

    assert embedded_server._started == []
    assert embedded_server.MARK not in os.environ


def test_it_ends_with_a_command_that_is_killed(tmp_path: Path) -> None:
    """kill -9 of the command, and its server is gone within seconds: nothing has to be swept up later."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_API", "PREFECT_HOME"))}
    environment |= {"SEATRIAL_HOME": str(tmp_path / "a home")}
    command = subprocess.Popen([sys.executable, "-c", HOLDER], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert command.stdout is not None
    address = command.stdout.readline().strip()
    port = int(address.rpartition(":")[2].partition("/")[0])
    command.send_signal(signal.SIGKILL)
    command.wait()
    until = time.monotonic() + 20
    while (alive := _listening(port)) and time.monotonic() < until:
        time.sleep(0.2)

    assert address.startswith("http://127.0.0.1:")
    assert not alive


def _listening(port: int) -> bool:
    return any(one.laddr.port == port and one.status == psutil.CONN_LISTEN for one in psutil.net_connections("tcp") if one.laddr)
