"""Where a run of kill_and_resume dies: seeded faults, each certain to be reached, each with what it is there to show. Pure.

A run of `steps` updates makes a checkpoint after every `every` of them. A death in update s (0-based) leaves the newest checkpoint at or
before s, since a save under way comes to its end first (trainer/faults.py). A death inside a save strikes the first checkpoint
behind its update, and leaves that one or the one before.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from trainer.config import SAVE_PHASES, STEP_PHASES, WINDOW_PHASES, Fault, FaultKind
from trainer.lanes import rank_lanes

UNSAVING_PHASES = (*STEP_PHASES, "load")  # of deaths that leave the checkpoints as they are
SHORT_EPOCH = 2.0  # updates: of a shorter epoch every checkpoint lies at a border
ALWAYS = 3  # in the middle of an epoch, again in that epoch, inside a save
KINDS: tuple[FaultKind, ...] = ("kill",) * 4 + ("launcher", "stop")  # of the run that moves to other ranks; a stop takes 2 s to be noticed


class Kill(NamedTuple):
    """A planned death."""

    fault: Fault
    purpose: str  # what it is there to show


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The run in which ranks die."""

    steps: int  # updates
    epoch_steps: float  # updates in one epoch
    every: int  # updates between checkpoints

    @property
    def last_saved(self) -> int:
        """The last checkpoint that updates follow, in updates done."""
        return max(self.steps - 1, 0) // self.every * self.every

    def epoch_inside(self, step: int) -> int | None:
        """The epoch, 1 or later, that a step lies in with at least one update to either border; None for any other step."""
        epoch = int(step // self.epoch_steps)
        into = step - epoch * self.epoch_steps
        return epoch if epoch >= 1 and 1 <= into <= self.epoch_steps - 1 else None

    def behind_border(self, second: int, extra: int) -> int | None:
        """The first checkpoint that follows an epoch's end by less than an update, with room for the deaths between `second` and it."""
        low = second + self.every + extra + 1
        begun = (step for step in range(self.every, self.last_saved, self.every) if step >= max(low, self.epoch_steps))
        return next((step for step in begun if self.epoch_steps > SHORT_EPOCH and step % self.epoch_steps < 1), None)

    def inside(self) -> list[int]:
        """Checkpoints in the middle of an epoch after the first, where a lost position shows."""
        return [step for step in range(self.every, self.last_saved, self.every) if self.epoch_inside(step) is not None]

    def pairs(self, extra: int) -> list[int]:
        """Checkpoints in the middle of an epoch that also holds the next one, with room behind it for `extra` deaths, each further on."""
        inside = set(self.inside())
        return [
            step for step in sorted(inside)
            if step + self.every in inside and self.epoch_inside(step) == self.epoch_inside(step + self.every)
            and step + self.every + extra < self.last_saved - 1
        ]  # fmt: skip

    def bordered(self, extra: int) -> list[int]:
        """Those pairs that leave room for a death which comes back to the first checkpoint of the next epoch."""
        return [step for step in self.pairs(extra) if self.behind_border(step + self.every, extra) is not None]


def span_of(*, steps: int, epoch_steps: float, extra: int) -> Span:
    """The run with the longest distance of checkpoints that still lets ranks die twice in one epoch, a checkpoint of its own in between.

    One of which a later checkpoint follows an epoch's end by less than an update is taken first. Args: extra, deaths that follow those two
    and leave checkpoints alone. Where no epoch is long enough there are five checkpoints.
    """
    spans = [Span(steps=steps, epoch_steps=epoch_steps, every=every) for every in range(max(1, int(epoch_steps)), 0, -1)]
    for span in (*(span for span in spans if span.every > 1 and span.bordered(extra)), *spans):
        if span.pairs(extra):
            return span
    return Span(steps=steps, epoch_steps=epoch_steps, every=max(1, steps // 5))


def extra_kills(*, kills: int, is_windowed: bool) -> int:
    """Deaths of `plan_same_ranks` besides those that it always plans."""
    return max(kills - ALWAYS - is_windowed, 0)


def windowed_ranks(*, world_size: int, lanes: int, accumulation: int, is_own: bool) -> tuple[int, ...]:
    """Ranks that have more than one micro-batch a step: those with several lanes, or all where gradients are accumulated."""
    if accumulation > 1:
        return tuple(range(world_size))
    return () if is_own else tuple(rank for rank in range(world_size) if len(rank_lanes(rank, world_size, lanes)) > 1)


def plan_same_ranks(span: Span, *, seed: int, world_size: int, windowed: Sequence[int], kills: int) -> tuple[Kill, ...]:
    """SIGKILLs of a run that always comes back on as many ranks, one an attempt, each in another phase as long as there are phases.

    The second death comes after a checkpoint that the resumed ranks made themselves: a counter that starts at zero in each process is right
    at the first resume and wrong at the second. The one inside an accumulation window comes last, since an own training step may put all
    its samples through the model at once: then it alone is not reached.
    Args: windowed, ranks that have several micro-batches a step; kills, at least so many.
    """
    draw = random.Random(f"{seed}: same ranks")
    extra = extra_kills(kills=kills, is_windowed=bool(windowed))
    pairs = (span.bordered(extra) if windowed else []) or span.pairs(extra)
    first = draw.choice(pairs) if pairs else max(min(span.every, span.last_saved - extra - 3), 0)
    second = min(first + span.every, max(span.last_saved - extra - 2, 0))
    epoch, border = span.epoch_inside(first), span.behind_border(second, extra) if pairs and windowed else None
    plan = _Planner(draw, span, world_size)
    last = second + span.every - 1 if epoch is None else min(second + span.every - 1, int((epoch + 1) * span.epoch_steps) - 1)
    plan.strike(
        plan.step_in(first, second - 1), draw.choice(STEP_PHASES),
        f"in the middle of epoch {epoch}" if pairs else "after the first checkpoint",
    )  # fmt: skip
    plan.strike(
        plan.step_in(second, last, left=extra), plan.fresh(STEP_PHASES),
        (f"again in epoch {epoch}" if pairs else "again, a checkpoint further") + ": the resumed ranks made this checkpoint themselves",
    )  # fmt: skip
    for number in range(extra):
        phase = plan.fresh(UNSAVING_PHASES)
        step = plan.next_step(left=extra - number - 1) if border is None else plan.low  # at once: room is kept for so many
        plan.strike(step, phase, f"in another phase: {phase}")
    plan.strike(
        draw.randint(plan.low, (border or span.last_saved) - 1), draw.choice(SAVE_PHASES),
        "inside a save: half a checkpoint may not be trusted",
    )  # fmt: skip
    if windowed:
        step = draw.randint(plan.saved, span.steps - 1) if border is None else draw.randint(border, border + span.every - 1)
        where = "" if border is None else "; comes back to the first checkpoint of an epoch"
        plan.strike(step, WINDOW_PHASES[0], f"inside an accumulation window: half a gradient is lost with it{where}", ranks=windowed)
    return tuple(plan.made)


def plan_other_ranks(span: Span, *, seed: int, world_sizes: Sequence[int]) -> tuple[Kill, ...]:
    """One death for each change of the number of ranks, the first in the middle of an epoch. Args: world_sizes, by attempt."""
    draw = random.Random(f"{seed}: other ranks")
    changes = len(world_sizes) - 1
    plan = _Planner(draw, span, world_sizes[0])
    starts = [step for step in span.inside() if step + changes - 1 < span.last_saved] or [min(span.every, span.last_saved - changes)]
    start = max(draw.choice(starts), 0)
    for number in range(changes):
        plan.world_size = world_sizes[number]
        left = changes - number - 1
        step = plan.step_in(start, start + span.every - 1, left=left) if number == 0 else plan.next_step(left=left)
        plan.strike(step, plan.fresh(STEP_PHASES), f"comes back on {world_sizes[number + 1]} ranks", kind=draw.choice(KINDS))
    return tuple(plan.made)


@dataclass(slots=True)
class _Planner:
    """Deaths one after the other, each at a later step than the one before: updates beyond the best so far are no crash loop."""

    draw: random.Random
    span: Span
    world_size: int

    made: list[Kill] = field(default_factory=list)
    low: int = 0  # the next death's first step

    def step_in(self, low: int, high: int, *, left: int = 0) -> int:
        """A step in [low, high], not `low` if there is another: updates after the checkpoint are lost and made again."""
        low = max(low, self.low)
        high = max(low, min(high, self.span.last_saved - 2 - left))
        return self.draw.randint(min(low + 1, high), high)

    def next_step(self, *, left: int) -> int:
        """A step after the last death's that leaves room for `left` more before the last checkpoint."""
        high = max(self.low, self.span.last_saved - 2 - left)
        return self.draw.randint(self.low, self.low + (high - self.low) // (left + 1))

    @property
    def saved(self) -> int:
        """The checkpoint that the last death, inside a save, may have left whole."""
        return (self.made[-1].fault.step // self.span.every + 1) * self.span.every

    def fresh(self, phases: Sequence[str]) -> str:
        """A phase that no death was planned in, if there is one."""
        used = {kill.fault.phase for kill in self.made}
        return self.draw.choice([phase for phase in phases if phase not in used] or list(phases))

    def strike(self, step: int, phase: str, purpose: str, *, ranks: Sequence[int] = (), kind: FaultKind = "kill") -> None:
        """Plan a death of the next attempt."""
        rank = self.draw.choice(ranks or range(self.world_size))
        self.made.append(Kill(Fault(kind=kind, rank=rank, step=step, phase=phase, attempt=len(self.made)), purpose))
        self.low = step + 1
