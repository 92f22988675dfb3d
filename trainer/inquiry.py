"""A leader's eye for incidents: notices stalls, has stalls and deaths looked into, decides, keeps the record, tells the flow process.

Looking takes a second and may break, so a child does it (trainer/looking.py). A death is looked into after the next attempt's first
update: the way back does not wait for it. Torch-free.
"""

import contextlib
import shutil
import socket
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainer.blame import SURE, Mitigation, Places, blamed, is_definite, mitigation, waits
from trainer.children import Child
from trainer.config import TrainJob
from trainer.deaths import fault_text
from trainer.incidents import Case, Seen, new_folder, ring_path, rings_of, write_record
from trainer.looking import Job, Looker
from trainer.ring import RingReader
from trainer.stalls import StallWatch
from trainer.watch import LOOK_S, is_writable, wait_for
from trainer.wires import GroupRequest, Incident, frame
from trainer.world import Event
from validation.finding import Finding

INSIDE_S = 1.0  # between two looks into the rings of quiet ranks
END_S = 10.0  # how long a run's end waits for what is still to be looked into
AGAIN = 2.0  # a stall that was not definite is looked into again after twice the time, four times, ...
RINGS_KEPT = 2  # attempts before the running one whose rings stay


@dataclass(slots=True)
class _Stall:
    """A time without progress that was longer than the threshold."""

    case: Case
    looks: int = 0
    finding: Finding | None = None
    is_told: bool = False
    due_s: float = 0.0  # quiet time of the next look


