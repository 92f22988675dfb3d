"""Gate scaling: what is each worker worth, in throughput, idle time, and time and cost to the target quality?

The pure quantities live in `validation.scaling_quantities`; `validation.scaling_summary` reduces the timed points to one record a world
size, and `validation.scaling_view` draws them.
"""

from collections.abc import Iterator
from dataclasses import replace

from validation.completeness import absent_columns, complete, listed
from validation.policy import ScalingPolicy
from validation.records import CURVE_COLUMNS, ScalingRecords
from validation.scaling_quantities import device_efficiency, fit_step_model, idle_by_rank, scaling_efficiency
from validation.scaling_summary import (
    Summary,
    WorldSize,
    best_quality,
    curve_flaws,
    is_shaped,
    point_flaws,
    repeated_points,
    summarise,
)
from validation.scaling_view import notes, plots, tables
from validation.verdict import Check, GateVerdict, check, conclude, controlled, inconclusive

__all__ = ["device_efficiency", "fit_step_model", "idle_by_rank", "judge_scaling", "scaling_efficiency"]

GATE = "scaling"
RERUN = "run the gate again on an otherwise idle machine: `seatrial gate scaling --release ID`"
IDLE = "idle share"  # how the names of the checks begin that the control has to fail


def judge_scaling(records: ScalingRecords, policy: ScalingPolicy) -> GateVerdict:
    """Judge efficiency, idle time and the way to the target quality at every world size.

    The control judges the points with a planted straggler by the same function: the idle-share check has to fail and name its rank.
    """
    return controlled(_judge(records, policy), records.planted_defect, IDLE, _judge_planted(records, policy))


def _judge_planted(records: ScalingRecords, policy: ScalingPolicy) -> GateVerdict:
    """The planted points in place of the real ones, reduced to the checks that name the planted rank."""
    sizes = {point.world_size for point in records.planted}
    if not sizes:
        return inconclusive(GATE, reason="no planted run was timed", action=RERUN)
    others = tuple(point for point in records.points if point.world_size not in sizes)
    # a planted run with more ranks than devices is judged all the same: the control asks whether a straggler is seen at all
    devices = max(records.devices, *sizes)
    verdict = _judge(replace(records, points=others + records.planted, devices=devices), policy)
    named = {f"rank {records.planted_rank} at W={size}" for size in sizes}
    return replace(verdict, checks=tuple(item for item in verdict.checks if item.where in named))


def _judge(records: ScalingRecords, policy: ScalingPolicy) -> GateVerdict:
    if records.devices < 1:
        return inconclusive(GATE, reason=f"the evidence names {records.devices} devices", action=RERUN)
    summary = summarise(records, policy)
    checks = [
        complete(
            list(_missing(records, summary, policy)), source="every world size and repeat of the policy has to be timed", action=RERUN
        ),
        *_sound_checks(records),
        *_target_check(records),
        *_efficiency_checks(summary, records.devices, policy),
        *(_idle_check(size, policy) for size in summary.sizes if 1 < size.world_size <= records.devices),
    ]
    return conclude(
        GATE, checks, passed_reason=_passed(summary, policy), tables=tables(summary),
        plots=plots(summary, records, policy), notes=notes(summary, records, policy),
    )  # fmt: skip


def _missing(records: ScalingRecords, summary: Summary, policy: ScalingPolicy) -> Iterator[str]:
    if 1 not in records.world_sizes or not summary.baseline:
        yield "a timed run at world size 1, the reference of every efficiency"
    if not any(size > 1 for size in records.world_sizes):
        yield "a world size above 1"
    found = {size.world_size: size for size in summary.sizes}
    for size in sorted(set(records.world_sizes)):
        pairs = found[size].repeats if size in found else 0
        if pairs < policy.repeats.value:
            yield f"{policy.repeats.value} repeats at W={size} beside world size 1's ({pairs} usable)"
    misshapen = [f"W={point.world_size}, repeat {point.repeat}" for point in records.points if not is_shaped(point)]
    if misshapen:
        yield f"one time for each rank, and phases, at {listed(sorted(misshapen))}"
    twice = [f"W={size} {reduction} repeat {repeat}" for size, reduction, repeat in repeated_points(records.points)]
    if twice:
        yield f"one point each for {listed(twice)} (found several)"
    absent = absent_columns(records.curve, CURVE_COLUMNS)
    if absent or records.curve.empty:
        yield f"the quality curve ({listed(absent)} absent)" if absent else "the quality curve"


