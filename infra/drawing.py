"""What all drawn plots share: colours, text, frames, and the rule for values that cannot be drawn."""

import math
import textwrap
from collections.abc import Iterator
from itertools import cycle, islice

from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from infra.wording import number
from validation.verdict import Plot, Series

INK, FRAME, GRID, LIMIT = "#1f2328", "#9aa3ad", "#e3e7eb", "#8a1c1c"
# Okabe and Ito's colour-blind-safe palette, darkened until text in these colours has a contrast of 4.5 on white.
COLOURS = ("#0067a5", "#b84a00", "#007a5a", "#9a4a7d", "#7a6200", "#3f3f3f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")  # one more than colours: 42 pairs before one repeats
WRITTEN_OVER = {"facecolor": "white", "edgecolor": "none", "pad": 1.0}  # behind words that may fall on a line or bar
TEXT_PT, SMALL_PT, TITLE_PT = 10.0, 9.0, 11.5
FAR = 5.0  # a threshold this many times beyond the data is named at the edge instead of squeezing the data flat


def drawable(y: float, plot: Plot) -> bool:
    """Whether a value has a place on the plot's axis."""
    return math.isfinite(y) and (y > 0 or not plot.y_log)


def wrapped(text: str, width: int) -> str:
    """Plain text for the canvas, at most three lines of `width` characters; dollar signs are not read as mathematics."""
    lines = textwrap.wrap(" ".join(text.split()), width) or [""]
    if len(lines) > 3:
        lines = [*lines[:2], lines[2][: width - 1] + "…"]
    return "\n".join(lines).replace("$", r"\$")


def styled(plot: Plot) -> Iterator[tuple[Series, str, str]]:
    """Each series with its colour and marker."""
    return islice(zip(plot.series, cycle(COLOURS), cycle(MARKERS), strict=False), len(plot.series))


def frame(axes: Axes, *, x_label: str, y_label: str, values_on_x: bool) -> None:
    """Axis labels, quiet spines, a grid along the values."""
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FRAME)
    axes.set_xlabel(wrapped(x_label, 70), fontsize=TEXT_PT, color=INK)
    axes.set_ylabel(wrapped(y_label, 34), fontsize=TEXT_PT, color=INK)
    axes.tick_params(which="both", labelsize=SMALL_PT, labelcolor=INK, color=FRAME, length=3)
    axes.grid(visible=True, axis="x" if values_on_x else "y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def plain_ticks(axes: Axes, plot: Plot, *, values_on_x: bool, x_is_number: bool) -> None:
    """Write ticks as people write numbers, never as 1e6 with an offset; a log axis keeps its powers of ten."""
    formatter = FuncFormatter(lambda value, _: number(value))
    if x_is_number:
        axes.xaxis.set_major_formatter(formatter)
    if not plot.y_log:
        (axes.xaxis if values_on_x else axes.yaxis).set_major_formatter(formatter)


def error_bars(series: Series, plot: Plot) -> tuple[list[float], list[float]]:
    """Lengths below and above each value; 0 where no interval is given or it cannot be drawn."""
    if not len(series.low) == len(series.high) == len(series.y):
        return [0.0] * len(series.y), [0.0] * len(series.y)
    below = [max(0.0, y - end) if drawable(y, plot) and drawable(end, plot) else 0.0 for y, end in zip(series.y, series.low, strict=True)]
    above = [max(0.0, end - y) if drawable(y, plot) and drawable(end, plot) else 0.0 for y, end in zip(series.y, series.high, strict=True)]
    return below, above


def totals(plot: Plot) -> list[float]:
    """Where drawn values end: interval tops, or for a stacked plot the sum at each x; finite values only."""
    if not plot.stacked:
        return [y for series in plot.series for y in (*series.y, *series.high) if math.isfinite(y)]
    sums: dict[str | float, float] = {}
    for series in plot.series:
        for x, y in zip(series.x, series.y, strict=True):
            sums[x] = sums.get(x, 0.0) + (y if math.isfinite(y) else 0.0)
    return list(sums.values())


def has_line(plot: Plot) -> bool:
    """Whether the threshold is drawn as a line; one far beyond the data would hide them and is named in words (`far_note`)."""
    return plot.reference is not None and drawable(plot.reference, plot) and not far_note(plot)


def far_note(plot: Plot) -> str:
    """Words for a threshold too far beyond the data to be shown, "" when it is near, absent, or on a log axis."""
    if plot.reference is None or plot.y_log or not math.isfinite(plot.reference):
        return ""
    if plot.reference > FAR * max(totals(plot), default=math.inf) > 0:
        return f"{reference_text(plot)}: far beyond this picture"
    return ""


def reference_text(plot: Plot) -> str:
    """The threshold's label, with its value unless the label already says it; before a remark in brackets, not after."""
    shown, label = number(plot.reference), plot.reference_label or "threshold"
    name, bracket, remark = label.partition(" (")
    return label if shown in name.split() else f"{name} {shown}{bracket}{remark}"
