"""What the files of a folder are, by their names: whose dump, which snapshot, taken before or after the end."""

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Kind = Literal["dump", "stack", "result", "exits", "states", "incident", "timeline", "trace", "ring"]
MAX_FILES, MAX_DEPTH = 200_000, 4
RUN_FILE, OF_A_RUN = "group.jsonl", frozenset({"parts", "logs", "checkpoints"})  # a run of ours and its folders that hold no evidence
INCIDENTS = "incidents"
DUMP_SUFFIXES = frozenset({"", ".json", ".pkl", ".pickle", ".bin", ".dump", ".trace", ".fr", ".hang", ".after", ".snapshot", ".txt"})
NO_EVIDENCE = frozenset({".md", ".rst", ".html", ".py", ".ipynb", ".csv", ".png", ".svg"})  # pages and programs, whatever their names say
WHOLE = {
    "exitcodes.json": "exits", "exit_codes.json": "exits", "exit-codes.json": "exits", "states.json": "states",
    "incident.json": "incident", "timeline.parquet": "timeline",
}  # fmt: skip
_RANK = re.compile(r"rank[\s_.\-]*(\d+)", re.IGNORECASE)
_LAST = re.compile(r"(\d+)(?!.*\d)")
_NUMBER = re.compile(r"(?:snap(?:shot)?|hang|dump|stack|moment|sample|time|t)?[\s_.\-]*(\d+)", re.IGNORECASE)
_LATE = re.compile(r"(?<![a-z])(after|late|post)(?![a-z])", re.IGNORECASE)
_STACK = re.compile(r"(?<![a-z])(stacks?|pyspy|py-spy|traceback)(?![a-z])", re.IGNORECASE)
_RESULT = re.compile(r"(?<![a-z])(results?)(?![a-z])", re.IGNORECASE)
_PART = re.compile(  # a folder that holds a part of one job's evidence, not a job of its own
    r"^((snap(shot)?s?|hang|dumps?|stacks?|moment|sample|time|t|after|late|post|rank|node|host|flight|evidence|traces?)[\s_.\-]*\d*|\d)$",
    re.I,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One file of evidence."""

    path: Path
    kind: Kind
    rank: int = -1  # -1 = of the whole job, or told inside
    number: int = 1  # of the snapshot
    is_late: bool = False  # taken after a time-out or the end
    job: str = ""  # folder of its job below the one that was searched, "" = that one

    def key(self) -> tuple[int, bool, int, str]:
        """Order that does not depend on the file system."""
        return self.rank, self.is_late, self.number, str(self.path)


def find(folder: Path) -> tuple[list[Found], list[str]]:
    """Every file below a folder that may be evidence, sorted, and what could not be looked at, in words."""
    problems: list[str] = []
    found = [item for path in _files(folder, problems) if (item := classify(folder, path)) is not None]
    return sorted(found, key=Found.key), problems


def classify(folder: Path, path: Path) -> Found | None:
    """What a file is by its name; None = nothing that is read here."""
    relative = path.relative_to(folder)
    parents, name = relative.parts[:-1], relative.name
    job = "/".join(_job_parts(parents))
    if name in WHOLE:
        return Found(path=path, kind=WHOLE[name], job=job)  # type: ignore[arg-type]
    if name.endswith(".parquet"):
        return Found(path=path, kind="trace", job=job) if name.startswith("trace") else None
    if name.endswith(".ring"):
        return Found(path=path, kind="ring", rank=_rank(name, parents)[0], job=job)
    rank, rest = _rank(name, parents)
    suffix = Path(name).suffix.lower()
    kind: Kind = "stack" if _STACK.search(rest) else "result" if _RESULT.search(rest) else "dump"
    if rank < 0 or name.startswith(".") or suffix in NO_EVIDENCE or (kind == "dump" and (suffix == ".txt" or not _may_be_dump(suffix))):
        return None
    is_late = any(_LATE.search(text) for text in (rest, *parents))
    return Found(path=path, kind=kind, rank=rank, number=_number(rest, parents), is_late=is_late, job=job)


def same_job(found: Sequence[Found]) -> dict[str, list[Found]]:
    """Files by job. Folders with different ranks, as of several machines, are one job; with the same ranks they are several."""
    jobs: dict[str, list[Found]] = {}
    for item in found:
        jobs.setdefault(item.job, []).append(item)
    ranks = [rank for items in jobs.values() for rank in sorted({item.rank for item in items if item.kind in ("dump", "ring")})]
    if len(jobs) > 1 and ranks and sorted(ranks) == list(range(len(ranks))):
        return {"": list(found)}
    return jobs


def _may_be_dump(suffix: str) -> bool:
    return suffix in DUMP_SUFFIXES or suffix[1:].isdigit()


def _job_parts(parents: Sequence[str]) -> Sequence[str]:
    end = len(parents)
    while end and _PART.match(parents[end - 1]):
        end -= 1
    return parents[:end]


def _rank(name: str, parents: Sequence[str]) -> tuple[int, str]:
    """The rank a name tells, and what is left of the name."""
    if match := _RANK.search(name):
        return int(match[1][:9]), name[: match.start()] + name[match.end() :]
    for parent in reversed(parents):
        if match := _RANK.search(parent):
            return int(match[1][:9]), name
    stem = name.removesuffix(".json")
    if match := _LAST.search(stem):
        return int(match[1][:9]), stem[: match.start()] + stem[match.end() :]
    return -1, name


def _number(rest: str, parents: Sequence[str]) -> int:
    """Which snapshot: "hang2", "hang.2", a folder "snapshot-2"; 1 where nothing tells."""
    texts = (rest, *(parent for parent in reversed(parents) if _PART.match(parent) and not re.match(r"rank|node|host", parent, re.I)))
    return next((int(match[1][:9]) for text in texts if (match := _NUMBER.search(text))), 1)


def _files(folder: Path, problems: list[str]) -> Iterator[Path]:
    """Regular files, in sorted order. Links to files are followed, links to folders are not; pipes and devices are never opened."""
    count = 0
    unreadable: list[OSError] = []
    for root, folders, names in os.walk(folder, onerror=unreadable.append):
        here = Path(root)
        linked = [name for name in folders if (here / name).is_symlink()]
        problems += [f"{(here / name).relative_to(folder)} is a link to a folder and was not followed" for name in sorted(linked)]
        not_evidence = OF_A_RUN if RUN_FILE in names else frozenset()
        folders[:] = sorted(set(folders) - set(linked) - not_evidence) if len(here.relative_to(folder).parts) < MAX_DEPTH else []
        for name in sorted(names):
            count += 1
            if count > MAX_FILES:
                problems.append(f"there are more than {MAX_FILES} files; only the first were looked at")
                return
            if _is_readable(here / name, folder, problems):
                yield here / name
    problems += [f"{error.filename} cannot be looked into ({error.strerror})" for error in unreadable]


def _is_readable(path: Path, folder: Path, problems: list[str]) -> bool:
    try:
        mode = path.stat().st_mode
    except OSError as error:
        what = "is a link that leads nowhere" if path.is_symlink() else f"cannot be looked at ({error.strerror})"
        problems.append(f"{path.relative_to(folder)} {what}")
        return False
    if not stat.S_ISREG(mode):
        problems.append(f"{path.relative_to(folder)} is no regular file and was not opened")
    elif path.is_symlink() and not path.resolve().is_relative_to(folder.resolve()):
        problems.append(f"{path.relative_to(folder)} is a link to a file outside this folder; it was read")
    return stat.S_ISREG(mode)