class Inquiry:
    """All that one leader knows of incidents. `verdict` is what the attempt has to be ended for."""

    def __init__(self, request: GroupRequest, link: socket.socket, note: Callable[..., None], places: Places) -> None:
        """Args: note, writes a line into the folder's history; places, of this call's ranks."""
        job = request.job
        self._job, self._link, self._note, self._places = job, link, note, places
        self._folder = Path(job.folder).absolute()
        self._looker = Looker(link, self._folder / "logs" / "incidents.log", request.read)
        self._seats: dict[int, tuple[int, ...]] = {}  # attempt -> place by rank
        self._attempt = 0
        self._watch = StallWatch(floor_s=job.stall_floor_s, stall_s=job.stall_s, now_ns=time.monotonic_ns())
        self._due_ns = self._inside_ns = 0  # the next look at the ranks; the next one into their rings
        self._stall: _Stall | None = None
        self._dead: list[Job] = []  # to be looked into
        self._untold: list[Incident] = []
        self._newest = self._folder
        self.verdict: Finding | None = None

    def begin(self, attempt: int, seats: Sequence[int]) -> None:
        """A new attempt begins. Args: seats, place by rank."""
        self._attempt, self._seats[attempt], self._stall, self.verdict = attempt, tuple(seats), None, None
        self._watch = StallWatch(floor_s=self._job.stall_floor_s, stall_s=self._job.stall_s, now_ns=time.monotonic_ns())
        for number, path in rings_of(self._folder):
            if number < attempt - RINGS_KEPT and number not in [job.case.attempt for job in self._dead]:
                path.unlink(missing_ok=True)

    @property
    def children(self) -> list[Child]:
        """Whom to wait for besides the ranks."""
        return self._looker.children

    def spared(self) -> list[int]:
        """Processes that outlive an attempt: a look at the dead. One at living ranks ends with them."""
        if self._looker.looks_at_living:
            self._take(self._looker.end("the ranks ended meanwhile"))
        return [child.pid for child in self.children]

    def look(self, ranks: Sequence[Child]) -> None:
        """Do what is due. Costs next to nothing most of the time, and never waits."""
        now_ns = time.monotonic_ns()
        self._take(self._looker.poll(now_ns))
        self._tell()
        if now_ns < self._due_ns:
            return
        self._due_ns = now_ns + int(LOOK_S * 1e9)
        made = _made(ranks)
        self._watch.look(now_ns, made=made, said=sum(len(child.events) for child in ranks))
        if self._watch.is_quiet and now_ns >= self._inside_ns:
            self._inside_ns = now_ns + int(INSIDE_S * 1e9)
            self._watch.look_inside(now_ns, *_marks([ring_path(self._folder, self._attempt, child.rank) for child in ranks]))
        if self._stall is not None and not self._watch.is_quiet:
            self._moved_again()
        if not self.children and self.verdict is None:
            if self._watch.is_stalled and (self._stall is None or self._watch.quiet_s >= self._stall.due_s):
                self._look_at_living(ranks)
            elif self._dead and all(_is_back(child) for child in ranks):
                self._look_at_dead(ranks)

    @property
    def stalled_since_ns(self) -> int:
        """When the last progress was seen, monotonic."""
        return self._watch.moved_ns

    @property
    def newest(self) -> Path:
        """The folder of the newest incident."""
        return self._newest

    def known(self) -> str:
        """What was found about the running stall, for the words of the end that it comes to; "" when nothing was."""
        finding = self._stall.finding if self._stall else None
        return "" if finding is None or finding.verdict == "healthy" else f" Diagnosis of the stall before: {finding.explanation}"

    # A stall

    def _look_at_living(self, ranks: Sequence[Child]) -> None:
        stall = self._stall = self._stall or _Stall(self._case(ranks, threshold_s=self._watch.threshold_s))
        stall.due_s = AGAIN * self._watch.quiet_s
        stall.case = replace(
            stall.case, looks=stall.looks, known=stall.finding, stalled_s=self._watch.quiet_s, planned=self._planned(ranks)
        )
        self._take(self._looker.start([Job(stall.case, None)], ranks))

    def _case(self, ranks: Sequence[Child], *, threshold_s: float = 0.0) -> Case:
        number, folder = new_folder(self._folder, reserved=[job.case.number for job in self._dead])
        self._newest = folder
        return Case(
            folder=folder, number=number, attempt=self._attempt, world_size=len(ranks), is_over=False, ranks=self._seen(ranks),
            planned=self._planned(ranks), threshold_s=threshold_s, detected_ns=time.time_ns(),
        )  # fmt: skip

    def _found_living(self, finding: Finding) -> None:
        stall = self._stall
        if stall is None:  # they moved meanwhile
            return
        stall.looks, stall.finding = stall.looks + 1, finding
        if is_definite(finding, looks=stall.looks):
            self.verdict = finding
        elif finding.verdict != "healthy" and (finding.verdict != "inconclusive" or stall.looks > 1):
            self._keep(stall.case, finding, waits(), is_over=False, is_news=not stall.is_told)
            stall.is_told = True

    def _moved_again(self) -> None:
        """The stall ended by itself."""
        if self._looker.looks_at_living:
            self._looker.end("")
        stall, self._stall = self._stall, None
        if stall is not None and stall.is_told and stall.finding is not None:
            self._keep(stall.case, stall.finding, waits(ended=True), is_over=True)
        elif stall is not None:
            shutil.rmtree(stall.case.folder, ignore_errors=True)

    # The end of an attempt

    def bury(self, ranks: Sequence[Child], *, lost: int | None, planned: str, is_last: bool, next_size: int) -> None:
        """An attempt ends before its time: settle blame and mitigation now, have it looked into later.

        Args: ranks, reaped unless the deadline passed; lost, a rank that died or was stopped without a word; planned, the planned fault
        behind it; is_last, no attempt follows; next_size, planned ranks of the next one.
        """
        stall, self._stall = self._stall, None
        case = stall.case if stall else self._case(ranks)
        planned = planned or (case.planned if stall else planted(self._job))
        case = replace(case, is_over=True, ranks=self._seen(ranks), planned=planned)
        if stall is not None:
            case = replace(case, looks=stall.looks, known=stall.finding, stalled_s=self._watch.quiet_s)
        before = self._places.left_out
        self._blame(case, blamed(self.verdict) if self.verdict else () if lost is None else (lost,))
        new = [rank for rank, place in enumerate(self._seats[self._attempt]) if place in self._places.left_out and place not in before]
        size = len(self._places.seats(next_size, self._job.parallel))
        done = mitigation(is_last=is_last, left_out=new, world_size=len(ranks), next_size=size)
        if self.verdict is not None:  # looked into while the ranks lived
            self._keep(case, self.verdict, done, is_over=True)
        else:
            self._dead.append(Job(case, done))

    def _rest(self) -> None:
        """Wait for a look that is under way."""
        until_ns = time.monotonic_ns() + int(END_S * 1e9)
        while self.children and time.monotonic_ns() < until_ns:
            wait_for(self.children, self._link, until_ns)
            self._take(self._looker.poll(time.monotonic_ns()))
        self._take(self._looker.end("the run was over before it was looked into"))

    def finish(self) -> None:
        """Look into what is left, and tell it. Raises EOFError when the flow process hung up."""
        self._moved_again()
        self._rest()
        if self._dead:
            self._look_at_dead([])
            self._rest()
        for message in self._untold:
            self._link.sendall(frame(message))
        self._untold = []

    def _look_at_dead(self, ranks: Sequence[Child]) -> None:
        dead, self._dead = self._dead, []
        self._take(self._looker.start(dead, ranks))

    def _blame(self, case: Case, ranks: Sequence[int]) -> None:
        if case.planned and not self._job.blame_planned:
            return
        place = self._seats[case.attempt][ranks[0]] if ranks else None
        self._places.blame(case.number, place)
        self._note("blame", attempt=case.attempt, incident=case.number, place=place)

    # What comes of it

    def _take(self, found: Sequence[tuple[Job, Finding]]) -> None:
        for (case, done), finding in found:
            if done is None:
                self._found_living(finding)
                continue
            if finding.confidence in SURE:  # it knows more than who died first
                self._blame(case, blamed(finding))
            self._keep(case, finding, done, is_over=True)

    def _keep(self, case: Case, finding: Finding, done: Mitigation, *, is_over: bool, is_news: bool = True) -> None:
        """Write the record and have it told. Args: is_over, it is the last word on the incident; is_news, there was none before."""
        with contextlib.suppress(OSError):  # a disk that is full costs the record, not the run
            write_record(case, finding, done)
        if is_over:
            self._note("incident", number=case.number, attempt=case.attempt, verdict=finding.verdict, finding=finding.kind)
        if is_over or is_news:
            self._untold.append(Incident(
                folder=str(case.folder), number=case.number, attempt=case.attempt, verdict=finding.verdict, kind=finding.kind,
                ranks=finding.ranks, text=finding.explanation, mitigation=done.text, planned=case.planned, is_over=is_over,
            ))  # fmt: skip

    def _tell(self) -> None:
        """Tell the flow process, unless it is slow to listen: later then."""
        while self._untold and is_writable(self._link):
            self._link.sendall(frame(self._untold.pop(0)))

    def _planned(self, ranks: Sequence[Child]) -> str:
        fault = last_fault(ranks)
        return fault_text(fault) if fault else planted(self._job)

    def _seen(self, ranks: Sequence[Child]) -> tuple[Seen, ...]:
        return tuple(_seen(child, ring_path(self._folder, self._attempt, child.rank)) for child in ranks)


