"""Members of a group that did not come to an operation that the others wait in: who, why, and whether it may still come."""

from collections.abc import Mapping

from validation.finding import Confidence, Finding, FindingKind, Operation
from validation.hang_order import Divergence, came_before, divergence
from validation.hang_reasons import CAUSES, Reason, has_collected, has_ended, is_exhausted, is_heard, is_well_over, marker_of, reason_of
from validation.hang_scene import Scene
from validation.hang_signatures import BARRIERS
from validation.hang_waits import Wait, answer, is_moment, late_arrivals
from validation.hang_words import at, found, has_timed_out, listed, named, numbered, operation, sentence, verb

# of several missing ranks with several reasons, the first of these is the cause
_ORDER: tuple[FindingKind, ...] = (
    "frozen_process", "dataloader_deadlock", "exception_path", "op_type_mismatch", "uneven_inputs", "missing_participant", "late_rank",
)  # fmt: skip


def judge_absent(scene: Scene, wait: Wait, missing: tuple[int, ...]) -> Finding:
    """Say why `missing`, members that are inside nothing else, are not in the operation.

    Args: missing, not empty.
    """
    late = late_arrivals(wait)
    ended = () if is_well_over(scene) else tuple(rank for rank in missing if has_ended(scene, rank) and rank not in late)
    silent = tuple(rank for rank in missing if rank not in ended and not is_heard(scene, rank))
    if len(ended) + len(silent) == len(missing) and len(ended) > len(wait.ranks):
        return _extra(scene, wait, ended)
    if len(ended) == len(missing) == len(wait.ranks) == 1 and not is_exhausted(scene, ended[0]):
        return _one_through_one_waits(scene, wait, ended[0])
    reasons = {rank: _reason(scene, wait, rank, late) for rank in missing}
    known = {rank: reason for rank, reason in reasons.items() if reason is not None}
    if not known and all(is_heard(scene, rank) for rank in missing):
        return _too_early(scene, wait, missing)
    if not known:
        words = f"All others wait in {_operation_words(scene, wait)}"
        return unheard(scene, missing, _place(scene, wait, missing[0]), words, _lines(scene, wait, missing))
    kind = next(kind for kind in _ORDER if any(reason.kind == kind for reason in known.values()))
    culprits = tuple(rank for rank, reason in sorted(known.items()) if reason.kind == kind)
    is_guess = kind == "late_rank" or (kind == "missing_participant" and all(known[rank].confidence == "low" for rank in culprits))
    is_vague = all(known[rank].confidence == "low" for rank in culprits)  # of as many as wait it cannot be told who is wrong
    if is_guess and len(culprits) + is_vague > len(wait.ranks) and not late:
        return _too_early(scene, wait, culprits)
    return _named(scene, wait, culprits, known[culprits[0]], late)


def _reason(scene: Scene, wait: Wait, rank: int, late: Mapping[int, float]) -> Reason | None:
    """Why this rank is missing, seen together with what came later and how often the others repeat the operation."""
    stands, key = scene.stands(rank), answer(scene, wait)
    if rank not in scene.rows and stands is not None and stands.op and key is not None and len(wait.ranks) > 1:
        kind: FindingKind = "missing_participant" if stands.op in BARRIERS else "op_type_mismatch"
        return Reason(kind, f"is in {stands.op} at {stands.where}, as its stack shows", "medium")
    if not is_heard(scene, rank) and is_well_over(scene):
        return None
    reason = reason_of(scene, rank, wait.ranks)
    if rank in late and (reason is None or reason.kind not in ("frozen_process", "exception_path")):
        marker = marker_of(scene, rank)
        known = reason.cause if reason is not None else ""
        cause = known or _gc(scene, rank) or (CAUSES.get(marker.phase, "") if marker is not None else "")
        if reason is not None and reason.kind == "dataloader_deadlock":
            cause = "data"
        return Reason("late_rank", f"came {late[rank]:.1f} s after the others", "high", cause)
    if reason is None:
        return None
    if reason.kind == "missing_participant" and is_well_over(scene):
        if 2 * len(wait.ranks) <= len(wait.lane.members):  # no majority waited, and nobody knows for how long: a moment of a healthy job
            return None
        if is_moment(scene) and (stands is None or stands.p2p):  # which it may leave at once
            return None
        return Reason("late_rank", "came later, for all ended well", "medium", _gc(scene, rank))
    if reason.kind == "late_rank" and reason.confidence != "high" and not reason.cause and has_timed_out(scene):
        return Reason("missing_participant", f"{reason.words} and never came, until the others gave up", "medium")
    if reason.kind == "missing_participant" and has_ended(scene, rank) and _ran_less(scene, wait, rank):
        return Reason("uneven_inputs", "is through with fewer turns than the others", "medium")
    return reason


