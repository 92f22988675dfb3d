"""A Prefect server for one command: started while this process still imports, gone when the command is, however it ends.

Prefect starts such a server by itself where no address is set, but only once its libraries are loaded, waits seconds for it to end, and
leaves it behind when the process is killed.
"""

import atexit
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flows.leaving import RARELY
from infra.server_process import LOOPBACK, Command, Server, ServerError, answers_http, free_port
from infra.settings import Settings

START_S = 180.0  # the first start makes the database: 20-26 s on an idle machine
END_GRACE_S = 1.0  # all that counts was committed when it was answered
BOOT = f"import gc, sys; gc.set_threshold({RARELY}); import uvicorn; sys.exit(uvicorn.main())"
MARK = "SEATRIAL_EMBEDDED_SERVER"  # its address, for whoever would show a link to it

_started: list[Server] = []


def start_early(settings: Settings) -> None:
    """Start it unless a server is named already; before anything imports prefect. Repeatable."""
    if _started or "prefect" in sys.modules or not _is_ours(settings):
        return
    port = free_port()
    folder = settings.home / "prefect"
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-c", BOOT, "--factory", "prefect.server.api.server:create_app", "--host", LOOPBACK]
    words += ["--port", str(port), "--log-level", "error", "--lifespan", "on"]
    own = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
    _start(Command(name="embedded-server", words=words, environment={**os.environ, **own}, folder=folder, grace_s=END_GRACE_S))
    os.environ["PREFECT_API_URL"] = os.environ[MARK] = f"http://{LOOPBACK}:{port}/api"


@contextmanager
def at_hand() -> Iterator[None]:
    """Enter when the server answers. Flow runs send one that was started here no heartbeats: it ends with them, and nobody else listens.

    Raises ServerError as `wait_until_ready` does.
    """
    wait_until_ready()
    if not _started:
        yield
        return
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings

    with temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}):  # the thread that sends them is waited for: up to a second
        yield


def wait_until_ready() -> None:
    """Return when the server that was started here answers; at once when there is none. Raises ServerError with the end of its log."""
    until = time.monotonic() + START_S
    while _started:
        server = _started[-1]
        try:
            server.wait(lambda: answers_http(f"{os.environ[MARK]}/health"), START_S)
            return
        except ServerError:
            if server.is_alive or time.monotonic() > until:
                raise
        time.sleep(1.0)  # two first commands in one home make the same database, and one of them finds it half made
        _start(server.command)


def _start(command: Command) -> None:
    _started.append(server := Server(command))
    atexit.register(server.end)  # registered before Prefect's own handlers, so it runs after them


def _is_ours(settings: Settings) -> bool:
    """Whether this process keeps Prefect's state under its own home and no server is named, in the environment or in a profile."""
    home = settings.home / "prefect"
    profiles = home / "profiles.toml"
    if "PREFECT_API_URL" in os.environ or os.environ.get("PREFECT_PROFILE") or Path(os.environ.get("PREFECT_HOME", "")) != home:
        return False
    return not (profiles.is_file() and "PREFECT_API_URL" in profiles.read_text(encoding="utf-8", errors="replace"))
