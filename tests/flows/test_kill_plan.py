"""The kill plan: every death is certain to be reached, for any seed and size, and strikes where it is said to."""

from collections.abc import Iterator, Sequence
from itertools import pairwise, product

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flows.kill_plan import Kill, Span, extra_kills, plan_other_ranks, plan_same_ranks, span_of, windowed_ranks
from trainer.config import FAULT_PHASES, SAVE_PHASES, STEP_PHASES, WINDOW_PHASES
from trainer.group import CRASH_LOOP

SPANS = st.builds(
    span_of, steps=st.integers(12, 60), epoch_steps=st.floats(0.5, 25), extra=st.integers(0, 4)
)  # fmt: skip


def outcomes(plan: Sequence[Kill], span: Span) -> Iterator[tuple[list[int], list[int]]]:
    """Every way a run may go: (checkpoints that attempts 1, 2, ... load, updates that each attempt had reached).

    A death inside a save may leave that checkpoint or not, and training may be anywhere behind it. Asserts that each death is reached.
    """
    for sealed in product((False, True), repeat=len(plan)):
        start, starts, reached = 0, [], []
        for kill, is_sealed in zip(plan, sealed, strict=True):
            step, phase = kill.fault.step, kill.fault.phase
            if phase in SAVE_PHASES:
                saved = next(one for one in range(start + span.every, span.steps + 1, span.every) if one > step)
                start, end = (saved if is_sealed else saved - span.every), saved
            elif phase == "load":
                end = 0
            else:
                assert start <= step < span.steps
                start, end = max(start, step // span.every * span.every), step
            starts.append(start)
            reached.append(end)
        yield starts, reached


def assert_no_crash_loop(reached: Sequence[int]) -> None:
    """No CRASH_LOOP attempts in a row end without an update beyond the best so far."""
    best = fruitless = 0
    for step in reached:
        fruitless = 0 if step > best else fruitless + 1
        best = max(best, step)
        assert fruitless < CRASH_LOOP


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), span=SPANS, world_size=st.integers(1, 8), kills=st.integers(1, 7), is_windowed=st.booleans())
def test_every_death_on_the_same_ranks_is_reached(seed: int, span: Span, world_size: int, kills: int, is_windowed: bool) -> None:
    """One an attempt, ever later, on a rank that exists, whatever a death inside a save leaves behind."""
    extra = extra_kills(kills=kills, is_windowed=is_windowed)
    assume(span.last_saved > span.every + extra + 3)
    windowed = (world_size - 1,) if is_windowed else ()
    plan = plan_same_ranks(span, seed=seed, world_size=world_size, windowed=windowed, kills=kills)

    assert [kill.fault.attempt for kill in plan] == list(range(max(kills, 3 + is_windowed)))
    assert all(0 <= kill.fault.rank < world_size and kill.fault.kind == "kill" for kill in plan)
    assert all(first.fault.step <= second.fault.step for first, second in pairwise(plan))
    for _, reached in outcomes(plan, span):
        assert_no_crash_loop(reached)
    assert is_windowed == (plan[-1].fault.phase in WINDOW_PHASES)
    assert not is_windowed or plan[-1].fault.rank == world_size - 1
    assert sum(kill.fault.phase in SAVE_PHASES for kill in plan) == 1
    assert plan[0].fault.phase in STEP_PHASES