def _gc(scene: Scene, rank: int) -> str:
    return "gc" if has_collected(scene, rank) else ""


def _ran_less(scene: Scene, wait: Wait, rank: int) -> bool:
    """Whether the others wait in one more turn of what the rank did before; not where it went on to a later step at some place."""
    one, marker = marker_of(scene, wait.ranks[0]), marker_of(scene, rank)
    if one is not None and marker is not None and one.step == marker.step >= 0 and (jump := _jumped(wait, rank)) is not None:
        return not jump.is_sure
    if one is not None and marker is not None and min(one.step, marker.step) >= 0 and one.step != marker.step:
        return True
    key, track = answer(scene, wait), wait.lane.tracks.get(wait.ranks[0])
    return key is not None and track is not None and key.op not in BARRIERS and came_before(track, wait.seq)


def _jumped(wait: Wait, rank: int) -> Divergence | None:
    """Where the rank went on to a later step than the others, which they have come to by now; None = nowhere, or not recorded."""
    mine, theirs = wait.lane.tracks.get(rank), wait.lane.tracks.get(wait.ranks[0])
    if mine is None or theirs is None or not len(mine.seq) or not len(theirs.seq):
        return None
    where = divergence(wait.lane, rank, wait.ranks[0], wait.seq)
    return where if where.shift > 0 and mine.value("step", where.seq) > theirs.value("step", where.seq) >= 0 else None


def _named(scene: Scene, wait: Wait, culprits: tuple[int, ...], reason: Reason, late: Mapping[int, float]) -> Finding:
    """The finding for missing ranks with one reason."""
    place = _place(scene, wait, culprits[0])
    who = listed(culprits)
    first = f"{sentence(who)} {reason.words if len(culprits) == 1 else _plural(reason.words)}; {listed(wait.ranks)} "
    first += f"{verb(wait.ranks, 'waits', 'wait')} for {verb(culprits, 'it', 'them')} in {_operation_words(scene, wait)}."
    is_slow = reason.kind == "late_rank"
    lateness = max((late.get(rank, 0.0) for rank in culprits), default=0.0) or (_waited_s(scene, wait) if is_slow else 0.0)
    return found(
        scene, reason.kind, ranks=culprits, explanation=first, cause=reason.cause, collective=place, lateness_s=lateness,
        lines=(*_lines(scene, wait, culprits), f"{who} {reason.words}"), confidence=_confidence(scene, wait, reason),
        verdict="straggler" if is_slow else None, phase="data" if reason.kind == "dataloader_deadlock" else "",
    )  # fmt: skip


def _plural(words: str) -> str:
    for one, many in (("is ", "are "), ("has ", "have "), ("waits ", "wait "), ("gave ", "gave "), ("lives,", "live,")):
        if words.startswith(one):
            return many + words[len(one) :]
    return words


def _confidence(scene: Scene, wait: Wait, reason: Reason) -> Confidence:
    unknown = [rank for rank in wait.lane.members if rank not in scene.rows and rank not in wait.ranks]
    if unknown and reason.confidence == "high":
        return "medium"
    return reason.confidence


def _place(scene: Scene, wait: Wait, rank: int) -> Operation:
    """The operation that is waited in, with the place where the missing rank stands."""
    own = operation(scene, wait.lane, wait.seq, rank, answer(scene, wait))
    return own if own.where else operation(scene, wait.lane, wait.seq, wait.ranks[0], answer(scene, wait))


def _operation_words(scene: Scene, wait: Wait) -> str:
    return numbered(answer(scene, wait), wait.lane, wait.seq) + at(scene.where(wait.ranks[0], wait.lane, wait.seq))


def _lines(scene: Scene, wait: Wait, culprits: tuple[int, ...]) -> tuple[str, ...]:
    """What shows it: who waits, the last operation of those that are missing, where they stand."""
    lines = [f"{listed(wait.ranks)}: inside {_operation_words(scene, wait)}"]
    for rank in culprits[:4]:
        track, stands, marker = wait.lane.tracks.get(rank), scene.stands(rank), marker_of(scene, rank)
        last = (
            f"its last operation in {named(wait.lane)} is seq {track.reached}"
            if track is not None and track.reached > 0
            else "no operation there"
        )
        stack = f"; its main thread is at {stands.where}" if stands is not None else ""
        phase = f'; step {marker.step}, phase "{marker.phase}"' if marker is not None and marker.phase else ""
        lines.append(f"rank {rank}: {last}{phase}{stack}")
    return tuple(lines)


