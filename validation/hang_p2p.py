"""Sends and receives that never meet: circles, and peers that are somewhere else."""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from validation.finding import Confidence, Finding, FindingKind, Operation
from validation.flight import DEFAULT_GROUP
from validation.hang_absent import judge_missing_peer, unheard
from validation.hang_majority import Conflict
from validation.hang_reasons import has_ended, is_failed, is_heard, is_well_over, marker_of, stopped_inside
from validation.hang_scene import Scene
from validation.hang_waits import Wait, answer, is_moment
from validation.hang_words import at, found, listed, numbered, sentence, verb

_OTHER = {"send": "recv", "recv": "send"}


class Talk(NamedTuple):
    """A send or receive that a rank is inside."""

    rank: int
    op: str  # "send" or "recv"
    peer: int = -1  # -1 = not recorded
    tag: int = 0
    elements: int = -1
    seq: int = -1
    group: str = DEFAULT_GROUP
    where: str = ""

    def __str__(self) -> str:
        direction = "to" if self.op == "send" else "from"
        peer = f" {direction} rank {self.peer}" if self.peer >= 0 else ""
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.op}{peer}{tag}{at(self.where)}"


def talks_of(scene: Scene) -> dict[int, Talk]:
    """What each rank that stands still sends or receives, from the records, else from its stack."""
    talks = {}
    for rank in scene.ranks:
        rows, stands = scene.rows.get(rank), scene.stands(rank)
        if rows is not None and rows.moved:
            continue  # it went on between the snapshots: whatever it is in now, it has just come there
        if rows is not None and rows.peers:
            talks[rank] = _recorded(scene, rank, rows.peers[0])
        elif stands is not None and stands.p2p and not (rows is not None and rows.heads):
            talks[rank] = Talk(rank, stands.p2p, where=stands.where)
    return talks


def _recorded(scene: Scene, rank: int, row: int) -> Talk:
    dump = scene.rows[rank].dump
    signature = dump.signatures[int(dump.signature[row])]
    elements = spell_elements(signature.sizes or signature.output_sizes)
    place = dump.places[int(dump.place[row])] if dump.place is not None and 0 <= int(dump.place[row]) < len(dump.places) else ""
    name = dump.groups[int(dump.group[row])].name
    return Talk(rank, signature.op, signature.peer, signature.tag, elements, int(dump.seq[row]), name, place or scene.where(rank))


def spell_elements(sizes: Iterable[tuple[int, ...]]) -> int:
    """Elements of all tensors together; -1 = none recorded."""
    total, any_size = 0, False
    for size in sizes:
        count = 1
        for width in size:
            count *= width
        total, any_size = total + count, True
    return total if any_size else -1


def judge_talks(scene: Scene, talks: Mapping[int, Talk], waits: tuple[Wait, ...], conflict: Conflict | None) -> Finding | None:
    """Judge the sends and receives; None when there are none, or when they only wait for what is judged elsewhere."""
    if not talks or (conflict is not None and all(talk.peer < 0 for talk in talks.values())):
        return None
    if any(talk.peer < 0 for talk in talks.values()):
        return _by_kinds(scene, talks, waits)
    for talk in talks.values():
        other = talks.get(talk.peer)
        if other is not None and other.peer == talk.rank and other.op != talk.op:
            return _pair(scene, talk, other)
    circle = _circle(talks)
    strange = _strangers(scene, talks, circle)
    if strange:
        return _wrong_peer(scene, talks, circle, strange, waits)
    if circle:
        return _cycle(scene, [talks[rank] for rank in circle], waits)
    return _chain(scene, talks, waits)


def _circle(talks: Mapping[int, Talk]) -> tuple[int, ...]:
    """Ranks of which each waits for the next, the last for the first; the circle with the lowest rank; () = none."""
    for start in sorted(talks):
        path = [start]
        while (peer := talks[path[-1]].peer) in talks and peer not in path:
            path.append(peer)
        if peer == start:
            return tuple(path)
    return ()


def _strangers(scene: Scene, talks: Mapping[int, Talk], circle: tuple[int, ...]) -> tuple[int, ...]:
    """Those on a circle of sends and receives that have a peer they never had before, where the others have their usual one."""
    if len({talks[rank].op for rank in circle}) < 2 or any(
        scene.rows.get(rank) is None or scene.rows[rank].dump.wrapped for rank in circle
    ):
        return ()
    strange = tuple(rank for rank in circle if not _has_talked(scene, talks[rank]))
    return strange if 2 * len(strange) < len(circle) else ()


