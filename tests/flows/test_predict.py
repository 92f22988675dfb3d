"""A day's requests are scored once, by exactly what serves, its fallback beside it."""

import numpy as np
import pytest
from helpers_watched import BASE, GOOD, HOLED, MODEL, NEW, Watched, broken, watched, yard

from flows.predict import lines, predict
from flows.rollback import fall_back
from infra.serving_log import PART_COLUMNS
from infra.store import evidence_key
from validation.errors import ConfigError, EvidenceError

__all__ = ["broken", "watched", "yard"]
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's and torch.export's own
DAY = "2026-01-03"


def score(watched: Watched, day: str = DAY):
    return predict(watched.settings, say=watched.said.append, model=MODEL, day=day)


def test_a_day_is_scored_by_what_serves_and_in_the_shadow(watched: Watched) -> None:
    """Each request has its row: id, time, exact version, the digest of its files, both scores."""
    watched.serve(NEW)
    document = score(watched)
    (part,) = watched.log.parts(DAY)
    table = watched.log.table(part)

    assert (document["ok"], document["requests"], document["answered"], document["version"]) == (True, 120, 120, NEW)
    assert tuple(table.columns) == PART_COLUMNS
    assert table["row_id"].is_unique
    assert set(table["version"]) | set(table["reference_version"]) == {NEW, GOOD}
    assert set(table["model_sha256"]) == {watched.desk.registry.files(MODEL, NEW)}
    # slope 2 is surer than slope 1, of the same sign
    assert ((table["score"] - 0.5).abs() > (table["reference_score"] - 0.5).abs()).all()
    assert table["latency_ms"].notna().sum() == 120


def test_inputs_and_scores_are_counted_on_the_training_bins(watched: Watched) -> None:
    """Every row of the day falls into one bin of each column; the bins are made once and kept."""
    watched.serve(NEW)
    score(watched)
    first = watched.log.reference(NEW, GOOD)
    score(watched, "2026-01-04")
    counts = watched.log.parts(DAY)[0].counts

    assert set(counts) == {"x0", "x1", "x2", "colour", ""}
    assert {sum(found["rows"]) for found in counts.values()} == {120}
    assert watched.log.reference(NEW, GOOD) == first
    assert len([word for word in watched.said if "is new" in word]) == 1


def test_the_same_day_again_changes_nothing(watched: Watched) -> None:
    """A rerun finds every request answered, says so, and writes nothing."""
    watched.serve(NEW)
    score(watched)
    before = watched.desk.store.list("")
    again = score(watched)

    assert (again["ok"], again["requests"], again["answered_before"]) == (True, 0, 120)
    assert "nothing new to score" in lines(again)[0]
    assert watched.desk.store.list("") == before


def test_a_day_of_two_versions_keeps_both(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a rollback at noon the afternoon is the fallback's; the morning stays the version's that answered it."""
    watched.serve(NEW)
    monkeypatch.setenv("LAMPS_NOW", f"{DAY} 12:00")
    score(watched)
    fall_back(watched.settings, MODEL, "a test", leaving=NEW)
    monkeypatch.setenv("LAMPS_NOW", f"{DAY} 23:59:59")
    document = score(watched)
    parts = watched.log.parts(DAY)

    assert [(part.version, part.rows, part.reference_version) for part in parts] == [(NEW, 60, GOOD), (GOOD, 60, BASE)]
    assert document["kind"] == "last_known_good"
    assert not set(watched.log.table(parts[0])["row_id"]) & set(watched.log.table(parts[1])["row_id"])


def test_scores_that_are_no_number_are_no_answers(watched: Watched) -> None:
    """Rows that a version cannot score are counted as not answered; the others are kept."""
    watched.serve(HOLED)
    document = score(watched)
    table = watched.log.table(watched.log.parts(DAY)[0])

    assert 0 < document["answered"] < document["requests"]
    assert np.array_equal(table["answered"].to_numpy(), table["score"].notna().to_numpy())


def test_a_version_whose_files_were_altered_answers_nothing(watched: Watched, broken: str) -> None:
    """It is never loaded: its requests stay without an answer, the shadow's scores are kept, and the command says so."""
    watched.serve(broken)
    document = score(watched)
    table = watched.log.table(watched.log.parts(DAY)[0])

    assert (document["ok"], document["answered"], document["requests"]) == (False, 0, 120)
    assert "registered was" in document["failure"]
    assert table["reference_score"].notna().all()


@pytest.mark.parametrize(
    ("model", "day", "told"),
    [
        (MODEL, "2026-02-30", "is not a day"),
        (MODEL, "2026-1-3", "is not a day"),
        (MODEL, "2025-12-31", "its live split is of 2026-01-01 up to 2026-01-13"),
        (MODEL, "2026-01-13", "Name a day of these"),
        ("no-such-model", DAY, "`seatrial show` names the models"),
    ],
)
def test_what_cannot_be_scored_is_refused(watched: Watched, model: str, day: str, told: str) -> None:
    """A wrong day or model ends before anything is written."""
    watched.serve(NEW)

    with pytest.raises(ConfigError, match=told):
        predict(watched.settings, say=watched.said.append, model=model, day=day)
    assert watched.log.days() == ()


def test_a_table_edited_by_hand_is_found(watched: Watched) -> None:
    """Predictions that were changed in the store are no evidence: scoring the day again says so."""
    watched.serve(NEW)
    score(watched)
    (part,) = watched.log.parts(DAY)
    key = evidence_key(part.table)
    body, etag = watched.desk.store.get_with_etag(key)
    watched.desk.store.replace(key, body + b"x", etag)

    with pytest.raises(EvidenceError, match="was altered"):
        score(watched)
