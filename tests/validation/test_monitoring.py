"""The monitor's judgement of a serving version: who stays, who goes, and what cannot be told."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers_monitoring import MONITORING, SCALE, day, differences, served

from validation.drift import Drift
from validation.errors import ConfigError, EvidenceError
from validation.monitoring import COVERAGE, WORSE, judge_monitoring
from validation.monitoring_join import join
from validation.monitoring_outcomes import Purse, purse_of_all
from validation.monitoring_service import MISSING, REQUESTS, SCORES, STILL, drift_warnings, proven_share
from validation.policy import parse_policy
from validation.served import MonitorRecords, Usual

GOOD = differences(20)


def said(records: MonitorRecords) -> tuple[str, str]:
    found = judge_monitoring(records, MONITORING)
    return found.health, found.action


def test_a_version_as_good_as_its_fallback_stays() -> None:
    """Twenty days at a difference of zero: healthy, nothing to do, control caught."""
    found = judge_monitoring(served(GOOD), MONITORING)

    assert (found.health, found.action, found.warnings) == ("healthy", "none", ())
    assert found.verdict.control
    assert found.verdict.control.caught


@pytest.mark.parametrize("mean", [-5.0, -10.0])
def test_a_worse_version_is_rolled_back_and_the_day_is_named(mean: float) -> None:
    """Half a standard deviation worse and more: rolled back, on all rows, from some day on."""
    found = judge_monitoring(served(differences(20, mean=mean)), MONITORING)

    assert (found.health, found.action) == ("degraded", "roll_back")
    assert found.reason.startswith(f"{WORSE} (all rows, proven on 2013-12-0")
    assert "last_known_good 6" in found.reason


def test_what_was_proven_once_stays_proven() -> None:
    """A version that recovers after its proof was complete is still rolled back: the test promised nothing else."""
    assert said(served([*differences(10, mean=-6.0), *([3.0] * 20)])) == ("degraded", "roll_back")


def test_one_bad_slice_is_found_and_named() -> None:
    """The whole is within the margin (half of it), one carrier is not."""
    found = judge_monitoring(served([1.5] * 25, carrier_drop=6.0), MONITORING)

    assert found.action == "roll_back"
    assert "carrier=UA" in found.reason
    assert "all rows" not in found.reason


def test_a_young_version_is_inconclusive() -> None:
    """Two days would not even show the planted drop, and the reason says so."""
    found = judge_monitoring(served(GOOD[:2]), MONITORING)

    assert (found.health, found.action) == ("inconclusive", "watch")
    assert f"a version worse by {SCALE:.3g} minutes is not to be seen yet in 2 bets" in found.reason
    assert found.verdict.control
    assert not found.verdict.control.caught


def test_the_first_day_has_no_outcomes_at_all() -> None:
    """No mature day: inconclusive, never healthy."""
    assert said(served([])) == ("inconclusive", "watch")


def silent(records: MonitorRecords, answered: int, requests: int = 200) -> MonitorRecords:
    health = records.health.copy()
    health.loc[health["day"] == records.today, ["requests", "answered"]] = (requests, answered)
    return replace(records, health=health)


@pytest.mark.parametrize(
    ("answered", "expected"),
    [(200, ("healthy", "none")), (198, ("healthy", "none")), (197, ("inconclusive", "watch")), (150, ("degraded", "roll_back"))],
    ids=["all", "at the limit", "beyond it by chance", "proven"],
)
def test_requests_without_an_answer_end_a_version_when_proven(answered: int, expected: tuple[str, str]) -> None:
    """One in a hundred is allowed; a few more may be chance; a quarter is not."""
    assert said(silent(served(GOOD), answered)) == expected


def test_a_version_that_does_not_answer_goes_on_its_first_day() -> None:
    """No outcome is needed for that, and the outcomes' own blindness does not stand in its way."""
    found = judge_monitoring(silent(served([]), 0), MONITORING)

    assert (found.health, found.action) == ("degraded", "roll_back")
    assert found.reason.startswith(REQUESTS)
    assert found.verdict.control
    assert found.verdict.control.caught


