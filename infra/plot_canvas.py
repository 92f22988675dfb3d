"""A verdict's plots as PNG: described by data in validation/verdict.py, drawn here and nowhere else.

Drawn without pyplot and without metadata, so that equal plots give equal bytes. Figures are 6.4 inches wide and are shown at 640
CSS pixels. Series differ by marker, dash and label besides colour. What cannot be drawn (NaN, infinity, nothing at all) is
written into the picture: a hole in a plot must not look like a good value.
"""

import io
import math
import warnings

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from infra.drawing import INK, LIMIT, TEXT_PT, TITLE_PT, drawable, wrapped
from infra.plot_bars import draw_bars, height_in
from infra.plot_lines import draw_lines
from infra.wording import number
from validation.verdict import Plot

WIDTH_IN = 6.4
DPI = 115  # 736 pixels wide: the registry shows pictures at their own size and cuts off what is wider than its column


def draw(plot: Plot) -> bytes:
    """Draw a plot as PNG, 736 pixels wide; the same plot gives the same bytes. Data that cannot be drawn are named in the picture."""
    problem = _problem(plot)
    numeric = _is_numeric(plot)
    height = 1.6 if problem else 3.7 if numeric else height_in(plot)
    figure = Figure(figsize=(WIDTH_IN, height), dpi=DPI, facecolor="white", layout="constrained")
    figure.suptitle(wrapped(plot.title, 66), fontsize=TITLE_PT, fontweight="bold", color=INK, x=0.012, ha="left")
    axes = figure.add_subplot()
    if problem:
        axes.set_axis_off()
        axes.text(0.5, 0.5, wrapped(problem, 60), ha="center", va="center", fontsize=TEXT_PT, color=LIMIT, transform=axes.transAxes)
    elif numeric:
        draw_lines(axes, plot)
    else:
        draw_bars(axes, plot)
    return _encoded(figure)


def _encoded(figure: Figure) -> bytes:
    body = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*[Gg]lyph")  # names in scripts that the font lacks are drawn as boxes
        FigureCanvasAgg(figure).print_png(body, metadata={"Software": None})  # type: ignore[no-untyped-call]
    return body.getvalue()


def _problem(plot: Plot) -> str:
    """Why a plot cannot be drawn at all, "" when it can."""
    if not any(series.x for series in plot.series):
        return "nothing to draw: the evidence holds no values"
    if any(len(series.x) != len(series.y) for series in plot.series):
        return "cannot be drawn: a series has more labels than values, or fewer; see the table"
    if not any(drawable(y, plot) for series in plot.series for y in series.y):
        return f"nothing to draw: {', '.join(sorted({number(y) for series in plot.series for y in series.y}))} only"
    return ""


def _is_numeric(plot: Plot) -> bool:
    return plot.kind != "bar" and all(isinstance(x, int | float) and math.isfinite(x) for series in plot.series for x in series.x)
