"""What a reader sees of a scaling experiment: tables, pictures and the words beside them."""

import math

from validation.policy import ScalingPolicy
from validation.records import PHASES, ScalingRecords
from validation.scaling_quantities import TargetCost
from validation.scaling_summary import Summary, WorldSize
from validation.verdict import Plot, Series, Table


def tables(summary: Summary) -> list[Table]:
    """World sizes, idle time by rank, phases, and every set-up that was timed."""
    return [table for table in (_sizes(summary), _idle(summary), _phases(summary), _setups(summary)) if table.rows]


def plots(summary: Summary, records: ScalingRecords, policy: ScalingPolicy) -> list[Plot]:
    """Throughput, efficiency, time and cost to target, idle by rank, phases."""
    if not summary.sizes:
        return []
    pictures = [_throughput_plot(summary), _efficiency_plot(summary, policy)]
    priced = [(size, size.target) for size in summary.sizes if size.target]
    if priced:
        pictures += _target_plots(priced, records)
    return [*pictures, *_idle_plot(summary), _phase_plot(summary)]


def notes(summary: Summary, records: ScalingRecords, policy: ScalingPolicy) -> list[str]:
    """Method, limits and assumptions, then what the experiment says about world sizes."""
    percent = f"{100 * policy.confidence.value:g}%"
    price = policy.price_per_device_hour
    words = [
        f"Every world size takes the same global batch of {records.global_batch_size} samples, so all need the same steps to target.",
        f"Intervals are {percent} Student t intervals of the mean over repeats of throughput(W) / throughput(1) of the same repeat. They "
        "assume independent, near-normal ratios, hold for each world size alone, and few repeats make them wide.",
        f"The baseline is the one-worker set-up with the highest median throughput: reduction {summary.baseline or 'unknown'}. Other "
        "world sizes are judged with the exact reduction where it was timed, since the quality curve is its.",
        f"Cost is {price.value:g} USD a device-hour times min(W, devices) times wall time; the price: {price.source}.",
    ]
    over = [str(size.world_size) for size in summary.sizes if size.oversubscribed]
    if over:
        words.append(
            f"Oversubscribed: W={', '.join(over)} share {summary.devices} devices. They are judged against what these devices could do "
            "at best; their idle and phase times include waiting for a core and are not judged."
        )
    return [*words, *_model_words(summary), *_choice_words(summary)]


def _model_words(summary: Summary) -> list[str]:
    model = summary.model
    if model is None:
        return []
    caution = " With no more points than terms the error says nothing." if model.points <= 3 else ""
    return [
        f"Fit of {model.points} points: step_ms(W) = {model.compute_ms:.3g} / min(W, {model.devices}) + {model.per_rank_ms:.3g} W + "
        f"{model.per_doubling_ms:.3g} log2 W, RMS error {model.rms_ms:.3g} ms.{caution} It describes these points and predicts no others."
    ]


def _choice_words(summary: Summary) -> list[str]:
    priced = [(size.target.wall_s, size.target.cost, size.world_size) for size in summary.sizes if size.target]
    if not priced:
        return []
    wall_s, _, fastest = min(priced)
    cost, cheapest = min((cost, size) for _, cost, size in priced)
    return [f"Fastest to the target quality: W={fastest} ({wall_s:.4g} s). Cheapest: W={cheapest} ({cost:.4g} USD)."]


def _sizes(summary: Summary) -> Table:
    columns = (
        "world size", "oversubscribed", "reduction", "throughput (samples/s)", "step (ms)", "efficiency over W", 
        "efficiency over devices", "low", "high", "repeats", "costliest phase", "time to target (s)", "device-hours", "cost (USD)",
    )  # fmt: skip
    rows = tuple(
        (
            size.world_size, f"yes, {size.world_size} on {summary.devices}" if size.oversubscribed else "no", size.reduction,
            size.throughput_sps, size.step_ms, size.efficiency, size.device_efficiency, *(size.interval or (None, None)), size.repeats,
            size.costliest_phase, *_priced(size.target),
        )
        for size in summary.sizes
    )  # fmt: skip
    return Table(title="World sizes", columns=columns, rows=rows)


def _priced(target: TargetCost | None) -> tuple[float | None, float | None, float | None]:
    return (None, None, None) if target is None else (target.wall_s, target.device_hours, target.cost)


def _idle(summary: Summary) -> Table:
    rows = tuple(
        (size.world_size, rank, idle, "slowest" if rank == size.idle.slow_rank else "")
        for size in summary.sizes if size.world_size > 1
        for rank, idle in enumerate(size.idle.idle_ms)
    )  # fmt: skip
    return Table(title="Idle time by rank", columns=("world size", "rank", "idle (ms a step)", ""), rows=rows)


