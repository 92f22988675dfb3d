"""Pure quantities of a scaling experiment; every input is checked for shape, unit and finiteness before it is divided by.

Numbers measured are refused with EvidenceError, arguments chosen by a person with ConfigError; both name the next step.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import scipy  # its parts are loaded when they are first asked for

from validation.errors import ConfigError, EvidenceError


class Idle(NamedTuple):
    """What the slowest rank costs the others in one step."""

    idle_ms: tuple[float, ...]  # per rank: slowest busy time minus its own; 0.0 for the slowest
    slow_rank: int  # the first of the slowest


@dataclass(frozen=True, slots=True, kw_only=True)
class StepModel:
    """step_ms(W) = compute_ms / min(W, devices) + per_rank_ms * W + per_doubling_ms * log2(W), each term >= 0."""

    compute_ms: float  # divided among the devices that W ranks can use
    per_rank_ms: float  # grows with every rank: a ring's latency, work done in turn
    per_doubling_ms: float  # grows with every doubling: a tree's latency, waiting for the slowest
    rms_ms: float  # root mean square of measured - fitted over the points it was fitted to
    points: int  # world sizes it was fitted to; 3 or fewer leave nothing to test it with
    devices: int

    def step_ms(self, world_size: int) -> float:
        """Fitted wall clock of one step in ms."""
        shared = self.compute_ms / min(world_size, self.devices)
        return shared + self.per_rank_ms * world_size + self.per_doubling_ms * math.log2(world_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetCost:
    """What it takes to train to the target quality at one world size."""

    wall_s: float
    device_hours: float  # accelerators held x hours; ranks beyond the devices hold none
    cost: float  # in the price's currency


def scaling_efficiency(throughput_sps: Mapping[int, float]) -> dict[int, float]:
    """Measure how much of linear speed-up each world size keeps.

    Args: throughput_sps, world size W (ranks) -> samples/s summed over all ranks, at the same global batch; must hold W = 1.
    Returns: W -> throughput(W) / (W * throughput(1)), by ascending W; dimensionless, 1.0 is linear.
    Raises: EvidenceError when W = 1 is missing or a throughput is not finite and positive; ConfigError for W < 1.
    Source: the chapter's scaling efficiency; derivation and limits in docs/gates/scaling.md.
    """
    _demand_throughputs(throughput_sps)
    return {size: float(throughput_sps[size]) / (size * float(throughput_sps[1])) for size in sorted(throughput_sps)}


def device_efficiency(throughput_sps: Mapping[int, float], *, devices: int) -> dict[int, float]:
    """Measure how much of what the devices could do at best each world size delivers.

    Args: throughput_sps as for `scaling_efficiency`; devices, accelerators (or cores) that all ranks share.
    Returns: W -> throughput(W) / (min(W, devices) * throughput(1)); equal to `scaling_efficiency` while W <= devices.
    Raises: as `scaling_efficiency`, and ConfigError for devices < 1.
    """
    if devices < 1:
        raise ConfigError(f"{devices} devices cannot train. Efficiency has no reference. Give the number the ranks shared, at least 1.")
    return {size: value * size / min(size, devices) for size, value in scaling_efficiency(throughput_sps).items()}


def idle_by_rank(rank_step_ms: Sequence[float]) -> Idle:
    """Tell how long each rank waits for the slowest in one step.

    Args: rank_step_ms, shape (W,): busy ms of one step per rank, its wait at collectives excluded.
    Returns: idle ms per rank, shape (W,), and the slowest rank.
    Raises: EvidenceError when the list is empty or a time is not finite and positive.
    """
    bad = {rank: value for rank, value in enumerate(rank_step_ms) if not _usable(value)}
    if bad or not len(rank_step_ms):
        raise EvidenceError(
            f"rank times {list(rank_step_ms)} hold {bad or 'no rank'}. Idle time needs a finite, positive busy time in ms for each rank. "
            "Run the scaling probe again and look at the timeline of that rank."
        )
    busy = [float(value) for value in rank_step_ms]
    slowest = max(busy)
    return Idle(idle_ms=tuple(slowest - value for value in busy), slow_rank=busy.index(slowest))


def mean_interval(values: Sequence[float], confidence: float) -> tuple[float, tuple[float, float] | None]:
    """Give the mean and its two-sided Student t interval.

    Args: values, shape (n,), finite, taken as independent and near normal; confidence in 0..1.
    Returns: mean and (low, high); the interval is None for n = 1 (one value says nothing about spread), unbounded for confidence 1.
    Raises: EvidenceError for no values or one that is not finite; ConfigError for a confidence outside 0..1.
    """
    if not 0 <= confidence <= 1:
        raise ConfigError(f"a confidence of {confidence} is outside 0..1. No interval has it. Write 0.95 for 95%.")
    if not len(values) or not all(math.isfinite(value) for value in values):
        raise EvidenceError(f"{list(values)} has no mean. The measurement is empty or broken. Run the probe again.")
    mean = float(np.mean(values))
    if len(values) == 1:
        return mean, None
    if confidence == 1:
        return mean, (-math.inf, math.inf)
    quantile = float(scipy.special.stdtrit(len(values) - 1, (1 + confidence) / 2))
    half = quantile * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return mean, (mean - half, mean + half)


def fit_step_model(step_ms: Mapping[int, float], *, devices: int) -> StepModel:
    """Fit StepModel's three terms by non-negative least squares over the measured world sizes.

    Args: step_ms, world size -> ms of one step; devices that the ranks shared.
    Raises: EvidenceError for no points or one that is not finite and positive; ConfigError for W or devices < 1.
    """
    if min((*step_ms, devices)) < 1:
        raise ConfigError(f"world sizes {sorted(step_ms)} on {devices} devices cannot be fitted. Give sizes and devices of at least 1.")
    if not step_ms or not all(_usable(value) for value in step_ms.values()):
        raise EvidenceError(f"step times {dict(step_ms)} cannot be fitted. A point is missing or broken. Run the scaling probe again.")
    sizes = np.array(sorted(step_ms), dtype=float)
    measured = np.array([step_ms[int(size)] for size in sizes])
    terms = np.stack([1 / np.minimum(sizes, devices), sizes, np.log2(sizes)], axis=1)  # (world sizes, 3)
    fitted, norm = scipy.optimize.nnls(terms, measured)
    compute_ms, per_rank_ms, per_doubling_ms = (float(value) for value in fitted)
    return StepModel(
        compute_ms=compute_ms, per_rank_ms=per_rank_ms, per_doubling_ms=per_doubling_ms, rms_ms=float(norm) / math.sqrt(len(sizes)),
        points=len(sizes), devices=devices,
    )  # fmt: skip


def cost_to_target(*, steps: int, step_ms: float, world_size: int, devices: int, price_per_device_hour: float) -> TargetCost:
    """Price the steps that reach the target quality at one world size.

    Args: steps, optimizer updates to the target (the same at every world size, since the global batch is); step_ms, wall clock of one.
    Returns: wall_s = steps * step_ms / 1000; device_hours = min(W, devices) * wall_s / 3600; cost = price * device_hours.
    Raises: EvidenceError for a step time that is not finite and positive or negative steps; ConfigError for W, devices < 1 or a bad price.
    """
    if min(world_size, devices) < 1 or not _usable(price_per_device_hour):
        raise ConfigError(
            f"W={world_size} on {devices} devices at a price of {price_per_device_hour} cannot be priced. Set price_per_device_hour in "
            "the policy and give sizes of at least 1."
        )
    if steps < 0 or not _usable(step_ms):
        raise EvidenceError(f"{steps} steps of {step_ms} ms cannot be priced. The measurement is broken. Run the scaling probe again.")
    wall_s = steps * step_ms / 1000
    device_hours = min(world_size, devices) * wall_s / 3600
    return TargetCost(wall_s=wall_s, device_hours=device_hours, cost=price_per_device_hour * device_hours)


def _demand_throughputs(throughput_sps: Mapping[int, float]) -> None:
    sizes = sorted(throughput_sps)
    if any(size < 1 for size in sizes):
        raise ConfigError(f"world sizes {sizes} hold one below 1. No rank can train it. Give whole numbers from 1, such as 1,2,4,8.")
    if 1 not in throughput_sps:
        raise EvidenceError(
            f"scaling evidence has no world size 1 (found {sizes}). Efficiency has no reference, so it cannot be judged. "
            "Run the scaling probe again with world sizes 1,2,4."
        )
    bad = {size: throughput_sps[size] for size in sizes if not _usable(throughput_sps[size])}
    if bad:
        raise EvidenceError(
            f"throughput in samples/s is not finite and positive at world sizes {bad}. The timed run is broken, not slow. "
            "Run the scaling probe again and look at those runs' timelines."
        )


def _usable(value: float) -> bool:
    return math.isfinite(value) and value > 0
