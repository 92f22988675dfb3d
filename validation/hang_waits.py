"""Who waits for whom: each operation that ranks are inside, the members that did not come, and what those do instead."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter

from validation.flight import DEFAULT_GROUP
from validation.hang_majority import sides_at
from validation.hang_scene import Lane, Scene
from validation.hang_signatures import Agreement
from validation.hang_tracks import SILENCE_NS


@dataclass(frozen=True, slots=True, kw_only=True)
class Wait:
    """One operation of a group, and the ranks that are inside it."""

    lane: Lane
    seq: int
    ranks: tuple[int, ...]
    absent: tuple[int, ...]  # members that had not issued it when the snapshot was taken
    seen_twice: bool  # no rank entered it between the first snapshot and the last

    @property
    def name(self) -> tuple[str, tuple[int, ...], int]:
        return (self.lane.name, self.lane.members, self.seq)


def waits_of(scene: Scene) -> tuple[Wait, ...]:
    """Every operation that somebody is inside; those with the most ranks first, then by group and number."""
    inside: dict[tuple[str, tuple[int, ...], int], list[int]] = {}
    lanes: dict[tuple[str, tuple[int, ...], int], Lane] = {}
    for rank, rows in scene.rows.items():
        for head in rows.heads:
            lane = scene.lane(rank, head)
            if lane is not None:
                name = (lane.name, lane.members, head.seq)
                inside.setdefault(name, []).append(rank)
                lanes[name] = lane
    found = [_wait(scene, lanes[name], name[2], tuple(ranks)) for name, ranks in inside.items()]
    found = [_without_later(wait, found) for wait in found]
    return tuple(sorted(found, key=lambda wait: (-len(wait.ranks), wait.lane.name, wait.lane.members, wait.seq)))


def _without_later(wait: Wait, waits: Iterable[Wait]) -> Wait:
    """The operation, with those that are inside a later one of the same group, as their stack shows, counted as through."""
    later = {rank for other in waits if other.lane is wait.lane and other.seq > wait.seq for rank in other.ranks}
    return wait if not later & set(wait.absent) else replace(wait, absent=tuple(rank for rank in wait.absent if rank not in later))


def _wait(scene: Scene, lane: Lane, seq: int, ranks: tuple[int, ...]) -> Wait:
    same = _in_same_by_stack(scene, lane, seq)
    absent = tuple(rank for rank in lane.members if not lane.reached(rank, seq) and rank not in same)
    return Wait(lane=lane, seq=seq, ranks=tuple(sorted({*ranks, *same})), absent=absent, seen_twice=_is_old(scene, lane, seq, ranks))


def _is_old(scene: Scene, lane: Lane, seq: int, ranks: Iterable[int]) -> bool:
    """Whether all these ranks were inside already when the first snapshot was taken, as far as there are two."""
    for rank in ranks:
        rows = scene.rows[rank]
        if rows.before is not None:
            numbers = {group.name: number for number, group in enumerate(rows.dump.groups)}
            if (numbers.get(lane.name, -1), seq) not in rows.before:
                return False
    return True


def is_moment(scene: Scene) -> bool:
    """Whether no rank was seen twice: what ranks are in may be over the next moment."""
    return all(rows.before is None for rows in scene.rows.values())


def _in_same_by_stack(scene: Scene, lane: Lane, seq: int) -> tuple[int, ...]:
    """Members without any record whose stack stands in the same operation."""
    unknown = [rank for rank in lane.members if rank not in scene.rows]
    sides = sides_at(scene, lane, seq) if unknown else ()
    op = sides[0][0].op if sides else ""
    return tuple(rank for rank in unknown if (stands := scene.stands(rank)) is not None and _same_operation(stands.op, op))


def _same_operation(called: str, recorded: str) -> bool:
    """Whether a called function is what the recorder names so: it leaves out "_into_tensor", "_object" and the like."""
    return bool(called) and bool(recorded) and (called == recorded or called.startswith(recorded) or recorded.startswith(called))


def late_arrivals(wait: Wait) -> Mapping[int, float]:
    """Members that did come, long after the others: rank -> seconds behind the middle one of those that waited."""
    waiting = sorted(wait.lane.tracks[rank].created_ns(wait.seq) for rank in wait.ranks if rank in wait.lane.tracks)
    if not waiting:
        return {}
    middle = waiting[len(waiting) // 2]
    found = {}
    for rank in wait.absent:
        track = wait.lane.tracks.get(rank)
        created = track.created_ns(wait.seq) if track is not None else 0
        if created and created - middle > SILENCE_NS:
            found[rank] = (created - middle) / 1e9
    return found


def answer(scene: Scene, wait: Wait) -> Agreement | None:
    """What most of the waiting ranks issued."""
    sides = sides_at(scene, wait.lane, wait.seq, wait.ranks)
    return sides[0][0] if sides else None


def edges(waits: Iterable[Wait]) -> dict[Wait, tuple[Wait, ...]]:
    """For each operation those that its missing members are inside instead."""
    waits = tuple(waits)
    by_rank: dict[int, list[int]] = {}
    for number, wait in enumerate(waits):
        for rank in wait.ranks:
            by_rank.setdefault(rank, []).append(number)
    graph = {}
    for number, wait in enumerate(waits):
        found = {other for rank in wait.absent for other in by_rank.get(rank, ()) if other != number}
        graph[wait] = tuple(waits[other] for other in sorted(found))
    return graph


def cycle_of(waits: tuple[Wait, ...]) -> tuple[Wait, ...]:
    """Operations that wait for each other in a circle; () = none. All that lie on a circle with the first one found."""
    graph = {number: [waits.index(other) for other in others] for number, others in enumerate(edges(waits).values())}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        start = min(error.args[1])
        return tuple(waits[number] for number in sorted(_reachable(graph, start)) if start in _reachable(graph, number))
    return ()


def _reachable(graph: Mapping[int, list[int]], start: int) -> set[int]:
    """Numbers that can be come to from `start`, which is among them only on a circle."""
    found: set[int] = set()
    ahead = [start]
    while ahead:
        for number in graph[ahead.pop()]:
            if number not in found:
                found.add(number)
                ahead.append(number)
    return found


def with_hidden_members(waits: tuple[Wait, ...]) -> tuple[Wait, ...]:
    """The waits, where groups of unknown members may lack ranks: two that are complete and still stuck lack each other's.

    A group's members are known from who has operations there when nobody recorded them; a rank that never came is invisible. Operations in
    which everyone known has arrived cannot both be stuck, so the ranks of each belong to the other.
    """
    stuck = [wait for wait in waits if not wait.absent and not wait.lane.is_known and wait.lane.name != DEFAULT_GROUP]
    if len(stuck) < 2:
        return waits
    everyone = {rank for wait in stuck for rank in wait.ranks}
    filled = {wait.name: tuple(sorted(everyone - set(wait.lane.members))) for wait in stuck}
    return tuple(_filled(wait, filled.get(wait.name, ())) for wait in waits)


def _filled(wait: Wait, hidden: tuple[int, ...]) -> Wait:
    absent = tuple(sorted({*wait.absent, *hidden}))
    return replace(wait, absent=absent)


def circle_with(wait: Wait, waits: tuple[Wait, ...], hidden: tuple[int, ...]) -> tuple[Wait, ...]:
    """The circle of an operation of a group with unknown members and those in which its hidden members are inside."""
    others = tuple(other for other in waits if other is not wait and set(hidden) & set(other.ranks) and set(wait.ranks) & set(other.absent))
    return (_filled(wait, hidden), *others)
