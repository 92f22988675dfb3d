"""Nobody waits: ranks that disagreed without a hang, waits that ended, time-outs that left nothing, and jobs that are well."""

from collections.abc import Iterable
from dataclasses import replace

import numpy as np

from validation.finding import Finding, FindingKind, Operation
from validation.flight import DEFAULT_GROUP, Marker
from validation.hang_conflict import is_swap, judge_conflict
from validation.hang_majority import Conflict, conflicts
from validation.hang_reasons import CAUSES, WITHIN, exception_of, has_collected, has_ended, is_exhausted, marker_of
from validation.hang_scene import Lane, Scene
from validation.hang_signatures import Agreement
from validation.hang_texts import is_echo, is_lost_connection, is_well
from validation.hang_words import at, found, has_timed_out, listed, named, operation, sentence, side_lines, verb

SLOW_S = 1.0  # a rank that came this late held up the job; what is less, timelines tell


def first_conflict(scene: Scene) -> Conflict | None:
    """The first disagreement of any group, the group of all ranks last: its order follows from the others'."""
    for lane in sorted(scene.lanes, key=lambda lane: (len(lane.tracks), lane.name)):
        for conflict in conflicts(scene, lane):
            return conflict
    return None


def judge_quiet_conflict(scene: Scene, conflict: Conflict) -> Finding:
    """A run that goes on although ranks disagree: the numbers are wrong."""
    if conflict.kind in ("op_type_mismatch", "root_mismatch") or not conflict.majority:
        return _wrong(judge_conflict(scene, conflict))
    lane, seq, culprit, peer = conflict.lane, conflict.seq, conflict.culprits[0], conflict.majority[0]
    swapped = is_swap(lane, culprit, peer, seq)
    who = listed(conflict.culprits)
    said = f"{sentence(who)} issued two operations in the other order" if swapped else f"{sentence(who)} issued other arguments"
    place = operation(scene, lane, seq, culprit, conflict.answer(peer))
    return found(
        scene, "order_swap_same_group" if swapped else "silent_mismatch", ranks=conflict.culprits, verdict="inconclusive", collective=place,
        explanation=f"{said} at seq {seq} of {named(lane)} than {listed(conflict.majority)}; nothing hangs, but the results are wrong.",
        lines=side_lines(scene, lane, seq, conflict.sides), confidence="high" if not conflict.unknown else "medium",
    )  # fmt: skip


def _wrong(finding: Finding) -> Finding:
    return replace(finding, verdict="inconclusive") if finding.verdict == "hang" else finding


