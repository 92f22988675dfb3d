"""Sentences, and a finding filled from what all of them share."""

from collections.abc import Iterable

from validation.finding import Confidence, Finding, FindingKind, Operation, Verdict
from validation.hang_meanings import action_of
from validation.hang_scene import Lane, Scene
from validation.hang_signatures import Agreement, spell
from validation.hang_texts import is_time_out

SHOWN = 8  # ranks or lines that are listed by name; of more, the count
DEADLY = frozenset({-4, -6, -7, -8, -9, -11})  # signals that kill, from outside or from a fault


def listed(ranks: Iterable[int]) -> str:
    """Ranks in words: "rank 3", "ranks 0, 1 and 2", "ranks 0, 1, ... (1,020 in all)"."""
    found = sorted(ranks)
    if len(found) > SHOWN:
        return f"ranks {', '.join(map(str, found[: SHOWN - 2]))}, ... ({len(found):,} in all)"
    if len(found) < 2:
        return f"rank {found[0]}" if found else "no rank"
    return f"ranks {', '.join(map(str, found[:-1]))} and {found[-1]}"


def sentence(text: str) -> str:
    """The text with a capital at its start, and nothing else changed."""
    return text[:1].upper() + text[1:]


def verb(ranks: Iterable[int], one: str, many: str) -> str:
    """The verb that fits the number of ranks."""
    return one if len(tuple(ranks)) == 1 else many


def named(lane: Lane) -> str:
    """The group in words."""
    return f'group "{lane.name}"'


def numbered(key: Agreement | None, lane: Lane, seq: int) -> str:
    """An operation and its place in words: "all_reduce of 8 Float (seq 7 of group "0")"."""
    return f"{spell(key) if key is not None else 'an operation'} (seq {seq} of {named(lane)})"


def at(place: str) -> str:
    """Where, as the end of a sentence's part."""
    return f" at {place}" if place else ""


def operation(scene: Scene, lane: Lane, seq: int, rank: int | None = None, key: Agreement | None = None) -> Operation:
    """A place in a group's order, with the call site of `rank`."""
    where = scene.where(rank, lane, seq) if rank is not None else ""
    return Operation(op=key.op if key is not None else "", seq=seq, group=lane.name, where=where)


def side_lines(scene: Scene, lane: Lane, seq: int, sides: Iterable[tuple[Agreement, tuple[int, ...]]]) -> tuple[str, ...]:
    """One line an answer: who issued what, where."""
    lines = []
    for key, ranks in sides:
        where = scene.where(ranks[0], lane, seq)
        lines.append(f"{named(lane)} seq {seq}: {listed(ranks)} issued {spell(key)}{at(where)}")
    return tuple(lines[:SHOWN])


def has_timed_out(scene: Scene) -> bool:
    """Somebody gave up waiting."""
    return any(is_time_out(one.result) for one in scene.evidence.ranks.values())


def is_crash(scene: Scene) -> bool:
    """A process was killed by a signal, and not only after the others had given up waiting."""
    killed = [one.exit_code for one in scene.evidence.ranks.values() if one.exit_code is not None and one.exit_code in DEADLY]
    return bool(killed) and not (has_timed_out(scene) and set(killed) <= {-9})


def waiting_ranks(scene: Scene, culprits: Iterable[int] = ()) -> tuple[int, ...]:
    """Ranks that are inside an operation and are not to blame."""
    blamed = set(culprits)
    return tuple(rank for rank, rows in scene.rows.items() if (rows.heads or rows.peers) and rank not in blamed)


def found(
    scene: Scene, kind: FindingKind, *, ranks: tuple[int, ...] = (), explanation: str, lines: Iterable[str] = (),
    verdict: Verdict | None = None, confidence: Confidence = "high", collective: Operation | None = None,
    first_visible: Operation | None = None, group: tuple[str, ...] | None = None, cause: str = "", phase: str = "", step: int = -1,
    lateness_s: float = 0.0,
) -> Finding:  # fmt: skip
    """A finding with its action, its victims and its verdict; what markers know of a lone culprit is added."""
    place = collective or Operation()
    marker = scene.rows[ranks[0]].dump.marker if len(ranks) == 1 and ranks[0] in scene.rows else None
    return Finding(
        verdict=verdict or ("crash" if is_crash(scene) else "hang"), kind=kind, ranks=tuple(sorted(ranks)), cause=cause,
        group=group if group is not None else ((place.group,) if place.group else ()), collective=place,
        first_visible=first_visible or place, step=step if step >= 0 or marker is None else marker.step,
        phase=phase or (marker.phase if marker is not None else ""), lateness_s=lateness_s, waiting=waiting_ranks(scene, ranks),
        explanation=explanation, action=action_of(kind), evidence=(*lines, *scene.evidence.problems[:SHOWN]), confidence=confidence,
    )  # fmt: skip
