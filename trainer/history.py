"""The history of a run's folder, group.jsonl: what a leader knows, on disk as it happens, so that the next one goes on. Torch-free.

Append-only, one JSON line each; by `kind`:

    attempt  attempt, world_size, call (the run_group call it belongs to), t_ns    written before its ranks are forked
    rank     attempt, rank, pid, started                                           a forked rank, so that its end can be verified
    event    attempt, rank, name, t_ns, fields                                     by the rank; of its updates the first, then some
    death    the fields of trainer.deaths.Death                                    the end of an attempt before its time
    blame    attempt, incident, place (null = nobody)                              who is to blame for it, last word (trainer/blame.py)
    incident number, attempt, verdict, finding                                     a stall or death that was looked into

Attempts are numbered through the folder's whole life. Deaths, events and faults count within one call of run_group only: between calls
nobody was waiting, and the machine may have been started anew.
"""

import contextlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from trainer.children import Pid
from trainer.deaths import Death, fault_text
from trainer.wires import Loss, Pulse
from trainer.world import Event, World
from validation.canonical import canonical_json

FILE = "group.jsonl"
LEADER_LOST = "unplanned: the leader was lost"
STEP_SAID_NS = 100_000_000  # between two updates that the leader hears of: each of its awakenings takes time from a rank
STEP_NOTE_NS = 5_000_000_000  # between two updates in the history, after an attempt's first: a new leader takes the rest for not done


@dataclass(frozen=True, slots=True, kw_only=True)
class Past:
    """What was before a leader started."""

    world_sizes: tuple[int, ...]  # of every attempt that stands in the folder; 0 where an attempt left no rank
    first_attempt: int  # of this call
    begun_ns: int | None  # when this call's first attempt started, monotonic; None before it
    events: tuple[Event, ...]  # of this call
    deaths: tuple[Death, ...]  # of this call, lost leaders included, in order
    blames: Mapping[int, int | None]  # of this call: place by incident


def note(folder: Path, kind: str, **fields: Any) -> None:
    """Append one line. A line that the disk refuses is lost: the group goes on, and only a new leader would miss it."""
    with contextlib.suppress(OSError):
        fd = os.open(folder / FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(fd, b"\n" * _is_torn(folder / FILE) + canonical_json({"kind": kind, **fields}) + b"\n")
        finally:
            os.close(fd)


def note_event(folder: Path, event: Event) -> None:
    """Append an event."""
    note(folder, "event", **asdict(event))


class Recorder:
    """One rank's `emit`: writes what a new leader would need into the history before it tells the leader, who may be about to die.

    Every update is in the pulse; of the first, the last and some between the leader is told.
    """

    def __init__(self, folder: Path, world: World, say: Callable[[Event], None], pulse: Pulse, *, steps: int | None = None) -> None:
        """Args: steps, updates in all, unless the rank says it itself when it has loaded."""
        self._folder = folder
        self._world = world
        self._say = say
        self._pulse = pulse
        self._steps = steps
        self._samples = 0  # of updates that were not told
        self._said_ns = -STEP_SAID_NS  # when an update was last told
        self._stepped_ns = -STEP_NOTE_NS  # when one was last written down

    def __call__(self, event: str, **fields: Any) -> None:
        now_ns = time.monotonic_ns()
        if event == "step":
            self._pulse.updates = fields["step"]
            self._samples += fields["samples"]
            if now_ns - self._said_ns < STEP_SAID_NS and fields["step"] != self._steps:
                return
            fields["samples"], self._samples, self._said_ns = self._samples, 0, now_ns
        self._steps = fields.get("steps", self._steps)
        made = Event(name=event, rank=self._world.rank, attempt=self._world.attempt, t_ns=now_ns, fields=fields)
        if event != "step":
            note_event(self._folder, made)
        elif now_ns - self._stepped_ns > STEP_NOTE_NS:
            note_event(self._folder, made)
            self._stepped_ns = now_ns
        self._say(made)


def read_lines(folder: Path) -> list[dict[str, Any]]:
    """Every whole line, oldest first; a torn one, and what is no record, is left out."""
    path = folder / FILE
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with contextlib.suppress(ValueError):
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, dict) and "kind" in line]


