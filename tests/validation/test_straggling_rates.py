"""How often a healthy job is accused, and how often a straggler is missed: on simulated jobs with six kinds of jitter.

A small sample runs always; `pytest -m proof tests/validation/test_straggling_rates.py` draws the rates that docs/stragglers.md shows.
"""

import numpy as np
import pytest
from helpers_straggling import JITTERS, busy, dragging, gauss, job, lognormal, on, pareto, slices

from validation.straggling import find_stragglers

STEP_MS = 107.0
FIFTH_MS = STEP_MS * 0.2
CALM = (gauss, pareto, slices, dragging)  # the others move a step by half a slowdown of 20 % and more, on any rank, in every step
KINDS = ("constant", "data", "hidden", "checkpoint", "input", "burst", "second half", "host")


def late_job(kind, ranks, seed, jitter, steps=20):
    """A job that is slowed by 20 % on average over its 20 steps, by one rank; with it the rank and its phases."""
    rank = seed % ranks
    some = np.arange(seed % 4, steps, 4)
    if kind == "host":
        factor = np.ones((steps, ranks))
        factor[:, rank] = 1.25
        return job(ranks=ranks, seed=seed, jitter=jitter, factor=factor), rank
    phase, ms, at = {
        "constant": ("forward", FIFTH_MS, None), "data": ("data", FIFTH_MS, None), "hidden": ("backward", FIFTH_MS, None),
        "checkpoint": ("checkpoint", 4 * FIFTH_MS, some), "input": ("data", 4 * FIFTH_MS, some),
        "burst": ("forward", 4 * FIFTH_MS, slice(8, 13)), "second half": ("backward", 2 * FIFTH_MS, slice(10, 20)),
    }[kind]  # fmt: skip
    late = {phase: on(ranks, steps, rank, ms, at)}
    return job(ranks=ranks, seed=seed, jitter=jitter, late=late, hidden=kind == "hidden"), rank


def accused(count, ranks, steps, jitter):
    """Of so many healthy jobs: those with any finding, and those where a rank is named."""
    found = [find_stragglers(job(ranks=ranks, steps=steps, seed=seed, jitter=jitter)) for seed in range(count)]
    return sum(map(bool, found)), sum(any(one.ranks for one in each) for each in found)


def caught(count, kind, ranks, jitter):
    """Of so many slowed jobs: those where the rank and nobody else is named."""
    hits = 0
    for seed in range(count):
        table, rank = late_job(kind, ranks, seed, jitter)
        hits += {named for one in find_stragglers(table) for named in one.ranks} == {rank}
    return hits


@pytest.mark.parametrize("jitter", JITTERS)
def test_healthy_jobs_are_left_alone(jitter):
    """No finding in 80 jobs of 2 to 64 ranks."""
    assert [accused(20, ranks, 20, jitter) for ranks in (2, 4, 8, 64)] == [(0, 0)] * 4


@pytest.mark.parametrize("kind", KINDS)
def test_slowed_jobs_are_seen(kind):
    """19 of 20 at least, over sizes and jitters."""
    assert sum(caught(2, kind, ranks, jitter) for ranks in (4, 8) for jitter in CALM) >= 0.95 * 2 * 2 * len(CALM)


@pytest.mark.proof
@pytest.mark.parametrize("steps", [20, 60, 200])
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_rate_of_false_alarms(ranks, steps, capsys):
    """At most one healthy job in 500 is accused, whatever its jitter."""
    count = {20: 1000, 60: 300, 200: 100}[steps] // (4 if ranks == 64 else 1)
    found = {jitter.__name__: accused(count, ranks, steps, jitter) for jitter in JITTERS}
    with capsys.disabled():
        print(f"\nW={ranks} steps={steps}, of {count} each: any finding, a rank named: {found}")  # noqa: T201

    assert sum(each[0] for each in found.values()) <= max(2, count * len(JITTERS) / 500)


@pytest.mark.proof
@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
@pytest.mark.parametrize("jitter", JITTERS)
def test_rate_of_detection(ranks, jitter, capsys):
    """The share of 20 % slowdowns found within 20 steps, by kind; printed, and at least 0.95 for a constant one under calm jitter."""
    count = 100 if ranks < 64 else 40
    found = {kind: caught(count, kind, ranks, jitter) / count for kind in KINDS}
    with capsys.disabled():
        print(f"\nW={ranks} {jitter.__name__}: {found}")  # noqa: T201

    assert jitter in (busy, lognormal) or min(found["constant"], found["hidden"], found["data"]) >= 0.95