@pytest.mark.parametrize(("answered", "requests"), [(0, 0), (201, 200)], ids=["no requests", "more answers than requests"])
def test_requests_that_were_not_counted_are_inconclusive(answered: int, requests: int) -> None:
    """Nothing asked, or a count that contradicts itself, is no good health."""
    assert said(silent(served(GOOD), answered, requests)) == ("inconclusive", "watch")


def test_scores_that_are_no_number_are_no_answers() -> None:
    """A day of NaN scores ends the version."""
    records = served(GOOD)
    predictions = records.predictions.assign(score=records.predictions["score"].where(records.predictions["day"] != records.today))
    found = judge_monitoring(replace(records, predictions=predictions), MONITORING)

    assert found.action == "roll_back"
    assert found.reason.startswith(SCORES)


@pytest.mark.parametrize("latency", [51.0, np.nan], ids=["slow", "not a number"])
def test_a_slow_service_is_degraded_and_goes_on(latency: float) -> None:
    """It still answers; NaN never passes."""
    records = served(GOOD)

    assert said(replace(records, health=records.health.assign(latency_p95_ms=latency))) == ("degraded", "watch")


def test_an_empty_column_is_degraded_and_goes_on() -> None:
    """Inputs that broke are named; outcomes decide about the version."""
    records = served(GOOD)
    column = records.inputs[0]
    emptied = replace(column, served={**column.served, records.today: (0,) * 10}, served_missing={records.today: 200})
    found = judge_monitoring(replace(records, inputs=(emptied,)), MONITORING)

    assert (found.health, found.action) == ("degraded", "watch")
    assert found.reason.startswith(f"{MISSING} (temp, 200 of 200")


def test_drift_alone_only_warns() -> None:
    """All of a week's rows in one bin: still healthy, to be watched, and the column is named."""
    records = served(GOOD)
    moved = replace(records.inputs[0], served=dict.fromkeys(records.inputs[0].served, (200, *(0,) * 9)))
    found = judge_monitoring(replace(records, inputs=(moved,)), MONITORING)

    assert (found.health, found.action, [item.where for item in found.warnings]) == ("healthy", "watch", ["temp"])


@pytest.mark.parametrize(("index", "is_chance", "warned"), [(0.25, False, 0), (0.26, False, 1), (0.9, True, 0), (np.nan, True, 0)])
def test_a_drift_that_chance_alone_would_show_is_no_warning(index: float, is_chance: bool, warned: int) -> None:
    """Beyond the limit and beyond chance, both."""
    drift = Drift(
        column="temp", rows=9, index=index, is_chance=is_chance, missing_share=0.0, missing_rows=(0, 9), reference_missing_share=0.0
    )

    assert len(list(drift_warnings(MONITORING, [drift], of_scores=False))) == warned


@pytest.mark.parametrize(("worst", "expected"), [(0.1, "degraded"), (0.3, "healthy")], ids=["more than ever", "as once in training"])
def test_missing_values_are_held_against_the_worst_day_of_training(worst: float, expected: str) -> None:
    """A quarter of the rows without a value is news only where training never had such a day; the day it had is named."""
    records = served(GOOD)
    column = records.inputs[0]
    sparse = replace(column, served_missing={records.today: 60}, usual=Usual(missing=worst, share=0.2))
    found = judge_monitoring(replace(records, inputs=(sparse,)), MONITORING)

    assert found.health == expected
    assert any(item.name == MISSING and f"training's worst day {worst:.3g}" in item.where for item in found.verdict.checks)


@pytest.mark.parametrize(
    ("usual", "expected"),
    [(0.3, ("degraded", "watch")), (0.9, ("healthy", "watch")), (1.0, ("healthy", "watch"))],
    ids=["never so in training", "nearly so", "always so"],
)
def test_a_column_that_stands_still_is_seen_on_the_first_evening(usual: float, expected: tuple[str, str]) -> None:
    """A feed that reports one number is nowhere missing: all of today's values in one bin, unless training knew such a day."""
    records = served(GOOD)
    column = records.inputs[0]
    still = replace(column, served={**column.served, records.today: (200, *(0,) * 9)}, usual=Usual(share=usual))
    found = judge_monitoring(replace(records, inputs=(still,)), MONITORING)

    assert found.health == expected[0]
    assert found.reason.startswith(f"{STILL} (temp, 200 of 200") == (expected[0] == "degraded")
    assert found.verdict.control
    assert (f"one value in {column.name}" in found.verdict.control.planted) == (usual < 0.8)


