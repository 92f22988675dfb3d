"""A child of the leader that looks into cases: it may take its time or break, and the leader only waits for its word. Torch-free."""

import os
import pickle
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from trainer.blame import Mitigation
from trainer.children import Child, fork_child, kill_child
from trainer.incidents import Case, look_into, unknown
from validation.finding import Finding

CHILD_S = 30.0  # a look takes one to two seconds; on a machine that is loaded fifteen times over it is given up
NICE = 10  # of a look at the dead: the living go first


class Job(NamedTuple):
    """A case, and what was done about it; None: the ranks live, and it depends on what is found."""

    case: Case
    done: Mitigation | None


class Looker:
    """At most one child, and its jobs."""

    def __init__(self, link: socket.socket, log: Path, read: str) -> None:
        """Args: link, which the child must not keep; log, takes its words; read, see `look_into`."""
        self._link, self._log, self._read = link, log, read
        self._child: Child | None = None
        self._jobs: Sequence[Job] = ()
        self._since_ns = 0

    @property
    def children(self) -> list[Child]:
        """Whom to wait for."""
        return [self._child] if self._child else []

    @property
    def looks_at_living(self) -> bool:
        """Whether a child is looking at ranks that live."""
        return self._child is not None and any(job.done is None for job in self._jobs)

    def start(self, jobs: Sequence[Job], ranks: Sequence[Child]) -> list[tuple[Job, Finding]]:
        """Fork a child for some jobs, while none is there. Args: ranks, whose descriptors it must not keep.

        Returns: nothing, or findings that say why there is no child.
        """

        def work(*_: object) -> list[Finding]:
            if all(job.case.is_over for job in jobs):
                os.nice(NICE)
            return look_into([job.case for job in jobs], self._read)

        inherited = [self._link.fileno(), *(fd for child in ranks for fd in (child.pidfd, child.inbox.fd))]
        try:
            self._child = fork_child(-1, work, log=self._log, inherited=inherited)
        except OSError as error:
            return [(job, unknown(f"no process could be started for it ({error})")) for job in jobs]
        self._jobs, self._since_ns = jobs, time.monotonic_ns()
        return []

    def poll(self, now_ns: int) -> list[tuple[Job, Finding]]:
        """What was found since the last time; never waits."""
        if self._child is None:
            return []
        self._child.listen()
        if self._child.over:
            return self.end("")
        if now_ns - self._since_ns > CHILD_S * 1e9:
            return self.end(f"looking into it took longer than {CHILD_S:g} s")
        return []

    def end(self, why: str) -> list[tuple[Job, Finding]]:
        """End the child, if there is one. Returns: what it found; `why` stands for what it did not."""
        child, jobs, self._child, self._jobs = self._child, self._jobs, None, ()
        if child is None:
            return []
        kill_child(child.pid)
        child.close()
        if child.result is not None:
            findings: list[Finding] = pickle.loads(child.result.body)  # noqa: S301 - our own child's, over an anonymous pipe
            return list(zip(jobs, findings, strict=True))
        why = why or (f"looking into it failed: {child.failure.text}" if child.failure else "the process that looked into it died")
        return [(job, unknown(why)) for job in jobs]