def ended_wait(scene: Scene) -> Finding | None:
    """An operation that some were inside for long before another rank came to it: slow, not hung."""
    worst: tuple[float, int, Lane, int] | None = None
    for lane in scene.lanes:
        for seq in _once_pending(scene, lane):
            created = sorted((track.created_ns(seq), rank) for rank, track in lane.tracks.items() if track.position(seq) >= 0)
            if len(created) < 2 or created[0][0] == 0:
                continue
            middle = created[(len(created) - 1) // 2][0]
            late_s = (created[-1][0] - middle) / 1e9
            if late_s > SLOW_S and (worst is None or late_s > worst[0]):
                worst = (late_s, created[-1][1], lane, seq)
    if worst is None:
        return None
    late_s, rank, lane, seq = worst
    marker = _marker_before(scene, lane, rank, seq)
    key = _key(scene, lane, seq, rank)
    return found(
        scene, "late_rank", ranks=(rank,), verdict="straggler", lateness_s=late_s, collective=operation(scene, lane, seq, rank, key),
        cause="gc" if has_collected(scene, rank) else CAUSES.get(marker.phase, "") if marker is not None else "", confidence="high",
        phase=marker.phase if marker is not None else "", step=marker.step if marker is not None else -1,
        explanation=f'Rank {rank} came {late_s:.1f} s after the others to {key.op} (seq {seq} of group "{lane.name}"); then all went on.',
        lines=(f'group "{lane.name}" seq {seq}: rank {rank} issued it {late_s:.3f} s after the middle one of the others',),
    )  # fmt: skip


def _marker_before(scene: Scene, lane: Lane, rank: int, seq: int) -> Marker | None:
    """Where the rank's program stood in the last snapshot before it came."""
    for dump in reversed(scene.of(rank).dumps):
        names = [number for number, group in enumerate(dump.groups) if group.name == lane.name]
        if dump.marker is not None and not bool(((dump.seq >= seq) & np.isin(dump.group, names)).any()):
            return dump.marker
    return None


def _once_pending(scene: Scene, lane: Lane) -> list[int]:
    """Numbers that some rank was seen inside, in any snapshot."""
    seqs = set()
    for rank in lane.tracks:
        for dump in scene.of(rank).dumps:
            names = {number for number, group in enumerate(dump.groups) if group.name == lane.name}
            seqs |= {int(dump.seq[row]) for row in (~dump.finished).nonzero()[0].tolist() if int(dump.group[row]) in names}
    return sorted(seqs)


def judge_parted(scene: Scene) -> Finding | None:
    """Some ranks are through, and well, and the others lost their connection to them: who had less to do, or more."""
    lost = tuple(rank for rank in scene.ranks if is_lost_connection(scene.of(rank).result))
    ended = tuple(rank for rank in scene.ranks if rank not in lost and has_ended(scene, rank))
    if not lost or len(ended) + len(lost) < len(scene.ranks) or not ended:
        return None
    dry = tuple(rank for rank in ended if is_exhausted(scene, rank)) if not any(is_exhausted(scene, rank) for rank in lost) else ()
    if not dry and len(lost) == len(ended):
        return None
    kind: FindingKind = "uneven_inputs" if dry else "extra_collective" if len(lost) < len(ended) else "missing_participant"
    culprits = dry or (lost if len(lost) < len(ended) else ended)
    place = _unanswered(scene, lost, ended)
    reason = "ran out of data" if dry else "called an operation more" if culprits == lost else "is through earlier"
    return found(
        scene, kind, ranks=culprits, verdict="hang", collective=place, confidence="medium" if dry else "low",
        explanation=f"{sentence(listed(ended))} ended well, and {listed(lost)} lost the connection: {listed(culprits)} {reason}.",
        lines=_last_lines(scene),
    )  # fmt: skip


def _unanswered(scene: Scene, left: Iterable[int], gone: Iterable[int]) -> Operation:
    """The last operation of all ranks that one of `left` issued, where none of `gone` did; without a number when it is not recorded."""
    lane = scene.default
    seq, peer = max(((lane.tracks[rank].last, rank) for rank in left if rank in lane.tracks), default=(-1, -1)) if lane else (-1, -1)
    if lane is None or peer < 0 or any(lane.holds(rank, seq) for rank in gone):
        return Operation(group=DEFAULT_GROUP)
    return operation(scene, lane, seq, peer, _key(scene, lane, seq, peer))


def _key(scene: Scene, lane: Lane, seq: int, rank: int) -> Agreement:
    track = lane.tracks[rank]
    return scene.keys[int(track.key[track.position(seq)])]


def judge_setup(scene: Scene) -> Finding | None:
    """Ranks stand in the making of a group, and those who made it know other groups than the rest."""
    inside = tuple(rank for rank in scene.ranks if any(one.in_setup for one in scene.standing.get(rank, ())))
    known: dict[tuple[str, ...], list[int]] = {}
    for rank in inside:
        rows = scene.rows.get(rank)
        if rows is not None:
            known.setdefault(tuple(sorted(group.name for group in rows.dump.groups if group.name != DEFAULT_GROUP)), []).append(rank)
    if len(known) < 2 and not (inside and has_timed_out(scene)):
        return None
    sides = sorted(known.items(), key=lambda side: (-len(side[1]), side[1]))
    lines = [f"{listed(ranks)}: know groups {', '.join(names) or 'none but that of all ranks'}" for names, ranks in sides[:8]]
    where = scene.where(inside[0])
    return found(
        scene, "group_membership_mismatch", verdict="hang", confidence="medium" if len(known) > 1 else "low", lines=lines,
        collective=Operation(op="new_group", where=where), explanation=f"{sentence(listed(inside))} are making a group{at(where)} and wait "
        "for each other: not every rank makes the same groups in the same order.",
    )  # fmt: skip


def judge_failed(scene: Scene) -> Finding:
    """Ranks failed, and no record shows in what."""
    raised = tuple(rank for rank in scene.ranks if exception_of(scene, rank))
    if raised and not has_timed_out(scene):
        text = exception_of(scene, raised[0])
        culprits = raised[:1] if len({exception_of(scene, rank) for rank in raised}) > 1 else raised
        left = [rank for rank in scene.ranks if rank not in raised and is_lost_connection(scene.of(rank).result)]
        return found(
            scene, "exception_path", ranks=culprits, verdict="crash", collective=_unanswered(scene, left, culprits),
            explanation=f"{sentence(listed(raised))} raised {text}.", lines=tuple(
                f"rank {rank}: {exception_of(scene, rank)}" for rank in raised[:8]), confidence="medium",
        )  # fmt: skip
    gave_up = [rank for rank, one in sorted(scene.evidence.ranks.items()) if is_echo(one.result)]
    last = _last_lines(scene)
    return found(
        scene, "insufficient_evidence", verdict="inconclusive", confidence="low",
        explanation=f"{sentence(listed(gave_up)) if gave_up else 'Some rank'} gave up or failed, but the records show nobody inside an "
        "operation: they were taken after the time-out, which ends every entry, or too early.",
        lines=last,
    )  # fmt: skip


def _last_lines(scene: Scene) -> tuple[str, ...]:
    lane = scene.default
    if lane is None:
        return ()
    lasts: dict[int, list[int]] = {}
    for rank, track in lane.tracks.items():
        lasts.setdefault(track.last, []).append(rank)
    lines = [f"{listed(ranks)}: last recorded operation of {named(lane)} is seq {seq}" for seq, ranks in sorted(lasts.items())]
    return tuple(lines[:8])


def judge_well(scene: Scene) -> Finding:
    """Nobody waits, nobody failed."""
    all_well = all(is_well(scene.of(rank).result) for rank in scene.ranks)
    unknown = tuple(rank for rank in scene.ranks if rank not in scene.rows)
    ends = [rank for rank in scene.ranks if is_well(scene.of(rank).result)]
    if ends and any(not scene.of(rank).result for rank in unknown):
        return found(
            scene, "insufficient_evidence", verdict="inconclusive", lines=_last_lines(scene), confidence="low",
            explanation=f"{sentence(listed(ends))} ended well, but of {listed(unknown)} nothing was recorded, not even an end.",
        )  # fmt: skip
    if not all_well and not any(scene.of(rank).dumps for rank in scene.ranks):
        return found(
            scene, "insufficient_evidence", verdict="inconclusive", lines=_last_lines(scene), confidence="low",
            explanation="There is no record from while the job ran: what was taken after a time-out or the end, or stacks alone, cannot "
            "show that all was well.",
        )  # fmt: skip
    if through := _through_early(scene):
        return found(
            scene, "insufficient_evidence", verdict="inconclusive", lines=_last_lines(scene), confidence="low",
            explanation=f"{sentence(listed(through))} {verb(through, 'is', 'are')} through, while others were last seen in a later step; "
            "no record shows what they did there, nor how they ended. Give the dumps and exit codes of that time, too.",
        )  # fmt: skip
    gap = f" Of {listed(unknown)} nothing was recorded." if unknown else ""
    return found(
        scene, "healthy", verdict="healthy", lines=_last_lines(scene), confidence="high" if all_well or not unknown else "medium",
        explanation=f"No rank waits for another, and their operations agree.{gap}",
    )  # fmt: skip


def _through_early(scene: Scene) -> tuple[int, ...]:
    """Ranks that are through with an earlier step than one that others, whose end is not known, were inside when they were last seen."""
    markers = {rank: marker for rank in scene.ranks if (marker := marker_of(scene, rank)) is not None}
    open_ended = [rank for rank in markers if not has_ended(scene, rank) and not scene.of(rank).result]
    last = max((markers[rank].step for rank in open_ended if markers[rank].phase in WITHIN), default=-1)
    return tuple(rank for rank, marker in markers.items() if marker.phase == "done" and 0 <= marker.step < last)


def judge_moving(scene: Scene) -> Finding:
    """Ranks wait for each other, but all went on between the snapshots."""
    return found(
        scene, "healthy", verdict="healthy", lines=_last_lines(scene),
        explanation="Ranks are inside operations, but every one of them went on between the snapshots: the job makes progress.",
    )  # fmt: skip