def test_a_day_without_values_in_training_is_told() -> None:
    """Where training was silent for a day, a silent feed cannot be told: the check is undecided when that is every column."""
    records = served(GOOD)
    column = replace(records.inputs[0], usual=Usual(missing=1.0, share=0.2))
    found = judge_monitoring(replace(records, inputs=(column,)), MONITORING)

    assert found.health == "inconclusive"
    assert "Silent for a whole day in training too, so that nobody would see it again: temp." in found.verdict.notes


@pytest.mark.parametrize(("days", "warned"), [(5, 0), (6, 1)], ids=["six days counted", "a week counted"])
def test_a_first_week_is_no_week_before_it_is_over(days: int, warned: int) -> None:
    """Six days are not seven: a column that says the weekday would drift."""
    records = served(differences(days))
    moved = replace(records.inputs[0], served=dict.fromkeys(records.inputs[0].served, (200, *(0,) * 9)))

    assert len(judge_monitoring(replace(records, inputs=(moved,)), MONITORING).warnings) == warned


def test_the_worst_drifts_are_named_and_the_others_told_in_one() -> None:
    """Held against what its own training weeks did: the column furthest beyond its own limit first, a usual one not at all."""
    common: dict[str, Any] = {
        "rows": 900,
        "is_chance": False,
        "missing_share": 0.0,
        "missing_rows": (0, 900),
        "reference_missing_share": 0.0,
    }
    drifts = [Drift(column=f"c{at}", index=0.3 + at / 10, **common) for at in range(5)]
    drifts.append(Drift(column="season", index=3.0, usual=Usual(index=3.1), **common))
    found = list(drift_warnings(MONITORING, drifts, of_scores=False))

    assert [item.where for item in found] == ["c4", "c3", "c2", "2 more: c1, c0; the worst of them"]
    assert [item.threshold for item in found] == [0.25] * 4


def test_a_day_told_in_parts_is_as_slow_as_its_slowest() -> None:
    """Two health rows of today add up; a latency that is no number is not hidden by the other."""
    records = served(GOOD)
    part = records.health.tail(1).assign(latency_p95_ms=np.nan)

    assert said(replace(records, health=pd.concat([records.health, part], ignore_index=True))) == ("degraded", "watch")


def test_too_few_outcomes_are_inconclusive() -> None:
    """Every fifth outcome is missing: the days are not judged, whatever the others say."""
    records = served(differences(20, mean=-10.0))
    found = judge_monitoring(replace(records, matured=records.matured[records.matured["row_id"] % 5 > 0]), MONITORING)

    assert (found.health, found.action) == ("inconclusive", "watch")
    assert [item.observed for item in found.verdict.checks if item.name == COVERAGE] == [pytest.approx(0.8)]


def test_outcomes_that_stop_coming_are_inconclusive() -> None:
    """Two good weeks do not speak for the third, of which nothing is known."""
    records = served(GOOD)
    found = judge_monitoring(replace(records, matured=records.matured[records.matured["known"] <= day(14)]), MONITORING)

    assert found.health == "inconclusive"
    assert found.reason.startswith(f"{COVERAGE} (2013-12-14 to 2013-12-20)")


def test_a_late_outcome_changes_nothing() -> None:
    """What was judged stays as it was: an outcome after its time is counted, not used."""
    records = served(GOOD)
    late = records.matured.assign(known=records.matured["known"].mask(records.matured["row_id"] < 10, day(9)))
    joined = join(replace(records, matured=late), MONITORING)

    assert joined.left_out == {"outcomes that came late": 10}
    assert joined.rows["row_id"].min() == 10


