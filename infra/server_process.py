"""Servers as processes of this machine: started behind a keeper, waited for until they answer, ended with all they started. Linux only."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from validation.errors import ConfigError, ReleaseError

LOOPBACK = "127.0.0.1"
PACKAGES = Path(__file__).resolve().parents[1]
ANSWER_S = 5.0  # of one question to a server
END_S = 15.0  # a server that was asked to end; its keeper kills it then
_TAIL_LINES = 12


class ServerError(ReleaseError):
    """A server did not start, or ended when it should not have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """What is started: a name for people, the words, its environment, and how it is asked to end."""

    name: str
    words: Sequence[str]
    environment: Mapping[str, str] = field(repr=False)  # holds passwords
    folder: Path  # its working folder; its output goes to <folder>/<name>.log
    user: str = ""  # whom it runs as; "" = this user
    signum: int = signal.SIGTERM
    grace_s: float = END_S


class Server:
    """A started command. It ends when `end` is called or when this process ends, by whatever cause."""

    def __init__(self, command: Command) -> None:
        """Start the command behind its keeper (infra/server_keeper.py), which watches a pipe that only this process holds open."""
        self.command = command
        self.log = command.folder / f"{command.name}.log"
        keeper = [sys.executable, "-m", "infra.server_keeper", str(command.grace_s), str(int(command.signum)), command.user]
        here = {"PYTHONPATH": os.pathsep.join(filter(None, (str(PACKAGES), command.environment.get("PYTHONPATH", ""))))}
        with self.log.open("ab") as log:
            self._keeper = subprocess.Popen(
                [*keeper, *command.words], cwd=command.folder, env={**command.environment, **here}, stdin=subprocess.PIPE, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip

    @property
    def name(self) -> str:
        """What people call it."""
        return self.command.name

    @property
    def is_alive(self) -> bool:
        """Whether the command has not ended."""
        return self._keeper.poll() is None

    def tail(self) -> str:
        """The last lines of its output."""
        with suppress(OSError):
            return "\n".join(self.log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
        return ""

    def wait(self, answers: Callable[[], bool], timeout_s: float) -> None:
        """Return when `answers()` is true. Raises ServerError with the end of the log when it ended, or did not answer in time."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.is_alive:
                raise ServerError(
                    f"{self.name} ended with exit code {self._keeper.returncode} before it answered. Its last lines:\n{self.tail()}\n"
                    f"Nothing is served. The whole log is {self.log}."
                )
            if answers():
                return
            if time.monotonic() > deadline:
                raise ServerError(
                    f"{self.name} did not answer within {timeout_s:.0f} s. Its last lines:\n{self.tail()}\nNothing is served. "
                    f"The whole log is {self.log}; on a loaded machine, start again."
                )
            time.sleep(0.1)

    def end(self) -> None:
        """End it and all that it started. Fine when it has ended."""
        if self._keeper.stdin is not None:
            with suppress(OSError):
                self._keeper.stdin.close()
        try:
            self._keeper.wait(self.command.grace_s + END_S)
        except subprocess.TimeoutExpired:
            self._keeper.kill()
            self._keeper.wait()


def free_port() -> int:
    """A port of loopback that nobody listens on."""
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def require_port(port: int, what: str) -> int:
    """Return the port (0: any free one). Raises ConfigError when somebody listens on it."""
    if port == 0:
        return free_port()
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: a port in TIME_WAIT is free
        try:
            probe.bind((LOOPBACK, port))
        except OSError as error:
            raise ConfigError(
                f"port {port} of {LOOPBACK}, meant for {what}, cannot be had ({error.strerror}). Nothing was started. End what listens "
                f"there (`ss -ltnp 'sport = :{port}'` names it), or give another port."
            ) from None
    return port


def answers_http(url: str) -> bool:
    """Whether a GET of the address is answered with 200."""
    with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(url, timeout=ANSWER_S) as answer:
        return int(answer.status) == 200
    return False


def answers_tcp(port: int) -> bool:
    """Whether somebody accepts connections on the port of loopback."""
    with suppress(OSError), socket.create_connection((LOOPBACK, port), timeout=ANSWER_S):
        return True
    return False
