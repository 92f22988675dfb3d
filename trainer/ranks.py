"""Rank groups and single calls in warm processes: everything that needs torch or a recipe's code runs behind this door.

    flow process ──control socket──> warm server (torch imported once) ──fork──> leader (own session) ──fork──> ranks
         └────────────────────── link: one socket a request ────────────────────────┘

The flow process never imports torch, may have any number of threads, and may die at any moment: the kernel closes its sockets and
signals the server, every leader kills its children and what those have left behind, and nothing lives on. Linux only.
"""

import atexit
import contextlib
import io
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainer import history
from trainer.children import state_of, wait_gone
from trainer.config import TrainJob
from trainer.watch import LOOK_S, STOPPED_S
from trainer.wires import (
    EARLY,
    USUAL,
    WARM_ENVIRON,
    CallRequest,
    Failure,
    GroupRequest,
    Inbox,
    Incident,
    Loss,
    Result,
    Started,
    Surroundings,
    frame,
    is_readable,
    raised,
)
from trainer.world import Progress
from validation.errors import ConfigError, RankError
from validation.records import RunRecord

START_S = 300.0  # a cold import of torch on a busy machine takes half a minute
GRACE_S = 90.0  # a leader's own work after its deadline: stacks, killing, tables
END_S = 5.0
BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from trainer.warm import serve; serve(*map(int, sys.argv[2:4]), sys.argv[4:])"
)


def warm_up(*, when_idle: Sequence[str] = ()) -> None:
    """Start the warm server unless it runs; returns at once, the imports go on in the background. Safe from any thread.

    Args: when_idle names modules that calls will need but ranks do not: a new server imports them once nobody asks it for anything.
    """
    _server(when_idle)


def run_group(
    job: TrainJob,
    *,
    on_progress: Callable[[Progress], None] | None = None,
    on_incident: Callable[[Incident], None] | None = None,
    read: str = "",
    _entry: str = "trainer.loop:run_rank",
    _collect: str = "trainer.runlog:collect",
) -> RunRecord:
    """Run a job's ranks to their end, with the restarts it allows, and return what the run left; blocks.

    A folder in which attempts stand goes on after them: the next one has the next number, and starts from the newest sealed checkpoint.
    The job's planned faults, world sizes and restarts count from this call's first attempt. A leader or warm server that is killed costs
    a restart like a rank: nothing of its group is alive when the next one starts.

    Args: on_progress is called in this thread, at most ten times a second, and on_incident for each stall and death (twice for a stall that
    is waited for: when it is found, and at its end); what they raise ends the group and comes out here. read, "module:function" that makes
    evidence of an incident's folder, with stacks and torch's own records; "": only the ranks' rings are read.
    Raises: RankError when the restarts are spent, CRASH_LOOP attempts in a row came no further, or the deadline passed, naming rank,
    step, exit and log. An error of the validation.errors tree that a rank raised comes back as itself; an InputError among them is not
    tried again. ConfigError when another run is alive in the folder.
    """
    _check_alone(job)
    request = GroupRequest(job=job, entry=_entry, collect=_collect, asked_ns=time.monotonic_ns(), read=read)
    while True:
        try:
            record: RunRecord = _ask(request, deadline_s=job.deadline_s, told={Progress: on_progress, Incident: on_incident})
        except _LostError as error:
            request = _after_loss(request, error)
        else:
            return record


def _check_alone(job: TrainJob) -> None:
    """What an earlier call left behind is dying or a run of its own."""
    if alive := wait_gone(history.ranks_of(history.read_lines(Path(job.folder))), END_S, kill=False):
        raise ConfigError(
            f"a run is alive in {job.folder} (process {alive[0].pid}, and {len(alive) - 1} more). Two runs would write over each other's "
            "checkpoints, so nothing was started. Wait for its end, or train in another folder."
        )


