"""What ranks left of a hang, a crash or a slow job -> who, what, why and what to do. Pure; the order of files and ranks is no matter.

The questions are asked in this order, and the first that has an answer is the finding; docs/diagnosis.md tells why in this order:

    did a process die first?  did ranks find each other at different steps?  does a group's name mean two groups?  did ranks of a group
    issue different operations?  do sends and receives miss each other?  do groups wait for each other in a circle?  who did not come, and
    why?  is everybody in the same operation?
    and, when nobody waits: did ranks disagree silently?  was somebody late?  did somebody fail?  what does the timeline say?
"""

from validation.finding import Finding
from validation.flight import Evidence
from validation.hang_absent import judge_absent
from validation.hang_arrivals import judge_arrivals
from validation.hang_conflict import blocking_conflict, judge_conflict
from validation.hang_cycle import judge_cycle
from validation.hang_deaths import first_deaths, judge_abort, judge_deaths
from validation.hang_p2p import judge_talks, talks_of
from validation.hang_program import deserters
from validation.hang_quiet import (
    ended_wait,
    first_conflict,
    judge_failed,
    judge_moving,
    judge_parted,
    judge_quiet_conflict,
    judge_setup,
    judge_well,
)
from validation.hang_reasons import is_failed
from validation.hang_scene import Scene, scene_of
from validation.hang_steps import judge_out_of_step
from validation.hang_stuck import clash, is_stale, judge_hidden, judge_stuck, split
from validation.hang_waits import Wait, circle_with, cycle_of, edges, waits_of, with_hidden_members
from validation.hang_words import found


def diagnose(evidence: Evidence) -> Finding:
    """Judge all evidence of one job at the time of its trouble.

    Returns: the finding; `ranks` are culprits only, never those that wait or that a backend aborted; () where it cannot be told.
    A timeline is looked at only when nothing hangs and nothing crashed.
    """
    scene = scene_of(evidence)
    waits = waits_of(scene)
    return _hang_or_crash(scene, waits) or _quiet(scene, waits)


def _hang_or_crash(scene: Scene, waits: tuple[Wait, ...]) -> Finding | None:
    """The finding of a job that stands still or died; None when it does neither."""
    dead = first_deaths(scene, waits)
    if dead:
        return judge_deaths(scene, dead, waits)
    finding = judge_out_of_step(scene) or clash(scene, waits) or split(scene)
    if finding is not None:
        return finding
    if waits and not any(wait.seen_twice for wait in waits):
        return None
    conflict = blocking_conflict(scene, waits)
    if conflict is not None:
        return judge_conflict(scene, conflict)
    talking = judge_talks(scene, talks_of(scene), waits, conflict)
    if talking is not None:
        return talking
    return _standing_still(scene, waits) if waits else None


def _standing_still(scene: Scene, waits: tuple[Wait, ...]) -> Finding | None:
    """Ranks wait, and their arguments agree."""
    filled = with_hidden_members(waits)
    circle = cycle_of(filled)
    if circle:
        return judge_cycle(scene, circle)
    inside = {rank for wait in waits for rank in wait.ranks}
    graph = edges(filled)
    ends = [(wait, tuple(rank for rank in wait.absent if rank not in inside)) for wait in filled if not graph[wait]]
    missing = [end for end in ends if end[1]]
    aborted = judge_abort(scene, waits)
    if aborted is not None:
        return aborted
    if missing:
        return judge_absent(scene, *missing[0])
    wait = ends[0][0]
    outside = tuple(rank for rank in scene.ranks if rank not in wait.lane.members)
    if not wait.lane.is_known and not wait.absent and (deserted := deserters(scene, set(outside) & inside)) and _is_waited_for(wait, waits):
        return judge_cycle(scene, circle_with(wait, waits, deserted))
    if is_stale(scene, wait):
        return None
    if not wait.lane.is_known and outside and _is_waited_for(wait, waits):
        return judge_hidden(scene, wait, outside)
    return judge_stuck(scene, wait)


def _is_waited_for(wait: Wait, waits: tuple[Wait, ...]) -> bool:
    """Whether others wait elsewhere for the ranks inside this operation."""
    return any(set(wait.ranks) & set(other.absent) for other in waits)


def _quiet(scene: Scene, waits: tuple[Wait, ...]) -> Finding:
    """Nobody stands still as far as can be seen."""
    if not scene.rows and not any(one.result or one.exit_code is not None or one.stacks for one in scene.evidence.ranks.values()):
        return _timeline(scene) or found(
            scene, "insufficient_evidence", verdict="inconclusive", confidence="low", explanation="There is no record of any rank."
        )
    conflict = first_conflict(scene)
    if conflict is not None:
        return judge_conflict(scene, conflict) if is_failed(scene) else judge_quiet_conflict(scene, conflict)
    late = ended_wait(scene)
    if late is not None:
        return late
    if is_failed(scene):
        return judge_abort(scene, waits) or judge_setup(scene) or judge_parted(scene) or judge_failed(scene)
    slow = judge_arrivals(scene) if scene.evidence.timeline is None else _timeline(scene)
    return slow or (judge_moving(scene) if waits else judge_well(scene))


def _timeline(scene: Scene) -> Finding | None:
    """What the steps' times say; None without a timeline, or when all is well there."""
    if scene.evidence.timeline is None:
        return None
    from validation.straggling import find_stragglers  # only a job with a timeline pays for it

    return next(iter(find_stragglers(scene.evidence.timeline)), None)
