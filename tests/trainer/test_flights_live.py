"""The live split of flights: what a version in service is asked in December, known as it was then, with outcomes that come later."""

from pathlib import Path

import helpers_flights
import numpy as np
import pandas as pd
import pytest
from helpers_flights import corrupted_after, few_days, write_source
from test_recipe import Good

from trainer.recipe import load_recipe
from trainer.recipe_checks import problems_of
from trainer.recipes import flights_data
from trainer.recipes.flights_data import FEATURES, load_encoding, load_split, prepared_folder
from trainer.recipes.flights_features import COLUMNS, known_at_departure, live_frame
from trainer.recipes.flights_source import NEVER, START, flight_table

STORM = pd.Timestamp("2013-12-14 15:00")  # snow: a third of the afternoon's flights never leave


@pytest.fixture(scope="module")
def december() -> helpers_flights.Tables:
    """The last days of November and a snow storm in December."""
    return few_days((11, [29, 30]), (12, [13, 14, 15]))


@pytest.fixture
def small_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package folder with a few days of each split, and an empty cache."""
    folder = write_source(tmp_path / "data", few_days((1, [1, 2]), (10, [1]), (12, [1, 14])))
    monkeypatch.setattr(flights_data, "source_folder", lambda: folder)
    monkeypatch.setenv("SEATRIAL_CACHE", str(tmp_path / "cache"))
    return folder


def minute(stamp: pd.Timestamp) -> int:
    """Minutes since START of a New York wall-clock time."""
    return int((stamp.tz_localize("America/New_York") - START) // pd.Timedelta(minutes=1))


def test_what_happens_later_changes_no_live_inputs(december: helpers_flights.Tables) -> None:
    """Other outcomes from a moment on leave every request asked until then as it was, bit by bit."""
    before, after = live_frame(december), live_frame(corrupted_after(december, minute(STORM)))
    until = (before["departure"] <= STORM).to_numpy()
    columns = list(COLUMNS)

    assert until.sum() > 1000
    pd.testing.assert_frame_equal(before.loc[until, columns], after.loc[until, columns], check_exact=True)
    assert not before.loc[~until, columns].equals(after.loc[~until, columns])


def test_requests_are_known_as_judged_ones_are(december: helpers_flights.Tables) -> None:
    """A live request's columns are those that the judge split's own function gives for that flight."""
    live = live_frame(december)
    known = known_at_departure(flight_table(december), december).set_index("sample_id").loc[live["sample_id"]]

    pd.testing.assert_frame_equal(live[list(COLUMNS)], known[list(COLUMNS)].reset_index(drop=True), check_exact=True)


def test_flights_that_never_arrive_are_asked_about_too(december: helpers_flights.Tables) -> None:
    """Cancelled and diverted flights are live requests whose label stays null."""
    live = live_frame(december)
    landed = flight_table(december).set_index("sample_id")["landed"].loc[live["sample_id"]] < NEVER

    assert live["departure"].min() >= pd.Timestamp("2013-12-01")
    assert 100 < int((~landed).sum()) < len(live) / 4
    assert np.array_equal(live["late"].notna().to_numpy(), landed.to_numpy())


def test_the_live_split_is_prepared_apart(small_source: Path) -> None:
    """It is encoded as the train split taught, in a folder of its own that a release never makes."""
    first = prepared_folder()
    names = {path.name for path in first.parent.iterdir() if path.is_dir()}
    live = load_split("live")

    assert names == {first.name}
    assert (live.inputs.shape, set(live.frame["month"])) == ((len(live), FEATURES), {"12"})
    assert live.inputs.tobytes() == flights_data.encode(live.frame, load_encoding()).tobytes()


def test_the_shipped_recipe_has_a_live_period() -> None:
    """The recipe says when its live split is, and is found whole."""
    recipe = load_recipe("flights")

    assert recipe.live_period == ("2013-12-01", "2014-01-01")  # type: ignore[attr-defined]
    assert list(problems_of(recipe)) == []


@pytest.mark.parametrize(
    ("period", "told"),
    [
        (("2013-03-01", ""), ""),
        (("2013-03-01", "2013-04-01"), ""),
        (("2013-02-28", ""), "has to begin after the judge split's end"),
        (("2013-04-01", "2013-03-01"), "and end later"),
        (("March", ""), "has to be (first, last) ISO times"),
        ("2013-03-01", "has to be (first, last) ISO times"),
        (("2013-03-01T00:00+00:00", ""), "has to be (first, last) ISO times"),
    ],
)
def test_a_live_period_comes_after_what_was_judged(period: object, told: str) -> None:
    """It may go on for ever, and may not begin among what was judged by."""
    recipe = Good()
    recipe.live_period = period  # type: ignore[attr-defined]
    problems = [item for item in problems_of(recipe) if "live_period" in item]

    assert bool(problems) == bool(told)
    assert all(told in item for item in problems)
