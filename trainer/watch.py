"""Waiting inside a leader: for children, for the flow process to hang up, for the deadline. Torch-free."""

import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.children import Child, Say, fork_child, kill_children, tail
from trainer.whereabouts import places
from trainer.wires import Failure, Result
from validation.errors import RankError


def wait_for(children: Sequence[Child], link: socket.socket, until_ns: int) -> bool:
    """Wait until a child that is not over speaks or dies; False when `until_ns` (monotonic) passed first.

    Raises: EOFError when the flow process closed its end of `link`; it says nothing on it after its request.
    """
    poller = select.poll()
    poller.register(link, select.POLLIN)
    for child in children:
        if not child.over:
            poller.register(child.inbox.fd, select.POLLIN)
            poller.register(child.pidfd, select.POLLIN)
    left_ms = max(0, -((time.monotonic_ns() - until_ns) // 1_000_000))
    ready = {fd for fd, _ in poller.poll(left_ms)}
    if link.fileno() in ready:
        raise EOFError("the flow process hung up")
    return bool(ready)


def is_writable(link: socket.socket) -> bool:
    """True when a short message would not have to wait for its reader."""
    return bool(select.select([], [link], [], 0)[1])


def run_alone(name: str, work: Callable[[Say], Any], *, link: socket.socket, log: Path, until_ns: int) -> Result | Failure:
    """Run `work` in one child and give back what it returned or raised; a death or the deadline is a RankError."""
    started_ns = time.monotonic_ns()
    child = fork_child(0, work, log=log, inherited=[link.fileno()])
    while not child.over:
        if not wait_for([child], link, until_ns):
            took_s = (until_ns - started_ns) / 1e9
            raise RankError(
                f"{name} passed its deadline of {round(took_s, 2):g} s and was killed while {places([child])[0]}. "
                "Mend what it waits for, or give it more time (deadline_s)."
            )
        child.listen()
    child.status = kill_children().get(child.pid)
    if child.result is None and child.failure is None:
        raise RankError(
            f"the process of {name} {child.describe_end()}. Its result is lost; its last words tell more.\n{tail(log)}".rstrip()
        )
    return child.result or child.failure  # type: ignore[return-value]  # one of them is there
