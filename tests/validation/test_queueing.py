"""The queue simulation against theory, against a recursion, and against laws that hold exactly."""

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.arrivals import Demand
from validation.errors import EvidenceError
from validation.queueing import BY_HAND, REST, SCHEDULED, Served, ServiceTimes, Visit, simulate, visits, waiting

COUNT = 20_000
SERVICE = ServiceTimes(gates={"scaling": (600.0, 660.0), "readiness": (60.0,)}, others={REST: (30.0,)}, human_s=(3600.0,))

visit_lists = st.lists(
    st.builds(
        Visit,
        at_s=st.integers(0, 60).map(float),
        service_s=st.integers(0, 20).map(float),
        model=st.integers(0, 3),
        priority=st.sampled_from((BY_HAND, SCHEDULED)),
    ),
    max_size=25,
)


def stream(rate: float, service: Sequence[float], seed: int, priorities: Sequence[int] | None = None) -> list[Visit]:
    """Visits of a Poisson process, each of a model of its own so that only places are short."""
    at = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, len(service)))
    lines = priorities or [SCHEDULED] * len(service)
    return [
        Visit(at_s=float(when), service_s=float(takes), model=number, priority=line)
        for number, (when, takes, line) in enumerate(zip(at, service, lines, strict=True))
    ]


def exponential(seed: int, count: int = COUNT) -> list[float]:
    """Service times with mean 1."""
    return np.random.default_rng(1000 + seed).exponential(1.0, count).tolist()


