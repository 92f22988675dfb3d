"""What the flights recipe sees is what was known at the scheduled departure, and it is prepared once."""

import multiprocessing
import zipfile
from pathlib import Path

import helpers_flights
import numpy as np
import pandas as pd
import pytest
from helpers_flights import corrupted_after, few_days, write_source

from trainer.recipes import flights_data, flights_source
from trainer.recipes.flights_data import FEATURES, PERIOD, FlightsSplit, encode, fit_encoding, load_encoding, load_split, prepared_folder
from trainer.recipes.flights_features import CATEGORIES, COLUMNS, NUMBERS, contract_frame, known_at_departure
from trainer.recipes.flights_history import event_log, waiting
from trainer.recipes.flights_source import START, flight_table, read_tables, source_folder
from validation.errors import DataError


@pytest.fixture(scope="module")
def storm_week() -> helpers_flights.Tables:
    """Five days around the storm of 8 February 2013: cancellations, long delays, red-eyes in the air at midnight."""
    return few_days((2, range(6, 11)))


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with four days of January and two of October, and an empty cache."""
    folder = write_source(tmp_path / "data", few_days((1, range(1, 5)), (10, range(1, 3))))
    monkeypatch.setattr(flights_data, "source_folder", lambda: folder)
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    return folder


def minute(stamp: str) -> int:
    """Minutes since START of a New York wall-clock time."""
    return int((pd.Timestamp(stamp, tz="America/New_York") - START) // pd.Timedelta(minutes=1))


@pytest.mark.parametrize("stamp", ["2013-02-07 12:00", "2013-02-08 00:10", "2013-02-08 15:37", "2013-02-09 18:00"])
def test_nothing_from_after_the_departure_enters(stamp: str, storm_week: helpers_flights.Tables) -> None:
    """Whatever happens from a moment on, the inputs of flights scheduled until then stay the same, bit by bit."""
    moment = minute(stamp)
    flights = flight_table(storm_week)
    changed = corrupted_after(storm_week, moment)
    before, after = known_at_departure(flights, storm_week), known_at_departure(flight_table(changed), changed)
    until = (flights["sched"] <= moment).to_numpy()
    columns = list(COLUMNS)

    assert until.sum() > 900
    pd.testing.assert_frame_equal(before.loc[until, columns], after.loc[until, columns], check_exact=True)
    assert not before.loc[~until, columns].equals(after.loc[~until, columns])


@pytest.mark.parametrize("dep_delay", [-43.0, -1.0, 0.0, 200.0])
def test_a_flight_does_not_see_itself(dep_delay: float, storm_week: helpers_flights.Tables) -> None:
    """A flight's own departure, early or late, changes nothing in its own inputs."""
    flights = storm_week["flights"].copy()
    row = flights.index[(flights["dep_delay"] < -5) & (flights["hour"] == 18)][0]
    flights.loc[row, ["dep_delay", "arr_delay"]] = dep_delay, 120.0
    changed = {**storm_week, "flights": flights}
    before, after = (known_at_departure(flight_table(tables), tables).loc[row, list(COLUMNS)] for tables in (storm_week, changed))

    assert before.equals(after)


@pytest.mark.parametrize(
    ("departure", "arrival", "dest", "block"),
    [
        pytest.param("2013-01-01 23:59", 445, "BQN", 226, id="red-eye to Puerto Rico"),
        pytest.param("2013-01-01 09:00", 1530, "HNL", 690, id="ten and a half time zones of day"),
        pytest.param("2013-07-01 18:00", 2030, "PHX", 330, id="Arizona has no summer time"),
        pytest.param("2013-07-01 21:30", 35, "LAX", 365, id="arrives after midnight in Los Angeles"),
        pytest.param("2013-03-09 23:30", 130, "ORD", 180, id="the night of the change to summer time"),
    ],
)
def test_blocks_cross_midnight_and_zones(departure: str, arrival: int, dest: str, block: int) -> None:
    """The scheduled arrival is the first moment at which the destination's clocks show it."""
    row = few_days((1, [1]))["flights"].head(1)
    stamp = pd.Timestamp(departure, tz="America/New_York").tz_convert("UTC")
    one = row.assign(time_hour=stamp.floor("h").isoformat(), minute=stamp.minute, sched_arr_time=arrival, dest=dest, arr_delay=10.0)
    table = flight_table({**helpers_flights.all_tables(), "flights": one})

    assert table["block"].tolist() == [block]
    assert table["landed"].tolist() == [minute(departure) + block + 10]


