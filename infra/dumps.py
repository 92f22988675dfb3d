"""A folder of evidence -> `validation.flight.Evidence`: dumps of the flight recorder, stacks, exit codes, results.

Read are folders as docs/diagnose.md names them: `rankN.hang.json`, `rankN.hang2.json`, ..., `rankN.after.json`, `rankN.stack.txt`,
`rankN.result.txt`, `exitcodes.json`, `states.json`; torch's own files (`nccl_trace_rank_0`, `trace_0.json`, JSON or pickle); several
snapshots by name, number or sub-folder. What cannot be used is said in `Evidence.problems`, and the rest is used.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from infra.dump_names import INCIDENTS, Found, Kind, find, same_job
from infra.dump_pool import Parsed, read_files
from infra.dump_runs import Member, moment_ns, one_run
from infra.dump_steps import StepRow, timeline_of
from infra.stack_files import parse_stack
from infra.timelines import read_timeline
from validation.errors import DataError
from validation.flight import Evidence, RankEvidence, ThreadStack

TEXT_BYTES = 4 * 2**20  # of a stack or a result
NAMED = 12  # folders or files that a message names
GONE = "X"  # a process's state in states.json
T = TypeVar("T")
Texts = Mapping[int, Sequence[tuple[Found, str]]]  # by rank, oldest first


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a folder holds."""

    evidence: Evidence
    found: tuple[Found, ...]  # every file that was taken for evidence
    cut: frozenset[int]  # ranks whose newest dump is cut off: that they are behind says nothing


def read_evidence(folder: Path) -> Evidence:
    """All that a folder says of one job. Raises DataError when it holds nothing that can be read, or several jobs."""
    return read_folder(folder).evidence


def read_folder(folder: Path) -> Reading:
    """The same, with what it was read from. A folder with nothing but traces, rings or a timeline gives evidence without ranks.

    Raises: DataError when there is no such folder, it holds several jobs, or nothing in it can be read.
    """
    found, problems = job_files(folder)
    members, unread = _parsed([item for item in found if item.kind == "dump"])
    members, mixed = one_run(members)
    problems += [*unread, *mixed]
    codes = _by_rank(_document(found, "exits", problems))
    states = _states(_document(found, "states", problems))
    newest_states = {rank: state for number in sorted(states) for rank, state in states[number].items()}
    stacks, results = _texts(found, "stack", problems), _texts(found, "result", problems)
    numbers = sorted({member.dump.rank for member in members} | codes.keys() | newest_states.keys() | stacks.keys() | results.keys())
    by_rank = {rank: list(own) for rank, own in groupby(sorted(members, key=_rank_of), _rank_of)}
    ranks = {}
    for rank in numbers:
        over = {number for number, seen in states.items() if seen.get(rank) == GONE}
        ranks[rank] = _rank_evidence(rank, by_rank.get(rank, []), codes.get(rank), newest_states.get(rank, ""), stacks, results, over)
    timeline = _timeline(found, problems)
    if timeline is None:
        timeline = timeline_of({rank: steps for rank, own in by_rank.items() if (steps := _newest_steps(own))})
    if not ranks and timeline is None and not any(item.kind in ("trace", "ring") for item in found):
        raise DataError(_nothing(folder, found, problems))
    incident = _document(found, "incident", problems)
    known = max([member.parsed.world_size for member in members], default=0)
    world_size = known or _whole(incident.get("world_size")) or max(codes, default=-1) + 1  # exit codes are of all ranks
    cut = frozenset(rank for rank, own in by_rank.items() if _newest_is_cut(own))
    evidence = Evidence(world_size=world_size, ranks=ranks, timeline=timeline, problems=tuple(dict.fromkeys(problems)))
    return Reading(evidence=evidence, found=tuple(found), cut=cut)


