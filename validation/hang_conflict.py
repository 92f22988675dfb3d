"""Ranks of one group that issued different operations under one number: who is wrong, and how it came to that."""

from collections.abc import Iterable

import numpy as np

from validation.finding import Confidence, Finding, FindingKind
from validation.hang_majority import Conflict, conflicts, sides_at
from validation.hang_order import Divergence, came_before, divergence, repeats_before
from validation.hang_reasons import exception_of, is_exhausted
from validation.hang_scene import Lane, Scene
from validation.hang_signatures import BARRIERS, Agreement, spell
from validation.hang_stacks import order_of_lines, order_of_places
from validation.hang_tracks import Track
from validation.hang_waits import Wait
from validation.hang_words import at, found, listed, named, operation, sentence, side_lines

ARGUMENTS = frozenset({"dtype_mismatch", "silent_mismatch"})  # a backend goes on with those: wrong numbers, no hang
_TAILS: dict[str, str] = {
    "missing_participant": "It left out {missed} and is ahead of the others.",
    "extra_collective": "It calls one operation more than the others.",
    "uneven_inputs": "It runs another number of turns than the others.",
    "exception_path": "It left its step early{exception}, while the others are still in it.",
    "teardown_deadlock": "It is cleaning up{exception}, while the others are still in the step.",
    "order_swap_same_group": "It issues the same operations in another order.",
}


def blocking_conflict(scene: Scene, waits: Iterable[Wait]) -> Conflict | None:
    """The first disagreement of a group that somebody is stuck in, or that failed; of several groups the one with the most ranks stuck."""
    stuck: dict[tuple[str, tuple[int, ...]], list[Wait]] = {}
    for wait in waits:
        stuck.setdefault((wait.lane.name, wait.lane.members), []).append(wait)
    for inside in stuck.values():
        lane, seqs = inside[0].lane, [wait.seq for wait in inside]
        for conflict in conflicts(scene, lane, max(seqs)):
            if conflict.kind not in ARGUMENTS or conflict.seq >= min(seqs):
                return conflict
    return None


def judge_conflict(scene: Scene, conflict: Conflict) -> Finding:
    """Name the minority, what it did instead, and where it left the common order."""
    lane, seq = conflict.lane, conflict.seq
    lines = (*side_lines(scene, lane, seq, conflict.sides), *aborted_lines(scene, conflict.culprits))
    if not conflict.majority:
        return _tie(scene, conflict, lines)
    culprit, peer = conflict.culprits[0], conflict.majority[0]
    where = divergence(lane, culprit, peer, seq)
    kind, is_guess = kind_of(scene, conflict, where)
    place = operation(scene, lane, where.seq, culprit, _answer_at(scene, lane, where.seq, peer if where.shift >= 0 else culprit))
    visible = operation(scene, lane, seq, culprit, conflict.answer(peer))
    said = _explained(scene, conflict, kind, where)
    if where.seq != seq:
        lines = (*lines, f"by steps and call sites {listed(conflict.culprits)} left the common order at seq {where.seq}")
    return found(
        scene, kind, ranks=conflict.culprits, explanation=said, lines=lines, collective=place, first_visible=visible,
        confidence=_confidence(conflict, is_guess), step=lane.tracks[culprit].value("step", seq),
    )  # fmt: skip


def _tie(scene: Scene, conflict: Conflict, lines: tuple[str, ...]) -> Finding:
    """As many on each side: both call sites, no verdict on who is wrong."""
    lane, seq = conflict.lane, conflict.seq
    sizes = len(conflict.sides)
    sides = "; ".join(
        f"{listed(ranks)} {spell(key)}{at(scene.where(ranks[0], lane, seq))}" for key, ranks in conflict.sides[:4]
    ) + ("; ..." if sizes > 4 else "")  # fmt: skip
    known = sum(len(ranks) for _, ranks in conflict.sides)
    no_one = (
        f"all {known} ranks differ, so no single rank is wrong"
        if sizes == known and known > 2
        else "with as many on each side it cannot be told who is wrong"
    )
    place = operation(scene, lane, seq, conflict.sides[0][1][0], conflict.sides[0][0])
    return found(
        scene, conflict.kind, ranks=conflict.culprits, collective=place, lines=lines,
        explanation=f"Under seq {seq} of {named(lane)} the ranks issued different operations: {sides}; {no_one}.",
        confidence="high" if sizes == known and not conflict.unknown else "medium",
    )  # fmt: skip


