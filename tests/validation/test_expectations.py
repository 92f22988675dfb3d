"""What the Great Expectations adapter reports, above all where the library itself would pass without looking."""

import numpy as np
import pandas as pd
import pytest
from helpers_gates import contract_frame, contract_frames, contract_spec_of_two

from validation.contract import Column
from validation.expectations import build_contract_records, run_expectations
from validation.records import Expectation


def violated(frame: pd.DataFrame, split: str = "judge", **changes: object) -> dict[str, list[str]]:
    """Aspect -> columns whose expectations failed on `frame`."""
    results = run_expectations(split, frame.assign(sample_id=np.arange(len(frame))), contract_spec_of_two(**changes))
    found: dict[str, list[str]] = {}
    for item in results:
        if not item.success:
            found.setdefault(item.aspect, []).append(item.column)
    return found


def test_a_frame_that_keeps_its_contract_violates_nothing() -> None:
    """Every expectation holds on both splits."""
    assert violated(contract_frame("train"), "train") == {}
    assert violated(contract_frame("judge"), "judge") == {}


def test_an_empty_frame_violates_every_expectation_about_rows() -> None:
    """Nothing passes vacuously on a frame without rows: neither nulls, nor categories, nor unique ids."""
    found = violated(contract_frame("judge").iloc[:0])

    assert set(found) == {"rows", "sample ids", "nulls", "values", "categories", "period", "freshness"}
    assert found["categories"] == ["carrier"]


def test_a_column_of_nulls_fails_even_where_nulls_are_allowed() -> None:
    """An all-null closed category passes the library's set expectation; here there was no value to look at."""
    loose = {"carrier": Column(kind="category", allowed=("AA",), max_null_share=1.0)}

    found = violated(contract_frame("judge").assign(carrier=None), columns=loose)

    assert found == {"nulls": ["carrier"], "categories": ["carrier"]}


@pytest.mark.parametrize("column", ["hour", "carrier", "late", "at"])
def test_an_absent_column_is_reported_by_name(column: str) -> None:
    """The library answers with an exception; the record says that the column is absent."""
    spec = contract_spec_of_two()
    frame = contract_frame("judge").drop(columns=column).assign(sample_id=range(100))

    results = run_expectations("judge", frame, spec)

    about = [item for item in results if item.column == column and not item.success]
    assert about
    assert {item.observed for item in about} == {"is absent"}


@pytest.mark.parametrize(("nulls", "passes"), [pytest.param(10, True, id="exactly-the-limit"), pytest.param(11, False, id="one-above")])
def test_the_null_share_may_reach_its_limit(nulls: int, passes: bool) -> None:
    """Ten nulls of 100 are within 0.1, eleven are not."""
    frame = contract_frame("judge")
    frame.loc[: nulls - 1, "hour"] = np.nan

    assert (violated(frame) == {}) is passes


@pytest.mark.parametrize("share", [1 / 3, 0.07, 0.29, 0.57])
def test_a_null_share_at_a_limit_that_is_not_exact_in_binary_passes(share: float) -> None:
    """1 - share rounds either way; the share itself has to pass."""
    frame = contract_frame("judge", rows=300)
    frame.loc[: round(300 * share) - 1, "hour"] = np.nan

    assert violated(frame, columns={"hour": Column(kind="number", max_null_share=share)}) == {}


@pytest.mark.parametrize("value", [-1.0, 24.0, np.inf, -np.inf], ids=["below", "above", "inf", "minus-inf"])
def test_a_value_outside_the_range_fails(value: float) -> None:
    """One sample outside the range, or not finite, is enough."""
    frame = contract_frame("judge")
    frame.loc[7, "hour"] = value

    assert violated(frame) == {"values": ["hour"]}


def test_an_infinity_fails_without_any_declared_range() -> None:
    """Numbers have to be finite even in an open range."""
    frame = contract_frame("judge")
    frame.loc[7, "hour"] = np.inf

    assert violated(frame, columns={"hour": Column(kind="number")}) == {"values": ["hour"]}


def test_a_category_outside_the_closed_set_fails() -> None:
    """A value the contract does not know is named."""
    frame = contract_frame("judge")
    frame.loc[7, "carrier"] = "ZZ"

    assert violated(frame) == {"categories": ["carrier"]}


def test_a_closed_category_of_code_numbers_is_read_as_text() -> None:
    """A category stored as integers is compared with the allowed texts."""
    frame = contract_frame("judge").assign(carrier=lambda rows: (rows["carrier"] == "AA").astype(int))

    assert violated(frame, columns={"carrier": Column(kind="category", allowed=("0", "1"))}) == {}


def test_a_number_column_that_holds_text_fails_by_kind() -> None:
    """Numbers as text are the wrong kind, whatever the comparison would say."""
    frame = contract_frame("judge").assign(hour=lambda rows: rows["hour"].astype(str))

    assert violated(frame)["columns"] == [""]


