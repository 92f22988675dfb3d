"""The chapter's worked example and lab, as a versioned implementation.

The listing `scaling_diagnosis.py` of the chapter "Hangs, stragglers, and scaling efficiency" computes an efficiency and the idle time that
one slow rank causes; its lab prints step time and delivered speed-up for 1 to 16 workers; its question asks what else decides whether
twice the throughput at twice the hourly price helped. tests/fixtures/chapter.json holds the printed numbers.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from validation.errors import ConfigError, EvidenceError
from validation.scaling_quantities import idle_by_rank, scaling_efficiency

DIAGNOSIS_VERSION = 1  # grows whenever the same input may give another output

COMPUTE_MS = 120.0  # local compute of one step, the lab's stated assumption
RING_MS_PER_WORKER = 0.35  # ring communication; found by fitting the printed table, which it reproduces in all ten cells
STRAGGLER_MS_PER_DOUBLING = 5.0  # logarithmic straggler penalty; found together with the ring term
MAX_WORKERS = 1_000_000  # the lab's model was fitted on 1 to 16 workers; beyond this a number is surely a slip of the pen


@dataclass(frozen=True, slots=True, kw_only=True)
class LabRow:
    """One row of the lab's table, rounded to one decimal as the chapter prints it."""

    workers: int
    step_ms: float
    speedup: float  # delivered speed-up over one worker at a fixed batch a worker; `workers` is ideal


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingDiagnosis:
    """What the chapter's listing prints."""

    version: int
    efficiency: float  # dimensionless, 1.0 is linear
    ideal_sps: float  # workers x the single worker's samples/s
    slow_rank: int  # where to look first
    idle_ms: tuple[float, ...]  # per rank: wait for the slowest in each step


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCost:
    """One way to train to the same quality target."""

    devices: int
    throughput_sps: float  # samples/s over all devices
    price_per_hour: float  # of the whole cluster
    samples_to_target: float  # grows when a larger global batch needs more steps
    restarts: int = 0
    lost_s_per_restart: float = 0.0  # down time and repeated work of one restart


@dataclass(frozen=True, slots=True, kw_only=True)
class Worth:
    """The second way over the first; below 1 is better. All dimensionless."""

    wall_time: float
    device_hours: float
    cost: float


def step_ms(workers: int) -> float:
    """Estimate one step's wall clock in ms: 120 + 0.35 W + 5 log2 W. Raises ConfigError unless 1 <= W <= MAX_WORKERS."""
    if not 1 <= workers <= MAX_WORKERS:
        raise ConfigError(f"{workers} workers cannot be estimated: the lab takes 1 to {MAX_WORKERS}. Give a list such as 1,2,4,8,16.")
    return COMPUTE_MS + RING_MS_PER_WORKER * workers + STRAGGLER_MS_PER_DOUBLING * math.log2(workers)


def speedup(workers: int) -> float:
    """Estimate delivered speed-up at a fixed batch a worker: W * step_ms(1) / step_ms(W); W is ideal."""
    return workers * step_ms(1) / step_ms(workers)


def lab_table(workers: Sequence[int] = (1, 2, 4, 8, 16)) -> tuple[LabRow, ...]:
    """Give the lab's table for these worker counts, in the order given. Raises ConfigError for a count out of range."""
    return tuple(LabRow(workers=n, step_ms=round(step_ms(n), 1), speedup=round(speedup(n), 1)) for n in workers)


def parse_workers(text: str) -> tuple[int, ...]:
    """Read worker counts such as "1,2,4,8,16". Raises ConfigError naming the part that is not a count from 1 to MAX_WORKERS."""
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        if not (part.isascii() and part.isdigit() and len(part) <= len(str(MAX_WORKERS)) and 1 <= int(part) <= MAX_WORKERS):
            raise ConfigError(f"workers '{text}' cannot be read at '{part}'. Give whole numbers from 1, separated by commas: 1,2,4,8,16.")
    counts = tuple(int(part) for part in parts)
    if len(set(counts)) < len(counts):
        raise ConfigError(f"workers '{text}' names a count twice. Name each count once: 1,2,4,8,16.")
    return counts


def scaling_diagnosis(
    *,
    single_sps: float = 420.0,
    workers: int = 4,
    distributed_sps: float = 1390.0,
    rank_step_ms: Sequence[float] = (118.0, 120.0, 119.0, 151.0),
) -> ScalingDiagnosis:
    """Quantify scaling efficiency and the idle time that a slow rank causes; the defaults are the chapter's.

    Args: samples/s of one worker and of all `workers`; busy ms of a step per rank, shape (workers,).
    Raises: ConfigError for workers < 1; EvidenceError for a number that is not finite and positive, for a rank list of another length, and,
        as the listing asserts, for an efficiency above 1.
    """
    if workers == 1 and distributed_sps != single_sps:
        raise EvidenceError("one worker has two throughputs. Efficiency has no reference. Give the same number twice, or workers > 1.")
    if len(rank_step_ms) != workers:
        raise EvidenceError(f"{len(rank_step_ms)} rank times were given for {workers} workers. Give one busy time for each rank.")
    efficiency = scaling_efficiency({1: single_sps, workers: distributed_sps})[workers]
    if efficiency > 1:
        raise EvidenceError(
            f"an efficiency of {efficiency:.3f} is above 1. {workers} workers cannot do more than {workers} times the work of the best "
            "single worker, so the baseline was handicapped. Measure the single worker again, at its own best set-up."
        )
    idle = idle_by_rank(rank_step_ms)
    return ScalingDiagnosis(
        version=DIAGNOSIS_VERSION, efficiency=efficiency, ideal_sps=workers * single_sps, slow_rank=idle.slow_rank, idle_ms=idle.idle_ms
    )


def worth(before: TrainingCost, after: TrainingCost) -> Worth:
    """Answer the chapter's question: did scaling help, to the same quality target?

    With twice the throughput at twice the hourly price and the same samples to target, wall time halves while device-hours and cost stay
    flat; more samples to target or more restarts raise all three. Raises EvidenceError for a number that is not finite and positive.
    """
    first, second = _seconds(before), _seconds(after)
    return Worth(
        wall_time=second / first,
        device_hours=second * after.devices / (first * before.devices),
        cost=second * after.price_per_hour / (first * before.price_per_hour),
    )


def _seconds(run: TrainingCost) -> float:
    needed = (run.devices, run.throughput_sps, run.price_per_hour, run.samples_to_target)
    lost_s = run.restarts * run.lost_s_per_restart
    if not (all(math.isfinite(value) and value > 0 for value in needed) and math.isfinite(lost_s) and lost_s >= 0):
        raise EvidenceError(f"{run} holds a number that is not finite and positive. Its worth cannot be computed. Measure it again.")
    return run.samples_to_target / run.throughput_sps + lost_s
