"""Requests of a day without their outcomes, and outcomes once they are mature."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
from tiny_recipe import TinyData, TinyRecipe

from trainer import serving
from trainer.recipe import Outcomes
from trainer.recipes.flights_replay import HISTORY, stale
from trainer.serving import mature, requests_of, score_columns, scores_back
from validation.errors import ConfigError, RecipeError

DAY = "2021-01-05"


class LiveRecipe(TinyRecipe):
    """Six requests a day from 2021-01-04 on; of each day's, one never has an outcome and one has none yet."""

    live_period = ("2021-01-04", "2021-01-08")

    def data(self, split: str) -> TinyData:
        assert split == "live"
        found = TinyData(24, 5)
        hours = pd.to_timedelta(np.arange(24) * 4, "h")
        on, excluded = found.labels.astype(np.float64), np.where(np.arange(24) % 6 == 2, "gone", None)
        on[np.isin(np.arange(24) % 6, (2, 3))] = np.nan
        found.frame = found.frame.assign(when=pd.Timestamp("2021-01-04") + hours, on=on, excluded=excluded)
        return found

    def outcomes(self, frame: pd.DataFrame, scores: npt.NDArray[np.float64]) -> Outcomes:
        assert frame["on"].notna().all()
        first = scores if scores.ndim == 1 else scores[:, 0]
        return Outcomes(utility=first, loss=first, confidence=first, hit=frame["on"].to_numpy(np.float64))


RECIPE = LiveRecipe()


def matured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, until: str, **changed: object) -> pd.DataFrame:
    """Outcomes of a table that scores every request, as they are known at the end of a day."""
    monkeypatch.setattr(serving, "load_recipe", lambda _: RECIPE)
    ids = RECIPE.data("live").sample_ids
    asked = pd.DataFrame({"row_id": ids, "version": "3", "answered": True, "score": 0.25, "reference_score": 0.75}).assign(**changed)
    asked.to_parquet(tmp_path / "asked.parquet")
    mature("x:y", str(tmp_path / "asked.parquet"), str(tmp_path / "found.parquet"), until=until, maturity_days=1)
    return pd.read_parquet(tmp_path / "found.parquet")


def test_requests_hold_nothing_of_the_outcome() -> None:
    """A day's rows: ids, inputs, contract and slice columns; no label, no word on why there is none."""
    asked = requests_of(RECIPE, DAY)

    assert asked.row_ids.tolist() == [1000 + 7 * row for row in range(6, 12)]
    assert set(asked.frame.columns) == {"colour", "size"}
    assert asked.inputs.tobytes() == TinyData(24, 5).inputs[6:12].tobytes()


def test_what_was_answered_is_not_asked_again() -> None:
    """Answered rows are left out; on a day on which nothing is left there are no rows, and no error."""
    all_of_it = requests_of(RECIPE, DAY).row_ids

    assert requests_of(RECIPE, DAY, answered=all_of_it[:4]).row_ids.tolist() == all_of_it[4:].tolist()
    assert requests_of(RECIPE, DAY, answered=all_of_it).inputs.shape[0] == 0


@pytest.mark.parametrize("day", ["2021-01-03", "2021-01-08"])
def test_days_outside_the_live_period_are_refused(day: str) -> None:
    """The last day is excluded, and the error names the days that there are."""
    with pytest.raises(ConfigError, match="2021-01-04 up to 2021-01-08"):
        requests_of(RECIPE, day)


def test_a_recipe_without_a_live_split_says_what_to_bring() -> None:
    """Old recipes go on as they are; only watching asks for more."""
    with pytest.raises(RecipeError, match="Give it a live_period"):
        requests_of(TinyRecipe(), DAY)


@pytest.mark.parametrize(("until", "rows"), [("2021-01-04", 0), ("2021-01-05", 5), ("2021-01-06", 10), ("2021-01-09", 20)])
def test_outcomes_count_once_they_are_mature(until: str, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a day are known a day after; of six, one has none yet and lacks, and one never will and is excluded."""
    found = matured(tmp_path, monkeypatch, until)

    assert len(found) == rows
    assert (found["known"] <= until).all()
    assert int((found["excluded"] == "gone").sum()) == rows // 5
    assert found.loc[found["excluded"] == "", "utility"].eq(0.25).all()
    assert found.loc[found["excluded"] != "", "utility"].isna().all()


def test_rows_without_an_answer_have_no_decision_to_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither those that the version did not answer, nor those that the fallback could not be compared on."""
    alone = matured(tmp_path, monkeypatch, "2021-01-09", reference_score=np.nan)
    silent = matured(tmp_path, monkeypatch, "2021-01-09", answered=False, score=np.nan)

    assert set(alone["excluded"]) == {"gone", "the fallback gave no score"}
    assert set(silent["excluded"]) == {"gone", "not answered"}
    assert silent["utility"].isna().all()


def test_scores_of_classes_come_back_in_their_order() -> None:
    """Twelve classes as columns and back: 10 comes after 9; beside them stands the largest."""
    scores = np.random.default_rng(0).dirichlet(np.ones(12), 5)
    table = pd.DataFrame(dict(score_columns("score", scores)))[::-1].iloc[::-1]

    assert scores_back(table, "score").tobytes() == scores.tobytes()
    assert table["score"].tolist() == scores.max(axis=1).tolist()
    assert scores_back(pd.DataFrame(score_columns("score", scores[:, 0])), "score").ndim == 1


def test_a_stale_cache_answers_with_the_day_before() -> None:
    """History comes from the same airport's last flight a day or more earlier; what has none keeps its own."""
    due = pd.to_datetime(["2013-12-01 08:00", "2013-12-01 09:00", "2013-12-02 08:30", "2013-12-02 09:00"])
    frame = pd.DataFrame({"origin": ["JFK", "JFK", "JFK", "LGA"], "departure": due, **{name: np.arange(4.0) for name in HISTORY}})
    frame = frame.assign(hour=[8.0, 9.0, 8.5, 9.0])
    old = stale(frame)

    assert old[HISTORY[0]].tolist() == [0.0, 1.0, 0.0, 3.0]
    assert old["hour"].tolist() == frame["hour"].tolist()
