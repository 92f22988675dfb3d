"""Waiting inside a leader: for children, for the flow process to hang up, for the deadline. Torch-free."""

import select
import socket
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

from trainer.children import Child, Say, fork_child, kill_children, state_of, tail
from trainer.whereabouts import places
from trainer.wires import Failure, Result
from validation.errors import RankError

# A signal that stops a process for a snapshot or a look inside continues it within a second (job control, cgroup freezers, gcore of a
# small process); a peer sees nothing but a slow collective until its time-out. 1.5 s and two looks are 2 s at most.
STOPPED_S = 1.5
LOOK_S = 0.25  # between two looks: one read of /proc a rank


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


class StopWatch:
    """Notices children that a signal has stopped (state T) and that do not go on; to be asked again and again."""

    def __init__(self) -> None:
        self.next_ns = time.monotonic_ns() + int(LOOK_S * 1e9)  # when the next look is due
        self._since_ns: dict[int, int] = {}  # rank -> when it was first seen stopped

    def look(self, children: Sequence[Child]) -> None:
        """Mark as over whoever was found stopped at every look for STOPPED_S; costs nothing before the next look is due."""
        now_ns = time.monotonic_ns()
        if now_ns < self.next_ns:
            return
        self.next_ns = now_ns + int(LOOK_S * 1e9)
        stopped = {child.rank: child for child in children if not child.over and state_of(child.pid) == "T"}
        self._since_ns = {rank: self._since_ns.get(rank, now_ns) for rank in stopped}
        for rank, since_ns in self._since_ns.items():
            if now_ns - since_ns >= STOPPED_S * 1e9:
                stopped[rank].stopped = stopped[rank].over = True


def is_writable(link: socket.socket) -> bool:
    """True when a short message would not have to wait for its reader."""
    return bool(select.select([], [link], [], 0)[1])


def run_alone(
    name: str, work: Callable[[Say], Any], *, link: socket.socket, log: Path, until_ns: int, spare: Collection[int] = ()
) -> Result | Failure:
    """Run `work` in one child and give back what it returned or raised; a death or the deadline is a RankError.

    Args: spare, other children that live on.
    """
    started_ns = time.monotonic_ns()
    child = fork_child(0, lambda say, _: work(say), log=log, inherited=[link.fileno()])
    while not child.over:
        if not wait_for([child], link, until_ns):
            took_s = (until_ns - started_ns) / 1e9
            raise RankError(
                f"{name} passed its deadline of {round(took_s, 2):g} s and was killed while {places([child])[0]}. "
                "Mend what it waits for, or give it more time (deadline_s)."
            )
        child.listen()
    child.status = kill_children(spare).get(child.pid)
    if child.result is None and child.failure is None:
        raise RankError(
            f"the process of {name} {child.describe_end()}. Its result is lost; its last words tell more.\n{tail(log)}".rstrip()
        )
    return child.result or child.failure  # type: ignore[return-value]  # one of them is there
