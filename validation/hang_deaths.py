"""Which process died first, and which deaths are only echoes of it."""

import signal

from validation.finding import Finding, Operation
from validation.flight import DEFAULT_GROUP
from validation.hang_conflict import aborted_lines
from validation.hang_majority import sides_at
from validation.hang_reasons import exception_of, left_in_step, marker_of
from validation.hang_scene import Lane, Scene
from validation.hang_signatures import spell
from validation.hang_texts import is_lost_connection, is_time_out
from validation.hang_waits import Wait, answer
from validation.hang_words import at, found, has_timed_out, listed, named, numbered, operation, sentence

_FAULTS = frozenset({-4, -7, -8, -11})  # no launcher sends these
_ABORTED = -6
_GONE = ("X", "Z")


def first_deaths(scene: Scene, waits: tuple[Wait, ...]) -> tuple[int, ...]:
    """Ranks whose death is a cause: killed by a signal, or gone with an error, before anybody gave up waiting. Aborts are judged apart."""
    dead = {rank: code for rank in scene.ranks if (code := _death(scene, rank)) is not None}
    if len(dead) == len(scene.ranks) > 1:  # the whole job was ended, and only a fault of its own tells one from the others
        dead = {rank: code for rank, code in dead.items() if code in _FAULTS}
    causes = [rank for rank, code in dead.items() if code != _ABORTED and _is_cause(scene, rank, code, waits)]
    if not causes:
        return ()
    unsaid = [rank for rank in causes if dead[rank] > 0]
    if len(unsaid) == len(causes) > 1:
        return ()  # several that gave up without a word: an echo of something else
    faults = [rank for rank in causes if dead[rank] in _FAULTS or dead[rank] == -9]
    return _earliest(scene, tuple(faults or causes))


def _death(scene: Scene, rank: int) -> int | None:
    """The exit code of a rank that did not end well by its own; 0 = gone, code not known; None = alive, or ended otherwise."""
    one, marker = scene.of(rank), marker_of(scene, rank)
    if one.exit_code is not None and one.exit_code < 0:
        return one.exit_code
    if one.exit_code is None and one.state in _GONE and not one.result and (marker is None or marker.phase != "done"):
        return 0
    if one.exit_code is not None and one.exit_code > 0 and not one.result and not exception_of(scene, rank):
        return one.exit_code
    return 0 if left_in_step(scene, rank) else None


def _is_cause(scene: Scene, rank: int, code: int, waits: tuple[Wait, ...]) -> bool:
    """Whether this death came before the trouble: ends by a launcher follow a time-out."""
    one, results = scene.of(rank), [other.result for other in scene.evidence.ranks.values() if other.result]
    if code in _FAULTS or (one.state in _GONE and not has_timed_out(scene)):
        return True
    if one.result and (is_time_out(one.result) or is_lost_connection(one.result)):
        return False
    if has_timed_out(scene):
        return code == -9 and any("nccl" in text.lower() for text in results) and not any("gloo" in text.lower() for text in results)
    if code in (-15, -2) or code > 0:
        return any(is_lost_connection(text) for text in results) or not any(rank in wait.ranks for wait in waits)
    if any(is_lost_connection(text) for text in results):
        return True
    busy = [other for wait in waits for other in wait.absent if other != rank and scene.of(other).exit_code is None]
    return not any(rank in wait.ranks for wait in waits) or not busy


def _earliest(scene: Scene, ranks: tuple[int, ...]) -> tuple[int, ...]:
    """Those that got least far; of equals, by their last heartbeats where those differ clearly."""
    if len(ranks) < 2:
        return ranks
    reached = {rank: _reached(scene, rank) for rank in ranks}
    first = [rank for rank in ranks if reached[rank] == min(reached.values())]
    beats = {rank: marker.beat_ns for rank in first if (marker := marker_of(scene, rank)) is not None and marker.beat_ns}
    if len(beats) == len(first) > 1 and max(beats.values()) - min(beats.values()) > 500_000_000:
        first = [rank for rank in first if beats[rank] - min(beats.values()) <= 500_000_000]
    return tuple(first)


def _reached(scene: Scene, rank: int) -> int:
    lane = scene.default
    track = lane.tracks.get(rank) if lane is not None else None
    return track.last if track is not None else -1


