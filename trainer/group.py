"""A rank group: attempts, restarts and records of one training job, inside its leader."""

import socket
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path

from trainer.children import Child, Say, fork_child, kill_children, tail
from trainer.deaths import Death, End, culprit, deadly, echo, fault_text, is_input_error, planned_fault, recoveries
from trainer.watch import is_writable, run_alone, wait_for
from trainer.whereabouts import whereabouts
from trainer.wires import Failure, GroupRequest, Result, frame, load_target
from trainer.world import Event, Progress, World
from validation.errors import RankError

ECHO_GRACE_S = 0.05  # a rank that failed through a peer may be heard before the peer is
COLLECT_S = 60.0  # at least this long for the tables, however late the ranks came in
PROGRESS_NS = 100_000_000  # between two words of progress to the flow process
THROUGHPUT_NS = 2_000_000_000  # window of the throughput in progress


class Group:
    """One job from its first fork to its RunRecord."""

    def __init__(self, request: GroupRequest, link: socket.socket) -> None:
        self.request = request
        self.job = request.job
        self.link = link
        self.until_ns = time.monotonic_ns() + int(self.job.deadline_s * 1e9)
        self.folder = Path(self.job.folder).absolute()
        self.events: list[Event] = []  # of all attempts that are over
        self.deaths: list[Death] = []
        self.steps = self.job.steps  # updates in all; a job without a limit learns it from its ranks
        self.meter = Meter()

    def run(self) -> Result | Failure:
        """Train, restart as often as the job allows, and collect. Raises RankError when the deadline passed."""
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        attempt = 0
        while failure := self._attempt(attempt):
            if attempt == self.job.max_restarts or is_input_error(failure):
                return failure
            attempt += 1
        return self._collect(attempts=attempt + 1)

    def _attempt(self, attempt: int) -> Failure | None:
        """Run one attempt to its end; None when every rank returned."""
        rendezvous = self.folder / f"rendezvous-{attempt}"
        rendezvous.unlink(missing_ok=True)  # a store that an earlier run left would answer for ranks that are long gone
        ranks: list[Child] = []
        self.meter = Meter()
        try:
            for rank in range(self.job.world_size_of(attempt)):
                ranks.append(self._fork(World(rank=rank, world_size=self.job.world_size_of(attempt), attempt=attempt), rendezvous, ranks))
            while not all(child.result for child in ranks):
                self._hear(ranks, attempt)
                if any(child.failed for child in ranks):
                    return self._bury(ranks, attempt)
            return None
        finally:
            kill_children()
            for child in ranks:
                self.events += child.events
                child.close()
            rendezvous.unlink(missing_ok=True)

    def _fork(self, world: World, rendezvous: Path, elder: Sequence[Child]) -> Child:
        entry, job = self.request.entry, self.job

        def work(say: Say) -> None:
            def emit(event: str, **fields: object) -> None:
                say(Event(name=event, rank=world.rank, attempt=world.attempt, t_ns=time.monotonic_ns(), fields=dict(fields)))

            load_target(entry)(job, world, str(rendezvous), emit)

        log = self.folder / "logs" / f"attempt-{world.attempt}-rank-{world.rank}.log"
        inherited = [self.link.fileno(), *(fd for child in elder for fd in (child.pidfd, child.inbox.fd))]
        return fork_child(world.rank, work, log=log, inherited=inherited)

    def _hear(self, ranks: Sequence[Child], attempt: int) -> None:
        """Wait until something happens and take in what it is. Raises RankError when the deadline passed."""
        if not wait_for(ranks, self.link, self.until_ns):
            raise RankError(
                f"the group of {len(ranks)} ranks passed its deadline of {self.job.deadline_s:g} s {_progress_so_far(ranks, attempt)}: "
                f"{whereabouts(ranks)}. Every rank was killed. Look first at a rank that is not waiting for the others, in "
                f"{self.folder / 'logs'}; if the run is merely long, raise deadline_s."
            )
        self._listen(ranks)

    def _listen(self, ranks: Sequence[Child]) -> None:
        for child in ranks:
            for event in child.listen():
                self.steps = event.fields.get("steps", self.steps)
                if event.rank == 0 and event.name == "step":
                    self._tell(event)

    def _tell(self, event: Event) -> None:
        """Forward progress, unless the flow process is slow to listen: then this word is dropped, and the ranks do not wait."""
        progress = self.meter.measure(event, steps=self.steps)
        if progress is not None and is_writable(self.link):
            self.link.sendall(frame(progress))

    def _bury(self, ranks: Sequence[Child], attempt: int) -> Failure:
        """Find the rank to blame, kill and reap the others, note the death."""
        noticed_ns = time.monotonic_ns()
        stuck = ""
        if all(echo(end) for end in _ends(ranks)):
            stuck = self._await_cause(ranks)
        end = culprit(_ends(ranks))
        statuses = kill_children()
        reaped_ns = time.monotonic_ns()
        for child in ranks:
            child.status = statuses.get(child.pid)
        self._listen(ranks)
        planned = planned_fault(end, sorted(deadly([event for child in ranks for event in child.events]), key=lambda event: event.t_ns))
        what = ranks[end.rank].describe_end()
        self.deaths.append(
            Death(
                fault=fault_text(planned) if planned else f"unplanned: rank {end.rank} {what.splitlines()[0]}",
                attempt=attempt,
                world_size=len(ranks),
                died_ns=planned.t_ns if planned else noticed_ns,
                noticed_ns=noticed_ns,
                reaped_ns=reaped_ns,
            )
        )
        remark = f" Planned fault: {fault_text(planned)}." if planned else ""
        return self._failure(ranks, end, f"{what} {_progress_so_far(ranks, attempt)}.{stuck}{remark}")

    def _await_cause(self, ranks: Sequence[Child]) -> str:
        """Give a cause that is slower than its echoes a moment to be heard; then say where the ranks are that did not fail."""
        until_ns = time.monotonic_ns() + int(ECHO_GRACE_S * 1e9)
        while all(echo(end) for end in _ends(ranks)) and wait_for([child for child in ranks if not child.over], self.link, until_ns):
            self._listen(ranks)
        alive = [child for child in ranks if not child.over]
        return f" Meanwhile {whereabouts(alive)}." if alive and all(echo(end) for end in _ends(ranks)) else ""

    def _failure(self, ranks: Sequence[Child], end: End, what: str) -> Failure:
        """What the flow process is told if this was the last attempt."""
        if end.failure is not None and end.failure.kind not in ("", "RankError"):
            return end.failure
        child = ranks[end.rank]
        trace = end.failure.trace if end.failure else tail(child.log)
        return Failure(
            kind="RankError",
            text=f"rank {end.rank} of {len(ranks)} {what} No restart is left (max_restarts={self.job.max_restarts}), so the run is over "
            f"and every other rank was killed. Read {child.log}, then mend the cause or allow more restarts.\n{trace}".rstrip(),
        )

    def _collect(self, attempts: int) -> Result | Failure:
        world_sizes = tuple(self.job.world_size_of(attempt) for attempt in range(attempts))
        fired = dict.fromkeys(fault_text(event) for event in self.events if event.name == "fault")

        def work(_: Say) -> object:
            return load_target(self.request.collect)(
                self.job,
                attempts=attempts,
                recoveries=recoveries(self.deaths, self.events, world_sizes),
                faults_fired=tuple(fired),
                seconds=(time.monotonic_ns() - self.request.asked_ns) / 1e9,
                world_sizes=world_sizes,
            )

        until_ns = max(self.until_ns, time.monotonic_ns() + int(COLLECT_S * 1e9))
        return run_alone(self.request.collect, work, link=self.link, log=self.folder / "logs" / "collect.log", until_ns=until_ns)


