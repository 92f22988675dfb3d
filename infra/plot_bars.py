"""Bars and points over categories: slices, ranks, faults. Many or long names are listed downwards, where they can be read."""

from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.transforms import blended_transform_factory

from infra.drawing import (
    COLOURS,
    INK,
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
    totals,
    wrapped,
)
from infra.plot_lines import label_ends
from infra.wording import cut, number
from validation.verdict import Plot, Series

FEW, SHORT = 6, 10  # more categories or longer names are listed downwards
FILLED, POINTS_FILLED = 0.78, 0.6  # share of a category's room taken by its bars, its points
CHARACTER, LINE = 0.022, 0.07  # of a small text, as a share of the axes' width and height: what does not fit its bar is not written on it
NAME = 44  # characters of a category listed downwards
MANY_BARS = 24  # values are not written beside more bars than these; the table has them


def categories(plot: Plot) -> list[str]:
    """Distinct x values in order of first appearance, as labels."""
    return list(dict.fromkeys(_name(x) for series in plot.series for x in series.x))


def is_downwards(plot: Plot) -> bool:
    """Whether the categories are listed downwards, values growing to the right."""
    names = categories(plot)
    return len(names) > FEW or max(map(len, names)) > SHORT


def height_in(plot: Plot) -> float:
    """Inches of figure that a plot over categories needs to be legible."""
    if not is_downwards(plot):
        return 3.7
    lanes = 1 if plot.stacked else len(plot.series)
    return 1.35 + len(categories(plot)) * (0.25 if lanes == 1 else 0.13 + 0.11 * lanes) + (0.25 if lanes > 1 or plot.stacked else 0)


def draw_bars(axes: Axes, plot: Plot) -> None:
    """Draw a plot over categories, downwards or upwards."""
    down = is_downwards(plot)
    labels = (plot.y_label, plot.x_label) if down else (plot.x_label, plot.y_label)
    frame(axes, x_label=labels[0], y_label=labels[1], values_on_x=down)
    if plot.y_log:
        (axes.set_xscale if down else axes.set_yscale)("log")
    (axes.set_xmargin if down else axes.set_ymargin)(0.08)  # room for values written beyond their bars
    plain_ticks(axes, plot, values_on_x=down, x_is_number=False)
    names = categories(plot)
    starts = dict.fromkeys(names, 0.0)
    for lane, (series, colour, marker) in enumerate(styled(plot)):
        spots = [names.index(_name(x)) + _offset(plot, lane) for x in series.x]
        if plot.kind == "bar":
            _bars(axes, plot, series, spots, colour, starts)
        else:
            _points(axes, plot, series, spots, colour, marker)
        _write_undrawable(axes, plot, series, spots, colour)
    _name_axis(axes, plot, names)
    _mark_reference(axes, plot)
    if len(plot.series) > 1:
        _legend(axes, plot)


def _name(x: str | float) -> str:
    return x if isinstance(x, str) else number(x)


def _offset(plot: Plot, lane: int) -> float:
    lanes = len(plot.series)
    filled = FILLED if plot.kind == "bar" else POINTS_FILLED
    return 0.0 if plot.stacked else (lane - (lanes - 1) / 2) * filled / lanes


def _bars(axes: Axes, plot: Plot, series: Series, spots: list[float], colour: str, starts: dict[str, float]) -> None:
    """Draw one series of bars; a stacked one begins where the series before it ended, and moves `starts`."""
    down, thick = is_downwards(plot), FILLED / (1 if plot.stacked else len(plot.series)) * 0.94
    below, above = error_bars(series, plot)
    written = len(series.x) * len(plot.series) <= MANY_BARS
    reach = max(totals(plot), default=0.0)
    for i, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        if not drawable(y, plot) or (plot.stacked and y == 0):
            continue  # an empty part would pin the axis to its height, and leave no room above the stack
        start = starts[_name(x)] if plot.stacked else 0.0
        error = [[below[i]], [above[i]]] if below[i] or above[i] else None
        style = {"color": colour, "edgecolor": "white", "hatch": _hatch(plot, series), "linewidth": 0.6, "ecolor": INK, "capsize": 3}
        if down:
            axes.barh(spots[i], y, thick, left=start, xerr=error, **style)  # type: ignore[arg-type]
        else:
            axes.bar(spots[i], y, thick, bottom=start, yerr=error, **style)  # type: ignore[arg-type]
        if plot.stacked:
            starts[_name(x)] = start + y
            text = number(y, 2)
            if written and y > (CHARACTER * (len(text) + 1) if down else LINE) * reach:
                _write(axes, down, start + y / 2, spots[i], text, "white", centred=True)
        elif written:
            _write(axes, down, y - below[i] if y < 0 else y + above[i], spots[i], number(y, 3), INK, centred=False)


def _hatch(plot: Plot, series: Series) -> str:
    """Stripes for series whose colour another one has already."""
    return "////" if plot.series.index(series) >= len(COLOURS) else ""


