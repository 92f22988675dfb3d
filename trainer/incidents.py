"""An incident: what ranks left of a stall or a death, what the diagnosis says of it, and its folder. Runs in a child of the leader.

    <run>/incidents/007/rank0.hang.json rank0.hang2.json rank0.stack.txt ... states.json exitcodes.json rank0.result.txt    the evidence
                        incident.json    comes last: version, number, attempt, world_size, threshold_s, stalled_s, detected_ns (wall clock),
                                         planned, finding (the form of `seatrial diagnose --json`), mitigation

Nothing here may end a run: what cannot be read or diagnosed is an inconclusive finding that says so.
"""

import contextlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.blame import Mitigation, in_words
from trainer.evidence import Taken, Watched, finish, take
from trainer.ring import read_ring
from trainer.wires import load_target
from validation.canonical import canonical_json
from validation.diagnose import diagnose
from validation.errors import ReleaseError
from validation.finding import Finding, document
from validation.flight import Dump, Evidence, RankEvidence

FOLDER, RECORD = "incidents", "incident.json"
VERSION = 1
KEPT = 20  # incidents of a run's folder; the oldest go first, those in the object store stay
GAP_S = 0.8  # between two snapshots: slowness is told from a hang by what moved in between; three times a slow step of a small job


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """One rank as its leader saw it last."""

    rank: int
    pid: int
    log: Path
    ring: Path
    exit_code: int | None = None  # of a rank that ended by itself
    result: str = ""  # what it raised
    state: str = ""  # of its process before it was ended for another rank's sake; "T": a signal stopped it; "" = see for yourself


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is to be looked into."""

    folder: Path  # of the incident
    number: int
    attempt: int
    world_size: int
    ranks: tuple[Seen, ...]
    is_over: bool  # the ranks are gone: their rings are what is left
    looks: int = 0  # into the same stall before
    known: Finding | None = None  # what an earlier look said, while the ranks lived
    planned: str = ""  # the planned fault behind it
    threshold_s: float = 0.0
    stalled_s: float = 0.0
    detected_ns: int = 0  # wall clock


def ring_path(run: Path, attempt: int, rank: int) -> Path:
    """Where a rank of an attempt records what it does; trainer.recording names it, which needs torch."""
    return run / "flight" / f"attempt-{attempt}-rank-{rank}.ring"


def rings_of(run: Path) -> list[tuple[int, Path]]:
    """The rings, and files of stacks, that stand in a run's folder, with their attempts."""
    found = [(path.name.split("-"), path) for path in (run / "flight").glob("attempt-*-rank-*.*")]
    return [(int(parts[1]), path) for parts, path in found if parts[1].isdecimal()]


def new_folder(run: Path, *, reserved: Sequence[int] = ()) -> tuple[int, Path]:
    """The next incident's number and its folder; old ones beyond KEPT are removed. Args: reserved, numbers whose folder is to come."""
    root = run / FOLDER
    standing = sorted(int(path.name) for path in root.glob("[0-9]*") if path.name.isdecimal())
    for number in standing[: max(0, len(standing) - KEPT + 1)]:
        shutil.rmtree(root / f"{number:03d}", ignore_errors=True)
    number = max([0, *standing, *reserved]) + 1
    return number, root / f"{number:03d}"


def look_into(cases: Sequence[Case], read: str) -> list[Finding]:
    """Take the evidence of each case, diagnose it and keep it in the case's folder. Raises nothing.

    Args: read, "module:function" that makes evidence of such a folder, as `seatrial diagnose` does; "": the rings alone.
    """
    return [_looked_into(case, read) for case in cases]


def _looked_into(case: Case, read: str) -> Finding:
    try:
        found = _diagnosed(_evidence(case, read))
    except Exception as error:  # the disk, another version's ring, a mistake of ours: the run goes on as if nobody had looked
        found = unknown(f"the evidence could not be taken ({type(error).__name__}: {error})")
    if found.verdict not in ("inconclusive", "healthy"):
        return found
    return case.known or (_seen_by_leader(case, found) if case.is_over else found)


