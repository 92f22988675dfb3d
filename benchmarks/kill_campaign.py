"""Kill a run at random and demand that nothing is lost: every killed run ends with the bits of a run that nobody disturbed.

    python benchmarks/kill_campaign.py [--kills 100] [--seed 1] [--json] [--quick]

Each run draws from its own seed: the world size it starts with and goes on with (1 to 8, often another one), one death or two (the
second one in the second attempt), their kind, rank, step and phase, the distance of checkpoints, the way of sharding, and one of two
models: a tiny one, whose gradients travel at once, and one whose gradients travel by chunks. Kinds: SIGKILL of a rank (most), SIGSTOP of
a rank, SIGKILL of the group's leader. Phases: every step's, a checkpoint's staging, writing and sealing, and in second attempts loading.
One run in OUTSIDE is killed from outside instead: SIGKILL of one rank a random time after its start, wherever it is then, in the middle of
an import, of a save, of the last step; a run that ended before does not count.

The run goes through trainer.ranks.run_group and is compared with an undisturbed twin of one rank: digest of weights and optimizer on
every rank, and of the sample ledger. One history line a death on stderr; the exit code is 1 if any run differs, is not restarted, or if a
planned death did not happen.

Limits: a planned death in a step's phase lets a save under way come to its end first (trainer.faults), one from outside does not. Small
models (the bits, not the load, are on trial) on one machine, which itself stays up.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from support.output import Document, parser, progress, publish

from trainer import history, ranks
from trainer.children import pid_of
from trainer.config import FAULT_PHASES, SAVE_PHASES, Fault, FaultKind, Parallel, TrainJob
from validation.records import RunRecord

RECIPES = ("support.recipes:tiny", "support.recipes:tiny", "support.recipes:chunked")  # the slower one in a third of the runs
MODES: tuple[Parallel, ...] = ("ddp", "fsdp2")
KINDS: tuple[FaultKind, ...] = ("kill",) * 8 + ("stop", "launcher")  # a stop takes two seconds to be noticed
STEPS = 12
LARGEST_WORLD = 8  # the recipes' lanes
OUTSIDE = 5
OUTSIDE_S = 1.2  # the latest such kill, after the first rank was forked; a run takes about a second
FSDP2_WORLDS = (1, 2, 4, 8)  # exact sharding needs equal lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the campaign."""

    seed: int
    recipe: str
    parallel: Parallel
    world_sizes: tuple[int, ...]  # by attempt
    checkpoint_every: int  # updates
    faults: tuple[Fault, ...]  # one an attempt but the last
    outside_s: float | None = None  # when the first attempt's rank is killed from outside
    victim: int = 0  # its rank


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One death and whether its run came out equal."""

    seed: int
    recipe: str
    parallel: str
    fault: str
    world_size: int
    resumed_world_size: int
    resumed_from_step: int
    recovery_s: float  # death -> next update
    equal: bool  # of the whole run

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.recipe.partition(':')[2]} {self.parallel} {self.fault}, W {self.world_size} -> "
            f"{self.resumed_world_size}, from step {self.resumed_from_step}, {self.recovery_s:.2f} s, "
            f"{'equal' if self.equal else 'DIFFERENT'}"
        )


def draw_plan(seed: int) -> Plan:
    """The run of one seed; a second death is planned where the first one leaves a step for it."""
    draw = random.Random(seed)
    checkpoint_every, recipe, parallel = draw.choice((1, 2, 3, 5)), draw.choice(RECIPES), draw.choice(MODES)
    sizes = FSDP2_WORLDS if parallel == "fsdp2" else tuple(range(1, LARGEST_WORLD + 1))
    faults: list[Fault] = []
    world_sizes = [draw.choice(sizes)]
    first_step = 0
    if draw.randrange(OUTSIDE) == 0:
        return Plan(
            seed=seed, recipe=recipe, parallel=parallel, world_sizes=(*world_sizes, draw.choice(sizes)), checkpoint_every=checkpoint_every,
            faults=(), outside_s=draw.uniform(0, OUTSIDE_S), victim=draw.randrange(world_sizes[0]),
        )  # fmt: skip
    for attempt in range(draw.choice((1, 2))):
        if first_step >= STEPS:
            break
        faults.append(draw_fault(draw, world_sizes[-1], attempt, first_step, checkpoint_every))
        first_step = last_step_of(faults[-1], checkpoint_every)
        world_sizes.append(draw.choice((world_sizes[-1], draw.choice(sizes), draw.choice(sizes))))
    return Plan(
        seed=seed, recipe=recipe, parallel=parallel, world_sizes=tuple(world_sizes), checkpoint_every=checkpoint_every, faults=tuple(faults)
    )  # fmt: skip


def draw_fault(draw: random.Random, world_size: int, attempt: int, first_step: int, checkpoint_every: int) -> Fault:
    """A death at a moment that this attempt will certainly reach, however far back it has to begin."""
    last_save = STEPS // checkpoint_every * checkpoint_every - 1  # the last step that is followed by a checkpoint
    phases = [phase for phase in FAULT_PHASES if phase not in SAVE_PHASES or first_step <= last_save]
    phase = draw.choice([phase for phase in phases if phase != "load" or attempt > 0])
    step = draw.randint(first_step, last_save if phase in SAVE_PHASES else STEPS - 1)
    return Fault(kind=draw.choice(KINDS), rank=draw.randrange(world_size), step=step, phase=phase, attempt=attempt)


def last_step_of(fault: Fault, checkpoint_every: int) -> int:
    """The first step that the next attempt makes for certain: a death while saving may leave that checkpoint sealed."""
    if fault.phase not in SAVE_PHASES:
        return fault.step
    return (fault.step // checkpoint_every + 1) * checkpoint_every


def run_plan(plan: Plan, folder: Path) -> RunRecord:
    """Run it through its deaths."""
    folder.mkdir()
    job = TrainJob(
        recipe=plan.recipe, folder=str(folder), world_size=plan.world_sizes[0], parallel=plan.parallel, steps=STEPS, faults=plan.faults,
        checkpoint_every=plan.checkpoint_every, max_restarts=len(plan.world_sizes) - 1, resume_world_sizes=plan.world_sizes[1:],
        deadline_s=120.0,
    )  # fmt: skip
    striker = threading.Thread(target=strike, args=(plan, folder), daemon=True)
    if plan.outside_s is not None:
        striker.start()
    return ranks.run_group(job)


def strike(plan: Plan, folder: Path) -> None:
    """SIGKILL the victim where it is, unless its attempt is over."""
    while len(victims := history.ranks_of(history.read_lines(folder))) < plan.world_sizes[0]:
        time.sleep(0.002)
    time.sleep(plan.outside_s or 0)
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        if pid_of(victims[plan.victim].pid) == victims[plan.victim]:
            os.kill(victims[plan.victim].pid, signal.SIGKILL)


def twins_of(folder: Path) -> dict[str, RunRecord]:
    """Each recipe's run that nobody disturbs, on one rank."""
    calm = {recipe: Plan(seed=-1, recipe=recipe, parallel="ddp", world_sizes=(1,), checkpoint_every=0, faults=()) for recipe in RECIPES}
    return {recipe: run_plan(plan, folder / f"twin-{number}") for number, (recipe, plan) in enumerate(calm.items())}


