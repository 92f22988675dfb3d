"""A month replayed evening by evening says what one look at its end says; drawn months are whole days."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from flows import replay as module
from flows.cli import main
from flows.replay import DAYS, FIRST, December, days_until, lines, records, replay, whole_month
from infra.settings import load_settings
from trainer.recipes.flights_month import Month, read_month, write_month
from validation.drift import reference_bins, served_counts
from validation.errors import ConfigError
from validation.policy import parse_policy

ROWS = 150  # a day
POLICY = parse_policy()


def month_of(rows: pd.DataFrame) -> Month:
    """What stands beside the rows: one column, the scores, one slice."""
    days, values = rows["day"], rows["score"]
    bins, scores = reference_bins("x", values), reference_bins("", values)
    names = ("clean", "broken")
    return Month(
        columns=(bins,), scores=scores, utility_scale=1.0, utility_unit="points", slices={"colour": ("blue", "red")},
        inputs={key: {"x": served_counts(bins, values, days)} for key in names},
        score_counts={key: {"": served_counts(scores, values, days)} for key in names},
    )  # fmt: skip


def rows_of(loss: float) -> pd.DataFrame:
    """A month of rows whose decisions are worse than the fallback's by `loss` in the mean; each tenth never has an outcome."""
    draw = np.random.default_rng(3)
    days = np.repeat(pd.date_range(FIRST, periods=DAYS).strftime("%Y-%m-%d"), ROWS)
    never = np.arange(len(days)) % 10 == 0
    utility = np.where(never, np.nan, draw.normal(-loss, 1.0, len(days)))
    return pd.DataFrame({
        "row_id": np.arange(len(days)), "version": "2", "day": days, "known": days, "excluded": np.where(never, "cancelled", ""),
        "utility": utility, "reference_utility": np.where(never, np.nan, 0.0), "loss": utility, "confidence": 0.5, "hit": 1.0,
        "score": draw.random(len(days)), "reference_score": 0.5, "colour": np.where(np.arange(len(days)) % 2, "red", "blue"),
    })  # fmt: skip


@pytest.fixture(scope="module")
def december() -> December:
    """A clean month and one that is worse by half a standard deviation."""
    clean = rows_of(-0.1)
    return December(month_of(clean), {"clean": clean, "broken": rows_of(0.5)})


def test_the_evening_of_the_rollback_is_the_one_that_the_last_look_names(december: December, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was judged once stays judged: looking each evening, and once at the end, end the version on the same day."""
    monkeypatch.setattr(module, "load_december", lambda *_: december)
    document = replay(load_settings(), say=lambda _: None, regression="broken", begins=8)

    assert document["ok"]
    assert document["rolled_back"] == whole_month(december, POLICY, seed=None, regression="broken")[0] == document["noticed"]
    assert document["days"] == days_until(document["rolled_back"]) > 1
    assert "broken from 2013-12-08 on" in lines(document)[0]


@pytest.mark.parametrize("seed", [None, 1, 2, 3])
def test_a_clean_month_is_left_alone(seed: int | None, december: December) -> None:
    """As it was, and with its days drawn anew."""
    ended, found = whole_month(december, POLICY, seed=seed, regression="")

    assert (ended, found.health) == ("", "healthy")


def test_drawn_days_are_whole(december: December) -> None:
    """Each day of a drawn month is one real day with all of its rows, under its new date, and nothing is known too early."""
    found = records(december, POLICY, seed=5, regression="", begins=8, today="2013-12-20")
    originals = found.predictions.assign(source=found.predictions["row_id"] % 10**7 // ROWS).groupby("day")["source"].nunique()

    assert found.predictions.groupby("day").size().eq(ROWS).all()
    assert originals.eq(1).all()
    assert found.predictions["row_id"].is_unique
    assert (found.predictions["day"].max(), found.matured["known"].max()) == ("2013-12-20", "2013-12-20")


def test_an_unknown_fault_is_refused(december: December, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names those that can be replayed."""
    monkeypatch.setattr(module, "load_december", lambda *_: december)

    with pytest.raises(ConfigError, match="Choose one of: broken"):
        replay(load_settings(), say=lambda _: None, regression="fire")


@pytest.mark.parametrize(
    ("given", "told"), [({"begins": 0}, "no day 0"), ({"begins": 32}, "no day 32"), ({"seed": -1}, "seed of 0 or more")]
)
def test_a_day_or_seed_that_there_is_not_is_refused(given: dict[str, int], told: str) -> None:
    """Before anything is trained or scored."""
    with pytest.raises(ConfigError, match=told):
        replay(load_settings(), say=lambda _: None, regression="broken", **given)


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--regression", "broken", "--seed", "3", "--begins", "5", "--json"], 0, '"begins": "2013-12-05"'),
        (["--json"], 0, '"rolled_back": ""'),
        (["--regression", "fire"], 2, "Choose one of: broken"),
    ],
    ids=["faulty", "clean", "unknown"],
)
def test_the_command_replays(
    december: December, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path,
    arguments: list[str], code: int, told: str,
) -> None:  # fmt: skip
    """`seatrial replay` hands its arguments over and ends with what was found."""
    monkeypatch.setenv("SEATRIAL_HOME", str(tmp_path))
    monkeypatch.setattr(module, "load_december", lambda *_: december)

    assert main(["replay", *arguments]) == code
    out, err = capfd.readouterr()
    assert told in (err if code == 2 else out)


def test_a_month_comes_back_from_its_file(tmp_path: Path, december: December) -> None:
    """Bins, counts and infinite edges are the same after the way through the cache folder."""
    write_month(december.month, tmp_path / "month.json")

    assert read_month(tmp_path / "month.json") == december.month