def _write(axes: Axes, down: bool, value: float, spot: float, text: str, colour: str, *, centred: bool) -> None:
    """Write at (value, category); beyond the value, away from zero, unless centred on it."""
    gap = (0, 0) if centred else ((4, 0) if down else (0, 3))
    beyond = ("right", "top") if value < 0 else ("left", "bottom")
    gap = (-gap[0], -gap[1]) if value < 0 else gap
    axes.annotate(
        text, (value, spot) if down else (spot, value), xytext=gap, textcoords="offset points", fontsize=SMALL_PT, color=colour,
        ha="center" if centred or not down else beyond[0], va="center" if centred or down else beyond[1],
    )  # fmt: skip


def _points(axes: Axes, plot: Plot, series: Series, spots: list[float], colour: str, marker: str) -> None:
    kept = [i for i, y in enumerate(series.y) if drawable(y, plot)]
    below, above = error_bars(series, plot)
    error = [[below[i] for i in kept], [above[i] for i in kept]] if any(below) or any(above) else None
    values, places = [series.y[i] for i in kept], [spots[i] for i in kept]
    down = is_downwards(plot)
    joined = plot.kind == "line" and not down
    axes.errorbar(
        values if down else places, places if down else values, xerr=error if down else None, yerr=None if down else error,
        color=colour, marker=marker, markersize=4.5, elinewidth=1.4, capsize=2, linestyle="-" if joined else "none",
    )  # fmt: skip


def _write_undrawable(axes: Axes, plot: Plot, series: Series, spots: list[float], colour: str) -> None:
    down = is_downwards(plot)
    at_edge = blended_transform_factory(*((axes.transAxes, axes.transData) if down else (axes.transData, axes.transAxes)))
    for spot, y in zip(spots, series.y, strict=True):
        if not drawable(y, plot):
            axes.text(
                *((0.01, spot) if down else (spot, 0.01)), number(y), transform=at_edge, fontsize=SMALL_PT, color=colour, weight="bold",
                ha="left" if down else "center", va="center" if down else "bottom", bbox=WRITTEN_OVER,
            )  # fmt: skip


def _name_axis(axes: Axes, plot: Plot, names: list[str]) -> None:
    """Name the categories, first on top; a thin line where "column=value" names change their column."""
    places = range(len(names))
    if not is_downwards(plot):
        axes.set_xticks(places, labels=[wrapped(name, SHORT) for name in names])
        axes.set_xlim(-0.6, len(names) - 0.4)
        return
    axes.set_yticks(places, labels=[wrapped(cut(name, NAME), NAME) for name in names])
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    if plot.kind != "bar" and len(plot.series) > 1:
        for place in places[::2]:  # bands show which points belong together
            axes.axhspan(place - 0.5, place + 0.5, color="#f3f5f7", linewidth=0, zorder=0)
    for place, (name, following) in enumerate(pairwise(names)):
        if "=" in following and name.partition("=")[0] != following.partition("=")[0]:
            axes.axhline(place + 0.5, color="#c4cad1", linewidth=0.8)


def _mark_reference(axes: Axes, plot: Plot) -> None:
    if plot.reference is None or not has_line(plot):
        axes.set_title(wrapped(far_note(plot), 80), fontsize=SMALL_PT, color=LIMIT, loc="right")
        return
    style = {"color": LIMIT, "linestyle": (0, (6, 3)), "linewidth": 1.4}
    if not is_downwards(plot):
        axes.axhline(plot.reference, **style)  # type: ignore[arg-type]
        label_ends(axes, [(plot.reference, reference_text(plot), LIMIT)])
        return
    axes.axvline(plot.reference, **style)  # type: ignore[arg-type]
    low, high = axes.get_xlim()
    left = (plot.reference - low) > 0.6 * (high - low)
    axes.annotate(
        wrapped(reference_text(plot), 60), (plot.reference, 1.0), xycoords=axes.get_xaxis_transform(), xytext=(0, 3),
        textcoords="offset points", fontsize=SMALL_PT, color=LIMIT, weight="bold", ha="right" if left else "left", va="bottom",
    )  # fmt: skip


def _legend(axes: Axes, plot: Plot) -> None:
    """Name the series above the axes, in drawing order; above the threshold's label where both stand there."""
    handles: list[Patch | Line2D] = [
        Patch(facecolor=colour, edgecolor="white", hatch=_hatch(plot, series), label=wrapped(series.name, 30))
        if plot.kind == "bar"
        else Line2D([], [], color=colour, marker=marker, linestyle="none", markersize=5, label=wrapped(series.name, 30))
        for series, colour, marker in styled(plot)
    ]
    figure = axes.get_figure(root=True)
    assert figure is not None
    from_left = blended_transform_factory(figure.transFigure, axes.transAxes)
    room_in = 0.2 if is_downwards(plot) and plot.reference is not None else 0.0
    longest = max(len(series.name) for series in plot.series)
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0.0, 1.0 + room_in / max(height_in(plot) - 1.3, 1.0)), bbox_transform=from_left,
        frameon=False,
        fontsize=SMALL_PT, labelcolor=INK, ncols=max(1, min(len(handles), 80 // (longest + 6))), handlelength=1.2, columnspacing=1.4,
        borderaxespad=0.2,
    )  # fmt: skip