def test_every_scheduled_block_is_plausible() -> None:
    """All 336,776 blocks lie between 50 and 700 minutes, so no arrival landed on a wrong day."""
    flights = flight_table(helpers_flights.all_tables())

    assert (len(flights), int(flights["block"].min()), int(flights["block"].max())) == (336_776, 50, 700)
    assert not flights[["lat", "lon"]].isna().any().any()


def test_history_counts_only_what_is_past() -> None:
    """An event at minute t counts from t + 1 on, until the window has passed, for its own group only."""
    log = event_log(np.array([0, 0, 1, -1]), np.array([10, 20, 15, 12]), np.array([[1], [2], [4], [8]]))
    counts, sums = log.window(np.array([0, 0, 0, 1, -1, 0]), np.array([10, 11, 25, 25, 25, 31]), 15)

    assert counts.tolist() == [0, 1, 2, 1, 0, 1]
    assert sums[:, 0].tolist() == [0, 1, 3, 4, 0, 2]
    assert log.latest(np.array([0, 0, 1, -1]), np.array([10, 21, 15, 30])).tolist() == [-1, 1, -1, -1]


def test_waiting_ends_with_departure_or_patience() -> None:
    """One waits from the minute after its own due time until it is done, or is given up."""
    due, done = np.array([0, 10, 30, 200]), np.array([25, 10, 2**40, 200])
    count, overdue = waiting(np.zeros(4, np.int64), due, done, patience=100)

    assert count.tolist() == [0, 1, 0, 0]
    assert overdue.tolist() == [0.0, 10.0, 0.0, 0.0]


def test_encoding_is_fitted_on_train_and_total(storm_week: helpers_flights.Tables) -> None:
    """A category never seen becomes code 0, a missing number the mean with its flag up; nothing is NaN."""
    frame = contract_frame(storm_week)
    encoding = fit_encoding(frame)
    odd = frame.head(2).assign(carrier=["ZZ", frame["carrier"][0]], plane_age=np.float32([np.nan, 3]))
    inputs = encode(odd, encoding)

    assert inputs.shape == (2, FEATURES)
    assert inputs[:, -len(CATEGORIES) :][:, CATEGORIES.index("carrier")].tolist()[0] == 0.0
    assert inputs[0, NUMBERS.index("plane_age") - (NUMBERS.index("weekday") < NUMBERS.index("plane_age"))] == 0.0
    assert np.isfinite(inputs).all()


def test_prepared_once_and_found_again(small_source: Path) -> None:
    """Splits are prepared once; the second call opens the same files, and only the wanted days are in them."""
    first = prepared_folder()
    made = first.stat().st_mtime_ns
    train, judge = load_split("train"), load_split("judge")

    assert prepared_folder().stat().st_mtime_ns == made
    assert sorted(path.name for path in first.parent.iterdir()) == [first.name, f"{first.name}.lock"]
    assert (set(train.frame["month"]), set(judge.frame["month"])) == ({"01"}, {"10"})
    assert len(train) == len(train.frame) == len(train.inputs)


def test_batches_are_the_rows_asked_for(small_source: Path) -> None:
    """Rows come in the order asked for, repeats and none at all included, as float32 with weight one."""
    train = load_split("train")
    batch = train.batch(np.array([5, 2, 5]))

    assert batch.inputs.numpy().tobytes() == train.inputs[[5, 2, 5]].tobytes()
    assert batch.labels.tolist() == train.frame["late"].iloc[[5, 2, 5]].tolist()
    assert batch.weights.tolist() == [1.0, 1.0, 1.0]
    assert train.batch(np.array([], np.int64)).inputs.shape == (0, FEATURES)


