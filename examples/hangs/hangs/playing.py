"""Plays a case: forks its ranks in a warm process, watches their rings, takes snapshots when they stand still, and has them diagnosed.

    <folder>/flight/attempt-0-rank-R.ring   the ranks' rings       <folder>/logs/rank-R.log   what they printed
    <folder>/evidence/rankR.hang.json rankR.hang2.json rankR.stack.txt ... states.json exitcodes.json rankR.result.txt
    <folder>/plain/rankR.hang.json          torch's own flight recorder at the same moment, and nothing of ours

Runs behind `trainer.ranks.call`: nothing of it outlives the call. Linux only.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from hangs.catalogue import Case, case_of
from hangs.plain import complete_plain, keep_plain
from hangs.reading import EVIDENCE, PLAIN, evidence_of, result_of, ring_of
from trainer.children import Child, fork_child
from trainer.evidence import Watched, take
from trainer.ring import RingReader
from validation.diagnose import diagnose
from validation.errors import EvidenceError, RankError
from validation.finding import Finding
from validation.flight import Marker

POLL_S = 0.05
FLOOR_S = 1.5  # these programs make a step in milliseconds; whoever is silent for so long is looked at
FACTOR = 5.0  # times the longest time without progress so far
TIMEOUT_SHARE = 0.6  # of the groups' time-out: not later than this
PRELUDE = 4  # operations before a program's own
GAP_S = 1.0  # between two snapshots
MIDWAY_S = 0.4  # after the prelude
SPREAD_S = 0.05  # between the ranks of one snapshot, where it is spread
DEADLINE_S = 20.0  # of a case
DEATH_S = 0.05  # survivors hear of a death within a second: the first look is before that
ASKED_S = 0.1  # between two looks into torch's own recorders
SURE = ("high", "medium")


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """One finding, and when it stood."""

    finding: Finding
    why: str  # "stall", "death", "midway", "end"
    threshold_s: float  # how long without progress was too long at that time
    after_s: float  # since the threshold was passed, a death was seen, or the look was due, the pause between snapshots included


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What came of a case."""

    looks: tuple[Look, ...]
    seconds: float

    @property
    def last(self) -> Look:
        """The word that counts: the last one in which somebody or something is found; what was said at the end, where there is none."""
        found = [look for look in self.looks if look.finding.verdict not in ("inconclusive", "healthy")]
        return found[-1] if found else self.looks[-1]


def play(name: str, folder: str, *, entries: int = 0) -> Played:
    """Play a case in an empty folder. Args: entries of the rings, 0 = the case's own number."""
    case, root = case_of(name), Path(folder)
    for part in ("flight", "logs", EVIDENCE, PLAIN):
        (root / part).mkdir(parents=True)
    stage = _Stage(case, root, entries or case.entries)
    try:
        return stage.play()
    finally:
        stage.close()


@dataclass(slots=True)
class _Progress:
    """How far the ranks are, and for how long they have stood still."""

    latest_s: float  # evidence is taken before the time-out, which wipes it out
    marks: dict[int, tuple[int, Marker]] = field(default_factory=dict)
    moved: float = 0.0  # monotonic
    longest_s: float = 0.0  # without progress
    begun: bool = False  # the prelude is over on all ranks

    def look(self, marks: dict[int, tuple[int, Marker]], now: float) -> None:
        if marks != self.marks:
            if self.begun:
                self.longest_s = max(self.longest_s, now - self.moved)
            self.marks, self.moved = marks, now

    @property
    def threshold_s(self) -> float:
        return min(max(FLOOR_S, FACTOR * self.longest_s), self.latest_s)


