"""A rank group: attempts, restarts and records of one training job, inside its leader."""

import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from trainer import history
from trainer.blame import Places, hang_text
from trainer.children import Child, Say, fork_child, kill_children, pid_of, state_of, tail
from trainer.deaths import Death, End, culprit, deadly, echo, fault_text, fruitless, is_input_error, planned_fault, recoveries
from trainer.inquiry import Inquiry, faults_of, last_fault
from trainer.meter import Meter
from trainer.watch import StopWatch, is_writable, run_alone, wait_for
from trainer.whereabouts import last_event, whereabouts
from trainer.wires import Failure, GroupRequest, Pulse, Result, frame, load_target
from trainer.world import Event, World
from validation.errors import RankError
from validation.finding import Finding

ECHO_GRACE_S = 0.05  # a rank that failed through a peer may be heard before the peer is
COLLECT_S = 60.0  # at least this long for the tables, however late the ranks came in
CRASH_LOOP = 3  # attempts in a row without a new update: one may be bad luck, two a slow peer of the first; three are the same place
UNSAVED_KEPT = 100  # checkpoints that could not be written, by name; a disk that stays full may refuse any number


class Group:
    """One job from its first fork to its RunRecord; a new leader goes on from the history that stands in the folder."""

    def __init__(self, request: GroupRequest, link: socket.socket) -> None:
        self.request = request
        self.job = request.job
        self.link = link
        self.folder = Path(self.job.folder).absolute()
        past = history.past_of(self.folder, request.asked_ns, request.lost)
        self.first = past.first_attempt
        self.world_sizes = list(past.world_sizes)  # of every attempt that stands in the folder
        self.events = list(past.events)  # of this call's attempts that are over
        self.deaths = list(past.deaths)
        self.until_ns = (past.begun_ns or time.monotonic_ns()) + int(self.job.deadline_s * 1e9)
        self.steps = self.job.steps  # updates in all; a job without a limit learns it from its ranks
        self.sealed = 0  # the newest checkpoint that stands, in updates
        self.unsaved: dict[int, str] = {}  # step -> why its checkpoint does not stand
        self.refused: dict[str, None] = {}  # what attempts passed over when they started, each once
        for event in past.events:
            self._take_in(event)
        self.meter = Meter()
        self.stops = StopWatch()
        self.places = Places(self.job.world_size, past.blames)
        self.inquiry = Inquiry(request, link, self._note, self.places)

    def run(self) -> Result | Failure:
        """Train, restart as often as the job allows, and collect; tell of every incident. Raises RankError when the deadline passed."""
        try:
            answer = self._run()
        except RankError:
            self.inquiry.finish()
            raise
        self.inquiry.finish()
        return answer

    def _run(self) -> Result | Failure:
        (self.folder / "logs").mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob("rendezvous-*"):  # by a leader that was killed
            left.unlink()
        if fruitless(self.deaths) >= CRASH_LOOP:  # a new leader: its predecessors' ends count
            return self._crash_loop("")
        while failure := self._attempt(len(self.world_sizes)):
            if len(self.deaths) > self.job.max_restarts or is_input_error(failure):
                return failure
            if fruitless(self.deaths) >= CRASH_LOOP:
                return self._crash_loop(failure.text.replace(f"{self._spent} ", ""))
        return self._collect()

    def _attempt(self, attempt: int) -> Failure | None:
        """Run one attempt to its end; None when every rank returned."""
        seats = self.places.seats(self.job.world_size_of(attempt - self.first), self.job.parallel)
        world_size = len(seats)
        rendezvous = self.folder / f"rendezvous-{attempt}"
        ranks: list[Child] = []
        self.world_sizes.append(world_size)
        self._note("attempt", attempt=attempt, world_size=world_size, call=self.request.asked_ns, t_ns=time.monotonic_ns())
        self.meter, self.stops = Meter(), StopWatch()
        self.inquiry.begin(attempt, seats)
        try:
            for rank, place in enumerate(seats):
                world = World(
                    rank=rank, world_size=world_size, attempt=attempt, first_attempt=self.first, one_machine=True, place=place
                )  # fmt: skip
                ranks.append(self._fork(world, rendezvous, ranks))
            while not all(child.result for child in ranks):
                self._hear(ranks, attempt)
                if any(child.failed for child in ranks):
                    return self._bury(ranks, attempt)
                if self.inquiry.verdict:
                    return self._end(ranks, attempt, self.inquiry.verdict)
            return None
        finally:
            kill_children(self.inquiry.spared())
            for child in ranks:
                self.events += child.events
                child.close()
            rendezvous.unlink(missing_ok=True)

    def _fork(self, world: World, rendezvous: Path, elder: Sequence[Child]) -> Child:
        entry, job = self.request.entry, self.job

        def work(say: Say, pulse: Pulse) -> None:
            load_target(entry)(job, world, str(rendezvous), history.Recorder(self.folder, world, say, pulse, steps=job.steps))

        log = self.folder / "logs" / f"attempt-{world.attempt}-rank-{world.rank}.log"
        inherited = [self.link.fileno(), *(fd for child in [*elder, *self.inquiry.children] for fd in (child.pidfd, child.inbox.fd))]
        child = fork_child(world.rank, work, log=log, inherited=inherited)
        self._note("rank", attempt=world.attempt, rank=world.rank, **asdict(pid_of(child.pid)))
        return child

    def _note(self, kind: str, **fields: object) -> None:
        history.note(self.folder, kind, **fields)

    def _hear(self, ranks: Sequence[Child], attempt: int) -> None:
        """Wait until something happens, or until it is time to look at the ranks, and take in what it is.

        Raises: RankError when the deadline passed.
        """
        waited_for = [*ranks, *self.inquiry.children]
        if not wait_for(waited_for, self.link, min(self.until_ns, self.stops.next_ns)) and time.monotonic_ns() >= self.until_ns:
            known = self.inquiry.known()
            self._look_into(ranks, attempt, lost=None, planned=last_fault(ranks), is_last=True)
            raise RankError(
                f"the group of {len(ranks)} ranks passed its deadline of {self.job.deadline_s:g} s {_progress_so_far(ranks, attempt)}: "
                f"{whereabouts(ranks)}. Every rank was killed. Look first at a rank that is not waiting for the others, in "
                f"{self.folder / 'logs'}; if the run is merely long, raise deadline_s.{known}"
            )
        self._listen(ranks)
        self.stops.look(ranks)
        self.inquiry.look(ranks)

    def _listen(self, ranks: Sequence[Child]) -> None:
        for child in ranks:
            for event in child.listen():
                self._take_in(event)
                if event.rank == 0 and event.name == "step":
                    self._tell(event)

    def _take_in(self, event: Event) -> None:
        """Learn how far the run is and what is safe."""
        self.steps = event.fields.get("steps", self.steps)
        if event.name == "sealed":
            self.sealed = max(self.sealed, int(event.fields["step"]))
        elif event.name == "unsaved" and len(self.unsaved) < UNSAVED_KEPT:
            self.unsaved[int(event.fields["step"])] = str(event.fields["reason"])
        elif event.name == "loaded":
            self.refused |= dict.fromkeys(event.fields.get("refused", ()))

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
        stuck += self.inquiry.known() if echo(end) else ""
        reaped_ns = self._reap(ranks)
        planned = planned_fault(end, deadly(faults_of(ranks)))
        what = ranks[end.rank].describe_end()
        so_far = _progress_so_far(ranks, attempt)
        first_line = what.splitlines()[0]
        self._note_death(Death(
            fault=fault_text(planned) if planned else f"unplanned: rank {end.rank} {first_line}",
            attempt=attempt, world_size=len(ranks), died_ns=planned.t_ns if planned else noticed_ns, noticed_ns=noticed_ns,
            reaped_ns=reaped_ns, reached=_reached(ranks),
            what=f"rank {end.rank} of {len(ranks)} {first_line} {so_far} ({last_event(ranks[end.rank])})",
        ))  # fmt: skip
        if not is_input_error(end.failure):
            silent = end.failure is None and ranks[end.rank].exit_code != -signal.SIGABRT  # a backend aborts whoever meets a peer's mistake
            self._look_into(ranks, attempt, lost=end.rank if silent else None, planned=planned)
        remark = f" Planned fault: {fault_text(planned)}." if planned else ""
        return self._failure(ranks, end, f"{what} {so_far}.{stuck}{remark}")

    def _end(self, ranks: Sequence[Child], attempt: int, finding: Finding) -> Failure:
        """End an attempt that hangs for good."""
        noticed_ns = time.monotonic_ns()
        since_ns = self.inquiry.stalled_since_ns
        reaped_ns = self._reap(ranks)
        planned = last_fault(ranks)
        what = hang_text(finding)
        so_far = _progress_so_far(ranks, attempt)
        self._note_death(Death(
            fault=fault_text(planned) if planned else what, attempt=attempt, world_size=len(ranks),
            died_ns=planned.t_ns if planned else since_ns, noticed_ns=noticed_ns, reaped_ns=reaped_ns, reached=_reached(ranks),
            what=f"{what} {so_far}",
        ))  # fmt: skip
        self._look_into(ranks, attempt, lost=None, planned=planned)
        remark = f" Planned fault: {fault_text(planned)}." if planned else ""
        words = (
            f"{what} {so_far}. {finding.explanation}{remark} {self._spent} What to do: {finding.action}. The evidence is in "
            f"{self.inquiry.newest}."
        )
        return Failure(kind="RankError", text=words, trace="\n".join(finding.evidence))

    def _reap(self, ranks: Sequence[Child]) -> int:
        """Kill and reap every rank and hear its last words. Returns: when nothing of them was left, monotonic."""
        for child in ranks:
            child.spared_state = "" if child.over else state_of(child.pid)
        statuses = kill_children(self.inquiry.spared())
        reaped_ns = time.monotonic_ns()
        for child in ranks:
            child.status = statuses.get(child.pid)
        self._listen(ranks)
        return reaped_ns

    def _note_death(self, death: Death) -> None:
        self.deaths.append(death)
        self._note("death", **asdict(death))

    def _look_into(self, ranks: Sequence[Child], attempt: int, *, lost: int | None, planned: Event | None, is_last: bool = False) -> None:
        self.inquiry.bury(
            ranks, lost=lost, planned=fault_text(planned) if planned else "",
            is_last=is_last or len(self.deaths) > self.job.max_restarts or fruitless(self.deaths) >= CRASH_LOOP,
            next_size=self.job.world_size_of(attempt + 1 - self.first),
        )  # fmt: skip

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
            text=f"rank {end.rank} of {len(ranks)} {what} {self._spent} Read {child.log}, then mend the cause or allow more restarts.\n"
            f"{trace}".rstrip(),
        )

    @property
    def _spent(self) -> str:
        return f"No restart is left (max_restarts={self.job.max_restarts}), so the run is over and every other rank was killed."

    def _crash_loop(self, last_words: str) -> Failure:
        """Why the run is over although restarts may be left. Args: last_words, of the last failure, with its trace."""
        last = self.deaths[-1]
        best = max(death.reached for death in self.deaths)
        left = self.job.max_restarts - len(self.deaths) + 1
        ends = "; ".join(dict.fromkeys(death.what for death in self.deaths[-CRASH_LOOP:]))
        words = (
            f"crash loop: {CRASH_LOOP} attempts in a row ended without an update beyond step {best}, the last one in attempt "
            f"{last.attempt}: {ends}. Starting again would end at the same place, so the run was stopped with {left} of "
            f"{self.job.max_restarts} restarts left; checkpoint {self.sealed or 'none'} is the newest that was sealed. Read the logs in "
            f"{self.folder / 'logs'}, mend the cause, then start the run on the same folder: it goes on from that checkpoint.\n{last_words}"
        )
        return Failure(kind="RankError", text=words.rstrip())

    def _collect(self) -> Result | Failure:
        world_sizes = tuple(self.world_sizes)
        fired = dict.fromkeys(fault_text(event) for event in self.events if event.name == "fault")

        def work(_: Say) -> object:
            return load_target(self.request.collect)(
                self.job,
                attempts=len(world_sizes),
                recoveries=recoveries(self.deaths, self.events, world_sizes),
                faults_fired=tuple(fired),
                seconds=(time.monotonic_ns() - self.request.asked_ns) / 1e9,
                world_sizes=world_sizes,
                unsaved=tuple(f"step {step}: {reason}" for step, reason in sorted(self.unsaved.items())),
                refused=tuple(self.refused),
            )

        until_ns = max(self.until_ns, time.monotonic_ns() + int(COLLECT_S * 1e9))
        log = self.folder / "logs" / "collect.log"
        return run_alone(self.request.collect, work, link=self.link, log=log, until_ns=until_ns, spare=self.inquiry.spared())


def _ends(ranks: Sequence[Child]) -> list[End]:
    found = []
    for child in ranks:
        if child.failed:
            faults = deadly(child.events)
            found.append(End(rank=child.rank, failure=child.failure, fault=faults[-1] if faults else None))
    return found


def _progress_so_far(ranks: Sequence[Child], attempt: int) -> str:
    """Where an attempt is, by the last update that any of its ranks made."""
    reached = _reached(ranks)
    return f"after step {reached} in attempt {attempt}" if reached else f"before its first step in attempt {attempt}"


def _reached(ranks: Sequence[Child]) -> int:
    """Updates done by the rank that came furthest; 0 before the attempt's first."""
    return max((child.pulse.updates for child in ranks), default=0)
