"""Releases in a queue for devices: who waits how long. Replayed with simpy, event by event; pure, and the same for the same seed.

A place is what one release holds for itself while it runs: every device of a machine. A release first takes its model's turn (one release
a model at a time), then a place; within each line re-runs asked for by hand go first, then first come, first served; nobody who runs is
interrupted. Waiting for a person holds neither.

simpy and not a recursion of waiting times (Kiefer and Wolfowitz 1955): with priorities and a turn a model the recursion no longer holds,
and an event loop of our own came out longer than the process below. tests/validation/test_queueing.py holds it against that recursion,
Erlang's C, Pollaczek and Khinchine, and Cobham.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy  # its parts are loaded when they are first asked for
import simpy

from validation.arrivals import WEEK_S, Demand, arrivals
from validation.errors import EvidenceError

BY_HAND, SCHEDULED = 0, 1  # priorities: the lower goes first
RELEASES_MIN = 200  # a seed, so that a 95th percentile rests on more than the largest few
WEEKS_MIN = 12
CONFIDENCE = 0.95
REST = "the rest"  # of a release: what is neither a gate nor training


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceTimes:
    """What releases were measured to take, to be drawn from: each part on its own, every measured value as likely as another."""

    gates: Mapping[str, tuple[float, ...]]  # gate -> seconds in each measured release
    others: Mapping[str, tuple[float, ...]]  # training, REST
    human_s: tuple[float, ...] = ()  # asked until answered; () = nobody is asked

    def release_s(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """How long each of `count` releases holds its place."""
        total: np.ndarray = sum((rng.choice(seconds, count) for seconds in (*self.gates.values(), *self.others.values())), np.zeros(count))
        return total

    def rerun_s(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """How long each of `count` re-runs holds its place: one gate, any as likely as another, and the rest."""
        held = np.stack([rng.choice(seconds, count) for seconds in self.gates.values()])
        rest = rng.choice(self.others[REST], count) if REST in self.others else np.zeros(count)
        total: np.ndarray = held[rng.integers(len(held), size=count), np.arange(count)] + rest
        return total

    def review_s(self, rng: np.random.Generator, count: int) -> np.ndarray:
        """How long a person lets each of `count` releases wait."""
        return rng.choice(self.human_s, count) if self.human_s else np.zeros(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """One release, or re-run, that asks for a place."""

    at_s: float
    service_s: float
    model: int = 0
    priority: int = SCHEDULED
    human_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """What became of a visit."""

    visit: Visit
    place: int
    started_s: float

    @property
    def wait_s(self) -> float:
        """Scheduled until running."""
        return self.started_s - self.visit.at_s

    @property
    def ended_s(self) -> float:
        """When it gave up its place."""
        return self.started_s + self.visit.service_s


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A mean over seeds with its 95% t interval; NaN ends with a single seed."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A queue under one demand with so many places."""

    demand: Demand
    places: int
    releases: int  # simulated, over all seeds
    load: float  # work asked for / work that the places can do; from 1 on the queue has no end
    wait_p50_s: Estimate
    wait_p95_s: Estimate
    run_s: float  # mean
    human_s: float  # mean
    rerun_wait_p95_s: float | None  # of re-runs by hand; None without any

    @property
    def is_stable(self) -> bool:
        """Whether waiting times settle; otherwise they grow as long as one simulates."""
        return self.load < 1


def simulate(visits: Sequence[Visit], *, places: int) -> tuple[Served, ...]:
    """Serve every visit; in the order in which they started."""
    env = simpy.Environment()
    pool, free = simpy.PriorityResource(env, places), list(range(places))
    turns: dict[int, simpy.PriorityResource] = defaultdict(lambda: simpy.PriorityResource(env, 1))
    served: list[Served] = []

    def run(visit: Visit) -> Generator[simpy.Event, Any, None]:
        yield env.timeout(visit.at_s)
        with turns[visit.model].request(visit.priority) as turn:
            yield turn
            with pool.request(visit.priority) as held:
                yield held
                place = heapq.heappop(free)
                served.append(Served(visit=visit, place=place, started_s=float(env.now)))
                yield env.timeout(visit.service_s)
                heapq.heappush(free, place)

    for visit in visits:
        env.process(run(visit))
    env.run()
    return tuple(served)


def visits(demand: Demand, service: ServiceTimes, rng: np.random.Generator) -> tuple[Visit, ...]:
    """Arrivals with what they take, drawn from what was measured."""
    asked = arrivals(demand, rng)
    whole, again, human = (draw(rng, len(asked)).tolist() for draw in (service.release_s, service.rerun_s, service.review_s))
    return tuple(
        Visit(at_s=item.at_s, model=item.model, service_s=gate_s, priority=BY_HAND)
        if item.is_rerun
        else Visit(at_s=item.at_s, model=item.model, service_s=release_s, human_s=human_s)
        for item, release_s, gate_s, human_s in zip(asked, whole, again, human, strict=True)
    )


def waiting(demand: Demand, service: ServiceTimes, *, places: int, seeds: Sequence[int]) -> Waiting:
    """Replay a demand once a seed and summarise the releases' waits.

    Raises: EvidenceError when no service time was measured, or one is negative or no number.
    """
    check_measured(service)
    runs = [simulate(visits(demand, service, np.random.default_rng(seed)), places=places) for seed in seeds]
    ours = [[item for item in run if item.visit.priority == SCHEDULED] for run in runs]
    everything = [item.visit.service_s for run in runs for item in run]
    releases = [item for run in ours for item in run]
    reruns = [item.wait_s for run in runs for item in run if item.visit.priority == BY_HAND]
    return Waiting(
        demand=demand, places=places, releases=len(releases),
        load=sum(everything) / (len(runs) * demand.weeks * WEEK_S * places),
        wait_p50_s=_over_seeds(ours, lambda waits: float(np.quantile(waits, 0.5))),
        wait_p95_s=_over_seeds(ours, lambda waits: float(np.quantile(waits, 0.95))),
        run_s=_mean([item.visit.service_s for item in releases]), human_s=_mean([item.visit.human_s for item in releases]),
        rerun_wait_p95_s=float(np.quantile(reruns, 0.95)) if reruns else None,
    )  # fmt: skip


def weeks_for(per_week: float) -> int:
    """How long to simulate so that percentiles rest on enough releases."""
    return max(WEEKS_MIN, math.ceil(RELEASES_MIN / per_week))


def check_measured(service: ServiceTimes) -> None:
    """Refuse to simulate what was never measured."""
    parts = {**service.gates, **service.others}
    bad = sorted(
        name for name, seconds in parts.items() if not seconds or not all(math.isfinite(value) and value >= 0 for value in seconds)
    )
    if not service.gates or bad:
        raise EvidenceError(
            f"service times of {', '.join(bad) or 'every gate'} were not measured, or are no seconds. A queue of made-up releases says "
            "nothing. Give the id of a release whose gates were held."
        )


def _over_seeds(runs: Sequence[Sequence[Served]], quantity: Callable[[list[float]], float]) -> Estimate:
    """A quantity of the waits in each run: mean and t interval over the runs."""
    values = [quantity([item.wait_s for item in run]) for run in runs if run]
    mean = _mean(values)
    if len(values) < 2:
        return Estimate(value=mean, low=math.nan, high=math.nan)
    half = float(scipy.special.stdtrit(len(values) - 1, (1 + CONFIDENCE) / 2)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return Estimate(value=mean, low=max(0.0, mean - half), high=mean + half)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else math.nan