def kills_of(plan: Plan, record: RunRecord, twin: RunRecord) -> list[Kill]:
    """A line for each planned death, also for one that did not happen, and for each that came from outside."""
    equal = (
        set(record.state_sha256_by_rank) == {twin.state_sha256}
        and record.ledger_sha256 == twin.ledger_sha256
        and record.steps == STEPS
        and record.faults_fired == tuple(map(str, plan.faults))
    )
    back = {recovery.fault: recovery for recovery in record.recoveries}
    deaths = [str(fault) for fault in plan.faults] if plan.outside_s is None else list(back)
    found = []
    for number, death in enumerate(deaths):
        recovery = back.get(death)
        found.append(
            Kill(
                seed=plan.seed,
                recipe=plan.recipe,
                parallel=plan.parallel,
                fault=death,
                world_size=plan.world_sizes[number],
                resumed_world_size=plan.world_sizes[number + 1],
                resumed_from_step=recovery.resumed_from_step if recovery else -1,
                recovery_s=recovery.total_s if recovery else float("nan"),
                equal=equal and recovery is not None,
            )
        )
    return found


def run_campaign(kills: int, seed: int, folder: Path, tell: Callable[[str], None] = progress) -> list[Kill]:
    """Make at least `kills` deaths, in runs of seeds seed, seed + 1, ...; `folder` has to exist.

    Raises: RankError when a run did not come to its end.
    """
    twins = twins_of(folder)
    found: list[Kill] = []
    while len(found) < kills:
        plan = draw_plan(seed)
        for kill in kills_of(plan, run_plan(plan, folder / f"seed-{seed}"), twins[plan.recipe]):
            found.append(kill)
            tell(f"{len(found)}/{kills} {kill}")
        seed += 1
    return found


def main() -> int:
    """Kill, compare, print."""
    options = parser(__doc__)
    options.add_argument("--kills", type=int, default=100, help="how many at least")
    options.add_argument("--seed", type=int, default=1, help="of the first run")
    arguments = options.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        kills = run_campaign(2 if arguments.quick else arguments.kills, arguments.seed, Path(folder))
    equal = sum(kill.equal for kill in kills)
    progress(f"{equal} of {len(kills)} kills without a trace, {time.monotonic() - start:.0f} s")
    document = Document(
        name="kill_campaign", peer="an undisturbed twin on one rank", ratio=equal / len(kills), goal=1.0, met=equal == len(kills),
        unit="share of kills whose run ended with the twin's bits", samples=[asdict(kill) for kill in kills],
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0 if document.met else 1


if __name__ == "__main__":
    sys.exit(main())