def _made(ranks: Sequence[Child]) -> int:
    """Updates that this attempt has made."""
    begun = next((int(event.fields.get("step", 0)) for child in ranks for event in child.events if event.name == "loaded"), 0)
    return max(max((child.pulse.updates for child in ranks), default=0) - begun, 0)


def _is_back(child: Child) -> bool:
    """Whether a rank has made an update in this attempt, or had none left to make."""
    return any(event.name in ("step", "finished") for event in child.events)


def _marks(rings: Sequence[Path]) -> tuple[dict[int, Hashable], set[str]]:
    """Where each rank's program is, by rank, and the phases; a rank whose ring cannot be read is left out."""
    marks: dict[int, Hashable] = {}
    phases = set()
    for rank, path in enumerate(rings):
        with contextlib.suppress(Exception):  # absent, torn, of another version: nothing is known then
            with RingReader(path) as ring:
                marker = ring.marker()
                marks[rank] = (marker.step, marker.micro, marker.since_ns, ring.issued())
            phases.add(marker.phase)
    return marks, phases


def _seen(child: Child, ring: Path) -> Seen:
    """A rank as its leader saw it last."""
    failure = child.failure
    exit_code = 1 if failure else 0 if child.result else None
    if child.over and not (child.stopped or child.spared_state) and exit_code is None:
        exit_code = child.exit_code
    result = "ok" if child.result else f"{failure.kind}: {failure.text}".removeprefix(": ") if failure else ""
    return Seen(
        rank=child.rank, pid=child.pid, log=child.log, ring=ring, exit_code=exit_code, result=result,
        state="T" if child.stopped else child.spared_state,
    )  # fmt: skip


def faults_of(ranks: Sequence[Child]) -> list[Event]:
    """The planned faults that ranks announced, in order."""
    return sorted((event for child in ranks for event in child.events if event.name == "fault"), key=lambda event: event.t_ns)


def last_fault(ranks: Sequence[Child]) -> Event | None:
    """The planned fault that was announced last."""
    return next(reversed(faults_of(ranks)), None)


def planted(job: TrainJob) -> str:
    """What the whole job was given so that it goes wrong, in words: its end is expected."""
    poison = f"poison: {job.poison.kind} on rank {job.poison.rank} at step {job.poison.step}" if job.poison else ""
    return poison or (f"planted defect: {job.defect}" if job.defect else "")