def newest_sealed(folder: Path) -> int | None:
    """The newest step that any attempt announced as sealed; None when there is none."""
    events = (line for line in read_lines(folder) if line.get("kind") == "event" and line.get("name") == "sealed")
    return max((int(line["fields"]["step"]) for line in events), default=None)


def ranks_of(lines: Sequence[Mapping[str, Any]]) -> list[Pid]:
    """The rank processes of the newest attempt; older ones were gone before it started."""
    numbered = [line for line in lines if line["kind"] == "rank"]
    newest = max((line["attempt"] for line in numbered), default=0)
    return [Pid(pid=line["pid"], started=line["started"]) for line in numbered if line["attempt"] == newest]


def deaths_of(lines: Sequence[Mapping[str, Any]], call: int) -> list[Death]:
    """The deaths that leaders of one call wrote down."""
    attempts = {line["attempt"] for line in _attempts(lines, call)}
    return [Death(**_without_kind(line)) for line in lines if line["kind"] == "death" and line["attempt"] in attempts]


def past_of(folder: Path, call: int, losses: Sequence[Loss]) -> Past:
    """Read what a new leader has to know. Args: call, asked_ns of its request; losses, of the leaders before it in that call."""
    lines = read_lines(folder)
    sizes = _world_sizes(folder, lines)
    own = _attempts(lines, call)
    first = own[0]["attempt"] if own else len(sizes)
    events = tuple(Event(**_without_kind(line)) for line in lines if line["kind"] == "event" and line["attempt"] >= first)
    lost = [_death_of(loss, own, events) for loss in losses if own]
    deaths = sorted([*deaths_of(lines, call), *lost], key=lambda death: death.noticed_ns)
    blames = {line["incident"]: line["place"] for line in lines if line["kind"] == "blame" and line["attempt"] >= first}
    return Past(
        world_sizes=sizes, first_attempt=first, begun_ns=own[0]["t_ns"] if own else None, events=events, deaths=tuple(deaths), blames=blames
    )  # fmt: skip


def _death_of(loss: Loss, attempts: Sequence[Mapping[str, Any]], events: Sequence[Event]) -> Death:
    """A lost leader ends the attempt that it had started last; it counts as planned when one of that attempt's ranks announced it."""
    last = [line for line in attempts if line["t_ns"] <= loss.noticed_ns][-1:] or attempts[:1]
    attempt, world_size = last[0]["attempt"], last[0]["world_size"]
    inside = [event for event in events if event.attempt == attempt]
    planned = [event for event in inside if event.name == "fault" and fault_text(event).startswith("launcher")]
    return Death(
        fault=fault_text(planned[-1]) if planned else LEADER_LOST,
        attempt=attempt,
        world_size=world_size,
        died_ns=planned[-1].t_ns if planned else loss.noticed_ns,
        noticed_ns=loss.noticed_ns,
        reaped_ns=loss.gone_ns,
        reached=max((int(event.fields["step"]) for event in inside if event.name == "step"), default=0),
        what=f"its leader went away without a word in attempt {attempt}",
    )


def _world_sizes(folder: Path, lines: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
    """By attempt, from the history; where it is missing, from the folders that ranks have left."""
    sizes: dict[int, int] = {}
    for path in folder.glob("parts/attempt-*"):
        sizes[int(path.name.removeprefix("attempt-"))] = sum(1 for _ in path.glob("rank-*"))
    sizes |= {line["attempt"]: line["world_size"] for line in lines if line["kind"] == "attempt"}
    return tuple(sizes.get(attempt, 0) for attempt in range(max(sizes, default=-1) + 1))


def _attempts(lines: Sequence[Mapping[str, Any]], call: int) -> list[Mapping[str, Any]]:
    return [line for line in lines if line["kind"] == "attempt" and line["call"] == call]


def _without_kind(line: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in line.items() if key != "kind"}


def _is_torn(path: Path) -> bool:
    """Whether the last line has no end, as a machine that went down leaves it."""
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"