def judge_deaths(scene: Scene, ranks: tuple[int, ...], waits: tuple[Wait, ...]) -> Finding:
    """Name the process that died first, how, and the operation that the others were in."""
    place, lane = _interrupted(scene, ranks[0], waits)
    last = _reached(scene, ranks[0])
    how = ", ".join(dict.fromkeys(_how(scene, rank) for rank in ranks))
    who = sentence(listed(ranks))
    done = (
        f'; the last operation that it completed in group "0" is seq {place.seq - 1}'
        if last >= 0 and len(ranks) == 1 and lane is not None and lane.name == "0"
        else ""
    )
    echoes = [rank for rank in scene.ranks if rank not in ranks and is_lost_connection(scene.of(rank).result)]
    lines = [f"rank {rank}: {_how(scene, rank)}" for rank in ranks[:8]]
    if echoes:
        lines.append(f"{listed(echoes)}: lost the connection, as a consequence")
    if place.seq >= 0:
        lines.append(f'the others were in {place.op or "an operation"} (seq {place.seq} of group "{place.group}"){at(place.where)}')
    return found(
        scene, "dead_process", ranks=ranks, verdict="crash", collective=place, explanation=f"{who} died first ({how}){done}.",
        lines=(*lines, *aborted_lines(scene, ranks)), confidence="high" if len(ranks) == 1 else "medium",
    )  # fmt: skip


def _how(scene: Scene, rank: int) -> str:
    code = scene.of(rank).exit_code
    if code is None:
        return "gone, exit code not known"
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {-code}, {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"


def _interrupted(scene: Scene, rank: int, waits: tuple[Wait, ...]) -> tuple[Operation, Lane | None]:
    """The operation in which the others wait for this rank, for it alone if possible, or that it died in; else the one after its last."""
    for wait in sorted(waits, key=lambda wait: len(set(wait.absent) - {rank})):
        if rank in wait.absent or rank in wait.ranks:
            peer = next((other for other in wait.ranks if other != rank), rank)
            return operation(scene, wait.lane, wait.seq, peer, answer(scene, wait)), wait.lane
    lane = scene.default
    if lane is None or not lane.tracks:
        return Operation(group=DEFAULT_GROUP), lane
    seq = _reached(scene, rank) + 1 if _reached(scene, rank) >= 0 else max(track.last for track in lane.tracks.values())
    sides = sides_at(scene, lane, seq)
    return operation(scene, lane, seq, sides[0][1][0] if sides else None, sides[0][0] if sides else None), lane


def judge_abort(scene: Scene, waits: tuple[Wait, ...]) -> Finding | None:
    """An abort by the backend where all operations that are known agree: what the one unknown rank issued must have been the wrong one.

    Only where sizes are compared: the splits of an all_to_all may differ, and any of those that were recorded may be the wrong one.
    """
    aborted = [rank for rank in scene.ranks if scene.of(rank).exit_code == _ABORTED]
    if not aborted:
        return None
    for lane in _suspects(scene, waits):
        others = [rank for rank in lane.members if rank not in aborted]
        if len(aborted) != 1 or aborted[0] not in lane.members or any(rank not in lane.tracks for rank in others):
            continue
        seq = min((lane.tracks[rank].last for rank in others), default=-1)  # that nobody was through
        if not all(_is_last_word(scene, rank, seq) for rank in others):
            continue
        sides = sides_at(scene, lane, seq, others)
        if len(sides) == 1 and len(sides[0][1]) > 1 and sides[0][0].elements and not lane.holds(aborted[0], seq):
            return _by_elimination(scene, lane, seq, aborted[0])
    place = _interrupted(scene, aborted[0], waits)[0]
    return found(
        scene, "insufficient_evidence", collective=place, verdict="inconclusive", confidence="low", lines=aborted_lines(scene, ()),
        explanation=f"{sentence(listed(aborted))} died with signal 6, as a backend does that received a wrong size; whose size was wrong "
        "was not recorded.",
    )  # fmt: skip


def _is_last_word(scene: Scene, rank: int, seq: int) -> bool:
    """Whether the records of this rank go to its end, or show it inside this number: nothing followed that is not recorded."""
    return bool(scene.of(rank).late_dumps) or any(head.seq == seq for head in scene.rows[rank].heads)


def _suspects(scene: Scene, waits: tuple[Wait, ...]) -> tuple[Lane, ...]:
    """Groups that somebody is stuck in, else the group of all."""
    lanes = tuple(dict.fromkeys(wait.lane for wait in waits))
    return lanes or ((scene.default,) if scene.default is not None else ())


def _by_elimination(scene: Scene, lane: Lane, seq: int, rank: int) -> Finding:
    key, others = sides_at(scene, lane, seq, (other for other in lane.members if other != rank))[0]
    place = operation(scene, lane, seq, rank, key)
    return found(
        scene, "shape_mismatch", ranks=(rank,), verdict="crash", collective=place, confidence="medium",
        explanation=f"Rank {rank} died with signal 6 where {listed(others)} issued {numbered(key, lane, seq)} alike: the backend aborts on "
        "sizes that differ, and only what this rank issued is not recorded.",
        lines=(f"{named(lane)} seq {seq}: {listed(others)} issued {spell(key)}", f"rank {rank}: signal 6, its last recorded operation is "
               f"seq {lane.tracks[rank].last if rank in lane.tracks else 'unknown'}"),
    )  # fmt: skip
