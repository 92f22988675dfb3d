"""Lines and points over a numeric x: curves, scaling efficiency."""

import math
from collections.abc import Sequence

from matplotlib.axes import Axes
from matplotlib.transforms import blended_transform_factory

from infra.drawing import (
    LIMIT,
    SMALL_PT,
    WRITTEN_OVER,
    drawable,
    error_bars,
    far_note,
    frame,
    has_line,
    plain_ticks,
    reference_text,
    styled,
    wrapped,
)
from infra.wording import number
from validation.verdict import Plot

DASHES: tuple[str | tuple[int, tuple[int, ...]], ...] = ("-", "--", "-.", ":", (0, (5, 1, 1, 1)), (0, (1, 1)))
MANY_POINTS = 40  # markers on a longer line would cover it
LINE_HEIGHT = 0.062  # of a label, as a share of the axes' height


def draw_lines(axes: Axes, plot: Plot) -> None:
    """Draw every series with its intervals and name it at its right end; the threshold is one more named line."""
    frame(axes, x_label=plot.x_label, y_label=plot.y_label, values_on_x=False)
    if plot.y_log:
        axes.set_yscale("log")
    ends = [end for index in range(len(plot.series)) for end in _draw_series(axes, plot, index)]
    _limit(axes, plot)
    plain_ticks(axes, plot, values_on_x=False, x_is_number=True)
    _tick(axes, plot)
    _write_undrawable(axes, plot)
    if plot.reference is not None and has_line(plot):
        axes.axhline(plot.reference, color=LIMIT, linestyle=(0, (6, 3)), linewidth=1.4)
        ends.append((plot.reference, reference_text(plot), LIMIT))
    axes.set_title(wrapped(far_note(plot), 80), fontsize=SMALL_PT, color=LIMIT, loc="right")
    label_ends(axes, ends)


def _draw_series(axes: Axes, plot: Plot, index: int) -> list[tuple[float, str, str]]:
    """Draw one series; returns where its name belongs, nothing when it is the only one or has no drawable value."""
    series, colour, marker = list(styled(plot))[index]
    kept = [i for i, y in enumerate(series.y) if drawable(y, plot)]
    below, above = error_bars(series, plot)
    with_bars = any(below) or any(above)
    axes.errorbar(
        [float(x) for x in series.x], [y if drawable(y, plot) else math.nan for y in series.y],  # NaN breaks the line
        yerr=[below, above] if with_bars else None,
        color=colour, marker=marker if len(kept) <= MANY_POINTS else "", markersize=5.5, capsize=3, linewidth=1.8, elinewidth=1.3,
        linestyle=DASHES[index % len(DASHES)] if plot.kind == "line" else "none",
    )  # fmt: skip
    return [(series.y[kept[-1]], series.name, colour)] if kept and len(plot.series) > 1 else []


def _limit(axes: Axes, plot: Plot) -> None:
    """Start at zero where that costs little, and leave room for the threshold."""
    if plot.y_log:
        return
    low, high = axes.get_ylim()
    smallest = min(y for series in plot.series for y in (*series.y, *series.low) if drawable(y, plot))
    if smallest >= 0 and (low < 0 or smallest < 0.6 * high):
        low = 0.0
    if plot.reference is not None and has_line(plot):
        room = 0.06 * (max(high, plot.reference) - min(low, plot.reference))
        low, high = min(low, plot.reference - room if plot.reference < low else low), max(high, plot.reference + room)
    axes.set_ylim(low, high)


def _tick(axes: Axes, plot: Plot) -> None:
    """Few x values (world sizes) are ticked one by one where there is room; many are left to the locator."""
    values = sorted({float(x) for series in plot.series for x in series.x})
    if len(values) > 8:
        return
    room = 0.05 * (values[-1] - values[0])
    shown = values[:1]
    for value in values[1:]:
        if value - shown[-1] >= room:
            shown.append(value)
    axes.set_xticks(shown, labels=[number(value) for value in shown])


def _write_undrawable(axes: Axes, plot: Plot) -> None:
    """Write NaN, infinities and, on a log axis, zeros at their x: a hole must not look like a value left out on purpose."""
    at_bottom = blended_transform_factory(axes.transData, axes.transAxes)
    for lift, (series, colour, _) in enumerate(styled(plot)):
        for x, y in zip(series.x, series.y, strict=True):
            if not drawable(y, plot):
                axes.text(
                    float(x), 0.02 + LINE_HEIGHT * lift, number(y), transform=at_bottom, ha="center", fontsize=SMALL_PT,
                    color=colour, weight="bold", bbox=WRITTEN_OVER,
                )  # fmt: skip


def label_ends(axes: Axes, ends: Sequence[tuple[float, str, str]]) -> None:
    """Write (y, name, colour) labels right of the axes at their heights, pushed apart where they would touch."""
    to_axes = axes.transAxes.inverted()
    placed = sorted(
        (float(to_axes.transform(axes.transData.transform((axes.get_xlim()[1], y)))[1]), wrapped(name, 18), colour)
        for y, name, colour in ends
    )
    spots = spread([spot for spot, _, _ in placed], [LINE_HEIGHT * (text.count("\n") + 1) for _, text, _ in placed])
    for spot, (_, text, colour) in zip(spots, placed, strict=True):
        axes.text(1.015, spot, text, transform=axes.transAxes, fontsize=SMALL_PT, color=colour, va="center", weight="bold")


def spread(spots: Sequence[float], heights: Sequence[float]) -> list[float]:
    """Move sorted label centres (axes fractions) up until none overlaps, then down again from the top of the axes."""
    moved = list(spots)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + (heights[i] + heights[i - 1]) / 2)
    ceiling = 1.0
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], ceiling)
        if i:
            ceiling = moved[i] - (heights[i] + heights[i - 1]) / 2
    return moved
