"""Stragglers are told from creation times alone, and ordinary jitter is not one."""

from dataclasses import replace

import numpy as np
import pytest
from helpers_hang import job

from validation.diagnose import diagnose
from validation.flight import Evidence
from validation.hang_arrivals import HELD_NS

RANKS, OPERATIONS, STEP_NS = 4, 60, 40_000_000


def arriving(late_ns: np.ndarray, hosts: tuple[str, ...] = ("",) * RANKS) -> Evidence:
    """A healthy job of 60 operations 40 ms apart, with (R, M) so many nanoseconds of lateness."""
    evidence = job(*[" ".join(["ar8"] * (OPERATIONS - 4))] * RANKS)
    held = np.cumsum(STEP_NS + late_ns.max(axis=0)) - late_ns.max(axis=0) + 1_800_000_000_000_000_000
    ranks = {}
    for rank, known in evidence.ranks.items():
        dump = replace(known.dumps[0], created_ns=held + late_ns[rank])
        ranks[rank] = replace(known, dumps=(dump,), host=hosts[rank])
    return replace(evidence, ranks=ranks)


def jitter() -> np.ndarray:
    """What a busy host does to every rank."""
    return np.random.default_rng(3).exponential(1_500_000, size=(RANKS, OPERATIONS)).astype(np.int64)


@pytest.mark.parametrize("every", [1, 3])
def test_a_rank_that_all_wait_for_is_named(every: int) -> None:
    """In each operation, or in the first of several in a step."""
    late = jitter()
    late[2, 8::every] += 30_000_000
    finding = diagnose(arriving(late))

    assert (finding.verdict, finding.kind, finding.ranks) == ("straggler", "late_rank", (2,))
    assert finding.first_visible.seq == 9
    assert finding.lateness_s == pytest.approx(0.028, abs=0.003)


def test_pauses_that_go_round_blame_nobody() -> None:
    """As collections of garbage do that every process makes in its own step."""
    late = jitter()
    for number in range(8, OPERATIONS, 6):
        late[number // 6 % RANKS, number] += 250_000_000
    finding = diagnose(arriving(late))

    assert (finding.kind, finding.ranks, finding.cause) == ("late_rank", (), "gc")


def test_jitter_stages_and_other_clocks_are_no_stragglers() -> None:
    """What chance delays differs in length; stages come one by one; a clock that is ahead is so in every operation."""
    few = jitter()
    few[1, [7, 15, 22, 30, 41, 47, 55]] += np.array([6, 9, 14, 80, 7, 120, 30], dtype=np.int64) * HELD_NS // 3
    stages = jitter() + np.arange(RANKS)[:, None] * 8_000_000
    ahead = jitter()
    ahead[3] += 30_000_000

    assert [diagnose(arriving(late)).kind for late in (jitter(), few, stages, ahead)] == ["healthy"] * 4


def test_clocks_of_several_hosts_are_not_compared() -> None:
    """Who is late by another host's clock may not be."""
    late = jitter()
    late[2, 8:] += 30_000_000

    assert diagnose(arriving(late, ("a", "a", "b", "b"))).kind == "healthy"