def _after_loss(request: GroupRequest, error: "_LostError") -> GroupRequest:
    """The request for the next leader, once nothing of the lost one's group is alive. Raises RankError when the restarts are spent."""
    lines = history.read_lines(Path(request.job.folder))
    if alive := wait_gone(history.ranks_of(lines), 2 * END_S, kill=True):
        raise RankError(
            f"{error} Its rank process {alive[0].pid} survived SIGKILL for {END_S:g} s, so no other group may start beside it. "
            "Look for a hung disk or driver (state D in ps), and start again once it is gone."
        ) from None
    lost = (*request.lost, Loss(noticed_ns=error.noticed_ns, gone_ns=time.monotonic_ns()))
    if len(history.deaths_of(lines, request.asked_ns)) + len(lost) > request.job.max_restarts:
        raise error
    return replace(request, lost=lost)


def call(target: str, *args: Any, deadline_s: float, early: bool = False, **kwargs: Any) -> Any:
    """Run "module:function" in a warm process of its own session and return its result.

    Args: early, a server that still imports does not finish that first: the function imports what it needs.
    Arguments and result are pickled; the result may not hold torch objects, since this process stays free of torch.
    Raises: errors of the validation.errors tree as the function raised them; RankError for any other exception (with the end of its
    traceback), a death, or the deadline (s, counted from the fork).
    """
    request = CallRequest(target=target, arguments=pickle.dumps((args, kwargs)), deadline_s=deadline_s)
    return _ask(request, deadline_s=deadline_s, word=EARLY if early else USUAL)


def shut_down() -> None:
    """End the warm server and every group that still runs on it; the next request starts a new one."""
    global _current
    with _lock:
        server, _current = _current, None
    if server is not None:
        server.end()


class _LostError(RankError):
    """A leader went away without a word, and nobody here had asked it to."""

    def __init__(self, message: str, noticed_ns: int) -> None:
        super().__init__(message)
        self.noticed_ns = noticed_ns


class _Server:
    """The warm server as its flow process sees it."""

    def __init__(self, when_idle: Sequence[str]) -> None:
        self._when_idle = when_idle
        self.words = tempfile.TemporaryFile()  # noqa: SIM115  (its stdout and stderr, for as long as it lives)
        self._control, self._theirs = socket.socketpair()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._launched = threading.Event()
        self.dismissed = False  # ended on purpose
        # The kernel takes the death of the starting *thread* for the parent's, so one that lives as long as this process starts it.
        self._keeper = threading.Thread(target=self._keep, name="warm-server", daemon=True)
        self._keeper.start()
        self._launched.wait()

    def _keep(self) -> None:
        try:
            with self._theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", BOOT, json.dumps(sys.path), str(self._theirs.fileno()), str(os.getpid()), *self._when_idle],
                    pass_fds=[self._theirs.fileno()],
                    stdin=subprocess.DEVNULL, stdout=self.words, stderr=self.words,
                    env=os.environ | WARM_ENVIRON, start_new_session=True,
                )  # fmt: skip
        finally:
            self._launched.set()
        self._process.wait()

    @property
    def pid(self) -> int:
        return self._process.pid if self._process else 0

    @property
    def lives(self) -> bool:
        hung_up = is_readable(self._control.fileno(), 0)  # it never speaks there; seen at once, its end only when it is reaped
        return self._keeper.is_alive() and not hung_up

    def hand(self, link: socket.socket, word: bytes) -> None:
        """Give the server one end of a request's link."""
        with self._lock, contextlib.suppress(OSError):  # a server that is dead or shut down shows as a closed link
            socket.send_fds(self._control, [word], [link.fileno()])

    def last_words(self) -> str:
        """The end of what the server wrote."""
        size = os.fstat(self.words.fileno()).st_size
        return os.pread(self.words.fileno(), 2000, max(0, size - 2000)).decode(errors="replace").strip()

    def end(self) -> None:
        """Have it end its groups and itself; also in the middle of its imports."""
        self.dismissed = True
        if self._process is not None:
            self._process.terminate()
            self._keeper.join(END_S)
            self._process.kill()
        self._keeper.join()
        self._control.close()


_lock = threading.Lock()
_current: _Server | None = None


def _server(when_idle: Sequence[str] = ()) -> _Server:
    global _current
    with _lock:
        if _current is None or not _current.lives:
            _current = _Server(when_idle)
        return _current


