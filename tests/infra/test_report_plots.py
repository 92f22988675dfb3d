"""Plots drawn as PNG."""

import io
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import helpers_report as sample
import numpy as np
import pytest
from matplotlib.figure import Figure
from PIL import Image

from infra import plots
from infra.drawing import reference_text
from infra.plot_bars import draw_bars
from infra.plot_canvas import draw
from infra.plot_lines import spread
from infra.plots import plot_png
from validation.verdict import Plot, Series

PLOTS = {plot.title: plot for line in sample.refused().gates for plot in line.verdict.plots}


def a_plot(*ys: tuple[float, ...], kind: str = "line", x: tuple[str | float, ...] = (1.0, 2.0, 4.0), **changes: object) -> Plot:
    series = tuple(Series(name=f"series {i}", x=x[: len(y)], y=y) for i, y in enumerate(ys))
    return Plot(**{"title": "t", "kind": kind, "x_label": "x", "y_label": "y (ms)", "series": series, **changes})  # type: ignore[arg-type]


def pixels(png: bytes) -> "np.typing.NDArray[np.int64]":
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(np.int64)


@pytest.mark.parametrize("title", PLOTS)
def test_plot_is_a_png_of_plausible_size(title: str) -> None:
    """Every sample plot is 736 pixels wide, neither empty nor heavy."""
    png = plot_png(PLOTS[title])
    image = Image.open(io.BytesIO(png))
    assert image.format == "PNG"
    assert image.width == 736
    assert 10_000 < len(png) < 250_000
    assert len(np.unique(pixels(png))) > 20


@pytest.mark.parametrize("title", ["Scaling efficiency", "Recovery by segment", "Mean utility by contender"])
def test_equal_plots_give_equal_bytes(title: str) -> None:
    """Drawing anew, past the cache, gives the same file: no clock and no version in it."""
    assert draw(PLOTS[title]) == plot_png(PLOTS[title])
    assert "Software" not in Image.open(io.BytesIO(plot_png(PLOTS[title]))).info


def test_kept_pictures_are_shown_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What lies beside a report and still holds is read, not drawn; an altered picture, other code's or a torn index is."""
    monkeypatch.setattr(plots, "_recalled", recalled := {})
    first, second = (PLOTS[title] for title in ("Scaling efficiency", "Recovery by segment"))
    plots.keep(tmp_path, {"plots/first.png": first, "plots/second.png": second})
    (tmp_path / "plots" / "second.png").write_bytes(b"another picture")
    plots.recall(tmp_path)
    drawn = Counter[str]()
    monkeypatch.setattr(plots, "_drawn", lambda plot: drawn.update([plot.title]) or b"")

    assert plots.plot_png(first) == (tmp_path / "plots" / "first.png").read_bytes()
    plots.plot_png(second)
    assert drawn == {"Recovery by segment": 1}

    recalled.clear()
    index = tmp_path / plots.INDEX
    whole = index.read_text()
    for text in (whole.replace('"drawn_by": "', '"drawn_by": "0'), whole[:100], "[]", '{"drawn_by": 1}'):
        index.write_text(text)
        plots.recall(tmp_path)
    assert recalled == {}


def test_many_slices_get_the_height_they_need() -> None:
    """45 slices are listed downwards with room for each name, nothing is squeezed into a fixed height."""
    many, few = PLOTS["Utility of the candidate minus last known-good, by slice"], PLOTS["Idle time by rank at W=4"]
    assert pixels(plot_png(many)).shape[0] > 45 * 25
    assert pixels(plot_png(few)).shape[0] < 500