def job_files(folder: Path) -> tuple[list[Found], list[str]]:
    """The files of the one job that a folder holds, and what could not be looked at.

    Raises: DataError when there is no such folder, or it holds the folders of several jobs.
    """
    if not folder.is_dir():
        what = "is a file, not a folder" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}, so there is nothing to diagnose. Give the folder that holds the ranks' dumps.")
    try:
        found, problems = find(folder)
    except PermissionError as error:
        raise DataError(
            f"{folder} cannot be looked into ({error.strerror}). Nothing was diagnosed. Ask for the right to read it."
        ) from None
    jobs = same_job(found)
    if len(jobs) < 2:
        return next(iter(jobs.values()), []), problems
    if "" in jobs:
        others = sorted(job for job in jobs if job and not job.startswith(f"{INCIDENTS}/"))
        if others:
            problems.append(f"folders with evidence of their own are left aside: {_some(others)}; diagnose one of them by giving its path")
        incidents = [_incident(folder, job) for job in sorted(jobs) if job.startswith(f"{INCIDENTS}/")]
        if incidents:
            problems.append(
                f"evidence of earlier moments of this run: {_some(incidents[-NAMED:])}; diagnose one of them by giving its path"
            )
        return jobs[""], problems
    raise DataError(
        f"{folder} holds the evidence of {len(jobs)} jobs: {_some(sorted(jobs))}. One diagnosis is about one job, so nothing was "
        f"diagnosed. Give one of them, e.g. seatrial diagnose {folder / min(jobs)}"
    )


def _incident(folder: Path, job: str) -> str:
    """An incident of a run, and what was found in it at the time."""
    value: Any = _guarded(folder / job / "incident.json", lambda path: json.loads(_head(path, TEXT_BYTES)), None, [])
    finding = value.get("finding") if isinstance(value, dict) else None
    if not isinstance(finding, dict):
        return job
    ranks = finding.get("ranks")
    who = f" of rank {', '.join(map(str, ranks[:NAMED]))}" if isinstance(ranks, list) and ranks else ""
    return f"{job} ({finding.get('verdict')}: {str(finding.get('kind')).replace('_', ' ')}{who})"


def _parsed(found: Sequence[Found]) -> tuple[list[Member], list[str]]:
    """Dumps that could be read, in the order of the files, and what is to be said of files."""
    members, problems = [], []
    results: list[Parsed] = read_files([(item.path, item.rank) for item in found])
    for item, parsed in zip(found, results, strict=True):
        problems += [f"{item.path.name} {note}" for note in parsed.notes]
        if parsed.dump is None:
            continue
        if item.rank >= 0 and parsed.dump.rank != item.rank:
            problems.append(f"{item.path.name} is of rank {parsed.dump.rank} by what it says itself, and was taken for that rank's")
        members.append(Member(item, parsed))
    return members, _gathered(problems, [item.path.name for item in found])


def _gathered(problems: Sequence[str], names: Sequence[str]) -> list[str]:
    """The same thing said of many files is said once."""
    by_note: dict[str, list[str]] = {}
    for problem in problems:
        name = next(name for name in names if problem.startswith(f"{name} "))
        by_note.setdefault(problem[len(name) + 1 :], []).append(name)
    return [f"{_some(said)} {note}" if len(said) == 1 else f"{_some(said)}, each: {note}" for note, said in by_note.items()]


def _rank_evidence(
    rank: int, members: Sequence[Member], code: int | None, state: str, stacks: Texts, results: Texts, over: AbstractSet[int]
) -> RankEvidence:  # fmt: skip
    """One rank's. Args: over, numbers of snapshots that were taken when the process was gone."""
    ordered = sorted(members, key=lambda member: (moment_ns(member.dump), member.found.number, str(member.found.path)))
    moments: list[tuple[ThreadStack, ...]] = [threads for _, text in stacks.get(rank, ()) if (threads := parse_stack(text))]
    result = results[rank][-1][1].strip() if rank in results else ""
    has_raised = result not in ("", "ok")  # of a rank that raised and is gone, what it was in is over
    is_late = [member.found.is_late or (has_raised and member.found.number in over) for member in ordered]
    return RankEvidence(
        rank=rank,
        dumps=tuple(member.dump for member, late in zip(ordered, is_late, strict=True) if not late),
        late_dumps=tuple(member.dump for member, late in zip(ordered, is_late, strict=True) if late),
        stacks=tuple(moments), exit_code=code, result=result, state=state,
        host=next((member.parsed.host for member in ordered if member.parsed.host), ""),
    )  # fmt: skip