def _sound_checks(records: ScalingRecords) -> Iterator[Check]:
    """Broken numbers fail: they are measurements, and they are wrong."""
    flaws = sorted(
        (point.world_size, point.repeat, point.reduction, name)
        for point in records.points
        if is_shaped(point)
        for name in point_flaws(point)
    )
    where = "W={}, repeat {}, {}: {}".format(*flaws[0]) if flaws else ""
    source = "a rate or time that is not finite and positive was not measured"
    if records.points:
        name = "timed numbers that are not finite and positive"
        yield check(name, float(len(flaws)), "==", 0, unit="", source=source, where=where, action="look at that run's timeline")
    if not absent_columns(records.curve, CURVE_COLUMNS) and len(records.curve):
        bad = float(curve_flaws(records.curve))
        action = "look at the candidate's loss: training diverged or its quality is undefined"
        yield check("quality curve values that are not finite", bad, "==", 0, unit="", source=source, action=action)


def _target_check(records: ScalingRecords) -> Iterator[Check]:
    best = best_quality(records.curve)
    if best is not None:
        quality, step = best
        yield check(
            f"best {records.quality_name}", quality, ">=", records.target_quality, unit="", source="the recipe's target quality",
            where=f"reached at step {step}",
            action="train longer, or find out what the candidate cannot learn; slice_quality says for whom",
        )  # fmt: skip


def is_decided(records: ScalingRecords, policy: ScalingPolicy) -> bool:
    """Whether no efficiency interval straddles its floor, so that more repeats would not change what the gate says of it."""
    return all(item.passed is not None for item in _efficiency_checks(summarise(records, policy), records.devices, policy))


def _efficiency_checks(summary: Summary, devices: int, policy: ScalingPolicy) -> list[Check]:
    return [_efficiency_check(size, devices, policy) for size in summary.sizes if size.world_size > 1]


def _efficiency_check(size: WorldSize, devices: int, policy: ScalingPolicy) -> Check:
    floor = policy.oversubscribed_floor if size.oversubscribed else policy.efficiency_floor
    over = f"oversubscribed: {size.world_size} ranks on {devices} devices" if size.oversubscribed else ""
    made = check(
        f"device efficiency at W={size.world_size}", size.device_efficiency, ">=", floor.value, unit="",
        source=floor.source, where=over, interval=size.interval,
        action=f"run scaling again on an idle machine; if it stays so, shorten {size.costliest_phase}, the costliest phase there",
    )  # fmt: skip
    return made if size.interval else replace(made, passed=None)  # one repeat says nothing about spread


def _idle_check(size: WorldSize, policy: ScalingPolicy) -> Check:
    rank = size.idle.slow_rank
    return check(
        f"{IDLE} at W={size.world_size}", size.idle_share, "<=", policy.idle_share_max.value, unit="of a step",
        source=policy.idle_share_max.source, where=f"rank {rank} at W={size.world_size}",
        action=f"rank {rank} keeps the others waiting: look at its input, its share of work, its core and its heat",
    )  # fmt: skip


def _passed(summary: Summary, policy: ScalingPolicy) -> str:
    judged = [size for size in summary.sizes if size.world_size > 1 and size.device_efficiency is not None]
    kept = ", ".join(f"{size.device_efficiency:.2f} at W={size.world_size}" for size in judged)
    floors = f"{policy.efficiency_floor.value:g} ({policy.oversubscribed_floor.value:g} where ranks share a device)"
    return f"device efficiency is {kept or 'not measured'} with a floor of {floors}, and the target quality is reached"