@pytest.mark.parametrize(
    "plot",
    [
        pytest.param(a_plot(), id="no series"),
        pytest.param(a_plot(()), id="empty series"),
        pytest.param(a_plot((math.nan, math.inf)), id="nothing finite"),
        pytest.param(a_plot((0.0, -1.0), y_log=True), id="nothing positive on a log axis"),
        pytest.param(a_plot((1.0, math.nan, 2.0), (math.inf, 1.0, 3.0)), id="holes in lines"),
        pytest.param(a_plot((1.0, math.nan, 2.0), kind="bar", x=("a", "b", "c")), id="hole in bars"),
        pytest.param(a_plot((1.0, math.nan), (2.0, 3.0), kind="bar", x=("a", "b"), stacked=True), id="hole in a stack"),
        pytest.param(a_plot((1.0, 0.0, 2.0), kind="point", x=("a", "b", "a very long category name"), y_log=True), id="zero on a log axis"),
        pytest.param(a_plot((1.0,)), id="one point"),
        pytest.param(a_plot((5.0, 5.0), reference=5.0), id="flat line on the threshold"),
        pytest.param(a_plot((0.0, 0.0), kind="bar", x=("a", "b"), reference=3.0), id="zeros"),
        pytest.param(a_plot((1.0, 2.0), reference=math.nan), id="threshold is NaN"),
        pytest.param(a_plot((-1.0, 2.0), kind="bar", x=("down", "up"), reference=0.5), id="negative bar"),
        pytest.param(a_plot((1.0, 2.0), title="costs $5, not $\\frac$ " * 9, y_label="$", x_label="\n$x_{"), id="dollar signs"),
        pytest.param(a_plot((1.0, 2.0), kind="bar", x=("航班 ✈", "<script>")), id="scripts the font lacks"),
        pytest.param(a_plot(*[(float(i), i + 1.0) for i in range(12)]), id="more series than colours"),
        pytest.param(a_plot((1.0, 2.0), kind="line", x=("W=1", "W=2")), id="line over words"),
    ],
)
def test_odd_data_are_drawn_or_named_never_raised(plot: Plot) -> None:
    """A report is written on the worst day: NaN, infinities, empty series and hostile names give a picture."""
    assert pixels(plot_png(plot)).shape[1] == 736


def test_series_of_unequal_length_say_so() -> None:
    """A broken plot does not bring down the report; the picture says what is wrong with it."""
    broken = Plot(title="t", kind="line", x_label="x", y_label="y", series=(Series(name="s", x=(1.0, 2.0), y=(1.0,)),))
    assert len(np.unique(pixels(plot_png(broken)))) > 10


def test_a_hole_is_marked() -> None:
    """NaN breaks the line and is written at its place: less blue line, and blue ink near the axis where the plot without it has none."""
    with_hole, without = (
        (pixels(plot_png(plot)) == [0, 103, 165]).all(axis=2) for plot in (a_plot((1.0, math.nan, 2.0)), a_plot((1.0, 2.0), x=(1.0, 4.0)))
    )
    foot = slice(int(0.78 * len(without)), None)
    assert with_hole.sum() < without.sum() / 2
    assert with_hole[foot].any()
    assert not without[foot].any()


def test_threshold_far_away_does_not_flatten_the_data() -> None:
    """A budget of 900 s beside recoveries of 2 s is named in words; the bars keep most of the width."""
    blue = (pixels(plot_png(a_plot((2.0, 1.0), kind="bar", x=("first long fault", "second"), reference=900.0))) == [0, 103, 165]).all(
        axis=2
    )
    assert blue.any(axis=0).sum() > 400


def test_labels_are_pushed_apart_and_stay_inside() -> None:
    """Labels of lines that end close together do not overlap, and none leaves the axes."""
    spots = spread([0.5, 0.51, 0.99, 1.0], [0.1] * 4)
    assert all(after - before >= 0.1 - 1e-9 for before, after in pairwise(spots))
    assert max(spots) <= 1.0


@pytest.mark.parametrize(
    ("label", "text"),
    [
        ("floor", "floor 0.01"),
        ("", "threshold 0.01"),
        ("floor (0.2 if shared)", "floor 0.01 (0.2 if shared)"),
        ("limit 0.01", "limit 0.01"),
    ],
)
def test_a_thresholds_value_stands_beside_its_name(label: str, text: str) -> None:
    """A remark in brackets follows the value and is never taken for it."""
    plot = Plot(title="t", kind="bar", x_label="x", y_label="y", series=(), reference=0.01, reference_label=label)
    assert reference_text(plot) == text


def test_a_stack_with_an_empty_part_keeps_room_above_it() -> None:
    """A phase that took no time draws nothing: the picture is the same as without it, apart from the legend."""
    figure = Figure()
    series = tuple(Series(name=name, x=("W=1", "W=2"), y=(y, y)) for name, y in (("forward", 9.0), ("checkpoint", 0.0)))
    plot = Plot(title="t", kind="bar", x_label="x", y_label="ms", series=series, stacked=True)
    draw_bars(figure.add_subplot(), plot)
    assert figure.axes[0].get_ylim()[1] > 9.2