def _rank_of(member: Member) -> int:
    return member.dump.rank


def _newest_steps(members: Sequence[Member]) -> Sequence[StepRow]:
    newest = max(members, key=lambda member: (moment_ns(member.dump), member.found.number))
    return newest.parsed.steps


def _newest_is_cut(members: Sequence[Member]) -> bool:
    current = [member for member in members if not member.found.is_late]
    newest = max(current, key=lambda member: (moment_ns(member.dump), member.found.number), default=None)
    return newest is not None and newest.parsed.is_cut


def without_cut(reading: Reading) -> Evidence:
    """The evidence without the dumps of ranks whose newest file is cut off, as if they had left none: older ones would show them behind."""
    ranks = {rank: replace(known, dumps=()) if rank in reading.cut else known for rank, known in reading.evidence.ranks.items()}
    return replace(reading.evidence, ranks=ranks)


def _texts(found: Sequence[Found], kind: Kind, problems: list[str]) -> dict[int, list[tuple[Found, str]]]:
    """A rank's texts of one kind, oldest first."""
    texts: dict[int, list[tuple[Found, str]]] = {}
    for item in sorted((item for item in found if item.kind == kind), key=lambda item: (item.rank, item.number, str(item.path))):
        data = _guarded(item.path, lambda path: _head(path, TEXT_BYTES), b"", problems)
        if data:
            texts.setdefault(item.rank, []).append((item, data.decode("utf-8", errors="replace")))
    return texts


def _document(found: Sequence[Found], kind: Kind, problems: list[str]) -> Mapping[str, Any]:
    """The one JSON object of a kind; empty where there is none that can be read."""
    for item in (item for item in found if item.kind == kind):
        value: Any = _guarded(item.path, lambda path: json.loads(_head(path, TEXT_BYTES)), None, problems)
        if isinstance(value, dict):
            return value
        if value is not None:
            problems.append(f"{item.path.name} is no JSON object and was left out")
    return {}


def _guarded(path: Path, read: Callable[[Path], T], missing: T, problems: list[str]) -> T:
    try:
        return read(path)
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({error.strerror})")
    except (ValueError, RecursionError) as error:
        problems.append(f"{path.name} is no whole JSON ({error}) and was left out")
    return missing


def _head(path: Path, size: int) -> bytes:
    with path.open("rb") as file:
        return file.read(size)


def _by_rank(document: Mapping[str, Any]) -> dict[int, int]:
    """Whole numbers by rank; what is none is passed over."""
    numbers = {_whole(key): _whole(value) for key, value in document.items()}
    return {rank: value for rank, value in numbers.items() if rank is not None and value is not None}


def _states(document: Mapping[str, Any]) -> dict[int, dict[int, str]]:
    """Each rank's state by snapshot: {"1": {"0": "S"}, "2": ...}; {"0": "S"} is taken for the first one's."""
    is_nested = any(isinstance(value, dict) for value in document.values())
    nested = document if is_nested else {"1": document}
    return {
        number: {rank: str(state) for key, state in states.items() if (rank := _whole(key)) is not None}
        for text, states in nested.items()
        if isinstance(states, dict) and (number := _whole(text)) is not None
    }


def _whole(value: Any) -> int | None:
    try:
        return None if value is None or isinstance(value, bool) else int(value)
    except (TypeError, ValueError, OverflowError):
        return None


def _timeline(found: Sequence[Found], problems: list[str]) -> pd.DataFrame | None:
    paths = [item.path for item in found if item.kind == "timeline"]
    if not paths:
        return None
    try:
        return read_timeline(paths[0])
    except DataError as error:
        problems.append(str(error))
        return None


def _nothing(folder: Path, found: Sequence[Found], problems: Sequence[str]) -> str:
    """What to say when nothing could be read."""
    why = f"Of {len(found)} files none could be read: {'; '.join(problems[:NAMED])}." if found or problems else "It holds no such file."
    return (
        f"{folder} has no flight-recorder dumps, traces or timeline that can be read, so nothing was diagnosed. {why} Give a folder with a "
        "file a rank, e.g. rank0.hang.json or nccl_trace_rank_0; docs/diagnose.md names all that is read."
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
