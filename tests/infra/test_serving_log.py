"""The serving log: parts of a day are written once, in order, and read back verified."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers_stores import KINDS, make_store

from infra.serving_log import PART_COLUMNS, Part, ServingLog, checked_day, parquet_bytes
from infra.store import MemoryStore, ObjectStore, evidence_key
from validation.errors import ConfigError, ConflictError, EvidenceError

DAY = "2026-01-03"
PART = Part(
    model="boat", day=DAY, number=1, version="3", kind="candidate", model_sha256="a" * 64, reference_version="2",
    reference_kind="last_known_good", reference_sha256="b" * 64, recipe="boats:recipe", release_id="boat-20260101-000000-3f9c",
    made_at="2026-01-03T23:00:00+00:00", rows=2, answered=1, failure="", reference_failure="",
    counts={"x": {"rows": [1, 1], "missing": 0}, "": {"rows": [1, 0], "missing": 1}},
)  # fmt: skip


def table(version: str = "3", rows: int = 2) -> pd.DataFrame:
    """A table of a part; the last row has no answer."""
    scores = np.linspace(0.1, 0.9, rows)
    scores[-1] = np.nan
    values = {
        "row_id": np.arange(rows), "made_at": PART.made_at, "version": version, "model_sha256": "a" * 64, "score": scores,
        "reference_version": "2", "reference_score": 0.5, "latency_ms": np.nan, "answered": ~np.isnan(scores),
    }  # fmt: skip
    return pd.DataFrame(values)[list(PART_COLUMNS)]


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_what_was_written_is_read_back(store: ObjectStore) -> None:
    """A part and its table are the same in every kind of store, NaN and types included."""
    log = ServingLog(store, "boat")
    made = log.add(PART, table())

    assert log.parts(DAY) == (made,)
    pd.testing.assert_frame_equal(log.table(made), table())
    assert (log.days(), log.days(until="2026-01-02"), log.parts("2026-01-04")) == ((DAY,), (), ())


def test_a_number_is_taken_once() -> None:
    """Of two processes that score one day at once the second loses, whatever it scored; the same part again is fine."""
    log = ServingLog(MemoryStore(), "boat")
    log.add(PART, table())
    log.add(PART, table())

    with pytest.raises(ConflictError):
        log.add(replace(PART, version="4"), table("4"))
    assert log.add(replace(PART, version="4", number=2), table("4")).number == 2
    assert [part.version for part in log.parts(DAY)] == ["3", "4"]


@pytest.mark.parametrize("number", [1, 2])
def test_a_part_that_was_removed_is_missed(tmp_path: Path, number: int) -> None:
    """A gap in a day's numbers is told as such, at its beginning too."""
    store = make_store("folder", tmp_path)
    log = ServingLog(store, "boat")
    for each in (1, 2, 3):
        log.add(replace(PART, number=each), table())
    store.delete(f"serving/boat/days/{DAY}/000{number}")

    with pytest.raises(EvidenceError, match="Restore serving/ from a backup"):
        log.parts(DAY)


def test_an_altered_part_is_no_record() -> None:
    """Other fields, another model's part and rubbish are refused."""
    store = MemoryStore()
    made = ServingLog(store, "boat").add(PART, table())
    key = f"serving/boat/days/{DAY}/0001"
    body, etag = store.get_with_etag(key)
    for wrong in (b"[]", b"rubbish", body.replace(b'"boat"', b'"ship"'), body.replace(b'"rows":2,', b""), body + b" "):
        etag = store.replace(key, wrong, etag)
        with pytest.raises(EvidenceError, match="It cannot be judged by it"):
            ServingLog(store, "boat").parts(DAY)
    store.replace(key, body, etag)

    assert ServingLog(store, "boat").parts(DAY) == (made,)


def test_a_table_of_another_version_is_refused() -> None:
    """Rows are judged by exact version: a table that holds others', or too few rows, is not this part's."""
    store = MemoryStore()
    log = ServingLog(store, "boat")
    foreign = log.add(PART, table("4"))
    short = log.add(replace(PART, number=2, rows=5), table())
    rubbish = replace(short, table=log.add(replace(PART, number=3), table()).table)
    body, etag = store.get_with_etag(evidence_key(rubbish.table))
    store.replace(evidence_key(rubbish.table), body[:-9], etag)

    for part, told in ((foreign, r"rows of version \['4'\]"), (short, "was altered"), (rubbish, "was altered")):
        with pytest.raises(EvidenceError, match=told):
            log.table(part)


def test_the_origin_of_a_version_is_kept_once() -> None:
    """The first one stands: what a version is compared with does not move while it serves."""
    log = ServingLog(MemoryStore(), "boat")

    assert log.reference("3", "2") is None
    assert log.add_reference("3", "2", {"utility_scale": 1.5})["utility_scale"] == 1.5
    assert log.add_reference("3", "2", {"utility_scale": 9.0})["utility_scale"] == 1.5
    assert log.reference("3", "") is None


def test_verdicts_of_a_day_stand_in_order() -> None:
    """Each signed verdict once, however often it is written down."""
    log = ServingLog(MemoryStore(), "boat")
    for attestation in ("a" * 64, "b" * 64, "a" * 64):
        log.add_verdict(DAY, attestation)

    assert log.verdicts(DAY) == ("a" * 64, "b" * 64)


@pytest.mark.parametrize("day", ["", "today", "2026-1-3", "2026-02-30", "20260103", "2026-01-03T00:00", "../../x"])
def test_a_day_is_written_one_way(day: str) -> None:
    """Anything else could name another folder of the store."""
    with pytest.raises(ConfigError, match="Write it like 2013-12-24"):
        checked_day(day)


def test_equal_tables_are_equal_bytes() -> None:
    """So the same scores are the same evidence."""
    assert parquet_bytes(table()) == parquet_bytes(table().copy())