def _phases(summary: Summary) -> Table:
    columns = ("world size", *(f"{name.removesuffix('_ms')} (ms)" for name in _phase_names(summary)))
    rows = tuple((size.world_size, *(size.phase_ms.get(name) for name in _phase_names(summary))) for size in summary.sizes)
    return Table(title="Phases of a step, mean over ranks", columns=columns, rows=rows)


def _setups(summary: Summary) -> Table:
    rows = tuple(
        (size, reduction, len(values), values[0], (values[(len(values) - 1) // 2] + values[len(values) // 2]) / 2, values[-1])
        for (size, reduction), values in sorted(summary.setups.items())
    )
    columns = ("world size", "reduction", "repeats", "lowest (samples/s)", "median (samples/s)", "highest (samples/s)")
    return Table(title="Every set-up that was timed", columns=columns, rows=rows)


def _phase_names(summary: Summary) -> list[str]:
    found = {name for size in summary.sizes for name in size.phase_ms}
    return [name for name in PHASES if name in found] + sorted(found - set(PHASES))


def _throughput_plot(summary: Summary) -> Plot:
    x = tuple(float(size.world_size) for size in summary.sizes)
    spread = [summary.setups[size.world_size, size.reduction] for size in summary.sizes]
    measured = Series(
        name="measured (median, lowest to highest repeat)", x=x, y=tuple(size.throughput_sps for size in summary.sizes),
        low=tuple(values[0] for values in spread), high=tuple(values[-1] for values in spread),
    )  # fmt: skip
    series = [measured]
    if summary.baseline:
        single = summary.sizes[0].throughput_sps  # ascending, and a baseline means that W=1 was measured
        series.append(Series(name="ideal: W x one worker", x=x, y=tuple(w * single for w in x)))
        if any(size.oversubscribed for size in summary.sizes):
            limit = tuple(min(w, summary.devices) * single for w in x)
            series.append(Series(name=f"ideal on {summary.devices} devices", x=x, y=limit))
    return Plot(title="Throughput", kind="line", x_label="world size (ranks)", y_label="samples/s", series=tuple(series))


def _efficiency_plot(summary: Summary, policy: ScalingPolicy) -> Plot:
    sizes = [size for size in summary.sizes if size.device_efficiency is not None]
    x = tuple(float(size.world_size) for size in sizes)
    judged = tuple(size.device_efficiency or 0.0 for size in sizes)
    ends = [
        size.interval if size.interval and all(map(math.isfinite, size.interval)) else (y, y) for size, y in zip(sizes, judged, strict=True)
    ]
    series = (
        Series(name="over min(W, devices): judged", x=x, y=judged, low=tuple(e[0] for e in ends), high=tuple(e[1] for e in ends)),
        Series(name="over W", x=x, y=tuple(size.efficiency or 0.0 for size in sizes)),
    )
    return Plot(
        title="Efficiency", kind="line", x_label="world size (ranks)", y_label="share of linear speed-up (dimensionless)", series=series,
        reference=policy.efficiency_floor.value,
        reference_label=f"floor ({policy.oversubscribed_floor.value:g} where ranks share devices)",
    )  # fmt: skip


def _target_plots(priced: list[tuple[WorldSize, TargetCost]], records: ScalingRecords) -> list[Plot]:
    x = tuple(f"W={size.world_size}" for size, _ in priced)
    goal = f"{records.quality_name} {records.target_quality:g}"
    cost = Series(name="cost", x=x, y=tuple(target.cost for _, target in priced))
    time = Series(name="time", x=x, y=tuple(target.wall_s for _, target in priced))
    return [
        Plot(title=f"Cost to {goal}", kind="bar", x_label="world size (ranks)", y_label="USD", series=(cost,)),
        Plot(title=f"Time to {goal}", kind="bar", x_label="world size (ranks)", y_label="seconds", series=(time,)),
    ]


def _idle_plot(summary: Summary) -> list[Plot]:
    ranks = [(f"W={s.world_size} rank {rank}", idle) for s in summary.sizes if s.world_size > 1 for rank, idle in enumerate(s.idle.idle_ms)]
    if not ranks:
        return []
    series = Series(name="idle", x=tuple(label for label, _ in ranks), y=tuple(idle for _, idle in ranks))
    return [Plot(title="Idle time by rank", kind="bar", x_label="rank", y_label="ms a step", series=(series,))]


def _phase_plot(summary: Summary) -> Plot:
    x = tuple(f"W={size.world_size}" for size in summary.sizes)
    series = tuple(
        Series(name=name.removesuffix("_ms"), x=x, y=tuple(size.phase_ms.get(name, 0.0) for size in summary.sizes))
        for name in _phase_names(summary)
    )
    y_label = "ms a step, mean over ranks"
    return Plot(title="Phases of a step", kind="bar", x_label="world size (ranks)", y_label=y_label, series=series, stacked=True)
