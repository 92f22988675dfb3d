"""Kill ranks at random and demand that nothing is lost: every killed run ends with the bits of a run that nobody disturbed.

    python benchmarks/kill_campaign.py [--kills 100] [--seed 1] [--json] [--quick]

Each run draws from its own seed: the world size it starts with and goes on with (1 to 8, often another one), one SIGKILL or two (the
second one in the second attempt), their rank, step and phase, and the distance of checkpoints. It runs through trainer.ranks.run_group
and is compared with an undisturbed twin of one rank: digest of weights and optimizer on every rank, and of the sample ledger.
One history line a kill on stderr; the exit code is 1 if any run differs, is not restarted, or if a planned kill did not fire.

Limits: a tiny model (the bits, not the load, are on trial) on one machine; SIGKILL of single ranks, not of the leader or the machine.
"""

import random
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from support.output import Document, parser, progress, publish

from trainer import ranks
from trainer.config import FAULT_PHASES, Fault, TrainJob
from validation.records import RunRecord

RECIPE = "support.recipes:tiny"
STEPS = 12
LARGEST_WORLD = 8  # the recipe's lanes


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run of the campaign."""

    seed: int
    world_sizes: tuple[int, ...]  # by attempt
    checkpoint_every: int  # updates
    faults: tuple[Fault, ...]  # one an attempt but the last


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One death and whether its run came out equal."""

    seed: int
    fault: str
    world_size: int
    resumed_world_size: int
    resumed_from_step: int
    recovery_s: float  # death -> next update
    equal: bool  # of the whole run

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.fault}, W {self.world_size} -> {self.resumed_world_size}, from step {self.resumed_from_step}, "
            f"{self.recovery_s:.2f} s, {'equal' if self.equal else 'DIFFERENT'}"
        )


def draw_plan(seed: int) -> Plan:
    """The run of one seed; a second kill is planned where the first one leaves a step for it."""
    draw = random.Random(seed)
    checkpoint_every = draw.choice((1, 2, 3, 5))
    faults: list[Fault] = []
    world_sizes = [draw.randint(1, LARGEST_WORLD)]
    first_step = 0
    for attempt in range(draw.choice((1, 2))):
        if first_step >= STEPS:
            break
        faults.append(draw_fault(draw, world_sizes[-1], attempt, first_step, checkpoint_every))
        first_step = last_step_of(faults[-1], checkpoint_every)
        world_sizes.append(draw.choice((world_sizes[-1], draw.randint(1, LARGEST_WORLD), draw.randint(1, LARGEST_WORLD))))
    return Plan(seed=seed, world_sizes=tuple(world_sizes), checkpoint_every=checkpoint_every, faults=tuple(faults))


def draw_fault(draw: random.Random, world_size: int, attempt: int, first_step: int, checkpoint_every: int) -> Fault:
    """A SIGKILL at a moment that this attempt will certainly reach, however far back it has to begin."""
    last_seal = STEPS // checkpoint_every * checkpoint_every - 1  # the last step that is followed by a checkpoint
    phase = draw.choice([phase for phase in FAULT_PHASES if phase != "checkpoint" or first_step <= last_seal])
    step = draw.randint(first_step, last_seal if phase == "checkpoint" else STEPS - 1)
    return Fault(kind="kill", rank=draw.randrange(world_size), step=step, phase=phase, attempt=attempt)


def last_step_of(fault: Fault, checkpoint_every: int) -> int:
    """The first step that the next attempt makes for certain: a death while sealing may leave that checkpoint sealed."""
    if fault.phase != "checkpoint":
        return fault.step
    return (fault.step // checkpoint_every + 1) * checkpoint_every


def run_plan(plan: Plan, folder: Path) -> RunRecord:
    """Run it through its kills."""
    folder.mkdir()
    job = TrainJob(
        recipe=RECIPE, folder=str(folder), world_size=plan.world_sizes[0], steps=STEPS, faults=plan.faults,
        checkpoint_every=plan.checkpoint_every, max_restarts=len(plan.faults), resume_world_sizes=plan.world_sizes[1:], deadline_s=120.0,
    )  # fmt: skip
    return ranks.run_group(job)


def kills_of(plan: Plan, record: RunRecord, twin: RunRecord) -> list[Kill]:
    """A line for each planned kill, also for one that did not fire."""
    equal = (
        set(record.state_sha256_by_rank) == {twin.state_sha256}
        and record.ledger_sha256 == twin.ledger_sha256
        and record.steps == STEPS
        and record.faults_fired == tuple(map(str, plan.faults))
    )
    back = {recovery.fault: recovery for recovery in record.recoveries}
    found = []
    for number, fault in enumerate(plan.faults):
        recovery = back.get(str(fault))
        found.append(
            Kill(
                seed=plan.seed,
                fault=str(fault),
                world_size=plan.world_sizes[number],
                resumed_world_size=plan.world_sizes[number + 1],
                resumed_from_step=recovery.resumed_from_step if recovery else -1,
                recovery_s=recovery.total_s if recovery else float("nan"),
                equal=equal and recovery is not None,
            )
        )
    return found


def run_campaign(kills: int, seed: int, folder: Path, tell: Callable[[str], None] = progress) -> list[Kill]:
    """Make at least `kills` kills, in runs of seeds seed, seed + 1, ...; `folder` has to exist.

    Raises: RankError when a run did not come to its end.
    """
    twin = run_plan(Plan(seed=-1, world_sizes=(1,), checkpoint_every=0, faults=()), folder / "twin")
    found: list[Kill] = []
    while len(found) < kills:
        plan = draw_plan(seed)
        for kill in kills_of(plan, run_plan(plan, folder / f"seed-{seed}"), twin):
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