def _seen_by_leader(case: Case, found: Finding) -> Finding:
    """When the records show nothing: a rank that was stopped before anybody had to wait for it, or nothing that is known."""
    stopped = tuple(seen.rank for seen in case.ranks if seen.state == "T")
    if stopped:
        who = in_words(stopped).capitalize()
        return Finding(
            verdict="hang", kind="frozen_process", ranks=stopped,
            explanation=f"{who} {'was' if len(stopped) == 1 else 'were'} stopped by a signal (state T) and did not go on.",
            action="find who stops processes on that machine: a debugger, job control, a container that is paused",
        )  # fmt: skip
    return unknown("an attempt ended, and what its ranks recorded shows nothing wrong") if found.verdict == "healthy" else found


def _diagnosed(evidence: Evidence) -> Finding:
    try:
        return diagnose(evidence)
    except Exception as error:
        return unknown(f"the diagnosis itself failed ({type(error).__name__}: {error})")


def unknown(why: str) -> Finding:
    """The finding when there is none."""
    return Finding(
        verdict="inconclusive", kind="insufficient_evidence", confidence="low", explanation=f"Not diagnosed: {why}.",
        action="Read the logs of the ranks; the evidence that there is stands in the incident's folder.",
    )  # fmt: skip


def _evidence(case: Case, read: str) -> Evidence:
    """Have snapshots written into the folder, two of living ranks and one of what is left of dead ones, and read it back."""
    number = 2 * case.looks + 1
    watched = [Watched(rank=seen.rank, pid=seen.pid, ring=seen.ring, log=seen.log) for seen in case.ranks]
    moments = [(take(watched, case.folder, number=number), _dumps(case))]
    if case.is_over:
        codes = {seen.rank: seen.exit_code for seen in case.ranks if seen.exit_code is not None}
        finish(case.folder, exit_codes=codes, results={seen.rank: seen.result for seen in case.ranks if seen.result})
        _put_states(case, number, moments[0][0].states)
    else:
        time.sleep(GAP_S)
        moments.append((take(watched, case.folder, number=number + 1), _dumps(case)))
    if not read:
        return _of_rings(case, moments)
    evidence: Evidence = load_target(read)(case.folder)
    return evidence


def _put_states(case: Case, number: int, found: Mapping[int, str]) -> None:
    """Say of ranks that were ended for another one's sake what they did before; all of them are gone by now."""
    path = case.folder / "states.json"
    states = json.loads(path.read_text())
    states[str(number)] = {str(seen.rank): seen.state or found.get(seen.rank, "") for seen in case.ranks}
    path.write_bytes(canonical_json(states))


def _dumps(case: Case) -> dict[int, Dump]:
    found = {}
    for seen in case.ranks:
        with contextlib.suppress(OSError, ReleaseError):  # it never came to record anything
            found[seen.rank] = read_ring(seen.ring)
    return found


def _of_rings(case: Case, moments: Sequence[tuple[Taken, Mapping[int, Dump]]]) -> Evidence:
    """Evidence of the rings alone: no stacks, and nothing that torch's C++ began by itself."""
    ranks = {}
    for seen in case.ranks:
        dumps = tuple(rings[seen.rank] for _, rings in moments if seen.rank in rings)
        is_late = case.is_over and seen.result not in ("", "ok")  # what a rank was in that raised is over for it
        ranks[seen.rank] = RankEvidence(
            rank=seen.rank, dumps=() if is_late else dumps, late_dumps=dumps if is_late else (), exit_code=seen.exit_code,
            result=seen.result, state=seen.state or moments[-1][0].states.get(seen.rank, ""),
        )  # fmt: skip
    return Evidence(world_size=case.world_size, ranks=ranks)


def write_record(case: Case, finding: Finding, done: Mitigation) -> None:
    """Write incident.json, whole or not at all. Raises OSError."""
    record: dict[str, Any] = {
        "version": VERSION, "number": case.number, "attempt": case.attempt, "world_size": case.world_size, "threshold_s": case.threshold_s,
        "stalled_s": case.stalled_s, "detected_ns": case.detected_ns, "planned": case.planned, "finding": document(finding),
        "mitigation": {"action": done.action, "text": done.text, "left_out": list(done.left_out)},
    }  # fmt: skip
    case.folder.mkdir(parents=True, exist_ok=True)
    new = case.folder / f".{RECORD}"
    new.write_bytes(canonical_json(record))
    new.replace(case.folder / RECORD)
