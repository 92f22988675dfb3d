"""A leader: the process that takes one request, forks children for it, and leaves nobody behind.

It is forked from the warm server, one for each request, and stays single-threaded. Everything that could hang or crash (the recipe, torch,
the tables) runs in its children; it only waits for their words, their deaths, its parent's hanging up and the deadline.
"""

import importlib
import os
import pickle
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from trainer.children import adopt_orphans, die_with_parent, kill_children
from trainer.group import Group
from trainer.watch import run_alone
from trainer.wires import (
    WARM_ENVIRON,
    CallRequest,
    Failure,
    GroupRequest,
    Inbox,
    Result,
    Started,
    Surroundings,
    failure_of,
    frame,
    is_readable,
    load_target,
)


def lead(link: socket.socket, server: int) -> NoReturn:
    """Live a leader's life: take the request from `link`, answer it, leave nobody alive, exit. `server` is the parent's pid."""
    try:
        os.setsid()
        adopt_orphans()
        signal.signal(signal.SIGTERM, _give_up)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # here and in the ranks: a death like any other, not an exception at a random line
        die_with_parent(server, signal.SIGTERM)
        _answer(link)
    finally:
        kill_children()
        os._exit(0)


def _give_up(*_: object) -> NoReturn:
    """The server, and with it the flow process, is going away."""
    kill_children()
    os._exit(1)


def _answer(link: socket.socket) -> None:
    try:
        surroundings, request = _receive(link)
        _surround(surroundings)
        link.sendall(frame(Started(pid=os.getpid())))
        answer = Group(request, link).run() if isinstance(request, GroupRequest) else _call(request, link)
    except BaseException as error:
        answer = failure_of(error)
    kill_children()
    link.sendall(frame(answer))


def _receive(link: socket.socket) -> tuple[Surroundings, GroupRequest | CallRequest]:
    """Wait for the request. Raises EOFError when the flow process hung up before it was whole."""
    inbox = Inbox(link.fileno())
    while not inbox.closed:
        is_readable(link.fileno())
        for message in inbox.read():
            link.setblocking(True)
            return message  # type: ignore[no-any-return]
    raise EOFError("the flow process hung up before its request was whole")


def _surround(surroundings: Surroundings) -> None:
    """Stand where the flow process stands now."""
    os.environ.clear()
    os.environ.update(surroundings.environ | WARM_ENVIRON)
    time.tzset()
    os.chdir(surroundings.cwd)
    sys.path[:] = surroundings.path
    importlib.invalidate_caches()


def _call(request: CallRequest, link: socket.socket) -> Result | Failure:
    def work(_: Any) -> Any:
        args, kwargs = pickle.loads(request.arguments)  # noqa: S301  (the flow process's own bytes)
        return load_target(request.target)(*args, **kwargs)

    memory = os.memfd_create("log")  # nothing to clean up on disk, whoever dies
    until_ns = time.monotonic_ns() + int(request.deadline_s * 1e9)
    return run_alone(request.target, work, link=link, log=Path(f"/proc/{os.getpid()}/fd/{memory}"), until_ns=until_ns)
