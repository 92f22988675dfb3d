"""Drills of rank groups: what is planted, which finding or words have to name it, and what has to become of the run."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flows.drill_stage import Ran, Stage
from trainer.config import Fault
from trainer.drill_plan import PREFIX, expected_digest
from validation.failure_modes import default_modes
from validation.records import Drill

# Six updates are enough for the watch to know what is usual; checkpoints stand at 2, 4, 6, ...
STEP, STEPS = 6, 10
USUAL: Mapping[str, Any] = {
    "world_size": 2, "steps": STEPS, "checkpoint_every": 2, "max_restarts": 1, "stall_s": 20.0, "deadline_s": 40.0, "stall_floor_s": 0.4,
}  # fmt: skip
FOR_EVER_MS = 1e9
Promise = Literal["same bits", "same bits on fewer ranks", "stopped", "unharmed", "waited"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """One run that fails by plan."""

    faults: tuple[Fault, ...] = ()
    script: str = ""  # of trainer.drill_scripts, in a recipe's place
    kinds: tuple[str, ...] = ()  # findings that are right
    ranks: tuple[int, ...] = ()  # culprits; () = nobody may be named
    step: int = -1  # that the finding names, if it names one; -1 = any
    words: str = ""  # of the leader, that are right as well
    promise: Promise = "same bits"
    options: Mapping[str, Any] = field(default_factory=dict)


def fault(kind: Any, *, rank: int = 1, step: int = STEP, phase: str = "backward", attempt: int = 0, ms: float = 0.0) -> Fault:
    """A planned fault of rank 1 at STEP, unless said otherwise."""
    return Fault(kind=kind, rank=rank, step=step, phase=phase, attempt=attempt, ms=ms)


def kinds_of(name: str) -> tuple[str, ...]:
    """The findings that lead to a mode."""
    return next(mode.kinds for mode in default_modes() if mode.name == name)


OUT_OF_STEP = (*kinds_of("skipped_collective"), "missing_participant")
SCENES: Mapping[str, tuple[Scene, ...]] = {
    "rank_killed": (Scene(faults=(fault("kill"),), kinds=kinds_of("rank_killed"), ranks=(1,), words="kill:rank=1"),),
    "launcher_lost": (Scene(faults=(fault("launcher"),), words="recovered from launcher:rank=1"),),
    "frozen_process": (
        Scene(faults=(fault("stop"),), kinds=kinds_of("frozen_process"), ranks=(1,), words="was stopped by a signal"),
        Scene(faults=(fault("hold", ms=FOR_EVER_MS),), kinds=kinds_of("frozen_process"), ranks=(1,)),
    ),
    "loader_deadlock": (Scene(faults=(fault("starve", phase="data"),), kinds=kinds_of("loader_deadlock"), ranks=(1,), step=STEP),),
    "exception_swallowed": (Scene(faults=(fault("swallow"),), kinds=kinds_of("exception_swallowed"), ranks=(1,)),),
    "teardown_deadlock": (
        Scene(script="teardown_deadlock", kinds=kinds_of("teardown_deadlock"), ranks=(1,), options={"world_size": 3}),
    ),
    "blamed_again": (
        Scene(
            faults=tuple(fault("starve", phase="data", attempt=attempt, step=STEP + 2 * attempt) for attempt in range(2)),
            kinds=kinds_of("loader_deadlock"), ranks=(1,), promise="same bits on fewer ranks",
            options={"max_restarts": 3, "steps": STEPS + 2, "blame_planned": True},
        ),
    ),
    "crash_loop": (
        Scene(
            faults=tuple(fault("error", step=3, attempt=attempt) for attempt in range(6)), words="crash loop", promise="stopped",
            options={"max_restarts": 9},
        ),
    ),
    "hang": (  # a rank in its own code may be slow: it is waited for until the collectives' time-out
        Scene(
            faults=(fault("delay", phase="collective", ms=FOR_EVER_MS),), kinds=(*kinds_of("hang"), "late_rank"), ranks=(1,),
            options={"stall_s": 4.0},
        ),
    ),
    "skipped_collective": (
        Scene(faults=(fault("skip", phase="collective"),), kinds=OUT_OF_STEP, ranks=(1,), options={"world_size": 3}),
        Scene(faults=(fault("extra", phase="collective"),), kinds=OUT_OF_STEP, ranks=(1,), options={"world_size": 3}),
    ),
    "mismatched_arguments": (
        Scene(
            faults=(fault("argument", phase="collective"),), kinds=kinds_of("mismatched_arguments"), ranks=(1,), options={"world_size": 3}
        ),
    ),
    "group_misuse": (Scene(script="group_misuse", kinds=kinds_of("group_misuse"), ranks=(2,), options={"world_size": 3}),),
    "point_to_point": (Scene(script="point_to_point", kinds=kinds_of("point_to_point"), ranks=(0, 1)),),
    "fabric": (Scene(script="fabric", kinds=kinds_of("fabric")),),
    "undiagnosed": (
        Scene(script="undiagnosed", kinds=kinds_of("undiagnosed"), words="imed out", promise="same bits", options={"stall_s": 3.0}),
    ),
    "false_alarm": (Scene(faults=(fault("pause", ms=1200.0),), kinds=kinds_of("false_alarm"), promise="unharmed"),),
    "full_disk": (Scene(faults=(fault("full", step=0, phase="write"),), words="No space left", promise="unharmed"),),
}  # fmt: skip


def drill_group(name: str, stage: Stage, *, only: int | None = None) -> Drill:
    """Play a mode's scenes. Args: only, the place of the one scene that is asked for."""
    scenes = SCENES[name] if only is None else SCENES[name][only : only + 1]
    return both(name, [play(name, scene, stage) for scene in scenes])