def test_an_excluded_row_is_settled_and_not_judged() -> None:
    """A flight that was cancelled counts as covered, and has no utility."""
    records = served(GOOD)
    gone = records.matured.assign(excluded=np.where(records.matured["row_id"] % 5 == 0, "cancelled", ""))
    joined = join(replace(records, matured=gone.assign(utility=gone["utility"].mask(gone["excluded"] != ""))), MONITORING)

    assert joined.days["coverage"].tolist() == [1.0] * 20
    assert len(joined.rows) == 20 * 160


def with_rows(records: MonitorRecords, frame: str, **changes: Any) -> MonitorRecords:
    """The records with their first row once more, changed."""
    rows = getattr(records, frame)
    return replace(records, **{frame: pd.concat([rows, rows.head(1).assign(**changes)], ignore_index=True)})


@pytest.mark.parametrize(
    ("frame", "changes", "why"),
    [
        ("predictions", {}, "predictions made twice"),
        ("predictions", {"row_id": -1, "day": "2013-11-30"}, "predictions before 2013-12-01 or after 2013-12-21"),
        ("matured", {}, "outcomes told twice"),
        ("matured", {"row_id": -1}, "outcomes of rows that were not predicted"),
    ],
)
def test_contradictory_rows_are_left_out_and_told(frame: str, changes: dict[str, Any], why: str) -> None:
    """The verdict stands on the rest, and asks somebody to look."""
    found = judge_monitoring(with_rows(served(GOOD), frame, **changes), MONITORING)

    assert (found.health, found.action, [item.name for item in found.warnings]) == ("healthy", "watch", [why])


def test_an_outcome_before_its_prediction_is_told() -> None:
    """Nothing can be known before it was predicted: such an outcome is left out, and somebody has to look."""
    records = served(GOOD)
    early = replace(records, matured=records.matured.assign(known=records.matured["known"].mask(records.matured["row_id"] == 900, day(1))))

    assert [item.name for item in judge_monitoring(early, MONITORING).warnings] == ["outcomes known before their prediction"]
    assert not join(early, MONITORING).rows["row_id"].eq(900).any()


def test_a_utility_that_is_no_number_is_no_outcome() -> None:
    """Every fifth utility is NaN: covered by four fifths, inconclusive, and told."""
    records = served(GOOD)
    bad = records.matured.assign(utility=records.matured["utility"].mask(records.matured["row_id"] % 5 == 0))
    found = judge_monitoring(replace(records, matured=bad), MONITORING)

    assert (found.health, [item.name for item in found.warnings]) == ("inconclusive", ["outcomes whose utility is no number"])
    assert "coverage of outcomes" in {item.name for item in found.verdict.checks if item.passed is None}


def test_rows_of_another_version_are_never_mixed_in() -> None:
    """A broken version's rows under the same ids change nothing, and are no fault."""
    mine, theirs = served(GOOD), served(differences(20, mean=-50.0))
    both: dict[str, Any] = {
        name: pd.concat([getattr(theirs, name).assign(version="8"), getattr(mine, name)]) for name in ("predictions", "matured")
    }
    found = judge_monitoring(replace(mine, **both), MONITORING)

    assert (found.health, found.action) == ("healthy", "none")
    assert found.reason == judge_monitoring(mine, MONITORING).reason


def test_a_lapsed_waiver_is_degraded() -> None:
    """What a person let through for a time is no longer let through, and a person decides."""
    found = judge_monitoring(served(GOOD, waiver_lapsed="the waiver of scaling by ana lapsed on 2013-12-20"), MONITORING)

    assert (found.health, found.action) == ("degraded", "watch")
    assert "ana" in found.reason


@pytest.mark.parametrize("scale", [0.0, np.nan])
def test_a_margin_without_a_size_is_inconclusive(scale: float) -> None:
    """Without a standard deviation nobody can say what worse means."""
    assert said(served(GOOD, utility_scale=scale)) == ("inconclusive", "watch")


