"""What is known about a flight at its scheduled departure: the columns of the contract frame.

Nothing here looks ahead. The history columns count another flight's departure or landing only if it had really happened before this
flight's scheduled minute; an early departure counts from its scheduled minute on, so that no flight sees its own.
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import pandas as pd

from trainer.recipe import Column
from trainer.recipes.flights_history import EventLog, Floats, Ints, event_log, waiting
from trainer.recipes.flights_source import NEVER, flight_table, weather_before

DATA_YEAR = 2013
END = pd.Timestamp("2013-12-01")  # December's outcomes mature later: its flights are neither trained on nor judged, they are live
LIVE_END = pd.Timestamp("2014-01-01")
LATE_MINUTES = 15  # the US Department of Transportation's line between on time and late
CATEGORIES = ("origin", "carrier", "dest", "model")
PATIENCE = 240  # minutes after which a flight that has not left is taken for cancelled

GROUPS: Mapping[str, tuple[str, ...]] = {
    "everywhere": (), "origin": ("origin",), "carrier": ("carrier",), "hub": ("origin", "carrier"), "dest": ("dest",),
    "route": ("carrier", "dest"), "number": ("carrier", "flight"), "slot": ("origin", "hour_of_day"), "band": ("longitude_band",),
    "tail": ("tailnum",),
}  # fmt: skip


class Measure(NamedTuple):
    """One value of a departure or landing, and what it is worth before anything was seen."""

    log: str  # "left" | "landed"
    place: int  # column of the log's values
    start: float  # mean over a usual year; felt in January's first days only
    column: Column


_SHARE = Column(kind="number", minimum=0.0, maximum=1.0)
_DELAY = Column(kind="number", minimum=-30.0, maximum=180.0)  # minutes, clipped: one delay of 20 hours is not a hundred of 12 minutes
MEASURES: Mapping[str, Measure] = {
    "left_delay": Measure("left", 0, 12.0, _DELAY),
    "left_late": Measure("left", 1, 0.2, _SHARE),
    "landed_delay": Measure("landed", 0, 7.0, _DELAY),
    "landed_late": Measure("landed", 1, 0.22, _SHARE),
    "lost": Measure("landed", 2, -5.0, Column(kind="number", minimum=-210.0, maximum=210.0)),  # minutes lost on the way: wind, queues
}
# group, measure, window; each is one column, e.g. origin_left_delay_60m
WINDOWS: tuple[tuple[str, str, str], ...] = (
    ("everywhere", "landed_late", "28d"), ("everywhere", "landed_late", "7d"), ("everywhere", "left_delay", "120m"),
    ("origin", "left_delay", "60m"), ("origin", "left_delay", "120m"), ("origin", "left_delay", "720m"), ("origin", "left_late", "120m"),
    ("carrier", "left_delay", "240m"), ("carrier", "landed_late", "240m"), ("carrier", "landed_late", "7d"),
    ("carrier", "landed_late", "28d"), ("carrier", "lost", "28d"),
    ("hub", "left_delay", "120m"), ("hub", "left_delay", "240m"), ("hub", "landed_late", "28d"),
    ("dest", "landed_delay", "240m"), ("dest", "lost", "240m"), ("dest", "lost", "720m"), ("dest", "landed_late", "28d"),
    ("dest", "lost", "28d"),
    ("band", "landed_delay", "240m"), ("band", "lost", "120m"), ("band", "lost", "240m"), ("band", "lost", "480m"),
    ("route", "landed_late", "28d"), ("number", "landed_late", "7d"), ("number", "landed_late", "28d"),
    ("number", "lost", "28d"),
    ("slot", "landed_late", "28d"), ("tail", "landed_late", "28d"),
)  # fmt: skip
QUEUES = ("everywhere", "origin", "hub", "dest")


def _between(minimum: float, maximum: float, null_share: float = 0.0) -> Column:
    return Column(kind="number", minimum=minimum, maximum=maximum, max_null_share=null_share)


# Ranges are what the quantity can be, with room; null shares are twice to four times what January-September shows.
COLUMNS: Mapping[str, Column] = {
    "hour": _between(0, 24), "weekday": _between(0, 6), "arrival_hour": _between(0, 24), "distance": _between(50, 5500),
    "block": _between(30, 780), "dest_lat": _between(15, 65), "dest_lon": _between(-160, -60), "origin_due_next_60m": _between(0, 100),
    "plane_age": _between(0, 70, 0.3), "seats": _between(1, 600, 0.3), "temp": _between(-20, 115, 0.02),
    "wind_speed": _between(0, 150, 0.02), "wind_gust": _between(0, 150, 0.02), "wind_north": _between(-150, 150, 0.08),
    "wind_east": _between(-150, 150, 0.08),
    "precip": _between(0, 6, 0.02), "precip_4h": _between(0, 24), "pressure": _between(930, 1070, 0.25),
    "pressure_change": _between(-60, 60, 0.4), "visib": _between(0, 10, 0.02),
    **{"_".join(window): MEASURES[window[1]].column for window in WINDOWS},
    **{f"{group}_waiting": _between(0, 1000) for group in QUEUES}, **{f"{group}_overdue": _between(0, PATIENCE) for group in QUEUES},
    "tail_slack": _between(-300, 900), "tail_flying": _between(0, 1), "tail_left_delay": _between(-15, 180),
    "tail_landed_delay": _between(-30, 180), "tail_since": _between(0, 2880),
    "origin": Column(kind="category", allowed=("EWR", "JFK", "LGA")), "carrier": Column(kind="category"),
    "dest": Column(kind="category"), "model": Column(kind="category"),
}  # fmt: skip
NUMBERS = tuple(name for name, column in COLUMNS.items() if column.kind == "number")


def contract_frame(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Columns of every flight with an outcome before END, in the file's order.

    Returns: sample_id, departure (scheduled, New York wall clock), late (1.0 or 0.0, the label), slices, day, and COLUMNS.
    Cancelled and diverted flights never arrive, so "15 minutes late" is neither true nor false of them: they are left out of
    training and judging (another question, with another action), but while they fail to leave they count in the queues.
    """
    flights = flight_table(tables)
    flights = flights[flights["departure"] < END].reset_index(drop=True)
    frame = known_at_departure(flights, tables)
    return frame[(flights["landed"] < NEVER).to_numpy()].reset_index(drop=True)


