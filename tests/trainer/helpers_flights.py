"""A few days of the real tables, whole or as a package folder of their own."""

import functools
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from trainer.recipes.flights_source import flight_table, minutes_since_start, read_tables, source_folder

Tables = dict[str, pd.DataFrame]


@functools.cache
def all_tables() -> Tables:
    return read_tables(source_folder())


def few_days(*days: tuple[int, Sequence[int]]) -> Tables:
    """Tables with the flights of some (month, days of the month) only."""
    flights = all_tables()["flights"]
    keep = np.logical_or.reduce([(flights["month"] == month) & flights["day"].isin(list(chosen)) for month, chosen in days])
    return {**all_tables(), "flights": flights[keep].reset_index(drop=True)}


def write_source(folder: Path, tables: Tables) -> Path:
    """Write tables as the package's data files."""
    folder.mkdir()
    for name, table in tables.items():
        table.to_csv(folder / (f"{name}.csv.zip" if name == "flights" else f"{name}.csv"), index=False)
    return folder


def corrupted_after(tables: Tables, moment: int, seed: int = 0) -> Tables:
    """Give every departure, landing and weather report at `moment` (minutes) or later another outcome, also at or after `moment`."""
    draw = np.random.default_rng(seed)
    known = flight_table(tables)
    sched, block = known["sched"].to_numpy(), known["block"].to_numpy()
    flights = tables["flights"].copy()
    new_left = np.maximum(moment, sched - 30) + draw.integers(0, 400, len(flights))
    new_landed = np.maximum(moment, sched) + draw.integers(0, 900, len(flights))
    for column, moments, new in (
        ("dep_delay", known["left"], new_left - sched),
        ("arr_delay", known["landed"], new_landed - sched - block),
    ):
        later = moments.to_numpy() >= moment
        never = draw.random(len(flights)) < 0.2
        flights[column] = np.where(later, np.where(never, np.nan, new), flights[column])
    weather = tables["weather"].copy()
    reported = minutes_since_start(pd.to_datetime(weather["time_hour"], utc=True)) + 60
    for column in ("temp", "wind_speed", "precip", "pressure", "visib"):
        weather[column] = weather[column].where(reported <= moment, draw.uniform(0, 10, len(weather)))
    return {**tables, "flights": flights, "weather": weather}