class _Stage:
    """One case from its first fork to its end."""

    def __init__(self, case: Case, root: Path, entries: int) -> None:
        self.case, self.root, self.entries = case, root, entries
        self.evidence = root / EVIDENCE
        self.children: list[Child] = []
        self.codes: dict[int, int] = {}  # rank -> exit code
        self.looks: list[Look] = []
        self.number = 0  # of the newest snapshot
        self.reader, self.writer = os.pipe()  # ranks whose program is over wait for its end
        self.began = time.monotonic()
        self.progress = _Progress(latest_s=TIMEOUT_SHARE * case.timeout_s)
        self.readers: dict[int, RingReader] = {}
        self.asked = 0.0  # when torch's recorders were last asked
        self.quiet_until = 0.0  # a stall that was looked into is not looked into again before

    def play(self) -> Played:
        for rank in range(self.case.world_size):
            inherited = [self.writer, *(fd for child in self.children for fd in (child.pidfd, child.inbox.fd))]
            self.children.append(fork_child(rank, self._work(rank), log=self._log(rank), inherited=inherited))
        self._watch()
        return Played(looks=tuple(self.looks), seconds=time.monotonic() - self.began)

    def close(self) -> None:
        """End every rank; none lives to see another's death and to write of it."""
        living = [child for child in self.children if child.rank not in self.codes]
        for signum in (signal.SIGSTOP, signal.SIGKILL):
            for child in living:
                os.kill(child.pid, signum)
        for child in living:
            os.waitpid(child.pid, 0)
        for child in self.children:
            child.close()
        for reader in self.readers.values():
            reader.close()
        os.close(self.reader)
        os.close(self.writer)

    def _work(self, rank: int) -> Callable[..., None]:
        return lambda _say, _pulse: _live(self.case, rank, self.root, self.entries, self.reader)

    def _watch(self) -> None:
        until = self.began + DEADLINE_S
        heard_of: set[int] = set()  # ranks whose death was looked into
        while time.monotonic() < until:
            time.sleep(POLL_S)
            self._listen()
            self._ask_plainly()
            now = time.monotonic()
            self.progress.look(self._marks(), now)
            self.progress.begun = self.progress.begun or self._is_prelude_over()
            died = {child.rank for child in self.children if child.over and self._fell(child.rank)}
            if died and not self.progress.begun:
                raise RankError(f"{self.case.id}: rank {min(died)} ended before its program began.\n{self._log(min(died)).read_text()}")
            is_silent = self.case.look == "afterwards"
            if self._all_done() and (is_silent or not died - heard_of):
                return self._final()
            if is_silent:
                continue
            if self.case.look in ("midway", "spread") and not self.looks and self._started(now):
                self._judge("midway", now, spread=self.case.look == "spread")
            elif died - heard_of:
                heard_of |= died
                if self._judge("death", now):
                    return None
            elif self.progress.begun and now >= (passed := max(self.progress.moved + self.progress.threshold_s, self.quiet_until)):
                if self._judge("stall", passed):
                    return None
                self.quiet_until = time.monotonic() + self.progress.threshold_s
        return self._final()

    def _listen(self) -> None:
        for child in self.children:
            child.listen()
            if child.rank not in self.codes:
                pid, status = os.waitpid(child.pid, os.WNOHANG)
                if pid:
                    self.codes[child.rank] = os.waitstatus_to_exitcode(status)
                    child.over = True

    def _marks(self) -> dict[int, tuple[int, Marker]]:
        """How far each rank's ring has come."""
        found: dict[int, tuple[int, Marker]] = {}
        for rank in range(self.case.world_size):
            with contextlib.suppress(FileNotFoundError, EvidenceError):  # not made yet
                reader = self.readers.get(rank) or RingReader(ring_of(self.root, rank))
                self.readers[rank] = reader
                found[rank] = (reader.issued(), reader.marker()._replace(beat_ns=0))
        return found

    def _is_prelude_over(self) -> bool:
        marks = self.progress.marks
        return len(marks) == self.case.world_size and all(issued >= PRELUDE for issued, _ in marks.values())

    def _started(self, now: float) -> bool:
        ready = self.progress.begun and all(marker.step > 1 for _, marker in self.progress.marks.values())
        if not ready:
            self.quiet_until = now
        return ready and now >= self.quiet_until + MIDWAY_S

    def _fell(self, rank: int) -> bool:
        return self._result(rank) != "ok"

    def _result(self, rank: int) -> str:
        path = result_of(self.root, rank)
        return path.read_text() if path.exists() else ""

    def _all_done(self) -> bool:
        return all(child.over or self._result(child.rank) for child in self.children)

    def _snapshot(self, *, spread: bool = False) -> None:
        self.number += 1
        watched = [
            Watched(rank=child.rank, pid=child.pid, ring=ring_of(self.root, child.rank), log=self._log(child.rank))
            for child in self.children
        ]
        for group in [[one] for one in watched] if spread else [watched]:
            take(group, self.evidence, number=self.number)
            if spread:
                time.sleep(SPREAD_S)
        if self.number <= 2:
            keep_plain(self.root, self._living(), self.number)

    def _ask_plainly(self) -> None:
        """Keep torch's own last words of ranks that may die, now and then: nobody can ask the dead. Late ranks are left in peace."""
        due = time.monotonic() >= self.asked + ASKED_S
        if due and not self.number and self.case.look == "stall" and self.case.kind not in ("late_rank", "uniform_slowness"):
            self.asked = time.monotonic()
            keep_plain(self.root, self._living(), 1)

    def _log(self, rank: int) -> Path:
        return self.root / "logs" / f"rank-{rank}.log"

    def _living(self) -> list[int]:
        return [child.rank for child in self.children if child.rank not in self.codes]

    def _judge(self, why: str, due: float, *, spread: bool = False) -> bool:
        """Two snapshots and a finding; True when the case is over with it."""
        if why == "death":
            time.sleep(DEATH_S)
        self._snapshot(spread=spread)
        time.sleep(GAP_S)
        self._listen()
        self._snapshot(spread=spread)
        finding = self._find(why, due)
        return why == "death" or (why == "stall" and finding.verdict in ("hang", "crash") and finding.confidence in SURE)

    def _final(self) -> None:
        """What is said when all is over; where nothing else was to be seen, the evidence is what stood after the time-out."""
        due = time.monotonic()
        self._listen()
        if self.case.look != "afterwards":
            self._snapshot()
        self._find("end", due)

    def _find(self, why: str, due: float) -> Finding:
        (self.evidence / "exitcodes.json").write_text(json.dumps({str(rank): code for rank, code in sorted(self.codes.items())}))
        complete_plain(self.root)
        finding = diagnose(evidence_of(self.root, self.case.world_size))
        threshold_s = self.progress.threshold_s
        self.looks.append(Look(finding=finding, why=why, threshold_s=threshold_s, after_s=time.monotonic() - due))
        return finding


def _live(case: Case, rank: int, root: Path, entries: int, end: int) -> None:
    from hangs.living import live  # torch, which the process that reads a played case has no use for

    live(case, rank, root, entries=entries, end=end)