def test_another_source_is_prepared_anew(small_source: Path) -> None:
    """Changed data has another key: stale splits are never read."""
    before = prepared_folder()
    with (small_source / "planes.csv").open("a") as file:
        file.write("N0TAIL,2000,x,x,x,2,100,,x\n")

    assert prepared_folder() != before


def load_in_child(split: str) -> int:
    return len(load_split(split))


def test_ranks_may_load_at_once(small_source: Path) -> None:
    """Processes that start together on an empty cache all get whole splits, and what a killed one left is cleared away."""
    with multiprocessing.get_context("fork").Pool(3) as pool:
        rows = pool.map(load_in_child, ["train"] * 3)

    assert rows == [len(load_split("train"))] * 3
    assert len(list(prepared_folder().parent.iterdir())) == 2


def test_leftovers_of_a_killed_process_are_cleared(small_source: Path) -> None:
    """A half-built folder is built again from nothing."""
    folder = prepared_folder()
    folder.rename(folder.with_suffix(".building"))
    (folder.with_suffix(".building") / "junk").touch()

    assert not (prepared_folder() / "junk").exists()
    assert not folder.with_suffix(".building").exists()


@pytest.mark.parametrize("name", ["train.inputs.npy", "train.ids.npy", "train.parquet", "encoding.json"])
def test_cut_short_cache_says_what_to_delete(name: str, small_source: Path) -> None:
    """A prepared file that lost its end is an error that names the folder to delete."""
    path = prepared_folder() / name
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(DataError, match="Delete that folder"):
        load_encoding() if name == "encoding.json" else FlightsSplit(path.parent, "train").frame


def test_unknown_split_is_refused(small_source: Path) -> None:
    """There are three splits, and no fourth."""
    with pytest.raises(DataError, match="Ask for one of: train, judge, live"):
        load_split("test")


def test_missing_package_says_how_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package the error names it and the command."""
    monkeypatch.setattr(flights_source, "PACKAGE", "no-such-package-at-all")

    with pytest.raises(DataError, match=r"not installed.*python -m pip install --force-reinstall"):
        source_folder()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2 : len(body) // 2 + 64] = bytes(64)
    path.write_bytes(bytes(body))


def no_column(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flights.csv", "year,month\n2013,1\n")


@pytest.mark.parametrize("damage", [cut, flip, no_column, Path.unlink])
def test_damaged_table_is_named(damage: object, small_source: Path) -> None:
    """A table that is cut short, altered, of another shape or gone is named, with the way to get it back."""
    damage(small_source / "flights.csv.zip")  # type: ignore[operator]

    with pytest.raises(DataError, match=r"flights\.csv\.zip.*pip install --force-reinstall"):
        read_tables(small_source)


@pytest.fixture(scope="module")
def real_frames() -> dict[str, pd.DataFrame]:
    """Both splits of the whole package."""
    frame = contract_frame(helpers_flights.all_tables())
    return {split: frame[frame["departure"].between(*period, inclusive="left")] for split, period in PERIOD.items()}


@pytest.mark.parametrize(("split", "rows", "late"), [("train", 244_737, 0.2498), ("judge", 55_589, 0.1782)])
def test_whole_data_keeps_its_contract(split: str, rows: int, late: float, real_frames: dict[str, pd.DataFrame]) -> None:
    """The real splits have the known size and share of late flights, and every column stays within its contract."""
    frame = real_frames[split]
    outside = [
        name for name, column in COLUMNS.items()
        if frame[name].isna().mean() > column.max_null_share
        or (column.kind == "number" and not frame[name].dropna().between(column.minimum, column.maximum).all())
        or (column.allowed and not frame[name].isin(column.allowed).all())
    ]  # fmt: skip

    assert (len(frame), round(float(frame["late"].mean()), 4)) == (rows, late)
    assert frame["sample_id"].is_unique
    assert outside == []


def test_december_is_not_read(real_frames: dict[str, pd.DataFrame]) -> None:
    """The last judged departure is in November, the last trained one in September."""
    assert real_frames["judge"]["departure"].max() < pd.Timestamp("2013-12-01")
    assert real_frames["train"]["departure"].max() < pd.Timestamp("2013-10-01")