def kind_of(scene: Scene, conflict: Conflict, where: Divergence) -> tuple[FindingKind, bool]:
    """How the minority came to its operation, and whether that is only likely."""
    lane, seq = conflict.lane, conflict.seq
    culprit, peer = conflict.culprits[0], conflict.majority[0]
    if is_swap(lane, culprit, peer, seq):
        return "order_swap_same_group", False
    mine, theirs = conflict.answer(culprit), conflict.answer(peer)
    stands, exception = scene.stands(culprit), exception_of(scene, culprit)
    is_ahead = where.shift > 0 or _step(lane, culprit, seq) > _step(lane, peer, seq) >= 0
    if stands is not None and stands.in_cleanup and mine.op != theirs.op:
        return "teardown_deadlock", not exception
    if exception and (mine.op in BARRIERS or is_ahead or mine.op != theirs.op):
        is_parting = mine.op in BARRIERS or not came_before(lane.tracks[culprit], seq)  # an operation of no step
        return ("teardown_deadlock", False) if is_parting and not is_ahead else ("exception_path", False)
    if conflict.kind in (*ARGUMENTS, "root_mismatch"):
        return conflict.kind, False
    return _by_flow(scene, conflict, where)


def _by_flow(scene: Scene, conflict: Conflict, where: Divergence) -> tuple[FindingKind, bool]:
    """The same, from the way the program took: loops, steps, call sites, barriers."""
    lane, seq = conflict.lane, conflict.seq
    culprit, peer = conflict.culprits[0], conflict.majority[0]
    mine, theirs = conflict.answer(culprit), conflict.answer(peer)
    sites = (lane.tracks[culprit].where(seq), lane.tracks[peer].where(seq))
    goes_on, ends = repeats_before(lane.tracks[culprit], seq), repeats_before(lane.tracks[peer], seq)
    if is_exhausted(scene, culprit):
        return "uneven_inputs", False
    if where.shift > 0:
        return _left_out(lane, culprit, peer, where), not where.is_sure
    if _step(lane, culprit, seq) > _step(lane, peer, seq) >= 0:
        return ("exception_path", True) if _rest_of_step(scene, lane, culprit, peer, seq) > 1 else ("missing_participant", False)
    is_turn = goes_on and all(sites) and sites[0] == lane.tracks[culprit].where(seq - 1)  # one more of what it did before
    if (where.is_sure and where.shift < 0 and not is_turn) or 0 <= _step(lane, culprit, seq) < _step(lane, peer, seq):
        return "extra_collective", False
    order = order_of_places(*sites) or order_of_lines(scene.stands(culprit), scene.stands(peer))
    if mine.op in BARRIERS and theirs.op not in BARRIERS:
        return ("extra_collective", True) if order < 0 and not ends else ("missing_participant", True)
    if goes_on and not ends and mine.op not in BARRIERS and (is_turn or theirs.op not in BARRIERS):
        return "uneven_inputs", True
    if theirs.op in BARRIERS and mine.op not in BARRIERS:
        return "extra_collective", True
    if ends and mine.op == theirs.op and all(sites) and sites[0] != sites[1]:
        return "uneven_inputs", True
    return conflict.kind, False


def _left_out(lane: Lane, culprit: int, peer: int, where: Divergence) -> FindingKind:
    """Left out one operation, or gave up the rest of a step: an exception that was caught looks like that."""
    track, other = lane.tracks[culprit], lane.tracks[peer]
    step, begun = other.value("step", where.seq), track.value("step", where.seq - 1)
    same_micro = other.value("micro", where.seq) == other.value("micro", where.seq - 1)
    gave_up = where.is_sure and where.shift > 1 and step >= 0 and begun == step < track.value("step", where.seq) and same_micro
    return "exception_path" if gave_up else "missing_participant"