def _has_talked(scene: Scene, talk: Talk) -> bool:
    dump = scene.rows[talk.rank].dump
    same = np.array([one.op == talk.op and one.peer == talk.peer for one in dump.signatures], dtype=bool)
    return bool((same[dump.signature] & dump.finished).any())


def _wrong_peer(
    scene: Scene, talks: Mapping[int, Talk], circle: tuple[int, ...], strange: tuple[int, ...], waits: tuple[Wait, ...]
) -> Finding:  # fmt: skip
    """A circle that is closed by ranks which talk to somebody new."""
    talk, others = talks[strange[0]], tuple(rank for rank in circle if rank not in strange)
    return found(
        scene, "p2p_mismatch", ranks=strange, collective=_place(talk), verdict="hang", confidence="medium",
        explanation=f"Rank {talk.rank} is in {talk}, with whom it never did that before; {listed(others)} {verb(others, 'waits', 'wait')} "
        "for the usual peer.",
        lines=_lines(scene, [talks[rank] for rank in circle], waits),
    )  # fmt: skip


def _place(talk: Talk) -> Operation:
    return Operation(op=talk.op, seq=talk.seq, group=talk.group, where=talk.where)


def _lines(scene: Scene, talks: Iterable[Talk], waits: tuple[Wait, ...]) -> tuple[str, ...]:
    lines = [f"rank {talk.rank}: inside {talk}" for talk in talks]
    lines += [f"{listed(wait.ranks)}: inside {numbered(answer(scene, wait), wait.lane, wait.seq)}" for wait in waits]
    return tuple(lines[:12])


def _cycle(scene: Scene, talks: list[Talk], waits: tuple[Wait, ...], confidence: Confidence = "high") -> Finding:
    """A circle of sends and receives: all on it, none more than another."""
    ranks = tuple(sorted(talk.rank for talk in talks))
    ops = sorted({talk.op for talk in talks})
    said = "; ".join(f"rank {talk.rank} is in {talk}" for talk in talks[:4])
    return found(
        scene, "p2p_cycle", ranks=ranks, collective=_place(talks[0]), verdict="hang",
        explanation=f"{sentence(listed(ranks))} wait for each other in {' and '.join(ops)}: {said}; each is as wrong as the other.",
        lines=_lines(scene, talks, waits), confidence=confidence,
    )  # fmt: skip


def _pair(scene: Scene, one: Talk, other: Talk) -> Finding:
    """A send and a receive that name each other and do not meet: tags or sizes differ, or the network failed."""
    ranks = tuple(sorted((one.rank, other.rank)))
    what = "tags" if one.tag != other.tag else "sizes" if one.elements != other.elements else ""
    kind: FindingKind = "p2p_mismatch" if what else "all_ranks_same_op"
    said = f"Rank {one.rank} is in {one}, rank {other.rank} in {other}"
    if not what and (stopped := stopped_inside(scene, ranks)):
        return found(
            scene, "frozen_process", ranks=stopped, collective=_place(one), lines=_lines(scene, (one, other), ()), verdict="hang",
            explanation=f"{said}; they fit, but the process of {listed(stopped)} is stopped.",
            confidence="high" if scene.of(stopped[0]).state else "medium",
        )  # fmt: skip
    reason = (
        f"their {what} differ, and of two it cannot be told who is wrong" if what else "they fit, so not the program's order is at fault"
    )
    return found(
        scene, kind, ranks=ranks if what else (), collective=_place(one), explanation=f"{said}; {reason}.",
        lines=_lines(scene, (one, other), ()),
        confidence="medium",
    )  # fmt: skip