def _forget() -> None:
    """In a forked copy of a flow process: the server is the original's to end, and its lock may be held for ever."""
    global _lock, _current
    _lock, _current = threading.Lock(), None


os.register_at_fork(after_in_child=_forget)
atexit.register(shut_down)


Told = Mapping[type, Callable[[Any], None] | None]  # kind of message -> who wants to hear it


def _ask(request: GroupRequest | CallRequest, *, deadline_s: float, told: Told | None = None, word: bytes = USUAL) -> Any:
    """Hand a request to a leader of its own and wait for the answer; on return nothing of the request is alive."""
    surroundings = Surroundings(environ=dict(os.environ), cwd=os.getcwd(), path=[str(entry) for entry in sys.path])  # noqa: PTH109
    server = _server()
    with contextlib.ExitStack() as cleanup:
        ours, theirs = map(cleanup.enter_context, socket.socketpair())
        server.hand(theirs, word)
        theirs.close()
        ours.settimeout(START_S)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # _wait says what became of the server
            ours.sendall(frame((surroundings, request)))
        answer = _wait(ours, server, deadline_s, told or {}, cleanup)
    if isinstance(answer, Failure):
        raise raised(answer)
    return _TorchFree(io.BytesIO(answer.body)).load()


def _wait(link: socket.socket, server: _Server, deadline_s: float, told: Told, cleanup: contextlib.ExitStack) -> Result | Failure:
    inbox = Inbox(link.fileno())
    until = time.monotonic() + START_S
    leader = _Leader()
    while not inbox.closed:
        if not is_readable(inbox.fd, min(LOOK_S, until - time.monotonic())):
            if time.monotonic() >= until:
                raise RankError(_silence(server, "did not answer in time"))
            leader.end_if_stopped()
            continue
        for message in inbox.read():
            if isinstance(message, Result | Failure):
                return message
            if isinstance(message, Started):
                until = time.monotonic() + deadline_s + GRACE_S
                leader.pid = message.pid
                with contextlib.suppress(ProcessLookupError):  # killed and reaped within this very moment
                    cleanup.callback(_see_off, link, os.pidfd_open(message.pid))
            elif (hear := told.get(type(message))) is not None:
                hear(message)
    words = _silence(server, "went away without a word")
    raise RankError(words) if server.dismissed else _LostError(words, time.monotonic_ns())


class _Leader:
    """Ends a leader that somebody stopped (SIGSTOP): it would neither hear its ranks nor answer, and the run would wait for ever."""

    def __init__(self) -> None:
        self.pid = 0
        self._stopped_since: float | None = None

    def end_if_stopped(self) -> None:
        """Kill it after STOPPED_S: then it is lost like any other, and the run goes on with a new one. Asked every LOOK_S."""
        if not self.pid or state_of(self.pid) not in ("T", "t"):
            self._stopped_since = None
            return
        self._stopped_since = self._stopped_since or time.monotonic()
        if time.monotonic() - self._stopped_since >= STOPPED_S:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


def _see_off(link: socket.socket, leader: int) -> None:
    """Tell a leader (by pidfd) that nobody waits any more, and wait for its end: by then its group is gone. Kill it if it is stuck."""
    with contextlib.suppress(OSError):  # it has gone first
        link.shutdown(socket.SHUT_WR)
    if not is_readable(leader, END_S):
        signal.pidfd_send_signal(leader, signal.SIGKILL)  # the server ends what it leaves
        is_readable(leader, END_S)
    os.close(leader)


def _silence(server: _Server, what: str) -> str:
    return (
        f"the leader of this request {what}, so its result is lost. It or the warm server was stopped or killed from outside, as a "
        f"system that runs out of memory does. Ask again. The server's last words: {server.last_words() or 'none'}"
    )


class _TorchFree(pickle.Unpickler):
    """Unpacks a result, and refuses to import torch for it."""

    def find_class(self, module: str, name: str) -> Any:
        if module.partition(".")[0] == "torch":
            raise RankError(
                f"the result holds a {module}.{name}; unpacking it would import torch into the flow process. "
                "Return numbers, numpy arrays or records instead."
            )
        return super().find_class(module, name)
