"""The probe of kill_and_resume: a twin that nobody kills, runs that die by plan, two with a planted defect; under hard conditions."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from flows.kill_plan import Kill, Span, extra_kills, plan_other_ranks, plan_same_ranks, span_of, windowed_ranks
from flows.probes import CALL_DEADLINE_S, Bench
from trainer import ranks, runlog
from trainer.conditions import Chosen
from trainer.config import WINDOW_PHASES, Conditions
from validation.equivalence_legs import is_own
from validation.records import Condition, PlannedFault, RecoveryRecords, RecoveryRun

DEADLINE_S, STALL_S = 240.0, 30.0  # of one run with all its attempts; of a collective
MOST_RANKS = 4  # of the twin and of the run that dies most often: eight take twice as long, and the moved run comes back on them
PLANTED = {
    "repeat_batch_on_resume": "a resume that starts one batch too early, so that data is repeated",
    "stale_moments_on_resume": "a resume whose optimizer starts with empty moments",
}


@dataclass(kw_only=True)
class Setup:
    """What all runs of the gate share, and where they die."""

    bench: Bench
    conditions: Conditions
    span: Span
    world_size: int  # of the twin, and of every killed run's first attempt
    other_world_sizes: tuple[int, ...]  # of the moved run's later attempts
    is_own: bool  # the recipe's own hooks decide the weights
    same_ranks: tuple[Kill, ...]
    other_ranks: tuple[Kill, ...]
    state_mib: float = field(default=0.0)  # of the newest run's checkpoint

    def run(
        self, label: str, kills: Sequence[Kill] = (), then: Sequence[int] = (), *, world_size: int = 0, defect: str = ""
    ) -> RecoveryRun:  # fmt: skip
        """Run through these deaths. Args: then, ranks of attempts 1, 2, ..., () for as many as before; world_size, 0 for the usual."""
        first = world_size or self.world_size
        record, folder = self.bench.run(
            label, world_size=first, faults=tuple(kill.fault for kill in kills), max_restarts=len(kills), resume_world_sizes=tuple(then),
            steps=self.span.steps, checkpoint_every=self.span.every, audit=True, conditions=self.conditions, defect=defect,
            deadline_s=DEADLINE_S, stall_s=STALL_S,
        )  # fmt: skip
        self.state_mib = runlog.checkpoint_bytes(folder) / 2**20
        return RecoveryRun(
            record=record, ledger=runlog.load_ledger(folder), states=runlog.load_states(folder), consumed=runlog.load_consumed(folder),
            planned=tuple(PlannedFault(fault=str(kill.fault), purpose=kill.purpose) for kill in kills),
            same_bits=not self.is_own or {self.world_size} == {first, *then}, defect=PLANTED.get(defect, ""),
        )  # fmt: skip


def probe_recovery(bench: Bench) -> RecoveryRecords:
    """Kill ranks of one run at seeded moments and come back on as many, of another and come back on other numbers of them."""
    plan, policy = bench.plan, bench.plan.policy.kill_and_resume
    asked = (plan.request.recipe, plan.world_sizes, policy.steps.value)
    chosen: Chosen = ranks.call("trainer.hardening:choose", *asked, deadline_s=CALL_DEADLINE_S)
    setup = setup_of(bench, chosen.conditions)
    bench.say(f"ranks die in {', '.join(kill.fault.phase for kill in (*setup.same_ranks, *setup.other_ranks))}")
    twin = setup.run("twin")
    stayed, is_reached = without_unreached(setup.run("killed", setup.same_ranks), is_own=setup.is_own)
    moved = setup.run("moved", setup.other_ranks, setup.other_world_sizes)
    resumed = replace(setup.same_ranks[0].fault, rank=0, phase="backward")  # in the middle of an epoch
    alone = min(plan.world_sizes) if setup.is_own else 1  # an own trainer may not work on one rank
    planted = {
        defect: setup.run(f"planted-{defect}", [Kill(resumed, words)], world_size=alone, defect=defect) for defect, words in PLANTED.items()
    }  # fmt: skip
    return RecoveryRecords(
        twin=twin, killed=(stayed, moved), repeated=planted["repeat_batch_on_resume"], stale=planted["stale_moments_on_resume"],
        state_mib=setup.state_mib, brought=plan.facts.brought,
        conditions=(*chosen.held, *plan_conditions(setup, is_reached=is_reached)), epoch_steps=setup.span.epoch_steps,
    )  # fmt: skip


def setup_of(bench: Bench, conditions: Conditions) -> Setup:
    """Size the runs, and plan where they die."""
    plan, policy = bench.plan, bench.plan.policy.kill_and_resume
    training, own = plan.facts.training, is_own(plan.facts.brought)
    world_size = first_world_size(plan.world_sizes, is_own=own)
    windowed = windowed_ranks(world_size=world_size, lanes=training.lanes, accumulation=conditions.accumulation, is_own=own)
    span = span_of(
        steps=min(policy.steps.value, conditions.samples * conditions.epochs // conditions.global_batch_size),  # of whole batches
        epoch_steps=conditions.samples / conditions.global_batch_size,
        extra=extra_kills(kills=policy.kills.value, is_windowed=bool(windowed)),
    )
    others = other_world_sizes(plan.world_sizes, world_size, seed=training.seed, lanes=training.lanes, is_own=own)
    return Setup(
        bench=bench, conditions=conditions, span=span, world_size=world_size, is_own=own, other_world_sizes=others,
        same_ranks=plan_same_ranks(span, seed=training.seed, world_size=world_size, windowed=windowed, kills=policy.kills.value),
        other_ranks=plan_other_ranks(span, seed=training.seed, world_sizes=(world_size, *others)),
    )  # fmt: skip


def first_world_size(world_sizes: Sequence[int], *, is_own: bool) -> int:
    """Ranks of the twin: MOST_RANKS at most; for an own trainer two, where it was asked for: more may be added in another order."""
    several = [size for size in world_sizes if size > 1] or [1]
    fitting = [size for size in several if size <= MOST_RANKS] or [min(several)]
    return min(fitting) if is_own else max(fitting)


def other_world_sizes(world_sizes: Sequence[int], first: int, *, seed: int, lanes: int, is_own: bool) -> tuple[int, ...]:
    """Ranks that the moved run comes back on: the most, then any number, also an odd one; an own trainer's more, then fewer, as asked for.

    New ranks need what nobody saved for them (a random stream); fewer have to give up what more had.
    """
    draw = random.Random(f"{seed}: numbers of ranks")
    if is_own:
        more = [size for size in world_sizes if first < size <= 2 * first]
        fewer = [size for size in world_sizes if size < first]
        return tuple(draw.choice(sizes) for sizes in (more, fewer) if sizes) or (1 if first > 1 else 2,)
    widest = min(max(*world_sizes, 2), lanes)
    second = widest if widest > first else draw.choice([size for size in range(1, first + 1) if size != first] or [1])
    return second, draw.choice([size for size in range(1, widest + 1) if size != second] or [1])


def without_unreached(run: RecoveryRun, *, is_own: bool) -> tuple[RecoveryRun, bool]:
    """The run without the planned death between two micro-batches, when an own step made no such moment; and whether it was reached."""
    unreached = [item for item in run.planned if f"phase={WINDOW_PHASES[0]}" in item.fault and item.fault not in run.record.faults_fired]
    if not (is_own and unreached):
        return run, True
    return replace(run, planned=tuple(item for item in run.planned if item not in unreached)), False


def plan_conditions(setup: Setup, *, is_reached: bool) -> tuple[Condition, ...]:
    """What the kill plan had to hold, and whether it does."""
    span, first = setup.span, setup.same_ranks[0].fault.step
    epoch = f"an epoch has {span.epoch_steps:.1f} updates, checkpoints are {span.every} apart"
    is_inside = span.epoch_inside(first // span.every * span.every) is not None
    windows = [kill for kill in setup.same_ranks if kill.fault.phase in WINDOW_PHASES]
    why_no_window = "no rank has two micro-batches a step" if not windows else "the own training step never had two of them open"
    is_windowed, moved = bool(windows) and is_reached, " and ".join(map(str, setup.other_world_sizes))
    said = (
        ("killed_mid_epoch", is_inside, epoch),
        ("killed_twice_in_an_epoch", is_inside and bool(setup.span.pairs(0)), epoch),
        ("resumed_behind_an_epochs_end", any(map(_is_behind_border, windows)) and is_reached, epoch),
        ("killed_inside_a_save", True, "a phase of it drawn by seed"),
        ("killed_inside_accumulation", is_windowed, "between two micro-batches" if is_windowed else why_no_window),
        ("moved_to_other_ranks", {*setup.other_world_sizes} != {setup.world_size}, f"from {setup.world_size} to {moved}"),
    )  # fmt: skip
    return tuple(Condition(name=name, held=held, detail=detail) for name, held, detail in said)


def _is_behind_border(kill: Kill) -> bool:
    return "first checkpoint of an epoch" in kill.purpose
