"""Ranks that wait in one group for ranks that wait in another group for them."""

from collections.abc import Sequence

import numpy as np

from validation.finding import Confidence, Finding, FindingKind
from validation.flight import DEFAULT_GROUP
from validation.hang_order import came_before
from validation.hang_program import deserters
from validation.hang_scene import Scene
from validation.hang_signatures import BARRIERS
from validation.hang_waits import Wait, answer
from validation.hang_words import at, found, listed, named, numbered, operation, sentence, verb


def judge_cycle(scene: Scene, circle: Sequence[Wait]) -> Finding:
    """Name the smaller side of the circle; nobody when the sides are equal.

    Args: circle, operations of which each has a missing member inside another one.
    """
    if more := next((wait for wait in circle if _is_one_more(wait)), None):
        return _with_one_more(scene, circle, more)
    if left := _left_out(circle):
        return _without(scene, circle, *left)
    sides = [(wait, held) for wait in circle if (held := _held(wait, circle))]
    sides.sort(key=lambda side: (len(side[1]), side[0].lane.name, side[0].seq))
    is_tie = len(sides) < 2 or len(sides[0][1]) == len(sides[-1][1])
    deserted = deserters(scene, (rank for _, held in sides for rank in held)) if is_tie else ()
    culprits = deserted if is_tie else tuple(sorted({rank for _, held in sides[:-1] for rank in held if len(held) < len(sides[-1][1])}))
    both = tuple(sorted({rank for _, held in sides for rank in held}))
    if is_tie and not deserted and len(both) == len(scene.ranks) == 2:
        culprits = both
    if deserted:  # that side first
        sides.sort(key=lambda side: not set(side[1]) & set(deserted))
        is_tie = False
    mine, theirs = sides[0][0], sides[-1][0]
    kind, confidence = _kind(scene, mine, theirs, culprits if not is_tie else ())
    place = operation(scene, mine.lane, mine.seq, sides[0][1][0], answer(scene, mine))
    visible = operation(scene, theirs.lane, theirs.seq, sides[-1][1][0], answer(scene, theirs))
    group = tuple(sorted({wait.lane.name for wait, _ in sides}))
    if kind == "missing_participant":
        place, group = visible, (theirs.lane.name,)
    return found(
        scene, kind, ranks=culprits, explanation=_explained(scene, sides, culprits, kind), group=group, collective=place,
        first_visible=visible, confidence="medium" if is_tie and confidence == "high" else confidence, verdict="hang",
        lines=tuple(f"{listed(wait.ranks)} wait in {_words(scene, wait)} for {listed(wait.absent)}" for wait, _ in sides),
    )  # fmt: skip


def _is_one_more(wait: Wait) -> bool:
    """Whether those inside do more in this step than they, and all who are missing, did in the step before and the missing did in this."""
    ranks, step = (*wait.ranks, *wait.absent), _step(wait, wait.ranks[0])
    tracks = [track for rank in ranks if (track := wait.lane.tracks.get(rank)) is not None and not track.source.dump.wrapped]
    columns = [column for track in tracks if (column := track.column("step")) is not None]
    if step < 1 or len(columns) < len(ranks):
        return False
    counts = [[int((column == number).sum()) for column in columns] for number in (step - 1, step)]
    usual, inside = counts[0][0], len(wait.ranks)
    is_habit = usual > 0 and set(counts[0]) == {usual} and set(counts[1][inside:]) == {usual}
    return is_habit and min(counts[1][:inside]) > usual


def _with_one_more(scene: Scene, circle: Sequence[Wait], wait: Wait) -> Finding:
    """A circle that is closed by an operation which the others never call there."""
    place = operation(scene, wait.lane, wait.seq, wait.ranks[0], answer(scene, wait))
    return found(
        scene, "extra_collective", ranks=wait.ranks, group=(wait.lane.name,), collective=place, verdict="hang", lines=_lines(scene, circle),
        explanation=f"{sentence(listed(wait.ranks))} {verb(wait.ranks, 'waits', 'wait')} in {_words(scene, wait)}, one operation more than "
        f"in the step before; {listed(wait.absent)} did as many as then and {verb(wait.absent, 'is', 'are')} past it.",
        confidence="high" if wait.lane.is_known else "medium",
    )  # fmt: skip


def _lines(scene: Scene, circle: Sequence[Wait]) -> tuple[str, ...]:
    return tuple(
        f"{listed(one.ranks)} {verb(one.ranks, 'waits', 'wait')} in {_words(scene, one)} for {listed(one.absent)}" for one in circle
    )


def _left_out(circle: Sequence[Wait]) -> tuple[Wait, int, int] | None:
    """The rank that left one of a group's operations out in an earlier step, where it and those who wait for it there did as many in the
    step before: the operation, the rank, and the number under which it did so. None = not recorded, or there is no single one."""
    found = [
        (wait, rank, seq) for wait in circle for rank in wait.absent if (seq := _left_at(wait, rank)) > 0
    ]  # fmt: skip
    return found[0] if len({rank for _, rank, _ in found}) == 1 else None