@settings(max_examples=300)
@given(seed=st.integers(0, 2**32), span=SPANS, sizes=st.lists(st.integers(1, 8), min_size=2, max_size=3))
def test_every_death_of_a_run_that_moves_is_reached(seed: int, span: Span, sizes: list[int]) -> None:
    """One death for each change, on a rank of the attempt that it ends."""
    assume(span.last_saved > len(sizes) + 1)
    plan = plan_other_ranks(span, seed=seed, world_sizes=sizes)

    assert [kill.fault.attempt for kill in plan] == list(range(len(sizes) - 1))
    assert all(kill.fault.rank < size for kill, size in zip(plan, sizes, strict=False))
    assert all(f"comes back on {size} ranks" == kill.purpose for kill, size in zip(plan, sizes[1:], strict=True))
    for _, reached in outcomes(plan, span):
        assert_no_crash_loop(reached)


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32), epoch_steps=st.floats(5, 14), steps=st.integers(30, 50), extra=st.integers(0, 2))
def test_ranks_die_twice_in_an_epoch_after_the_first(seed: int, epoch_steps: float, steps: int, extra: int) -> None:
    """Both resumes begin in the middle of one epoch, 1 or later, from different checkpoints: the second made by resumed ranks."""
    span = span_of(steps=steps, epoch_steps=epoch_steps, extra=extra)
    plan = plan_same_ranks(span, seed=seed, world_size=2, windowed=(0, 1), kills=4 + extra)

    for starts, _ in outcomes(plan, span):
        first, second = starts[:2]
        assert span.epoch_inside(first) is not None
        assert span.epoch_inside(first) == span.epoch_inside(second)
        assert second == first + span.every
    assert [int(kill.fault.step // epoch_steps) for kill in plan[:2]] == [span.epoch_inside(first)] * 2
    assert plan[0].purpose == f"in the middle of epoch {span.epoch_inside(first)}"


@settings(max_examples=100)
@given(seed=st.integers(0, 2**32), epoch_steps=st.floats(8, 12), kills=st.integers(4, 5))
def test_a_resume_begins_where_an_epoch_has_just_begun(seed: int, epoch_steps: float, kills: int) -> None:
    """The last death comes back to a checkpoint less than an update behind an epoch's end, whatever the death inside a save left."""
    span = span_of(steps=30, epoch_steps=epoch_steps, extra=kills - 4)
    plan = plan_same_ranks(span, seed=seed, world_size=2, windowed=(0, 1), kills=kills)
    assume(span.bordered(kills - 4))

    assert "first checkpoint of an epoch" in plan[-1].purpose
    for starts, _ in outcomes(plan, span):
        assert starts[-1] >= epoch_steps
        assert starts[-1] % epoch_steps < 1


def test_a_border_is_looked_for_in_the_usual_run() -> None:
    """Thirty updates in epochs of some ten: there is a checkpoint of that kind, and two more of one epoch before it."""
    assert all(span_of(steps=30, epoch_steps=epoch_steps, extra=0).bordered(0) for epoch_steps in (9.75, 10.375, 10.5))


@pytest.mark.parametrize("epoch_steps", [0.7, 2.5, 100.0], ids=["less-than-an-update", "too-short", "longer-than-the-run"])
def test_without_an_epochs_middle_ranks_die_all_the_same(epoch_steps: float) -> None:
    """No checkpoint lies away from an epoch's border: the plan says so by not naming an epoch."""
    span = span_of(steps=30, epoch_steps=epoch_steps, extra=0)
    plan = plan_same_ranks(span, seed=1, world_size=2, windowed=(0, 1), kills=4)

    assert span.every == 6
    assert [kill.purpose.partition(":")[0] for kill in plan[:2]] == ["after the first checkpoint", "again, a checkpoint further"]


def test_over_seeds_ranks_die_everywhere() -> None:
    """The two runs together strike in every phase, by every kind of death, on every rank."""
    span = span_of(steps=30, epoch_steps=10.5, extra=2)
    drawn = [
        kill.fault for seed in range(120)
        for kill in (
            *plan_same_ranks(span, seed=seed, world_size=4, windowed=range(4), kills=6),
            *plan_other_ranks(span, seed=seed, world_sizes=(4, 2, 1)),
        )
    ]  # fmt: skip

    assert {fault.phase for fault in drawn} == {*FAULT_PHASES, *WINDOW_PHASES}
    assert {fault.kind for fault in drawn} == {"kill", "stop", "launcher"}
    assert {fault.rank for fault in drawn} == set(range(4))


@pytest.mark.parametrize("kills", [4, 6, 8])
def test_phases_are_not_used_twice(kills: int) -> None:
    """Each death strikes in another phase as long as there are phases."""
    span = span_of(steps=60, epoch_steps=20.5, extra=kills - 4)
    phases = [kill.fault.phase for kill in plan_same_ranks(span, seed=5, world_size=2, windowed=(0, 1), kills=kills)]

    assert len(set(phases)) == kills


def test_the_plan_is_a_function_of_the_seed() -> None:
    """Same seed, same deaths; another seed, others."""
    span = span_of(steps=30, epoch_steps=10.5, extra=0)
    plans = [plan_same_ranks(span, seed=seed, world_size=8, windowed=range(8), kills=4) for seed in (1, 1, 2)]

    assert plans[0] == plans[1] != plans[2]


@pytest.mark.parametrize(
    ("world_size", "accumulation", "is_own", "expected"),
    [
        pytest.param(2, 1, False, (0, 1), id="lanes"),
        pytest.param(8, 1, False, (), id="a-lane-each"),
        pytest.param(6, 1, False, (2, 5), id="uneven-lanes"),
        pytest.param(8, 2, False, tuple(range(8)), id="accumulation"),
        pytest.param(2, 1, True, (), id="own-path-takes-a-rank's-samples-at-once"),
        pytest.param(2, 3, True, (0, 1), id="own-path-accumulates"),
    ],
)
def test_ranks_that_have_several_micro_batches(world_size: int, accumulation: int, is_own: bool, expected: tuple[int, ...]) -> None:
    """Only between two micro-batches of one rank there is a moment to die in."""
    assert windowed_ranks(world_size=world_size, lanes=8, accumulation=accumulation, is_own=is_own) == expected
