"""Why a rank is not where the others wait: what its process, stack, marker and last words say."""

from collections.abc import Iterable
from typing import NamedTuple

from validation.finding import Confidence, FindingKind
from validation.flight import Marker
from validation.hang_scene import Scene
from validation.hang_texts import is_echo, is_lost_connection, is_well, noted_exception, own_exception, says_exhausted

STALE_NS = 800_000_000  # a heartbeat this old, while the others' are fresh, did not come for want of the interpreter lock
CAUSES = {
    "checkpoint": "checkpoint_io", "gc": "gc", "compile": "compile", "data": "data", "forward": "compute", "backward": "compute",
    "optimizer": "compute", "evaluate": "compute", "save": "checkpoint_io",
}  # fmt: skip

WITHIN = ("forward", "backward", "collective")  # phases that no program ends in


class Reason(NamedTuple):
    """Why one rank is missing."""

    kind: FindingKind
    words: str  # the rest of a sentence that begins with the rank
    confidence: Confidence
    cause: str = ""


def marker_of(scene: Scene, rank: int) -> Marker | None:
    """The rank's newest marker."""
    rows = scene.rows.get(rank)
    return rows.dump.marker if rows is not None else None


def exception_of(scene: Scene, rank: int) -> str:
    """The exception that this rank itself raised, as told by its note or by its last words."""
    marker = marker_of(scene, rank)
    noted = noted_exception(marker.note) if marker is not None else ""
    return noted.removeprefix("exception: ") or own_exception(scene.of(rank).result)


def is_exhausted(scene: Scene, rank: int) -> bool:
    """The rank said that its data came to an end."""
    marker = marker_of(scene, rank)
    return marker is not None and says_exhausted(marker.note)


def has_ended(scene: Scene, rank: int) -> bool:
    """The rank is through with its program, and well."""
    one, marker = scene.of(rank), marker_of(scene, rank)
    if marker is not None and marker.phase == "done":
        return True
    return is_well(one.result) or (one.exit_code == 0 and not one.result and _means_well(scene) and not left_in_step(scene, rank))


def left_in_step(scene: Scene, rank: int) -> bool:
    """Whether the process is gone with exit code 0, without a word, out of the middle of a step, and others lost their connection."""
    one, marker = scene.of(rank), marker_of(scene, rank)
    is_silent_end = one.exit_code == 0 and not one.result and marker is not None and marker.phase in WITHIN
    return is_silent_end and any(is_lost_connection(other.result) for other in scene.evidence.ranks.values())


def _means_well(scene: Scene) -> bool:
    """Whether exit code 0 says something in this job: not where ranks that failed end with it as well."""
    return not any(one.exit_code == 0 and is_echo(one.result) for one in scene.evidence.ranks.values())


def is_heard(scene: Scene, rank: int) -> bool:
    """The rank left a record or a stack."""
    return rank in scene.rows or bool(scene.standing.get(rank))


def is_well_over(scene: Scene) -> bool:
    """Every rank of the job ended well: whoever was waited for did come."""
    ends = [scene.of(rank) for rank in scene.ranks]
    return any(is_well(one.result) for one in ends) and all(is_well(one.result) or (one.exit_code == 0 and not one.result) for one in ends)


def beat_age_ns(scene: Scene, rank: int) -> int:
    """Age of the last heartbeat when the dump was taken; -1 = not recorded."""
    marker, rows = marker_of(scene, rank), scene.rows.get(rank)
    if marker is None or rows is None or not marker.beat_ns or not rows.dump.taken_ns:
        return -1
    return max(rows.dump.taken_ns - marker.beat_ns, 0)