def _left_at(wait: Wait, rank: int) -> int:
    mine, theirs = wait.lane.tracks.get(rank), wait.lane.tracks.get(wait.ranks[0])
    if mine is None or theirs is None or not len(mine.seq) or not len(theirs.seq):
        return -1
    steps, others = mine.column("step"), theirs.column("step")
    if steps is None or others is None or mine.seq[0] != theirs.seq[0] or mine.source.dump.wrapped or theirs.source.dump.wrapped:
        return -1
    width = min(len(steps), len(others))
    differs = np.flatnonzero(steps[:width] != others[:width])
    if not len(differs):
        return -1
    at, step = int(differs[0]), int(others[differs[0]])
    usual = int((others == step - 1).sum())
    fewer = int((steps == step).sum()) < int((others == step).sum()) == usual == int((steps == step - 1).sum())
    return int(theirs.seq[at]) if fewer and steps[at] > step >= 0 else -1


def _without(scene: Scene, circle: Sequence[Wait], wait: Wait, rank: int, seq: int) -> Finding:
    """A circle that is there because one rank left out an operation some steps ago, and came to the next one in its stead."""
    peer = wait.ranks[0]
    place, visible = (operation(scene, wait.lane, number, peer, answer(scene, wait)) for number in (seq, wait.seq))
    return found(
        scene, "missing_participant", ranks=(rank,), group=(wait.lane.name,), collective=place, first_visible=visible, verdict="hang",
        explanation=f"Rank {rank} left out seq {seq} of {named(wait.lane)} and met the others' with its next one; now {listed(wait.ranks)} "
        f"{verb(wait.ranks, 'waits', 'wait')} for it in {_words(scene, wait)}.", confidence="high" if wait.lane.is_known else "medium",
        lines=_lines(scene, circle),
    )  # fmt: skip


def _held(wait: Wait, circle: Sequence[Wait]) -> tuple[int, ...]:
    """Ranks inside this operation that another one of the circle waits for."""
    wanted = {rank for other in circle if other is not wait for rank in other.absent}
    return tuple(rank for rank in wait.ranks if rank in wanted)


def _kind(scene: Scene, mine: Wait, theirs: Wait, culprits: tuple[int, ...]) -> tuple[FindingKind, Confidence]:
    """Swapped, or left out the other group's operation altogether: by step markers, else by whether it is at a barrier of all ranks."""
    confidence: Confidence = "high" if mine.lane.is_known and theirs.lane.is_known else "medium"
    if not culprits:
        return "order_swap_cross_group", confidence
    one, other = _step(mine, culprits[0]), _step(theirs, theirs.ranks[0])
    if min(one, other) >= 0 and one != other:
        return ("missing_participant" if one > other else "order_swap_cross_group"), confidence
    key = answer(scene, mine)
    if _kept_order_before(mine, theirs, culprits[0]):
        return "missing_participant", "medium"
    if one < 0 and key is not None and key.op in BARRIERS and mine.lane.name == DEFAULT_GROUP:
        return "missing_participant", "medium"
    return "order_swap_cross_group", confidence


def _step(wait: Wait, rank: int) -> int:
    track = wait.lane.tracks.get(rank)
    return track.value("step", wait.seq) if track is not None else -1


def _kept_order_before(mine: Wait, theirs: Wait, culprit: int) -> bool:
    """Whether this rank went through both groups before, in the same operations: its order is right, and this time it left one out."""
    tracks = [(wait.lane.tracks.get(culprit), wait) for wait in (mine, theirs)]
    own, other = tracks[0][0], tracks[1][0]
    wanted = next((theirs.lane.tracks[rank] for rank in theirs.ranks if rank in theirs.lane.tracks), None)
    if own is None or other is None or wanted is None:
        return False
    key = wanted.key[wanted.position(theirs.seq)] if wanted.position(theirs.seq) >= 0 else -1
    return came_before(own, mine.seq) and bool((other.key == key).any())


def _words(scene: Scene, wait: Wait) -> str:
    return numbered(answer(scene, wait), wait.lane, wait.seq) + at(scene.where(wait.ranks[0], wait.lane, wait.seq))


def _explained(scene: Scene, sides: Sequence[tuple[Wait, tuple[int, ...]]], culprits: tuple[int, ...], kind: FindingKind) -> str:
    parts = [f"{listed(held)} {verb(held, 'waits', 'wait')} in {_words(scene, wait)}" for wait, held in sides]
    first = f"{sentence(', while '.join(parts))}: each side waits for the other."
    if not culprits or len(culprits) == len({rank for _, held in sides for rank in held}):
        return f"{first} With as many on each side it cannot be told whose order is wrong."
    if kind == "missing_participant":
        return f"{first} {sentence(listed(culprits))} left out the operation of {named(sides[-1][0].lane)}."
    return f"{first} {sentence(listed(culprits))} {verb(culprits, 'takes', 'take')} the groups in another order than the others."