def _chain(scene: Scene, talks: Mapping[int, Talk], waits: tuple[Wait, ...]) -> Finding | None:
    """No circle: every chain of peers ends at a rank that waits in a collective, is through, or is busy."""
    ends = {rank: talk for rank, talk in sorted(talks.items()) if talk.peer not in talks}
    inside = {rank for wait in waits for rank in wait.ranks}
    for talk in ends.values():
        if talk.peer not in inside and not has_ended(scene, talk.peer):
            return judge_missing_peer(scene, talk.rank, talk.peer, _place(talk), str(talk))
    wanted = {talk.peer for talk in talks.values()}
    # a rank that another one wants to talk to, and that talks to somebody who does not listen, has the wrong peer
    wrong = [talk for rank, talk in ends.items() if rank in wanted] or list(ends.values())
    talk = wrong[0]
    ranks, confidence = _blamed(scene, talk, wrong, wanted, inside)
    victims = sorted(rank for rank in talks if rank not in ranks)
    where = "waits in a collective" if talk.peer in inside else "is through"
    said = f"Rank {talk.rank} is in {talk}, but rank {talk.peer} {where} and has no part in it"
    tail = f"; {listed(victims)} {verb(victims, 'waits', 'wait')} for that" if victims else ""
    return found(
        scene, "p2p_mismatch", ranks=ranks, collective=_place(talk), verdict="hang",
        explanation=f"{said}{tail}.", lines=_lines(scene, talks.values(), waits), confidence=confidence,
    )  # fmt: skip


def _blamed(scene: Scene, talk: Talk, wrong: list[Talk], wanted: set[int], inside: set[int]) -> tuple[tuple[int, ...], Confidence]:
    """Whose peer is wrong: the one that talks to a rank which is elsewhere; that rank, when its step shows that it went ahead."""
    habit = _out_of_habit(scene, talk)
    if len(habit) == 1:
        return habit, "medium"
    if talk.rank in wanted and not habit:
        return tuple(sorted(one.rank for one in wrong)), "high"
    mine, theirs = marker_of(scene, talk.rank), marker_of(scene, talk.peer)
    if mine is not None and theirs is not None and theirs.step > mine.step >= 0:
        return (talk.peer,), "medium"
    if habit:
        return habit, "low"
    others = len([rank for rank in inside if rank != talk.rank])
    return (tuple(sorted(one.rank for one in wrong)), "medium") if others > len(wrong) else (tuple(sorted((talk.rank, talk.peer))), "low")


def _out_of_habit(scene: Scene, talk: Talk) -> tuple[int, ...]:
    """Of two ranks that talked before: who first did so more or less often in a step; both where it cannot be told; () = they did not."""
    mine, theirs = _talks_by_step(scene, talk.rank, talk.op, talk.peer), _talks_by_step(scene, talk.peer, _OTHER[talk.op], talk.rank)
    if not theirs:
        return ()
    both = tuple(sorted((talk.rank, talk.peer)))
    last = min(_newest_step(scene, rank) for rank in both)  # under way: what is lacking there may be still to come
    for before, step in pairwise(step for step in sorted({*mine, *theirs}) if _first_whole_step(scene, both) <= step < last):
        usual = mine.get(before, 0)
        if mine.get(step, 0) != theirs.get(step, 0):
            odd = [rank for rank, counts in ((talk.rank, mine), (talk.peer, theirs)) if counts.get(step, 0) != usual]
            return tuple(odd) if len(odd) == 1 else both
    odd_now = _out_of_habit_now(scene, talk, mine, theirs) if last > _first_whole_step(scene, both) else ()
    return odd_now or both


def _out_of_habit_now(scene: Scene, talk: Talk, mine: Mapping[int, int], theirs: Mapping[int, int]) -> tuple[int, ...]:
    """The same of the step in which the rank waits, when its peer is past the place where it usually answers; () = it cannot be told.

    Past it is a peer that is in a later step, or inside the collective before which it had done more in the step before.
    """
    marker = marker_of(scene, talk.rank)
    step = marker.step if marker is not None else -1
    usual = mine.get(step - 1, 0)
    if not usual or theirs.get(step - 1, 0) != usual:
        return ()
    answered = usual if _newest_step(scene, talk.peer) > step else _answers_before(scene, talk, step)
    is_left, is_more = theirs.get(step, 0) < answered, mine.get(step, 0) > usual
    return () if is_left == is_more else (talk.peer,) if is_left else (talk.rank,)


