"""Everybody came to one operation with equal arguments, and it does not end: the network, a root, or a name that means two groups."""

from validation.finding import Finding
from validation.flight import DEFAULT_GROUP
from validation.hang_reasons import is_failed, stopped_inside
from validation.hang_scene import Lane, Scene
from validation.hang_signatures import waits_for_all
from validation.hang_texts import is_echo, is_well
from validation.hang_waits import Wait, answer, is_moment
from validation.hang_words import at, found, listed, named, numbered, operation, sentence, verb


def clash(scene: Scene, waits: tuple[Wait, ...]) -> Finding | None:
    """A group name with member lists that contradict each other, in use."""
    for name, lists in sorted(scene.clashes.items()):
        lanes = scene.by_name.get(name, ())
        inside = [wait for wait in waits if wait.lane.name == name]
        if lanes:
            lane = inside[0].lane if inside else lanes[0]
            return _membership(scene, lane, inside[0].seq if inside else max(_last(lane), 1), lists)
    return None


def _last(lane: Lane) -> int:
    return max((track.last for track in lane.tracks.values()), default=-1)


def _membership(scene: Scene, lane: Lane, seq: int, lists: tuple[tuple[int, ...], ...]) -> Finding:
    rank = min(lane.tracks) if lane.tracks else None
    spoken = " and ".join(str(list(one)) for one in lists[:4])
    return found(
        scene, "group_membership_mismatch", collective=operation(scene, lane, seq, rank), group=(lane.name,),
        verdict="hang" if any(rows.heads for rows in scene.rows.values()) or is_failed(scene) else "inconclusive",
        explanation=f"{sentence(named(lane))} has different members on different ranks: {spoken}.",
        lines=tuple(f"{named(lane)}: {listed(one)} {verb(one, 'holds', 'hold')} the member list {list(one)}" for one in lists[:8]),
    )  # fmt: skip


def split(scene: Scene) -> Finding | None:
    """One name under which everyone issued the same, but some are through and others failed or are stuck: two groups behind one name."""
    for lane in scene.lanes:
        if lane.is_known or lane.name == DEFAULT_GROUP or len(lane.tracks) < 3:
            continue
        seq = _last(lane)
        there = [rank for rank, track in lane.tracks.items() if track.last == seq and track.position(seq) >= 0]
        key = scene.keys[int(lane.tracks[there[0]].key[-1])]
        through = [rank for rank in there if is_well(scene.of(rank).result) or _went_on(lane, rank, seq)]
        stuck = [rank for rank in there if rank not in through and (is_echo(scene.of(rank).result) or _is_inside(scene, lane, rank, seq))]
        is_one = len({int(lane.tracks[rank].key[-1]) for rank in there}) == 1
        if is_one and len(there) == len(lane.tracks) and through and stuck and waits_for_all(key.op):
            return _split(scene, lane, seq, tuple(through), tuple(stuck))
    return None


def _went_on(lane: Lane, rank: int, seq: int) -> bool:
    """Whether the rank is through this operation, as its snapshot says."""
    return lane.tracks[rank].is_finished(seq)


def _is_inside(scene: Scene, lane: Lane, rank: int, seq: int) -> bool:
    return any(head.seq == seq and scene.lane(rank, head) is lane for head in scene.rows[rank].heads)


def _split(scene: Scene, lane: Lane, seq: int, through: tuple[int, ...], stuck: tuple[int, ...]) -> Finding:
    key = scene.keys[int(lane.tracks[stuck[0]].key[-1])]
    sides = f"{listed(through)} {verb(through, 'is', 'are')} through while {listed(stuck)} {verb(stuck, 'is', 'are')} stuck"
    return found(
        scene, "group_membership_mismatch", collective=operation(scene, lane, seq, stuck[0], key), confidence="medium", verdict="hang",
        explanation=f"In {numbered(key, lane, seq)} {sides}, although it ends for all or for nobody: the name stands for different members "
        "on different ranks.",
        lines=(f"{listed(through)}: through seq {seq} of {named(lane)}", f"{listed(stuck)}: stuck or failed in seq {seq} of {named(lane)}"),
    )  # fmt: skip


def is_stale(scene: Scene, wait: Wait) -> bool:
    """Whether some are through what ends for all at once, by a lone snapshot: then it was not taken of all at one time."""
    key = answer(scene, wait)
    through = [rank for rank in wait.lane.tracks if rank not in wait.ranks and wait.lane.reached(rank, wait.seq)]
    return bool(through) and key is not None and waits_for_all(key.op) and is_moment(scene)


def judge_stuck(scene: Scene, wait: Wait) -> Finding:
    """All members are in the operation, or through it, and their arguments agree."""
    key = answer(scene, wait)
    through = tuple(rank for rank in wait.lane.members if rank not in wait.ranks and wait.lane.reached(rank, wait.seq))
    spoken = numbered(key, wait.lane, wait.seq)
    place = operation(scene, wait.lane, wait.seq, wait.ranks[0], key)
    lines = (f"{listed(wait.ranks)}: inside {spoken}{at(place.where)}",)
    if stopped := stopped_inside(scene, wait.ranks):
        return found(
            scene, "frozen_process", ranks=stopped, collective=place, verdict="hang", lines=lines,
            confidence="high" if scene.of(stopped[0]).state else "medium",
            explanation=f"All are in {spoken} with equal arguments, but the {verb(stopped, 'process', 'processes')} of {listed(stopped)} "
            f"{verb(stopped, 'is', 'are')} stopped, and with {verb(stopped, 'it', 'them')} the backend's part of the operation.",
        )  # fmt: skip
    if through and key is not None and not waits_for_all(key.op) and key.root < 0 and len(wait.ranks) > 1:
        return found(
            scene, "root_mismatch", collective=place, confidence="low", lines=(*lines, f"{listed(through)}: through it"),
            explanation=f"Every rank issued {spoken} alike as far as is recorded, but {listed(wait.ranks)} are stuck while "
            f"{listed(through)} {verb(through, 'is', 'are')} through: the roots differ, which were not recorded.",
        )  # fmt: skip
    said = f"{sentence(listed(wait.ranks))} are in {spoken} with equal arguments"
    tail = f", and {listed(through)} {verb(through, 'is', 'are')} through it" if through else ""
    return found(
        scene, "all_ranks_same_op", collective=place, lines=lines, confidence="high" if wait.lane.is_known else "medium",
        explanation=f"{said}{tail}: no rank left the common order, so the network or a library is at fault.",
    )  # fmt: skip


def judge_hidden(scene: Scene, wait: Wait, outside: tuple[int, ...]) -> Finding:
    """Everyone known of a group waits in it, and its members were not recorded: somebody is missing who never used the group."""
    key = answer(scene, wait)
    spoken = numbered(key, wait.lane, wait.seq)
    lone = outside if len(outside) == 1 else ()
    who = f"{listed(outside)} did not come" if lone else f"one of {listed(outside)} did not come"
    return found(
        scene, "missing_participant", ranks=lone, collective=operation(scene, wait.lane, wait.seq, wait.ranks[0], key), verdict="hang",
        confidence="low", lines=(f"{listed(wait.ranks)}: inside {spoken}", f"{listed(outside)}: never used {named(wait.lane)}"),
        explanation=f"{sentence(listed(wait.ranks))} {verb(wait.ranks, 'waits', 'wait')} in {spoken}, and {who}; the group's members were "
        "not recorded.",
    )  # fmt: skip
