"""The stall threshold: learned from a job's own updates, never below the floor, always before the collectives' time-out."""

import math

import pytest

from trainer.stalls import EARLY_FACTOR, EARLY_UPDATES, FACTOR, FLOOR_S, LOOKED_S, SLOW_FLOOR_S, TIMEOUT_SHARE, StallWatch, quantile

LOOK_S = 0.25
COMPUTING = {"forward", "collective"}


class Bench:
    """A watch and a clock that a test moves."""

    def __init__(self, *, floor_s: float = FLOOR_S, stall_s: float = 1200.0) -> None:
        self.now_ns = 0
        self.made = 0
        self.watch = StallWatch(floor_s=floor_s, stall_s=stall_s, now_ns=0)

    def wait(self, seconds: float, *, every_s: float = LOOK_S) -> "Bench":
        """Nothing happens for so long."""
        for _ in range(round(seconds / every_s)):
            self.now_ns += int(every_s * 1e9)
            self.watch.look(self.now_ns, made=self.made, said=0)
        return self

    def train(self, updates: int, *, step_s: float) -> "Bench":
        """Steps of this length."""
        for _ in range(updates):
            self.wait(step_s - LOOK_S)
            self.made += 1
            self.wait(LOOK_S)
        return self

    def inside(self, marks: dict[int, int], phases: set[str]) -> "Bench":
        """A look into the rings."""
        self.watch.look_inside(self.now_ns, marks, phases)
        return self


def test_fast_steps_have_the_floor() -> None:
    """A job whose steps take milliseconds is stalled after the floor, and not a look before."""
    bench = Bench().train(40, step_s=0.25).wait(FLOOR_S - LOOK_S)
    assert not bench.watch.is_stalled
    assert bench.wait(LOOK_S).watch.is_stalled
    assert bench.watch.threshold_s == FLOOR_S


def test_slow_steps_raise_it() -> None:
    """Steps of four seconds: twenty without one are a stall, and a single pause of two minutes among hundreds does not change that."""
    bench = Bench().train(60, step_s=4.0).wait(120).train(60, step_s=4.0)
    assert bench.watch.threshold_s == pytest.approx(FACTOR * 4.0)


def test_the_first_updates_may_take_long() -> None:
    """Imports and compilation come before the first update, warm-up with the next ones."""
    bench = Bench()
    assert bench.watch.threshold_s == SLOW_FLOOR_S
    assert bench.train(1, step_s=30.0).watch.threshold_s == EARLY_FACTOR * FLOOR_S
    assert bench.train(EARLY_UPDATES, step_s=0.25).watch.threshold_s == FLOOR_S


@pytest.mark.parametrize("phase", ["checkpoint", "evaluate", "setup"])
def test_what_is_known_to_be_long_is_waited_for(phase: str) -> None:
    """While any rank evaluates or saves the threshold is a minute, then five times the longest such time seen."""
    bench = Bench().train(20, step_s=0.25).wait(10).inside({0: 1, 1: 1}, {phase, "collective"})
    assert bench.watch.threshold_s == SLOW_FLOOR_S
    bench.wait(20).train(1, step_s=0.25).wait(10).inside({0: 2, 1: 2}, {phase, "collective"})
    assert bench.watch.threshold_s == pytest.approx(FACTOR * 30.25, rel=0.05)
    assert bench.train(3, step_s=0.25).watch.threshold_s == FLOOR_S


def test_a_rank_that_is_done_is_no_excuse() -> None:
    """All ranks at their end save and take leave; one alone at its end while others wait is a stall like any other."""
    bench = Bench().train(20, step_s=0.25).wait(6)
    assert bench.inside({0: 1, 1: 1}, {"done"}).watch.threshold_s == SLOW_FLOOR_S
    assert bench.inside({0: 1, 1: 1}, {"done", "collective"}).watch.threshold_s == FLOOR_S


def test_ranks_that_all_move_are_not_stalled() -> None:
    """An update that is made again and again shows in the rings only; as long as every rank moves it is progress."""
    bench = Bench().train(20, step_s=0.25).wait(6).inside({0: 1, 1: 1}, COMPUTING)
    assert bench.inside({0: 2, 1: 1}, COMPUTING).watch.is_stalled
    assert not bench.inside({0: 3, 1: 2}, COMPUTING).watch.is_stalled


def test_time_that_nobody_saw_does_not_count() -> None:
    """A leader that slept for ten seconds, as its machine did, has seen LOOKED_S of them."""
    bench = Bench().train(20, step_s=0.25)
    bench.wait(10, every_s=10)
    assert bench.watch.quiet_s <= LOOKED_S
    assert not bench.watch.is_stalled


@pytest.mark.parametrize("stall_s", [1.0, 8.0, 40.0])
def test_evidence_is_taken_before_the_time_out(stall_s: float) -> None:
    """Whatever was learned, the threshold stays below the collectives' own time-out, which wipes the evidence out."""
    assert Bench(stall_s=stall_s).train(20, step_s=20.0).watch.threshold_s == TIMEOUT_SHARE * stall_s


def test_it_can_be_switched_off() -> None:
    """An infinite floor leaves hangs to the time-out."""
    bench = Bench(floor_s=math.inf, stall_s=10.0).train(10, step_s=0.25).wait(600)
    assert not bench.watch.is_stalled


@pytest.mark.parametrize(("values", "found"), [([], 0.0), ([3.0], 3.0), ([1.0] * 99 + [9.0], 1.0), ([1.0] * 10 + [9.0], 9.0)])
def test_quantile_passes_over_the_few_worst(values: list[float], found: float) -> None:
    """Of a hundred values the worst one does not count; of eleven it does."""
    assert quantile(values) == found
