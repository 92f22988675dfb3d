"""Forked processes under a leader: their words, their deaths, and an end that leaves nobody behind. Linux only; torch-free."""

import contextlib
import ctypes
import faulthandler
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainer.wires import Failure, Inbox, Pulse, Result, failure_of, is_readable, voice
from trainer.world import Event

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOG_TAIL_LINES = 20
KEPT = {"step": 2, "sealed": 1, "unsaved": 1}  # events of one name that a leader remembers: the first ones and the last

Say = Callable[[Any], None]


def die_with_parent(parent: int, signum: int) -> None:
    """Ask the kernel for `signum` when the parent dies, also when it has died already."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signum), 0, 0, 0)
    if os.getppid() != parent:
        os.kill(os.getpid(), signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent dies, so that `kill_children` finds it."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_children(spare: Collection[int] = ()) -> dict[int, int]:
    """SIGKILL and reap every child, and then what those children leave behind, until only `spare` is left.

    Returns: pid -> wait status. No pid can be reused meanwhile: all of them are children that only this function reaps.
    """
    statuses: dict[int, int] = {}
    while doomed := _children() - set(spare):
        for pid in doomed:
            os.kill(pid, signal.SIGKILL)
        for pid in doomed:
            statuses[pid] = os.waitpid(pid, 0)[1]
    return statuses


def kill_child(pid: int) -> None:
    """SIGKILL and reap one child, unless it is gone."""
    with contextlib.suppress(ProcessLookupError, ChildProcessError):
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _children() -> set[int]:
    pid = os.getpid()
    return {int(word) for word in Path(f"/proc/self/task/{pid}/children").read_text().split()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pid:
    """A process that cannot be mistaken for a later one with the same number."""

    pid: int
    started: int  # clock ticks after boot


def pid_of(pid: int) -> Pid:
    """Who has this number now. Raises FileNotFoundError or ProcessLookupError when nobody has."""
    return Pid(pid=pid, started=int(_stat(pid)[19]))


def state_of(pid: int) -> str:
    """A process's state as the kernel's letter: R, S, D, T (stopped by a signal), Z, ...; "" when it is gone."""
    try:
        return _stat(pid)[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the third on: the second, a name, may hold spaces."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def wait_gone(processes: Iterable[Pid], seconds: float, *, kill: bool) -> list[Pid]:
    """Wait until these processes, of whatever parent, have ended with all their threads; returns those that have not in time.

    Args: kill ends with SIGKILL what half of the time has not ended.
    """
    left = list(processes)
    for share, is_last in ((0.5, False), (0.5, True)):
        until = time.monotonic() + share * seconds
        left = [process for process in left if not _is_gone(process, until)]
        if kill and not is_last:
            for process in left:
                with contextlib.suppress(ProcessLookupError):  # just now
                    os.kill(process.pid, signal.SIGKILL)
    return left


def _is_gone(process: Pid, until: float) -> bool:
    try:
        handle = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return pid_of(process.pid) != process or is_readable(handle, until - time.monotonic())
    except (FileNotFoundError, ProcessLookupError):
        return True
    finally:
        os.close(handle)


class Child:
    """One forked process as its leader sees it."""

    def __init__(self, rank: int, pid: int, inbox: Inbox, log: Path, pulse: Pulse) -> None:
        self.rank = rank
        self.pulse = pulse  # every update, also those that it did not speak of
        self.pid = pid
        self.inbox = inbox
        self.log = log
        self.pidfd = os.pidfd_open(pid)
        self.events: list[Event] = []  # of updates only the first and the last, see KEPT: a run may have millions
        self.result: Result | None = None
        self.failure: Failure | None = None
        self.status: int | None = None  # wait status, once reaped
        self.stopped = False  # by a signal, and it did not go on
        self.over = False  # it returned, raised, died or was stopped: there is nothing more to wait for
        self.spared_state = ""  # of its process when its group was ended for another one's sake: its own end says nothing then

    def listen(self) -> list[Event]:
        """Take what it said since the last time. A closed pipe or a dead process without a result is a death."""
        exited = is_readable(self.pidfd, 0)  # asked first: what it said before it died is then all there
        fresh = []
        for message in self.inbox.read():
            if isinstance(message, Event):
                fresh.append(message)
                self._keep(message)
            elif isinstance(message, Result):
                self.result = message
            else:
                self.failure = message
        self.over = self.over or exited or self.inbox.closed or self.result is not None or self.failure is not None
        return fresh

    def _keep(self, event: Event) -> None:
        same = [at for at, kept in enumerate(self.events) if kept.name == event.name]
        if len(same) == KEPT.get(event.name):
            del self.events[same[-1]]
        self.events.append(event)

    @property
    def failed(self) -> bool:
        return self.over and self.result is None

    @property
    def exit_code(self) -> int | None:
        """Of a reaped process; negative = signal."""
        return None if self.status is None else os.waitstatus_to_exitcode(self.status)

    def describe_end(self) -> str:
        """How it ended: stopped, what it raised, or once it is reaped, which signal killed it or its exit code."""
        if self.stopped:
            return "was stopped by a signal and did not go on"
        if self.failure is not None:
            kind = f"{self.failure.kind}: " if self.failure.kind else ""
            return f"raised {kind}{self.failure.text}"
        code = self.exit_code or 0
        if code < 0:
            return f"was killed by signal {-code} ({signal.Signals(-code).name})"
        return f"ended with exit code {code} without a word"

    def close(self) -> None:
        os.close(self.pidfd)
        os.close(self.inbox.fd)


def fork_child(rank: int, work: Callable[[Say, Pulse], Any], *, log: Path, inherited: Iterable[int]) -> Child:
    """Fork a process that runs `work(say, pulse)`, sends its return value or exception, and exits; it dies with this process.

    Args: log takes its stdout and stderr; inherited are descriptors of this process that it must not keep open.
    """
    reader, writer = os.pipe()
    parent, pulse = os.getpid(), Pulse()
    pid = os.fork()
    if pid == 0:
        _live(lambda say: work(say, pulse), writer, log, parent, (reader, *inherited))
    os.close(writer)
    return Child(rank, pid, Inbox(reader), log, pulse)


def _live(work: Callable[[Say], Any], writer: int, log: Path, parent: int, inherited: Iterable[int]) -> NoReturn:
    code = 1
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        die_with_parent(parent, signal.SIGKILL)
        for fd in inherited:
            os.close(fd)
        _write_to(log)
        say = voice(writer)
        try:
            say(Result(body=pickle.dumps(work(say), protocol=pickle.HIGHEST_PROTOCOL)))
            code = 0
        except BaseException as error:
            traceback.print_exc()
            say(failure_of(error))
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # the server's exit handlers and buffers are not this process's to run


def _write_to(log: Path) -> None:
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.close(fd)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a killed rank's last line should be in its log
    faulthandler.enable()


def tail(log: Path) -> str:
    """A log's last lines, without a crash report's list of everything that was imported."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line for line in text.splitlines() if line and not line.startswith("Extension modules:")]
    return "\n".join(lines[-LOG_TAIL_LINES:])
