"""What the monitor shows beside its checks: what betting has won, how good the version is, what its inputs look like, day by day."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from validation.betting import confidence_sequence
from validation.drift import Drift
from validation.monitoring_join import Joined
from validation.monitoring_outcomes import SHARES, Purse, margin_of
from validation.monitoring_service import drift_limit
from validation.policy import MonitoringPolicy
from validation.served import MonitorRecords
from validation.verdict import Plot, Series, Table

SHOWN_SLICES, SHOWN_COLUMNS = 12, 20

Row = tuple[str | float | int | None, ...]


def monitoring_tables(
    records: MonitorRecords, policy: MonitoringPolicy, joined: Joined, purses: Sequence[Purse], drifts: Sequence[Drift]
) -> tuple[Table, ...]:
    """Outcomes by day, purses by slice, drift by column, service by day."""
    return (
        _days(records, policy, joined, purses[0]),
        Table(
            title="What betting against the version has won, by slice (a slice never bet on has too few outcomes)",
            columns=("slice", "outcomes", f"difference ({records.utility_unit})", "highest purse", "rolled back at", "reached on"),
            rows=tuple((item.name, item.rows, _finite(item.difference), item.highest, item.needed, item.reached) for item in purses),
        ),
        Table(
            title=f"Inputs and scores of the week up to {records.today} against where the model was made",
            columns=(
                "column", "rows", "PSI beyond chance", "worst week of training", "chance alone would do", "missing today",
                "missing on training's worst day", "largest bin today", "largest bin on training's worst day",
            ),
            rows=tuple(
                (item.column, item.rows, _finite(item.index), item.usual.index, "yes" if item.is_chance else "no",
                 _finite(item.missing_share), item.usual_missing, _share(item.largest_rows), item.usual.share) for item in drifts
            ),
        ),
        _health(records),
    )  # fmt: skip


def monitoring_plots(
    records: MonitorRecords, policy: MonitoringPolicy, joined: Joined, purses: Sequence[Purse], drifts: Sequence[Drift]
) -> tuple[Plot, ...]:
    """The purses over days, the confidence sequence of the difference, drift by column, coverage; what has no data is left out."""
    x_label = f"day of service (1 = {records.since})"
    plots = [_purse_plot(records, purses, x_label), _interval_plot(records, policy, purses[0], x_label)]
    if known := [item for item in drifts if np.isfinite(item.index)]:
        shares = {item.column: item.index / drift_limit(policy, item) for item in known}
        shown = sorted(shares, key=lambda column: -shares[column])[:SHOWN_COLUMNS]
        bars = Series(name="PSI", x=tuple(shown), y=tuple(shares[column] for column in shown))
        plots.append(
            Plot(
                title="Drift over a week", kind="bar", x_label="column", y_label="PSI beyond chance / its limit",
                series=(bars,), reference=1.0, reference_label="drift_max, or training's worst week",
            )
        )  # fmt: skip
    days = joined.days
    line = Series(name="coverage", x=_places(records, days["day"].tolist()), y=tuple(days["coverage"].tolist()))
    plots.append(
        Plot(
            title="Predictions with an outcome in time", kind="line", x_label=x_label, y_label="share of the day's predictions",
            series=(line,), reference=policy.coverage_min.value, reference_label="coverage_min",
        )
    )  # fmt: skip
    return tuple(plot for plot in plots if plot.series and all(series.x for series in plot.series))


def _purse_plot(records: MonitorRecords, purses: Sequence[Purse], x_label: str) -> Plot:
    """Each purse as a share of what it needs, so that one line is the limit of all."""
    shown = [purses[0], *(item for item in purses[1 : 1 + 3] if item.values)]  # the three fullest slices beside the whole
    series = tuple(
        Series(name=item.name, x=_places(records, item.days), y=tuple(value / item.needed for value in item.values)) for item in shown
    )
    return Plot(
        title="What betting against the version has won", kind="line", x_label=x_label, y_label="share of what ends the version",
        series=tuple(item for item in series if item.x), y_log=True, reference=1.0, reference_label="rolled back",
    )  # fmt: skip


def _interval_plot(records: MonitorRecords, policy: MonitoringPolicy, purse: Purse, x_label: str) -> Plot:
    low, high = _ends(records, policy, purse)
    kept = np.isfinite(low) & np.isfinite(high)
    # far down the sequence is not followed: such days show their running mean at the edge
    running = np.cumsum(purse.means) / np.arange(1, len(purse.means) + 1)
    line = Series(
        name="mean of days so far",
        x=tuple(np.asarray(_places(records, purse.days))[kept].tolist()), y=tuple(running[kept].tolist()),
        low=tuple(np.minimum(low, running)[kept].tolist()), high=tuple(np.maximum(high, running)[kept].tolist()),
    )  # fmt: skip
    return Plot(
        title=f"Utility less that of {records.reference_kind} {records.reference_version}; the intervals hold on all days at once",
        kind="line", x_label=x_label, y_label=records.utility_unit, series=(line,), reference=-margin_of(records, policy),
        reference_label="margin",
    )  # fmt: skip


def _ends(records: MonitorRecords, policy: MonitoringPolicy, purse: Purse) -> tuple[np.typing.NDArray[np.float64], ...]:
    margin, alpha = margin_of(records, policy), 2 * policy.alpha.value * SHARES["all rows"]  # the upper end speaks as the purse does
    return confidence_sequence(np.asarray(purse.means, np.float64), margin=margin, alpha=alpha)


def _days(records: MonitorRecords, policy: MonitoringPolicy, joined: Joined, purse: Purse) -> Table:
    low, high = _ends(records, policy, purse)
    bets = {day: (purse.values[at], low[at], high[at]) for at, day in enumerate(purse.days)}
    means = joined.rows.groupby("day")[["utility", "reference_utility", "loss", "confidence", "hit"]].mean()
    rows: list[Row] = []
    for day, n, settled, excluded, coverage, is_judged in joined.days.itertuples(index=False):
        mean = means.loc[day] if day in means.index else pd.Series(np.nan, index=means.columns)
        worth = (mean["utility"], mean["reference_utility"], mean["loss"], mean["confidence"] - mean["hit"])
        ends = bets.get(day, (None, None, None))
        said = "yes" if is_judged else "no"
        rows.append((day, int(n), int(settled), int(excluded), float(coverage), said, *map(_finite, (*worth, *ends))))
    unit = records.utility_unit
    columns = (
        "day", "predictions", "outcomes in time", "of these excluded", "coverage", "judged", f"utility ({unit})",
        f"utility of {records.reference_kind} ({unit})", "log loss (nats)", "confidence less hit rate", "purse",
        "difference at least (days' losses up to the margin)", "at most (days' gains up to the margin)",
    )  # fmt: skip
    return Table(title="Outcomes by day of the prediction", columns=columns, rows=tuple(rows))


def _health(records: MonitorRecords) -> Table:
    frame = records.health.assign(day=records.health["day"].astype(str)).sort_values("day")
    rows = tuple(
        (day, int(requests), int(answered), _finite(latency))
        for day, requests, answered, latency in frame[["day", "requests", "answered", "latency_p95_ms"]].itertuples(index=False)
    )
    return Table(title="Service by day", columns=("day", "requests", "answered", "latency p95 (ms)"), rows=rows)


def _places(records: MonitorRecords, days: Sequence[str]) -> tuple[float, ...]:
    """Days as numbers, 1 on the first day of service."""
    since = np.datetime64(records.since)
    return tuple(float((np.datetime64(day) - since) / np.timedelta64(1, "D")) + 1 for day in days)


def _share(rows: tuple[int, int]) -> float | None:
    return rows[0] / rows[1] if rows[1] else None


def _finite(value: float | None) -> float | None:
    return float(value) if value is not None and np.isfinite(value) else None
