"""Timed points reduced to one record a world size: medians over repeats, efficiency from pairs, idle time, price of the target."""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from validation.completeness import absent_columns
from validation.policy import ScalingPolicy
from validation.records import CURVE_COLUMNS, Frame, ScalingPoint, ScalingRecords
from validation.scaling_quantities import (
    Idle,
    StepModel,
    TargetCost,
    cost_to_target,
    device_efficiency,
    fit_step_model,
    idle_by_rank,
    mean_interval,
)

Setup = tuple[int, str]  # world size and reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class WorldSize:
    """What was found at one world size, at the set-up that is judged there."""

    world_size: int
    reduction: str
    oversubscribed: bool  # more ranks than devices
    throughput_sps: float  # median over repeats
    step_ms: float  # median over repeats of step_ms_p50
    repeats: int  # paired with the baseline's repeats
    device_efficiency: float | None  # mean over pairs of throughput(W) / (min(W, devices) * throughput(1)); None without a pair
    interval: tuple[float, float] | None  # of device_efficiency; None below two pairs
    efficiency: float | None  # the same over W * throughput(1)
    idle: Idle  # from each rank's median busy time over repeats
    idle_share: float  # the longest idle time over the slowest rank's busy time, 0..1
    phase_ms: Mapping[str, float]  # median over repeats
    target: TargetCost | None  # None when the target was not reached

    @property
    def costliest_phase(self) -> str:
        """The phase that takes most of a step, without its unit; the first by name when several do."""
        return max(sorted(self.phase_ms), key=lambda phase: self.phase_ms[phase]).removesuffix("_ms")


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The whole experiment, ready to be judged and drawn."""

    devices: int
    baseline: str  # reduction of the best one-worker set-up; "" when W=1 was not measured
    sizes: tuple[WorldSize, ...]  # ascending
    setups: Mapping[Setup, tuple[float, ...]]  # every measured set-up -> throughputs in samples/s, ascending
    steps_to_target: int | None
    model: StepModel | None  # None below two world sizes


def point_flaws(point: ScalingPoint) -> list[str]:
    """Name the numbers of a point that are NaN, infinite, negative or, where a rate or time has to be positive, zero."""
    positive = {"throughput_sps": point.throughput_sps, "step_ms_p50": point.step_ms_p50}
    positive |= {f"rank_step_ms of rank {rank}": value for rank, value in enumerate(point.rank_step_ms)}
    flaws = [name for name, value in positive.items() if not (math.isfinite(value) and value > 0)]
    return flaws + [phase for phase, value in point.phase_ms.items() if not (math.isfinite(value) and value >= 0)]


def is_shaped(point: ScalingPoint) -> bool:
    """Whether a point has one time for each of its ranks, and phases."""
    return point.world_size >= 1 and len(point.rank_step_ms) == point.world_size and bool(point.phase_ms)


def repeated_points(points: Sequence[ScalingPoint]) -> list[tuple[int, str, int]]:
    """World size, reduction and repeat of points that were recorded more than once."""
    counts = Counter((point.world_size, point.reduction, point.repeat) for point in points)
    return sorted(key for key, count in counts.items() if count > 1)


def curve_flaws(curve: Frame) -> int:
    """Count values of the curve that are not finite."""
    present = [column for column in CURVE_COLUMNS if column in curve.columns]
    return int((~np.isfinite(curve[present].to_numpy(dtype=float))).sum())


def best_quality(curve: Frame) -> tuple[float, int] | None:
    """The best finite quality of the curve and the first step that had it; None for an empty or unusable curve."""
    rows = _finite(curve)
    return max(rows, key=lambda row: (row[1], -row[0]))[::-1] if rows else None


def steps_to(curve: Frame, target: float) -> int | None:
    """The first step of the curve whose quality is at least the target; None when none is."""
    return min((step for step, quality in _finite(curve) if quality >= target), default=None)


def _finite(curve: Frame) -> list[tuple[int, float]]:
    if absent_columns(curve, CURVE_COLUMNS):
        return []
    values = curve[["step", "quality"]].to_numpy(dtype=float)
    return [(int(step), float(quality)) for step, quality in values if math.isfinite(step) and math.isfinite(quality)]


def summarise(records: ScalingRecords, policy: ScalingPolicy) -> Summary:
    """Reduce the sound points of an experiment; broken and misshapen ones are left out and must be judged by the caller."""
    sound = [point for point in records.points if is_shaped(point) and not point_flaws(point)]
    setups: dict[Setup, list[ScalingPoint]] = {}
    for point in sorted(sound, key=lambda point: (point.world_size, point.reduction, point.repeat)):
        setups.setdefault((point.world_size, point.reduction), []).append(point)
    baseline = _best_single(setups)
    steps = steps_to(records.curve, records.target_quality)
    reference = {point.repeat: point.throughput_sps for point in setups.get((1, baseline), [])}
    judged = [(size, baseline if size == 1 else _judged_reduction(setups, size)) for size in sorted({size for size, _ in setups})]
    sizes = tuple(_world_size(setups[setup], reference, steps, records.devices, policy) for setup in judged)
    step_ms = {size.world_size: size.step_ms for size in sizes}
    return Summary(
        devices=records.devices, baseline=baseline, sizes=sizes, steps_to_target=steps,
        setups={setup: tuple(sorted(point.throughput_sps for point in points)) for setup, points in setups.items()},
        model=fit_step_model(step_ms, devices=records.devices) if len(step_ms) > 1 else None,
    )  # fmt: skip


def _best_single(setups: Mapping[Setup, Sequence[ScalingPoint]]) -> str:
    """The reduction whose one-worker runs have the highest median throughput; "" when there is none."""
    single = {reduction: median(p.throughput_sps for p in points) for (size, reduction), points in setups.items() if size == 1}
    return max(sorted(single), key=lambda reduction: single[reduction], default="")


def _judged_reduction(setups: Mapping[Setup, Sequence[ScalingPoint]], size: int) -> str:
    """The exact reduction where it was measured, since the quality curve is its; else the first other one."""
    return min(reduction for world_size, reduction in setups if world_size == size)  # "exact" < "fast"


def _world_size(
    points: Sequence[ScalingPoint], reference: Mapping[int, float], steps: int | None, devices: int, policy: ScalingPolicy
) -> WorldSize:  # fmt: skip
    size = points[0].world_size
    ratios = list(_paired(points, reference, devices))
    mean, interval = mean_interval(ratios, policy.confidence.value) if ratios else (None, None)
    busy_ms = [median(point.rank_step_ms[rank] for point in points) for rank in range(size)]
    idle = idle_by_rank(busy_ms)
    step_ms = median(point.step_ms_p50 for point in points)
    price = policy.price_per_device_hour.value
    return WorldSize(
        world_size=size, reduction=points[0].reduction, oversubscribed=size > devices,
        throughput_sps=median(point.throughput_sps for point in points), step_ms=step_ms, repeats=len(ratios),
        device_efficiency=mean, interval=interval, efficiency=None if mean is None else mean * min(size, devices) / size,
        idle=idle, idle_share=max(idle.idle_ms) / max(busy_ms), phase_ms=_phases(points),
        target=None if steps is None
        else cost_to_target(steps=steps, step_ms=step_ms, world_size=size, devices=devices, price_per_device_hour=price),
    )  # fmt: skip


def _paired(points: Sequence[ScalingPoint], reference: Mapping[int, float], devices: int) -> Iterator[float]:
    """Device efficiency of each repeat over the baseline's same repeat, so that slow drift of the machine cancels."""
    for point in points:
        if point.repeat in reference:
            pair = {1: reference[point.repeat], point.world_size: point.throughput_sps}
            yield device_efficiency(pair, devices=devices)[point.world_size]


def _phases(points: Sequence[ScalingPoint]) -> dict[str, float]:
    names = sorted(set.intersection(*(set(point.phase_ms) for point in points)))
    return {name: median(point.phase_ms[name] for point in points) for name in names}