def test_absent_columns_are_named() -> None:
    """Records that lack a column are inconclusive, and say which."""
    records = served(GOOD)
    found = judge_monitoring(replace(records, matured=records.matured.drop(columns="utility")), MONITORING)

    assert found.health == "inconclusive"
    assert "matured.utility" in found.reason


def test_a_day_that_is_no_date_is_an_error() -> None:
    """Judgement is impossible when outcomes cannot be put in order."""
    records = served(GOOD)

    with pytest.raises(EvidenceError, match='Write days as "2013-12-24"'):
        judge_monitoring(replace(records, matured=records.matured.assign(known="yesterday")), MONITORING)


def test_the_verdict_does_not_depend_on_the_order_of_rows() -> None:
    """Shuffled frames, the same verdict to the last digit."""
    records = served(GOOD)
    shuffled = replace(
        records, predictions=records.predictions.sample(frac=1.0, random_state=1), matured=records.matured.sample(frac=1.0, random_state=2)
    )

    assert judge_monitoring(shuffled, MONITORING).verdict.reason == judge_monitoring(records, MONITORING).verdict.reason


@pytest.mark.parametrize(("count", "n", "expected"), [(0, 100, 0.0), (100, 100, 0.01 ** (1 / 100)), (0, 0, 0.0)])
def test_a_proven_share_is_exact(count: float, n: float, expected: float) -> None:
    """Clopper-Pearson's lower limit at its ends: alpha^(1/n) when all failed."""
    assert proven_share(count, n, 0.01) == pytest.approx(expected)


@pytest.mark.parametrize("frames", [("matured",), ("predictions", "matured"), ("predictions", "matured", "health")])
def test_empty_frames_are_inconclusive(frames: tuple[str, ...]) -> None:
    """Nothing served or nothing known yet, in frames without a row or a type: never healthy, and no error."""
    records = served(GOOD)
    empty: dict[str, Any] = {name: pd.DataFrame(columns=getattr(records, name).columns) for name in frames}

    assert said(replace(records, **empty)) == ("inconclusive", "watch")


def test_records_without_inputs_are_inconclusive() -> None:
    """Inputs that nobody counted are missing evidence."""
    assert said(served(GOOD, inputs=(), scores=())) == ("inconclusive", "watch")


def test_a_version_that_is_its_own_fallback_stays() -> None:
    """Where nothing else could serve, the difference is nothing on every row."""
    records = served(GOOD)
    own = records.matured.assign(reference_utility=records.matured["utility"])

    assert said(replace(records, matured=own)) == ("healthy", "none")


@pytest.mark.parametrize(("value", "reached"), [(199.9, ""), (200.0, "2013-12-02")], ids=["just below", "exactly"])
def test_a_purse_ends_a_version_once_it_holds_what_is_needed(value: float, reached: str) -> None:
    """On the first day that it holds it, whatever it holds later; the most it held is told."""
    purse = Purse(
        name="all rows", rows=3, difference=0.0, days=(day(1), day(2), day(3)), means=(0.0,) * 3, values=(1.0, value, 5.0), needed=200.0
    )

    assert (purse.reached, purse.highest) == (reached, value)


@pytest.mark.parametrize("mean", [0.0, -3.0])
def test_what_was_seen_on_a_day_is_seen_the_same_later(mean: float) -> None:
    """A later look never rewrites an earlier one: each day's purse begins with all that was there the day before."""
    whole = served(differences(12, mean=mean))
    last = purse_of_all(whole, MONITORING, join(whole, MONITORING)).values

    for number in range(1, 13):
        until = replace(whole, today=day(number + 1), matured=whole.matured[whole.matured["known"] <= day(number + 1)])
        assert purse_of_all(until, MONITORING, join(until, MONITORING)).values == last[:number]


@pytest.mark.parametrize("alpha", [0, 1])
def test_a_promise_of_never_or_always_is_refused(alpha: float) -> None:
    """At an alpha of 0 nothing could ever be proven, at 1 everything is."""
    with pytest.raises(ConfigError, match="Correct these keys"):
        parse_policy(f"monitoring: {{alpha: {alpha}}}")