def live_frame(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Columns of every flight from END to LIVE_END as `contract_frame` has them; those that never arrive are asked about too.

    Their label is NaN, and `excluded` says why. Nothing but these two is of after a flight's scheduled departure.
    """
    flights = flight_table(tables)
    flights = flights[flights["departure"] < LIVE_END].reset_index(drop=True)
    frame = known_at_departure(flights, tables)
    arrived = (flights["landed"] < NEVER).to_numpy()
    never = np.where(flights["left"] < NEVER, "diverted", "cancelled")
    frame = frame.assign(late=frame["late"].where(arrived), excluded=np.where(arrived, "", never))
    return frame[(flights["departure"] >= END).to_numpy()].reset_index(drop=True)


def known_at_departure(flights: pd.DataFrame, tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Columns of every flight of a flight table, in its order, those that never arrive included (their label is 0.0)."""
    planes = tables["planes"].drop_duplicates("tailnum").set_index("tailnum").reindex(flights["tailnum"]).reset_index(drop=True)
    columns = {
        **_schedule(flights), "plane_age": DATA_YEAR - planes["year"], "seats": planes["seats"],
        **_weather(flights, tables["weather"]), **_history(flights),
    }  # fmt: skip
    numbers = pd.DataFrame({name: np.asarray(columns[name], np.float32) for name in NUMBERS})
    frame = flights[["sample_id", "departure", "origin", "carrier", "dest"]].assign(
        model=planes["model"].fillna("unknown"), late=(flights["arr_delay"] >= LATE_MINUTES).astype("float64")
    )
    return pd.concat([frame, numbers, _slices(flights, numbers)], axis=1)


def _schedule(flights: pd.DataFrame) -> dict[str, object]:
    clock = flights["departure"].dt
    hour = clock.hour + clock.minute / 60
    sched, origin = flights["sched"].to_numpy(np.int64), codes(flights, GROUPS["origin"])
    timetable = event_log(origin, sched, np.zeros((len(flights), 0), np.int64))
    return {
        "hour": hour, "weekday": clock.day_of_week, "arrival_hour": (hour + flights["block"] / 60) % 24, "distance": flights["distance"],
        "block": flights["block"], "dest_lat": flights["lat"], "dest_lon": flights["lon"],
        "origin_due_next_60m": timetable.window(origin, sched + 60, 60)[0],
    }  # fmt: skip


def _weather(flights: pd.DataFrame, weather: pd.DataFrame) -> dict[str, object]:
    now, before = weather_before(weather, flights, 1), weather_before(weather, flights, 4)
    angle = np.deg2rad(now["wind_dir"])
    rain = sum(weather_before(weather, flights, hours)["precip"].fillna(0.0).to_numpy() for hours in (1, 2, 3, 4))
    return {
        "temp": now["temp"], "wind_speed": now["wind_speed"], "wind_gust": now["wind_gust"].fillna(now["wind_speed"]),
        "wind_north": now["wind_speed"] * np.cos(angle), "wind_east": now["wind_speed"] * np.sin(angle), "precip": now["precip"],
        "precip_4h": rain, "pressure": now["pressure"], "pressure_change": now["pressure"] - before["pressure"], "visib": now["visib"],
    }  # fmt: skip


def _history(flights: pd.DataFrame) -> dict[str, object]:
    keyed = flights.assign(hour_of_day=flights["departure"].dt.hour, longitude_band=(flights["lon"] / 10).round())
    groups = {name: codes(keyed, columns) for name, columns in GROUPS.items()}
    sched = flights["sched"].to_numpy(np.int64)
    left, landed = (np.maximum(flights[name].to_numpy(np.int64), sched) for name in ("left", "landed"))
    left_delay = np.clip(flights["dep_delay"].to_numpy(np.int64), -15, 180)
    landed_delay = np.clip(flights["arr_delay"].to_numpy(np.int64), -30, 180)
    values = {
        "left": np.stack([left_delay, left_delay >= LATE_MINUTES], axis=1).astype(np.int64),
        "landed": np.stack([landed_delay, landed_delay >= LATE_MINUTES, landed_delay - left_delay], axis=1).astype(np.int64),
    }
    moments = {"left": left, "landed": landed}
    wanted = (
        {(MEASURES[measure].log, group) for group, measure, _ in WINDOWS} | {(log, "everywhere") for log in moments} | {("left", "tail")}
    )
    logs = {(log, group): event_log(groups[group], moments[log], values[log]) for log, group in sorted(wanted)}
    columns: dict[str, object] = dict(_window_means(logs, groups, sched))
    for group in QUEUES:
        columns[f"{group}_waiting"], columns[f"{group}_overdue"] = waiting(groups[group], sched, left, patience=PATIENCE)
    last = logs["left", "tail"].latest(groups["tail"], sched)
    return columns | _last_leg(last, sched, left, landed, flights["block"].to_numpy(np.int64), values)


def _window_means(logs: Mapping[tuple[str, str], EventLog], groups: Mapping[str, Ints], sched: Ints) -> dict[str, Floats]:
    """Means over each window, drawn towards the last 28 days of all flights: by 2 events within a day, by 10 over days."""
    usual = {}
    for name, measure in MEASURES.items():
        count, sums = logs[measure.log, "everywhere"].window(groups["everywhere"], sched, 28 * 1440)
        usual[name] = (sums[:, measure.place] + 50 * measure.start) / (count + 50)
    means = {}
    for group, name, window in WINDOWS:
        measure = MEASURES[name]
        minutes = int(window[:-1]) * (1440 if window.endswith("d") else 1)
        count, sums = logs[measure.log, group].window(groups[group], sched, minutes)
        pull = 2 if minutes < 1440 else 10
        means[f"{group}_{name}_{window}"] = (sums[:, measure.place] + pull * usual[name]) / (count + pull)
    return means


def _last_leg(last: Ints, sched: Ints, left: Ints, landed: Ints, block: Ints, values: Mapping[str, Ints]) -> dict[str, object]:
    """What is known of this aircraft's last departure from New York.

    tail_slack: minutes between its earliest way back (as long as the way out) and this departure; 900 when nothing is known.
    """
    leg = np.maximum(last, 0)
    known = last >= 0
    is_down = known & (landed[leg] < sched)
    back = np.where(is_down, landed[leg], np.maximum(sched, left[leg] + block[leg])) + block[leg]
    since = np.where(known, np.minimum(sched - left[leg], 2880), 2880)
    same_day = known & (since < 1440)
    return {
        "tail_slack": np.where(known, np.clip(sched - back, -300, 900), 900), "tail_flying": known & ~is_down,
        "tail_left_delay": np.where(same_day, values["left"][leg, 0], 0), "tail_since": since,
        "tail_landed_delay": np.where(same_day & is_down, values["landed"][leg, 0], 0),
    }  # fmt: skip


def codes(table: pd.DataFrame, columns: tuple[str, ...]) -> Ints:
    """Number the distinct combinations of some columns from 0; -1 where one of them is missing; all 0 for no columns."""
    together = np.zeros(len(table), np.int64)
    missing = np.zeros(len(table), bool)
    for name in columns:
        code = pd.factorize(table[name])[0]
        missing |= code < 0
        together = pd.factorize(together * (int(code.max(initial=0)) + 2) + code)[0]
    return np.where(missing, -1, together)


def _slices(flights: pd.DataFrame, numbers: pd.DataFrame) -> pd.DataFrame:
    clock = flights["departure"].dt
    hour = pd.cut(clock.hour, [-1, 8, 12, 16, 19, 23], labels=["00-08", "09-12", "13-16", "17-19", "20-23"])
    miles = pd.cut(flights["distance"], [0, 500, 1000, 1500, 6000], labels=["under 500", "500-1000", "1000-1500", "over 1500"])
    weather = np.select(
        [numbers["visib"].isna(), numbers["precip"] > 0, numbers["visib"] < 5, numbers["wind_gust"] >= 20],
        ["unknown", "rain or snow", "low visibility", "windy"], "fair",
    )  # fmt: skip
    return pd.DataFrame({
        "day": clock.strftime("%Y-%m-%d"), "month": clock.strftime("%m"), "hour_band": hour.astype(str),
        "distance_band": miles.astype(str), "weather_band": weather,
    })  # fmt: skip