def is_silent(scene: Scene, rank: int) -> bool:
    """The rank's heartbeat stopped while the others' went on."""
    own = beat_age_ns(scene, rank)
    others = sorted(age for other in scene.rows if other != rank and (age := beat_age_ns(scene, other)) >= 0)
    return own > STALE_NS and bool(others) and own > 4 * others[len(others) // 2] and _is_outlived(scene, rank)


def stopped_inside(scene: Scene, ranks: Iterable[int]) -> tuple[int, ...]:
    """Those of the ranks inside an operation whose process does not run at all: a backend's own threads stand still with it."""
    alive = [rank for rank in ranks if scene.of(rank).exit_code is None]
    stopped = tuple(rank for rank in alive if scene.of(rank).state in ("T", "t"))
    return stopped or tuple(rank for rank in alive if not scene.of(rank).state and is_silent(scene, rank))


def _is_outlived(scene: Scene, rank: int) -> bool:
    """Another rank's heart beat on after this one's last beat: they were not all ended together before the dump was taken."""
    last = {other: max((dump.marker.beat_ns for dump in (*one.dumps, *one.late_dumps) if dump.marker), default=0)
            for other, one in scene.evidence.ranks.items()}  # fmt: skip
    one_host = len({one.host for one in scene.evidence.ranks.values()}) == 1  # clocks of others may be off
    return not one_host or max(last.values()) - last.get(rank, 0) > STALE_NS


def reason_of(scene: Scene, rank: int, waiting: tuple[int, ...]) -> Reason | None:
    """Why this rank did not come, the surest sign first; None when nothing at all is known of it."""
    return _by_process(scene, rank, waiting) or _by_stack(scene, rank) or _by_end(scene, rank) or _by_phase(scene, rank)


def _by_process(scene: Scene, rank: int, waiting: tuple[int, ...]) -> Reason | None:
    one = scene.of(rank)
    if one.state in ("T", "t"):
        return Reason("frozen_process", "is stopped (state T)", "high")
    if is_silent(scene, rank) and one.exit_code is None and one.state not in ("X", "Z"):
        age, marker = beat_age_ns(scene, rank) / 1e9, marker_of(scene, rank)
        if (marker is not None and marker.phase == "gc") or _collects(scene, rank):  # which holds the lock, and ends
            return Reason("late_rank", f"has been collecting garbage, with the interpreter's lock held, for {age:.1f} s", "high", "gc")
        return Reason("frozen_process", f"lives, but its heartbeat is {age:.1f} s old: its interpreter lock is held", "high")
    seen = sum(bool(scene.standing.get(other)) for other in waiting)
    was_there = scene.rows.get(rank) is not None and not has_ended(scene, rank) and not exception_of(scene, rank)
    if was_there and not scene.standing.get(rank) and 2 * seen > len(waiting) and (one.exit_code is None or one.exit_code in (-9, -15)):
        return Reason("frozen_process", "gave no stack when the others did: its interpreter did not run", "medium")
    return None


def has_collected(scene: Scene, rank: int) -> bool:
    """Whether one of its stacks shows a garbage collection, and nothing that a finalizer in it waits for."""
    return any(stands.in_gc and not (stands.op or stands.p2p or stands.in_loader) for stands in scene.standing.get(rank, ()))


def _collects(scene: Scene, rank: int) -> bool:
    stands = scene.stands(rank)
    return stands is not None and stands.in_gc and has_collected(scene, rank)


def _by_stack(scene: Scene, rank: int) -> Reason | None:
    stands, exception = scene.stands(rank), exception_of(scene, rank)
    if stands is not None and _collects(scene, rank):
        return Reason("late_rank", f"is collecting garbage, begun at {stands.where}", "medium", "gc")
    if stands is not None and stands.in_loader:
        return Reason("dataloader_deadlock", f"waits for its data loader at {stands.where}", "high")
    if stands is not None and stands.in_cleanup:
        if exception:
            return Reason("exception_path", f"raised {exception} and is cleaning up at {stands.where}", "high")
        return Reason("exception_path", f"is cleaning up at {stands.where}", "medium")
    if exception:
        return Reason("exception_path", f"raised {exception}", "high")
    return None


def _by_end(scene: Scene, rank: int) -> Reason | None:
    if is_exhausted(scene, rank):
        marker = marker_of(scene, rank)
        return Reason("uneven_inputs", f"ran out of data{_after_step(marker)}", "high")
    if has_ended(scene, rank):
        return Reason("missing_participant", "is through with its program", "medium")
    return None


def _by_phase(scene: Scene, rank: int) -> Reason | None:
    marker, stands, rows = marker_of(scene, rank), scene.stands(rank), scene.rows.get(rank)
    phase = marker.phase if marker is not None else ""
    if phase == "data" and stands is None:
        return Reason("dataloader_deadlock", "is in its data phase", "medium", "data")
    moved = rows is not None and rows.moved
    earlier = {one.frames for one in scene.standing.get(rank, ())}
    is_still = rows is not None and rows.before is not None and not moved and len(earlier) <= 1 and scene.of(rank).state == "S"
    if phase == "data" and is_still:
        return Reason("dataloader_deadlock", "sleeps in its data phase", "medium", "data")
    if CAUSES.get(phase) == "compute" and is_still:
        return Reason("missing_participant", f'sleeps in phase "{phase}", as in a lock, and does not go on', "medium")
    if phase in CAUSES:
        return Reason("late_rank", f'is still in phase "{phase}"', "high" if moved or len(earlier) > 1 else "medium", CAUSES[phase])
    if stands is not None:
        sure = moved or len(earlier) > 1
        return Reason("late_rank", f"is busy elsewhere at {stands.where}", "medium" if sure else "low", "")
    if rows is not None:
        return Reason("late_rank" if moved else "missing_participant", "has not come", "low")
    return None


def _after_step(marker: Marker | None) -> str:
    return f" after step {marker.step}" if marker is not None and marker.step >= 0 else ""


def is_failed(scene: Scene) -> bool:
    """Some rank gave up, lost its peers, raised or died."""
    return any(is_echo(one.result) or (one.exit_code or 0) != 0 for one in scene.evidence.ranks.values()) or any(
        exception_of(scene, rank) for rank in scene.ranks
    )