def _rest_of_step(scene: Scene, lane: Lane, culprit: int, peer: int, seq: int) -> int:
    """Calls that the rank left out at the end of a step which it had begun, by the length of the peer's step before; 0 = none."""
    step, mine, theirs = _step(lane, peer, seq), lane.tracks[culprit].column("step"), lane.tracks[peer].column("step")
    if mine is None or theirs is None or _step(lane, culprit, seq - 1) != step:
        return 0
    before = np.flatnonzero(theirs == step - 1)[int((mine == step).sum()) :]
    return sum(not _is_same_call(scene, lane.tracks[peer], int(before[0]), place) for place in before.tolist())


def _is_same_call(scene: Scene, track: Track, first: int, place: int) -> bool:
    """Whether two operations, by their places on the track, are of one call that sends objects: their sizes as Long, then their bytes."""
    site, key = track.where(int(track.seq[first])), scene.keys[int(track.key[first])]
    is_objects = key.dtypes == ("Long",) and not set(scene.keys[int(track.key[place])].dtypes) - {"Long", "Byte"}
    return place > first and bool(site) and is_objects and track.where(int(track.seq[place])) == site


def is_swap(lane: Lane, culprit: int, peer: int, seq: int) -> bool:
    """Whether the two ranks issued this and one of the next operations in the other order, and agree again after that."""
    mine, theirs = lane.tracks[culprit], lane.tracks[peer]
    start, other = mine.position(seq), theirs.position(seq)
    width = min(len(mine.key) - start, len(theirs.key) - other, 9)
    one, two = mine.key[start : start + width], theirs.key[other : other + width]
    for ahead in range(1, width):
        if one[0] == two[ahead] and two[0] == one[ahead]:
            rest = ahead + 1
            return bool((one[1:ahead] == two[1:ahead]).all()) and (rest >= width or bool(one[rest] == two[rest]))
    return False


def _step(lane: Lane, rank: int, seq: int) -> int:
    return lane.tracks[rank].value("step", seq)


def _answer_at(scene: Scene, lane: Lane, seq: int, rank: int) -> Agreement | None:
    sides = sides_at(scene, lane, seq, (rank,))
    return sides[0][0] if sides else None


def _explained(scene: Scene, conflict: Conflict, kind: FindingKind, where: Divergence) -> str:
    """Who did what, where, and what follows from it."""
    lane, seq = conflict.lane, conflict.seq
    culprit, peer = conflict.culprits[0], conflict.majority[0]
    mine, theirs = (f"{spell(conflict.answer(rank))}{at(scene.where(rank, lane, seq))}" for rank in (culprit, peer))
    who, others = sentence(listed(conflict.culprits)), listed(conflict.majority)
    first = f"{who} issued {mine} under seq {seq} of {named(lane)}, where {others} issued {theirs}."
    count = f"{where.shift} operations" if where.shift > 1 else "an operation"
    missed = f"{count} at seq {where.seq}" if where.is_sure and where.shift > 0 else f"{count} at or before seq {where.seq}"
    exception = exception_of(scene, culprit)
    tail = _TAILS.get(kind, "").format(missed=missed, exception=f" after {exception}" if exception else "")
    return f"{first} {tail}".rstrip()


def aborted_lines(scene: Scene, culprits: Iterable[int]) -> tuple[str, ...]:
    """A word for ranks that a backend aborted and that are not to blame."""
    blamed = set(culprits)
    aborted = [rank for rank, one in sorted(scene.evidence.ranks.items()) if one.exit_code == -6 and rank not in blamed]
    if not aborted:
        return ()
    return (f"{listed(aborted)} died with signal 6: the backend aborts the rank that receives a wrong size, which says nothing against it",)


def _confidence(conflict: Conflict, is_guess: bool) -> Confidence:
    known = sum(len(ranks) for _, ranks in conflict.sides)
    if 2 * len(conflict.majority) <= known or (is_guess and conflict.unknown):
        return "low"
    return "medium" if is_guess or conflict.unknown else "high"