def mean_wait(served: Sequence[Served], priority: int | None = None) -> float:
    """Mean wait of a class, after the first tenth: the queue began empty."""
    kept = [item.wait_s for item in served[len(served) // 10 :] if priority in (None, item.visit.priority)]
    return sum(kept) / len(kept)


def erlang_c(places: int, load: float) -> float:
    """Probability that an arrival has to wait (Erlang 1917); load = rate x mean service / places."""
    offered = places * load
    full = offered**places / (math.factorial(places) * (1 - load))
    return full / (sum(offered**n / math.factorial(n) for n in range(places)) + full)


def kiefer_wolfowitz(arrived: Sequence[Visit], places: int) -> list[float]:
    """Waits of a first-come queue by recursion over the times at which places become free."""
    free, waits = [0.0] * places, []
    for visit in arrived:
        start = max(visit.at_s, heapq.heappop(free))
        waits.append(start - visit.at_s)
        heapq.heappush(free, start + visit.service_s)
    return waits


@pytest.mark.parametrize(
    ("places", "load"), [pytest.param(1, 0.5, marks=pytest.mark.slow), (1, 0.8), pytest.param(2, 0.7, marks=pytest.mark.slow), (4, 0.8)]
)
def test_exponential_service_waits_as_erlang_says(places: int, load: float) -> None:
    """M/M/c: the mean wait is C(c, load) / (c - load c), in units of the mean service time."""
    means = [mean_wait(simulate(stream(load * places, exponential(seed), seed), places=places)) for seed in range(4)]
    expected = erlang_c(places, load) / (places * (1 - load))

    assert np.mean(means) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("load", [pytest.param(0.3, marks=pytest.mark.slow), 0.6, pytest.param(0.8, marks=pytest.mark.slow)])
def test_constant_service_waits_as_pollaczek_and_khinchine_say(load: float) -> None:
    """M/D/1: half the wait of exponential service, load / (2 (1 - load))."""
    means = [mean_wait(simulate(stream(load, [1.0] * COUNT, seed), places=1)) for seed in range(3)]

    assert np.mean(means) == pytest.approx(load / (2 * (1 - load)), rel=0.08)


def test_two_priorities_wait_as_cobham_says() -> None:
    """M/M/1, nobody interrupted, half of the visits go first: R / (1 - l1) and R / ((1 - l1)(1 - l))."""
    load, first, last = 0.8, [], []
    for seed in range(4):
        lines = np.random.default_rng(seed).integers(2, size=COUNT).tolist()
        served = simulate(stream(load, exponential(seed), seed, lines), places=1)
        first.append(mean_wait(served, BY_HAND))
        last.append(mean_wait(served, SCHEDULED))

    assert np.mean(first) == pytest.approx(load / (1 - load / 2), rel=0.08)
    assert np.mean(last) == pytest.approx(load / ((1 - load / 2) * (1 - load)), rel=0.15)


@pytest.mark.parametrize("places", [1, 2, 3, 4])
def test_first_come_first_served_is_the_recursion_exactly(places: int) -> None:
    """Visit by visit, the waits are those of Kiefer and Wolfowitz."""
    arrived = stream(0.9 * places, exponential(7, 2000), 7)

    assert [item.wait_s for item in simulate(arrived, places=places)] == pytest.approx(kiefer_wolfowitz(arrived, places), abs=1e-6)


@given(arrived=visit_lists, places=st.integers(1, 4))
def test_every_visit_is_served_once_and_not_before_it_came(arrived: list[Visit], places: int) -> None:
    """Nothing is lost, nothing served twice, no wait is negative, no place beyond those there are."""
    served = simulate(arrived, places=places)

    assert sorted(map(repr, (item.visit for item in served))) == sorted(map(repr, arrived))
    assert all(item.wait_s >= 0 and 0 <= item.place < places for item in served)


@given(arrived=visit_lists, places=st.integers(1, 4))
def test_no_place_and_no_model_runs_two_at_once(arrived: list[Visit], places: int) -> None:
    """On one place, and of one model, each ends before the next starts."""
    by_owner: dict[tuple[str, int], list[Served]] = defaultdict(list)
    for item in simulate(arrived, places=places):
        by_owner["place", item.place].append(item)
        by_owner["model", item.visit.model].append(item)

    for line in by_owner.values():
        assert all(earlier.ended_s <= later.started_s for earlier, later in itertools.pairwise(line))


@given(arrived=visit_lists, places=st.integers(1, 4))
def test_no_place_stands_idle_while_one_waits_for_nothing_else(arrived: list[Visit], places: int) -> None:
    """With a model of its own each, a visit waits only while every place is busy."""
    alone = [Visit(at_s=item.at_s, service_s=item.service_s, model=number, priority=item.priority) for number, item in enumerate(arrived)]
    served = simulate(alone, places=places)

    for late in (item for item in served if item.wait_s > 0):
        moment = (late.visit.at_s + late.started_s) / 2
        assert sum(item.started_s <= moment < item.ended_s for item in served) == places


def test_with_one_model_a_second_place_changes_nothing() -> None:
    """Releases of one model wait for each other, whatever the number of devices."""
    service, demand = SERVICE, Demand(pattern="nightly", per_week=50, weeks=4, models=1)
    one, four = (waiting(demand, service, places=places, seeds=range(3)) for places in (1, 4))

    assert (one.wait_p50_s, one.wait_p95_s) == (four.wait_p50_s, four.wait_p95_s)


def test_more_places_never_make_it_worse() -> None:
    """Office hours, four models: the wait falls with each place, and so does the load."""
    demand = Demand(pattern="office", per_week=50, weeks=12, models=4)
    found = [waiting(demand, SERVICE, places=places, seeds=range(5)) for places in (1, 2, 4)]

    assert found[0].wait_p95_s.value > found[1].wait_p95_s.value >= found[2].wait_p95_s.value
    assert found[0].load == pytest.approx(4 * found[2].load)


def test_the_same_seeds_give_the_same_numbers_and_others_an_interval() -> None:
    """Seeds are all the randomness there is; the interval holds the mean."""
    demand = Demand(pattern="office", per_week=50, weeks=12)
    found, again = (waiting(demand, SERVICE, places=1, seeds=range(6)) for _ in range(2))

    assert found == again
    assert found.wait_p95_s.low < found.wait_p95_s.value < found.wait_p95_s.high


def test_one_seed_has_no_interval() -> None:
    """A single replay cannot say how sure it is."""
    found = waiting(Demand(pattern="steady", per_week=20, weeks=12), SERVICE, places=1, seeds=[0])

    assert math.isnan(found.wait_p95_s.low)


def test_more_work_than_the_places_can_do_is_called_so() -> None:
    """A week holds 168 hours; 300 releases of an hour have no steady queue."""
    service = ServiceTimes(gates={"scaling": (3600.0,)}, others={})
    found = waiting(Demand(pattern="steady", per_week=300, weeks=2), service, places=1, seeds=[0])

    assert not found.is_stable
    assert found.load > 1.5


def test_a_rerun_takes_one_gate_and_the_rest_and_asks_nobody() -> None:
    """A person who holds one gate again does not wait for the others."""
    drawn = visits(Demand(pattern="nightly", per_week=50, weeks=20), SERVICE, np.random.default_rng(0))
    reruns = [visit for visit in drawn if visit.priority == BY_HAND]

    assert {visit.service_s for visit in reruns} == {90.0, 630.0, 690.0}
    assert {visit.human_s for visit in reruns} == {0.0}
    assert {visit.human_s for visit in drawn if visit.priority == SCHEDULED} == {3600.0}


@pytest.mark.parametrize(
    "service",
    [
        pytest.param(ServiceTimes(gates={}, others={}), id="no gate"),
        pytest.param(ServiceTimes(gates={"scaling": ()}, others={}), id="never held"),
        pytest.param(ServiceTimes(gates={"scaling": (math.nan,)}, others={}), id="NaN"),
        pytest.param(ServiceTimes(gates={"scaling": (10.0,)}, others={REST: (-1.0,)}), id="negative"),
    ],
)
def test_what_was_not_measured_is_not_simulated(service: ServiceTimes) -> None:
    """Missing service times are refused with the next step, never taken for zero."""
    with pytest.raises(EvidenceError, match="Give the id of a release"):
        waiting(Demand(pattern="steady", per_week=1, weeks=1), service, places=1, seeds=[0])
