"""Who died first, and how long each death cost: pure functions on what a group's leader has seen. Torch-free."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from trainer.config import GENTLE_KINDS
from trainer.wires import Failure
from trainer.world import Event
from validation import errors
from validation.records import Recovery

# What a healthy rank raises when a peer is gone or never comes: an echo of the cause. Losing a peer may echo that peer's own time-out.
_TIMED_OUT = ("Timed out", "timeout", "timed out")
_ECHOES = ("gloo", "NCCL", "Connection closed by peer", "Connection reset by peer", "DistBackendError", "ProcessGroup")


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """A rank that ended before its time, as far as its leader knew when it noticed."""

    rank: int
    failure: Failure | None  # what it raised; None: it died without a word
    fault: Event | None  # the planned and deadly fault that it announced in this attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Death:
    """The end of an attempt before its time; monotonic ns."""

    fault: str
    attempt: int
    world_size: int
    died_ns: int
    noticed_ns: int
    reaped_ns: int
    reached: int = 0  # updates done when it ended
    what: str = ""  # who ended, how, where


def echo(end: End) -> int:
    """How far a rank's end is from the cause: 0, it may be the cause; 1, it waited too long for a peer; 2, it lost a peer."""
    if end.failure is None or end.failure.kind or not any(word in end.failure.text for word in _ECHOES):
        return 0
    return 1 if any(word in end.failure.text for word in _TIMED_OUT) else 2


def is_input_error(failure: Failure | None) -> bool:
    """True for an error that a person has to mend: starting again would only show it again."""
    return failure is not None and bool(failure.kind) and issubclass(getattr(errors, failure.kind), errors.InputError)


def culprit(ends: Sequence[End]) -> End:
    """The rank to blame among those that ended in the same moment.

    A planned fault first, then a mistake of the input, then a death without a word (no peer's trouble causes one), then what is least an
    echo, then the lowest rank.
    """
    return min(ends, key=lambda end: (end.fault is None, not is_input_error(end.failure), end.failure is not None, echo(end), end.rank))


def planned_fault(end: End, faults: Sequence[Event]) -> Event | None:
    """The planned fault behind an end: the rank's own, else the attempt's last one (a skipped collective ends the other ranks)."""
    return end.fault or (faults[-1] if faults else None)


def deadly(events: Sequence[Event]) -> list[Event]:
    """The "fault" events that can end a rank; a delay cannot."""
    return [event for event in events if event.name == "fault" and fault_text(event).partition(":")[0] not in GENTLE_KINDS]


def fruitless(deaths: Sequence[Death]) -> int:
    """How many attempts in a row, up to the last one, ended without an update beyond the best one so far."""
    best = count = 0
    for death in deaths:
        count = 0 if death.reached > best else count + 1
        best = max(best, death.reached)
    return count


def fault_text(event: Event) -> str:
    """A "fault" event's fault in its text form."""
    return str(event.fields["fault"])


def recoveries(deaths: Sequence[Death], events: Sequence[Event], world_sizes: Sequence[int]) -> tuple[Recovery, ...]:
    """One Recovery for each death, closed by the first later attempt in which every rank made an update or finished.

    Args: events of all attempts, any order; world_sizes by attempt. An attempt that died before its first update closes nothing: its
    time counts as import of the death before it, since the way back was not over. A death without a way back has no Recovery.
    """
    found = []
    for death in deaths:
        later = range(death.attempt + 1, len(world_sizes))
        back = next((attempt for attempt in later if len(_first_updates(events, attempt)) == world_sizes[attempt]), None)
        if back is not None:
            found.append(_recovery(death, [event for event in events if event.attempt == back], world_sizes[back]))
    return tuple(found)


def _first_updates(events: Sequence[Event], attempt: int) -> dict[int, int]:
    """Rank -> when it made its first update, or finished with none left to make (the death came after the last one)."""
    first: dict[int, int] = {}
    for event in events:
        if event.attempt == attempt and event.name in ("step", "finished"):
            first[event.rank] = min(event.t_ns, first.get(event.rank, event.t_ns))
    return first


def _recovery(death: Death, back: Sequence[Event], world_size: int) -> Recovery:
    imported_ns = max((event.t_ns for event in back if event.name == "imported"), default=death.reaped_ns)
    joined_ns = max((event.t_ns for event in back if event.name == "joined"), default=imported_ns)
    loads = [event for event in back if event.name == "loaded"]
    loaded_ns = max((event.t_ns for event in loads), default=joined_ns)
    first_ns = max(_first_updates(back, back[0].attempt).values())
    marks = (death.died_ns, death.noticed_ns, death.reaped_ns, imported_ns, joined_ns, loaded_ns, first_ns)
    detect_s, teardown_s, import_s, rendezvous_s, load_s, first_step_s = ((b - a) / 1e9 for a, b in pairwise(marks))
    return Recovery(
        fault=death.fault,
        world_size=death.world_size,
        resumed_world_size=world_size,
        resumed_from_step=int(loads[-1].fields.get("step", 0)) if loads else 0,
        detect_s=detect_s,
        teardown_s=teardown_s,
        import_s=import_s,
        rendezvous_s=rendezvous_s,
        load_s=load_s,
        first_step_s=first_step_s,
        total_s=(first_ns - death.died_ns) / 1e9,
    )