def _answers_before(scene: Scene, talk: Talk, step: int) -> int:
    """How often the peer had answered in the step before, when it came to the collective that it is inside now; 0 = not known."""
    rows = scene.rows[talk.peer]
    dump = rows.dump
    if not rows.heads or dump.step is None or int(dump.step[rows.heads[0].row]) != step:
        return 0
    head = rows.heads[0].row
    same = (dump.signature == dump.signature[head]) & (dump.group == dump.group[head])
    turn = int((same[:head] & (dump.step[:head] == step)).sum())
    before = np.flatnonzero(same & (dump.step == step - 1))
    if turn >= len(before):
        return 0
    answers = np.array([one.op == _OTHER[talk.op] and one.peer == talk.rank for one in dump.signatures], dtype=bool)
    return int((answers[dump.signature] & (dump.step == step - 1))[: before[turn]].sum())


def _newest_step(scene: Scene, rank: int) -> int:
    marker = marker_of(scene, rank)
    return marker.step if marker is not None else -1


def _first_whole_step(scene: Scene, ranks: Iterable[int]) -> int:
    """The first step of which none of these ranks' rings lost anything."""
    dumps = [scene.rows[rank].dump for rank in ranks]
    return max(int(dump.step[0]) + 1 if dump.wrapped and dump.step is not None and len(dump.step) else 0 for dump in dumps)


def _talks_by_step(scene: Scene, rank: int, op: str, peer: int) -> dict[int, int]:
    """Step -> how often the rank sent to this peer, or received from it, as its records show."""
    rows = scene.rows.get(rank)
    if rows is None or rows.dump.step is None:
        return {}
    dump = rows.dump
    wanted = np.array([one.op == op and one.peer == peer for one in dump.signatures], dtype=bool)
    steps = dump.step[wanted[dump.signature]] if len(wanted) and dump.step is not None else np.empty(0, dtype=np.int32)
    return dict(Counter(steps[steps >= 0].tolist()))


def _is_inside(scene: Scene, rank: int) -> bool:
    """Whether the rank is in a collective by its stack."""
    stands = scene.stands(rank)
    return stands is not None and bool(stands.op)


def _unmet(scene: Scene, talk: Talk, waits: tuple[Wait, ...]) -> Finding:
    """One rank is in a send or receive at one moment, and nothing shows that it stays there."""
    return found(
        scene, "insufficient_evidence", verdict="inconclusive", confidence="low", collective=_place(talk),
        lines=_lines(scene, (talk,), waits), explanation=f"Rank {talk.rank} is in {talk}, and nobody in the other half of it; it was seen "
        "once, and its peer was not recorded, so it cannot be told whether they meet.",
    )  # fmt: skip


def _by_kinds(scene: Scene, talks: Mapping[int, Talk], waits: tuple[Wait, ...]) -> Finding | None:
    """From stacks alone, without peers: all in send (or all in recv) is a circle; one receiver among senders listens to the wrong rank."""
    inside = {rank for wait in waits for rank in wait.ranks}
    busy = [rank for rank in scene.ranks if not (rank in talks or rank in inside or _is_inside(scene, rank) or has_ended(scene, rank))]
    some = list(talks.values())
    silent = tuple(rank for rank in busy if not is_heard(scene, rank))
    if silent and len(silent) == len(busy):
        said = "; ".join(f"rank {talk.rank} is in {talk}" for talk in some[:4])
        return unheard(scene, silent, _place(some[0]), sentence(said), _lines(scene, some, waits))
    if busy:
        return judge_missing_peer(scene, some[0].rank, busy[0], _place(some[0]), str(some[0])) if len(busy) == 1 else None
    if is_moment(scene) and is_well_over(scene):
        return None  # they did meet
    if is_moment(scene) and len(some) == 1 and not is_failed(scene):
        return _unmet(scene, some[0], waits)
    senders, receivers = ([talk for talk in some if talk.op == op] for op in ("send", "recv"))
    if len(some) > 1 and not (senders and receivers):
        return _cycle(scene, some, waits, "medium")
    wrong = receivers if len(receivers) == 1 else []  # of several receivers the one with the wrong peer cannot be told
    ranks = tuple(talk.rank for talk in wrong)
    first = wrong[0] if wrong else some[0]
    said = "; ".join(f"rank {talk.rank} is in {talk}" for talk in some[:4])
    guess = f"; {listed(ranks)} most likely {verb(ranks, 'has', 'have')} the wrong peer" if ranks else ""
    return found(
        scene, "p2p_mismatch", ranks=ranks, collective=_place(first), confidence="low",
        verdict="hang", lines=_lines(scene, some, waits),
        explanation=f"Sends and receives that do not meet: {said}{guess}. The peers were not recorded.",
    )  # fmt: skip