def _waited_s(scene: Scene, wait: Wait) -> float:
    """How long the others had waited when they were looked at; 0 = not known."""
    ages = []
    for rank in wait.ranks:
        track, rows = wait.lane.tracks.get(rank), scene.rows.get(rank)
        created = track.created_ns(wait.seq) if track is not None else 0
        if rows is not None and rows.dump.taken_ns and created:
            ages.append((rows.dump.taken_ns - created) / 1e9)
    return max(0.0, sorted(ages)[len(ages) // 2]) if ages else 0.0


def _extra(scene: Scene, wait: Wait, ended: tuple[int, ...]) -> Finding:
    """Few wait for many that are through: they called one operation more."""
    culprit, peer = wait.ranks[0], next((rank for rank in ended if rank in wait.lane.tracks), -1)
    where = divergence(wait.lane, culprit, peer, wait.seq) if peer >= 0 else None
    seq = where.seq if where is not None else wait.seq
    key = answer(scene, wait)
    said = (
        f"{sentence(listed(wait.ranks))} {verb(wait.ranks, 'waits', 'wait')} in {_operation_words(scene, wait)}, while "
        f"{listed(ended)} {verb(ended, 'is', 'are')} through: {verb(wait.ranks, 'it', 'they')} called one operation more"
    )  # fmt: skip
    return found(
        scene, "extra_collective", ranks=wait.ranks, collective=operation(scene, wait.lane, seq, culprit, key),
        explanation=f"{said}, at seq {seq}." if where is not None and where.is_sure else f"{said}, there or before.",
        first_visible=operation(scene, wait.lane, wait.seq, culprit, key), verdict="hang",
        lines=(*_lines(scene, wait, ()), f"{listed(ended)}: ended well, with no seq {wait.seq} in {named(wait.lane)}"),
        confidence="high" if where is not None and where.is_sure else "medium",
    )  # fmt: skip


def _one_through_one_waits(scene: Scene, wait: Wait, ended: int) -> Finding:
    """Two ranks, one through and one waiting: by counts alone it cannot be told who is wrong."""
    kind: FindingKind = "uneven_inputs" if _ran_less(scene, wait, ended) else "missing_participant"
    return found(
        scene, kind, collective=_place(scene, wait, ended), lines=_lines(scene, wait, (ended,)), confidence="low", verdict="hang",
        explanation=f"Rank {wait.ranks[0]} waits in {_operation_words(scene, wait)}, while rank {ended} is through; of two ranks it cannot "
        "be told whether one called an operation too many or the other one too few.",
    )  # fmt: skip


def _too_early(scene: Scene, wait: Wait, missing: tuple[int, ...]) -> Finding:
    """Most ranks are busy elsewhere and few wait: no sign yet of a wrong order."""
    return found(
        scene, "insufficient_evidence", collective=_place(scene, wait, missing[0]), verdict="inconclusive", confidence="low",
        explanation=f"Only {listed(wait.ranks)} {verb(wait.ranks, 'is', 'are')} in {_operation_words(scene, wait)}; {listed(missing)} "
        f"{verb(missing, 'is', 'are')} not there, and may still come: no fewer of them are missing than wait.",
        lines=_lines(scene, wait, missing),
    )  # fmt: skip


def unheard(scene: Scene, missing: tuple[int, ...], place: Operation, words: str, lines: tuple[str, ...]) -> Finding:
    """Nothing is known of the ranks that may be missing: that is said, and nobody is named, for they may wait as well."""
    return found(
        scene, "insufficient_evidence", confidence="low", verdict="inconclusive", collective=place, lines=lines,
        explanation=f"{words}; of {listed(missing)} nothing was recorded, so it cannot be told whether "
        f"{verb(missing, 'it is', 'they are')} missing there or not.",
    )  # fmt: skip


def judge_missing_peer(scene: Scene, waiting: int, peer: int, place: Operation, words: str) -> Finding:
    """A rank waits in a send or receive for a peer that is inside nothing: why the peer did not come."""
    reason = reason_of(scene, peer, (waiting,)) if is_heard(scene, peer) else None
    if reason is None:
        return unheard(scene, (peer,), place, f"Rank {waiting} waits in {words}", (f"rank {waiting}: inside {words}",))
    return found(
        scene, reason.kind, ranks=(peer,), cause=reason.cause, collective=place, confidence=reason.confidence,
        explanation=f"Rank {waiting} waits in {words}, but rank {peer} {reason.words}.", lines=(f"rank {waiting}: inside {words}",),
        verdict="straggler" if reason.kind == "late_rank" else None,
    )  # fmt: skip