def test_a_contract_without_columns_is_refused() -> None:
    """A model that reads something has to say what; no column is no evidence."""
    assert violated(contract_frame("judge"), columns={}) == {"columns": [""]}


def test_a_repeated_sample_id_fails() -> None:
    """An id may stand once in a split."""
    frame = contract_frame("judge").assign(sample_id=[0, 0, *range(2, 100)])

    failed = [item for item in run_expectations("judge", frame, contract_spec_of_two()) if not item.success]

    assert [(item.aspect, item.column) for item in failed] == [("sample ids", "sample_id")]


def test_a_column_name_that_stands_twice_fails() -> None:
    """Two columns of one name are refused instead of one being taken silently."""
    frame = contract_frame("judge")
    twice = pd.concat([frame, frame[["hour"]]], axis=1)

    assert violated(twice) == {"columns": [""]}


def test_a_late_column_fails_but_the_label_may_stand() -> None:
    """Of the columns known after the cutoff only the label may be in the frame."""
    assert violated(contract_frame("judge").assign(arr_delay=0.0)) == {"cutoff": [""]}
    assert violated(contract_frame("judge")) == {}


def test_the_label_under_another_name_fails() -> None:
    """A number column that moves exactly with the label is a leak, whatever its name."""
    frame = contract_frame("judge").assign(hint=lambda rows: 1.0 - 2.0 * rows["late"])

    assert violated(frame, columns={"hint": Column(kind="number")}) == {"cutoff": ["hint"]}


@pytest.mark.parametrize(
    ("moment", "aspect"),
    [
        pytest.param("2013-01-31T23:59:59", {"period": ["at"]}, id="before-the-first"),
        pytest.param("2013-03-01T00:00:00", {"period": ["at"]}, id="the-end-itself"),
        pytest.param("2013-02-28T23:59:59", {}, id="last-moment"),
        pytest.param(None, {"nulls": ["at"]}, id="no-time"),
    ],
)
def test_event_times_lie_within_the_period(moment: str | None, aspect: dict[str, list[str]]) -> None:
    """The period is [first, last); a missing time is a null."""
    frame = contract_frame("judge")
    frame.loc[5, "at"] = pd.Timestamp(moment)

    assert violated(frame) == aspect


def test_event_times_may_be_text_or_carry_a_zone() -> None:
    """ISO texts and times with an offset are compared in UTC."""
    frame = contract_frame("judge")

    assert violated(frame.assign(at=frame["at"].dt.strftime("%Y-%m-%dT%H:%M:%S"))) == {}
    assert violated(frame.assign(at=frame["at"].dt.tz_localize("UTC").dt.tz_convert("America/New_York"))) == {}
    assert violated(frame.assign(at="yesterday"))["nulls"] == ["at"]


@pytest.mark.parametrize(("rows", "stale"), [(89, True), (92, False)], ids=["four-days-old", "within-the-gap"])
def test_a_stale_split_fails(rows: int, stale: bool) -> None:
    """The last event may be three days older than the period's end, no more."""
    frame = contract_frame("judge").iloc[:rows]

    assert violated(frame) == ({"freshness": ["at"]} if stale else {})


def test_a_split_without_limits_is_not_asked_about_them() -> None:
    """Without min_rows and period nothing is evaluated for them, and the gate calls that inconclusive."""
    results = run_expectations("judge", contract_frame("judge").assign(sample_id=range(100)), contract_spec_of_two(min_rows={}, period={}))

    assert {"rows", "period", "freshness"} & {item.aspect for item in results} == set()


def test_records_hold_both_splits_and_three_plants() -> None:
    """The planted frames are judged by the same suite and each violates its own aspect."""
    records = build_contract_records(contract_frames(), contract_spec_of_two())

    assert all(item.success for item in records.expectations)
    assert records.rows == {"train": 100, "judge": 100}
    assert records.span["train"] == ("2013-01-01T00:00:00", "2013-01-31T12:00:00")
    failed = {(item.frame, item.aspect) for item in records.planted if not item.success}
    assert failed >= {("judge+late-column", "cutoff"), ("judge+nulls", "nulls"), ("train+judge-rows", "period")}


def test_a_sample_in_both_splits_is_found() -> None:
    """Ids shared between train and judge are counted."""
    frames = contract_frames()
    frames["judge"]["sample_id"] -= 902
    records = build_contract_records(frames, contract_spec_of_two())

    failed = [item for item in records.expectations if not item.success]
    assert [(item.expectation, item.observed) for item in failed] == [("sample_ids_to_not_be_in_train", "shares 2 ids with train")]


def test_the_input_frame_is_left_as_it_was() -> None:
    """Parsing times and codes happens on a copy."""
    frame = contract_frame("judge").assign(at=lambda rows: rows["at"].astype(str), sample_id=range(100))
    before = frame.copy()

    results = run_expectations("judge", frame, contract_spec_of_two())

    assert isinstance(results[0], Expectation)
    pd.testing.assert_frame_equal(frame, before)