def play(name: str, scene: Scene, stage: Stage) -> Drill:
    """Fire one scene, and look at what came of it."""
    options = {**USUAL, **scene.options}
    if scene.script:
        options["recipe"] = f"{PREFIX}{scene.script}"
    ran = stage.play(name, is_script=bool(scene.script), faults=scene.faults, **options)
    planned = {f"{PREFIX}{scene.script}"} if scene.script else {str(item) for item in _due(scene, ran)}
    said = "; ".join([*map(_shown, ran.findings), ran.deaths]) or "nothing was said"
    kept = is_kept(scene, ran, stage, options)
    return Drill(
        name=name, fired=planned <= ran.fired, detected=is_named(scene, ran), mitigated=kept, seconds=ran.seconds,
        detail=f"{', '.join(sorted(planned))}: {said[:400]}; promised {scene.promise}: {'kept' if kept else 'broken'}",
    )  # fmt: skip


def both(name: str, drills: Sequence[Drill]) -> Drill:
    """Several runs of one drill as one: all have to be right."""
    return Drill(
        name=name, fired=all(drill.fired for drill in drills), detected=all(drill.detected for drill in drills),
        mitigated=all(drill.mitigated for drill in drills), detail=" | ".join(drill.detail for drill in drills),
        seconds=sum(drill.seconds for drill in drills),
    )  # fmt: skip


def is_named(scene: Scene, ran: Ran) -> bool:
    """Whether a finding of the right kind names the right ranks and step; where the leader has words for it, they count too."""
    if scene.promise == "unharmed" and scene.kinds:  # nothing is wrong: whatever was said may not call it a hang
        return all(finding["verdict"] not in ("hang", "crash") for finding in ran.findings)
    right = [finding for finding in ran.findings if finding["kind"] in scene.kinds and tuple(sorted(finding["ranks"])) == scene.ranks]
    steps = {-1 if finding.get("step") is None else int(finding["step"]) for finding in right}
    if right and (scene.step < 0 or steps & {-1, scene.step}):
        return True
    unsaved = "; ".join(ran.record.unsaved) if ran.record else ""
    return bool(scene.words) and scene.words in f"{ran.deaths}; {unsaved}"


def is_kept(scene: Scene, ran: Ran, stage: Stage, options: Mapping[str, Any]) -> bool:
    """Whether what is promised against the failure happened."""
    if scene.promise == "stopped":
        return bool(ran.error) and len(ran.world_sizes) <= int(options["max_restarts"])
    if ran.record is None:
        return False
    sizes = ran.world_sizes
    if not is_same(scene, ran, stage, options):
        return False
    match scene.promise:
        case "same bits on fewer ranks":
            return sizes[-1] < sizes[0]
        case "unharmed":
            return len(sizes) == 1
    return len(sizes) > 1


def is_same(scene: Scene, ran: Ran, stage: Stage, options: Mapping[str, Any]) -> bool:
    """Whether the run ended with the bits of its undisturbed twin."""
    assert ran.record is not None  # asked only of runs that ended well
    if scene.script:
        return set(ran.record.state_sha256_by_rank) == {expected_digest(int(options["world_size"]))}
    twin = stage.twin(world_size=int(options["world_size"]), steps=int(options["steps"]))
    return (ran.record.state_sha256, ran.record.ledger_sha256) == (twin.state_sha256, twin.ledger_sha256)


def _due(scene: Scene, ran: Ran) -> list[Fault]:
    """The planned faults of attempts that there were."""
    return [item for item in scene.faults if item.attempt < len(ran.world_sizes)]


def _shown(finding: Mapping[str, Any]) -> str:
    ranks = ", ".join(map(str, finding["ranks"]))
    return f"{finding['verdict']}: {finding['kind']}{f' of rank {ranks}' if ranks else ''}"