class Meter:
    """Turns rank 0's updates of one attempt into progress, at most ten times a second."""

    def __init__(self) -> None:
        self._window: deque[tuple[int, int]] = deque()  # (t_ns, samples of that update)
        self._told_ns = 0

    def measure(self, event: Event, *, steps: int | None) -> Progress | None:
        """Progress after this update, or None when the last word was a moment ago."""
        self._window.append((event.t_ns, int(event.fields.get("samples", 0))))
        while event.t_ns - self._window[0][0] > THROUGHPUT_NS and len(self._window) > 2:
            self._window.popleft()
        if event.t_ns - self._told_ns < PROGRESS_NS and event.fields["step"] != steps:
            return None
        self._told_ns = event.t_ns
        seconds = (event.t_ns - self._window[0][0]) / 1e9
        samples = sum(count for _, count in self._window) - self._window[0][1]
        return Progress(
            step=int(event.fields["step"]),
            steps=steps or 0,
            throughput_sps=samples / seconds if seconds > 0 else 0.0,
            loss=float(event.fields.get("loss", float("nan"))),
            attempt=event.attempt,
        )


def _ends(ranks: Sequence[Child]) -> list[End]:
    found = []
    for child in ranks:
        if child.failed:
            faults = deadly(child.events)
            found.append(End(rank=child.rank, failure=child.failure, fault=faults[-1] if faults else None))
    return found


def _progress_so_far(ranks: Sequence[Child], attempt: int) -> str:
    """Where an attempt is, by the last update that any of its ranks reported."""
    steps = [int(event.fields["step"]) for child in ranks for event in child.events if event.name == "step"]
    return f"after step {max(steps)} in attempt {attempt}" if steps else f"before its first step in attempt {attempt}"
