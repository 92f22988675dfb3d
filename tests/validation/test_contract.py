"""The data_contract gate: one check per aspect and frame, columns named, three plants caught in every run."""

from dataclasses import replace
from functools import cache

import pytest
from helpers_gates import contract_frames, contract_spec_of_two

from validation.contract import ASPECTS, PLANTS, judge_contract
from validation.expectations import build_contract_records
from validation.records import ContractRecords, Expectation
from validation.verdict import Outcome


@cache
def records() -> ContractRecords:
    """Both splits under the contract, all well."""
    return build_contract_records(contract_frames(), contract_spec_of_two())


def broken(**changes: object) -> Expectation:
    """A violated expectation about judge's `hour`."""
    given: dict[str, object] = {
        "frame": "judge", "expectation": "column_values_to_not_be_null", "column": "hour", "success": False, "observed": "is 0.4 null",
        "expected": "at most 0.1 null", "aspect": "nulls",
    }  # fmt: skip
    return Expectation(**{**given, **changes})  # type: ignore[arg-type]


def test_two_frames_that_keep_the_contract_pass() -> None:
    """The gate passes, counts what it looked at, and its control was caught."""
    verdict = judge_contract(records())

    assert verdict.outcome is Outcome.PASS
    assert verdict.reason.endswith("hold on 100 train rows and 100 judge rows")
    assert verdict.control is not None
    assert verdict.control.caught
    assert verdict.control.expected == "cutoff; nulls; period"
    assert verdict.action == ""


def test_the_verdict_has_one_check_per_aspect_and_frame() -> None:
    """However many columns a contract has, the checks stay readable."""
    names = [item.name for item in judge_contract(records()).checks]

    assert names[: len(ASPECTS)] == list(ASPECTS)
    assert len(names) == 2 * len(ASPECTS) + 3


def test_a_violated_expectation_fails_with_the_column_in_the_reason() -> None:
    """The reason names frame, column, what was seen and what was asked; the action says what to do."""
    verdict = judge_contract(replace(records(), expectations=(*records().expectations, broken())))

    assert verdict.outcome is Outcome.FAIL
    assert "judge: hour is 0.4 null, asked at most 0.1 null" in verdict.reason
    assert verdict.action == ASPECTS["nulls"]


def test_many_violations_of_one_aspect_are_one_check_and_all_in_the_table() -> None:
    """Three columns are quoted, the rest is counted; the table has every one."""
    many = tuple(broken(column=f"c{number}") for number in range(7))
    verdict = judge_contract(replace(records(), expectations=(*records().expectations, *many)))

    failed = [item for item in verdict.checks if item.passed is False]
    assert [(item.name, item.observed) for item in failed] == [("nulls", 7.0)]
    assert "c2 is" in failed[0].where
    assert failed[0].where.endswith("4 more")
    assert len(verdict.tables[1].rows) == 7


def test_no_expectation_at_all_is_inconclusive() -> None:
    """An empty suite says nothing."""
    assert judge_contract(replace(records(), expectations=())).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize("aspect", ["rows", "sample ids", "columns", "cutoff", "nulls", "period", "freshness"])
def test_an_aspect_that_nobody_looked_at_is_inconclusive(aspect: str) -> None:
    """A contract without a limit, or a suite cut short, never passes that aspect."""
    kept = tuple(item for item in records().expectations if item.aspect != aspect)
    verdict = judge_contract(replace(records(), expectations=kept))

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason.startswith(f"{aspect} (train) was not measured")


@pytest.mark.parametrize("aspect", ["values", "categories"])
def test_a_contract_may_have_no_number_and_no_closed_category(aspect: str) -> None:
    """These two aspects exist only where the contract asks for them."""
    kept = tuple(item for item in records().expectations if item.aspect != aspect)

    assert judge_contract(replace(records(), expectations=kept)).outcome is Outcome.PASS


def test_an_absent_split_is_inconclusive() -> None:
    """Without the judge frame there is nothing to hold the candidate against."""
    train = {"train": contract_frames()["train"]}

    assert judge_contract(build_contract_records(train, contract_spec_of_two())).outcome is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("last_of_train", "outcome"),
    [
        pytest.param("2013-01-31T23:59:59", Outcome.PASS, id="before"),
        pytest.param("2013-02-01T00:00:00", Outcome.FAIL, id="at-the-same-moment"),
        pytest.param("2013-02-05T00:00:00", Outcome.FAIL, id="overlap"),
        pytest.param("", Outcome.INCONCLUSIVE, id="unknown"),
    ],
)
def test_training_has_to_end_before_judging_starts(last_of_train: str, outcome: Outcome) -> None:
    """The splits may not touch, whatever the declared periods say."""
    span = {"train": ("2013-01-01T00:00:00", last_of_train), "judge": ("2013-02-01T00:00:00", "2013-02-28T00:00:00")}

    assert judge_contract(replace(records(), span=span)).outcome is outcome


def test_a_late_column_is_seen_by_name_without_the_library() -> None:
    """The gate compares the column names itself as well."""
    columns = {"train": ("hour", "arr_delay"), "judge": ("hour",)}
    verdict = judge_contract(replace(records(), columns=columns))

    assert verdict.outcome is Outcome.FAIL
    assert "train: arr_delay" in verdict.reason


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.name)
def test_a_missed_plant_makes_the_gate_inconclusive(plant: object) -> None:
    """Each plant has to be refused in the very run; the one that passed is named."""
    name, words = plant.frame, plant.words  # type: ignore[attr-defined]
    blind = tuple(replace(item, success=True) if item.frame == name else item for item in records().planted)
    verdict = judge_contract(replace(records(), planted=blind))

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "positive control was missed" in verdict.reason
    assert words in verdict.reason


def test_a_plant_that_was_never_judged_counts_as_missed() -> None:
    """Empty planted evidence is a blind gate."""
    assert judge_contract(replace(records(), planted=())).outcome is Outcome.INCONCLUSIVE


def test_a_contract_without_late_columns_passes_and_says_so() -> None:
    """Where no column is known only after the cutoff the other two plants are the control, and a note says it."""
    verdict = judge_contract(build_contract_records(contract_frames(), contract_spec_of_two(known_after_cutoff=("late",))))

    assert verdict.outcome is Outcome.PASS
    assert any("no late column could be planted" in note for note in verdict.notes)


@pytest.mark.parametrize(
    ("spoil", "aspect"),
    [
        pytest.param(lambda frame: frame.drop(columns="carrier"), "columns", id="absent-column"),
        pytest.param(lambda frame: frame.iloc[:0], "rows", id="empty"),
        pytest.param(lambda frame: frame.assign(hour=float("nan")), "nulls", id="all-null"),
    ],
)
def test_a_spoiled_judge_frame_fails_from_end_to_end(spoil: object, aspect: str) -> None:
    """Frame in, verdict out: the reason starts with the aspect that broke first."""
    frames = contract_frames()
    frames["judge"] = spoil(frames["judge"])  # type: ignore[operator]

    verdict = judge_contract(build_contract_records(frames, contract_spec_of_two()))

    failed = [item.name for item in verdict.checks if item.passed is False]
    assert verdict.outcome is not Outcome.PASS
    assert aspect in failed
