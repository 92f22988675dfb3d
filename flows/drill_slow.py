"""Drills of slowness and of numbers that are silently wrong: nothing ends, so it has to be seen, and nobody may be harmed."""

from collections.abc import Callable, Mapping

from flows.diagnosing import diagnose_folder
from flows.drill_scenes import both, fault
from flows.drill_stage import Ran, Stage
from validation.finding import Finding
from validation.records import Drill
from validation.straggling import find_stragglers

STEPS, LATE_MS = 40, 60.0
LATE = {"forward": ("compute", "host_cpu", "imbalance"), "data": ("data",)}  # phase of the planted delay -> causes that are right


def straggler(stage: Stage) -> Drill:
    """Rank 1 of 2 is late in its forward pass, then in its data: it has to be named with a cause, and nothing is ended."""
    return both("straggler", [_late(stage, phase) for phase in LATE])


def _late(stage: Stage, phase: str) -> Drill:
    planned = fault("delay", step=5, phase=phase, ms=LATE_MS)
    ran = stage.play(f"late-{phase}", world_size=2, steps=STEPS, faults=(planned,))
    findings = stragglers_of(ran)
    right = [found for found in findings if found.kind == "late_rank" and found.ranks == (1,) and found.cause in LATE[phase]]
    wrong = [found for found in findings if found.ranks != (1,) and found.step >= planned.step]  # a first step that compiles is news, too
    shown = (*right, *wrong, *findings, diagnosed(ran))[0]
    return _judged("straggler", stage, ran, {str(planned)}, shown, seen=bool(right) and not wrong)


def uniform_slowness(stage: Stage) -> Drill:
    """Both ranks are slower from the middle on: it has to be said, and nobody named."""
    planned = tuple(fault("delay", rank=rank, step=STEPS // 2, phase="forward", ms=LATE_MS) for rank in range(2))
    ran = stage.play("uniform", world_size=2, steps=STEPS, faults=planned)
    found = diagnosed(ran)
    return _judged("uniform_slowness", stage, ran, set(map(str, planned)), found, seen=found.kind == "uniform_slowness" and not found.ranks)


def silent_mismatch(stage: Stage) -> Drill:
    """An all-reduce of two types ends well and adds nonsense: the rings of the run that looks healthy show it."""
    planned = fault("dtype", phase="collective")
    ran = stage.play("silent", world_size=3, steps=STEPS, faults=(planned,))
    found = diagnosed(ran)
    seen = found.kind == "silent_mismatch" and found.ranks == (1,)
    return _judged("silent_mismatch", stage, ran, {str(planned)}, found, seen=seen)


def stragglers_of(ran: Ran) -> tuple[Finding, ...]:
    """All that the recorded steps of the run's ranks say of slowness."""
    timeline = diagnose_folder(ran.folder).evidence.timeline
    return () if timeline is None else find_stragglers(timeline)


def diagnosed(ran: Ran) -> Finding:
    """What `seatrial diagnose` says of the run's folder. Raises DataError when it holds no evidence."""
    return diagnose_folder(ran.folder).finding


def _judged(name: str, stage: Stage, ran: Ran, planned: set[str], found: Finding, *, seen: bool) -> Drill:
    """Nothing is mitigated by itself: it counts that the finding says what to do, and that the run went through with its twin's bits."""
    twin = stage.twin(world_size=2, steps=STEPS)
    unharmed = ran.record is not None and ran.record.attempts == 1 and ran.record.state_sha256 == twin.state_sha256
    return Drill(
        name=name, fired=planned <= ran.fired, detected=seen, mitigated=unharmed and bool(found.action), seconds=ran.seconds,
        detail=f"{', '.join(sorted(planned))}: {found.kind} {found.cause} of ranks {found.ranks}: {found.explanation}"[:400],
    )  # fmt: skip


SLOW_DRILLS: Mapping[str, Callable[[Stage], Drill]] = {
    "straggler": straggler, "uniform_slowness": uniform_slowness, "silent_mismatch": silent_mismatch,
}  # fmt: skip
