"""The slice_quality gate: who passes, who fails, what stays open, and the control in the smallest slice."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from helpers_gates import SLICE_POLICY, outcomes, slice_records

from validation.errors import EvidenceError
from validation.policy import parse_policy
from validation.slices import judge_slices, plant, smallest_slice
from validation.verdict import Check, GateVerdict, Outcome


def judged(frame: pd.DataFrame | None = None, **changes: object) -> GateVerdict:
    """Judge `frame` (by default one where the candidate is better everywhere) under the default policy."""
    return judge_slices(slice_records(frame, **changes), SLICE_POLICY)


def named(verdict: GateVerdict, start: str) -> Check:
    """The first check whose name starts so."""
    return next(item for item in verdict.checks if item.name.startswith(start))


def worsened(amount: float, carrier: str = "UA", **changes: object) -> pd.DataFrame:
    """Outcomes whose candidate loses `amount` on one carrier."""
    frame = outcomes(**changes)  # type: ignore[arg-type]
    frame.loc[frame["carrier"] == carrier, "utility_candidate"] -= amount
    return frame


def test_a_candidate_that_is_better_everywhere_passes() -> None:
    """Both slices are judged, the control is caught, nothing is left to do."""
    verdict = judged()

    assert verdict.outcome is Outcome.PASS, verdict.reason
    assert verdict.control is not None
    assert verdict.control.caught
    assert verdict.control.expected == "utility of carrier=AA against"
    assert verdict.action == ""


def test_a_candidate_equal_to_what_serves_passes() -> None:
    """A retrained model with the same bits is no worse than the last known-good one, at zero variance."""
    frame = outcomes()
    for measure in ("utility", "loss", "confidence", "hit"):
        frame[f"{measure}_last_known_good"] = frame[f"{measure}_candidate"]
    verdict = judged(frame, contenders=("candidate", "last_known_good", "baseline", "rule"))

    assert verdict.outcome is Outcome.PASS, verdict.reason
    assert named(verdict, "overall utility against last_known_good").observed == 0.0


def test_a_regression_in_one_slice_fails_by_name() -> None:
    """The reason names slice, reference, difference, interval and limit."""
    verdict = judged(worsened(1.0))

    assert verdict.outcome is Outcome.FAIL
    assert named(verdict, "utility of carrier=UA against").passed is False
    assert named(verdict, "utility of carrier=AA against").passed is True
    assert "carrier=UA" in verdict.action


def test_a_regression_about_as_large_as_the_margin_is_inconclusive() -> None:
    """An interval that straddles the margin decides nothing, and nothing is not a pass."""
    frame = worsened(0.3 + 0.1 * outcomes()["utility_rule"].std(), days=120, per_day=40)
    verdict = judged(frame)

    item = named(verdict, "utility of carrier=UA against")
    assert item.passed is None
    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_a_slice_may_trail_by_less_than_the_margin() -> None:
    """Non-inferiority: a difference of a few hundredths of a standard deviation, well measured, passes."""
    frame = worsened(0.3 + 0.03 * outcomes()["utility_rule"].std(), days=200, per_day=40)
    verdict = judged(frame)

    item = named(verdict, "utility of carrier=UA against")
    assert item.observed is not None
    assert float(item.observed) < 0.0
    assert item.passed is True


def test_a_small_noisy_slice_is_reported_and_counts_against_coverage() -> None:
    """A third of the samples in a slice too noisy to decide: coverage 0.67 is short of 0.8, hence inconclusive."""
    frame = outcomes(days=60, per_day=60)
    frame["carrier"] = np.resize(["AA", "UA", "HA"], len(frame))
    noisy = frame["carrier"] == "HA"
    noise = np.random.default_rng(3).normal(size=int(noisy.sum())) * 5.0
    frame.loc[noisy, "utility_candidate"] = frame.loc[noisy, "utility_baseline"] + noise - noise.mean()
    verdict = judged(frame)

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert named(verdict, "coverage of carrier").observed == pytest.approx(2 / 3)
    assert not any(item.name.startswith("utility of carrier=HA") for item in verdict.checks)
    assert any("carrier=HA (n=1200)" in note for note in verdict.notes)


def test_a_wide_interval_does_not_hide_a_disaster() -> None:
    """A slice too noisy for the margin still fails when even its favourable end lies below."""
    frame = outcomes()
    rows = frame["carrier"] == "UA"
    frame.loc[rows, "utility_candidate"] += np.random.default_rng(1).normal(size=int(rows.sum())) * 5.0 - 20.0

    assert named(judged(frame), "utility of carrier=UA against").passed is False


@pytest.mark.parametrize(("n", "judged_slices"), [pytest.param(300, 2, id="exactly-min-n"), pytest.param(299, 1, id="one-below")])
def test_a_slice_is_judged_from_min_n_on(n: int, judged_slices: int) -> None:
    """300 samples are enough, 299 are listed as too few."""
    frame = outcomes(days=60, per_day=20)
    frame["carrier"] = np.where(np.random.default_rng(0).permutation(len(frame)) < n, "UA", "AA")
    found = judged(frame)

    assert sum(item.name.startswith("utility of carrier=") for item in found.checks) == judged_slices


def test_no_better_than_the_baseline_on_the_whole_is_inconclusive() -> None:
    """Not worse anywhere, but nothing speaks for a trained model either."""
    verdict = judged(outcomes(better=0.0, days=200))

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert named(verdict, "overall utility against baseline").passed is True
    assert named(verdict, "overall superiority over baseline").passed is None


def test_a_better_log_loss_shows_superiority_where_utility_is_too_noisy() -> None:
    """A proper score is the sharper measure of the two, and one of them is enough."""
    frame = outcomes(better=0.0, days=200)
    frame["loss_candidate"] = 0.48 + 0.1 * np.random.default_rng(5).normal(size=len(frame))
    item = named(judged(frame), "overall superiority over baseline")

    assert item.passed is True
    assert (item.where, item.unit) == ("by log loss", "nats")


def test_worse_by_both_measures_fails_superiority() -> None:
    """Surely worse in utility and in log loss is a fail, not a lack of evidence."""
    frame = outcomes(better=-0.3, days=200).assign(loss_candidate=0.6)

    assert named(judged(frame), "overall superiority over baseline").passed is False


def test_the_last_known_good_version_need_not_be_beaten() -> None:
    """Against what serves now the candidate has to be no worse; a retrained model is rarely better."""
    frame = outcomes()
    for measure in ("utility", "loss", "confidence", "hit"):
        frame[f"{measure}_last_known_good"] = frame[f"{measure}_candidate"]
    verdict = judged(frame, contenders=("candidate", "last_known_good", "baseline"))

    assert [item.name for item in verdict.checks if "superiority" in item.name] == ["overall superiority over baseline"]


@pytest.mark.parametrize("measure", ["utility", "loss", "confidence", "hit"])
@pytest.mark.parametrize("contender", ["candidate", "baseline", "rule"])
def test_one_nan_fails_naming_the_contender(measure: str, contender: str) -> None:
    """A single outcome that is no number fails, for references as for the candidate."""
    frame = outcomes()
    frame.loc[17, f"{measure}_{contender}"] = np.nan
    verdict = judged(frame, planted_slice="carrier=AA", planted_outcomes=outcomes())

    assert verdict.outcome is Outcome.FAIL
    assert f"outcomes of {contender} that are not finite ({measure}_{contender}) is 1" in verdict.reason


def test_an_infinite_log_loss_is_a_fact_and_an_infinite_utility_is_not() -> None:
    """A rule that was sure and wrong has an infinite log loss; utilities are amounts."""
    frame = outcomes()
    frame.loc[17, "loss_rule"] = np.inf
    assert judged(frame).outcome is Outcome.PASS

    frame.loc[17, "utility_rule"] = np.inf
    assert judged(frame, planted_slice="carrier=AA", planted_outcomes=frame).outcome is Outcome.FAIL


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        pytest.param(lambda frame: frame.iloc[:0], "samples", id="empty"),
        pytest.param(lambda frame: frame.drop(columns="utility_baseline"), "outcomes of baseline", id="no-utility"),
        pytest.param(lambda frame: frame.drop(columns="hit_candidate"), "outcomes of candidate", id="no-hit"),
        pytest.param(lambda frame: frame.drop(columns="cluster"), "columns of the outcomes", id="no-cluster"),
    ],
)
def test_missing_evidence_is_inconclusive(spoil: Callable[[pd.DataFrame], pd.DataFrame], said: str) -> None:
    """What was not recorded is named, and never passes."""
    frame = spoil(outcomes())
    verdict = judge_slices(replace(slice_records(), outcomes=frame), SLICE_POLICY)

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert verdict.reason.startswith(said)


@pytest.mark.parametrize(
    "contenders",
    [(), ("candidate",), ("baseline", "rule"), ("candidate", "last_known_good")],
    ids=["none", "alone", "no-candidate", "incumbent-only"],
)
def test_without_somebody_to_compare_with_it_is_inconclusive(contenders: tuple[str, ...]) -> None:
    """The candidate needs the baseline or the rule beside it; being like what serves is not enough."""
    assert judge_slices(replace(slice_records(), contenders=contenders), SLICE_POLICY).outcome is Outcome.INCONCLUSIVE


def test_without_slice_columns_it_is_inconclusive() -> None:
    """An average over everybody is not what this gate is for."""
    assert judge_slices(replace(slice_records(), slices=()), SLICE_POLICY).outcome is Outcome.INCONCLUSIVE


def test_all_samples_in_one_cluster_decide_nothing() -> None:
    """One day is one observation: no interval, no verdict."""
    verdict = judged(outcomes().assign(cluster=0))

    assert verdict.outcome is Outcome.INCONCLUSIVE


def test_repeated_samples_fail() -> None:
    """A sample counted twice makes every interval too narrow."""
    frame = pd.concat([outcomes(), outcomes()])

    assert judged(frame, planted_slice="carrier=AA", planted_outcomes=frame).outcome is Outcome.FAIL


def test_a_badly_calibrated_slice_fails_by_column_and_name() -> None:
    """Confidence 0.6 where a quarter comes true is a gap of 0.35."""
    frame = outcomes()
    frame.loc[frame["carrier"] == "UA", "confidence_candidate"] = 0.6
    item = named(judged(frame), "calibration gap by carrier")

    assert item.passed is False
    assert item.where == "carrier=UA"
    assert item.observed == pytest.approx(0.35, abs=0.02)


@pytest.mark.parametrize(
    ("quality", "passed"), [(0.65, True), (0.6499, False), (float("nan"), False), (None, None)], ids=["at", "below", "nan", "absent"]
)
def test_quality_has_to_reach_its_target(quality: float | None, passed: bool | None) -> None:
    """At the target exactly it passes; NaN fails; an absent measurement is open."""
    given = {} if quality is None else {"candidate": quality}

    assert named(judged(quality=given), "ROC AUC of the candidate").passed is passed


@pytest.mark.parametrize(
    ("latency_ms", "passed"),
    [
        pytest.param((50.0,) * 40, True, id="at-the-limit"),
        pytest.param((1.0,) * 19 + (999.0,), True, id="one-slow-of-twenty"),
        pytest.param((1.0,) * 18 + (999.0,) * 2, False, id="two-slow-of-twenty"),
        pytest.param((1.0,) * 39 + (float("nan"),), False, id="nan"),
        pytest.param((1.0,) * 19, None, id="too-few"),
        pytest.param((), None, id="none"),
    ],
)
def test_the_95th_percentile_of_latency_has_to_hold(latency_ms: tuple[float, ...], passed: bool | None) -> None:
    """Nearest rank of at least 20 calls; a NaN is never hidden among the slow ones."""
    assert named(judged(latency_ms=latency_ms), "latency p95").passed is passed


@pytest.mark.parametrize("planted_slice", ["carrier=AA", "", "carrier=ZZ"])
def test_a_control_that_is_not_planted_is_missed(planted_slice: str) -> None:
    """Unplanted outcomes pass as they are, so the gate has shown nothing and says so."""
    verdict = judged(planted_slice=planted_slice, planted_outcomes=outcomes())

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "positive control was missed" in verdict.reason


def test_a_plant_in_another_slice_does_not_count() -> None:
    """The control has to fail at the planted slice by name, not somewhere."""
    verdict = judged(planted_slice="carrier=AA", planted_outcomes=plant(outcomes(), "carrier=UA"))

    assert verdict.control is not None
    assert not verdict.control.caught


def test_planting_changes_the_candidates_utility_on_that_slice_only() -> None:
    """Every planted sample trails each contender by at least a standard deviation; the rest is untouched."""
    frame = outcomes()
    planted = plant(frame, "carrier=UA")

    rows = frame["carrier"] == "UA"
    pd.testing.assert_frame_equal(planted[~rows], frame[~rows])
    lag = frame.loc[rows, "utility_rule"] - planted.loc[rows, "utility_candidate"]
    assert lag.min() >= frame["utility_rule"].std(ddof=0)


@pytest.mark.parametrize("slice_name", ["carrier=ZZ", "nothing=AA", ""])
def test_planting_into_nobody_is_an_error(slice_name: str) -> None:
    """A plant without rows would make a control that cannot be caught."""
    with pytest.raises(EvidenceError, match="smallest_slice"):
        plant(outcomes(), slice_name)


def test_the_smallest_slice_with_enough_samples_and_days_is_planted() -> None:
    """HA is smaller but has too few samples; of two large enough ones the smaller is chosen."""
    frame = outcomes()
    frame["carrier"] = ["HA"] * 100 + ["UA"] * 400 + ["AA"] * 700

    assert smallest_slice(frame, ("carrier",), 300) == "carrier=UA"
    assert smallest_slice(frame, ("carrier",), 5000) == ""


def test_the_order_of_rows_does_not_matter() -> None:
    """The same evidence in another order gives the same checks."""
    frame = outcomes()
    shuffled = frame.sample(frac=1.0, random_state=1)

    first, second = judged(frame).checks, judged(shuffled).checks
    assert [(item.name, item.passed) for item in first] == [(item.name, item.passed) for item in second]


def test_tables_and_plots_show_every_judged_slice() -> None:
    """A reader sees n, base rate, utilities, differences with intervals and calibration by slice."""
    verdict = judged()

    assert [row[0] for row in verdict.tables[2].rows] == ["carrier=AA", "carrier=UA"]
    assert len(verdict.tables[3].rows) == 4
    assert [series.name for series in verdict.plots[0].series] == ["against baseline", "against rule"]
    assert all(len(series.x) == len(series.low) == len(series.high) == 2 for series in verdict.plots[0].series)


def test_a_good_candidate_is_rarely_stopped_and_a_bad_slice_rarely_passes() -> None:
    """Of 40 judge sets with ten slices each, an equal candidate fails in none, and one slice 0.2 sd worse passes in at most one."""
    policy = parse_policy("slice_quality: {min_n: 100}").slice_quality
    failed = passed = 0
    for seed in range(40):
        frame = outcomes(days=60, per_day=50, seed=seed, better=0.02)
        frame["carrier"] = np.resize(list("abcdefghij"), len(frame))
        bad = frame.assign(utility_candidate=frame["utility_candidate"].where(frame["carrier"] != "c", frame["utility_candidate"] - 0.24))
        failed += judge_slices(slice_records(frame), policy).outcome is Outcome.FAIL
        passed += named(judge_slices(slice_records(bad), policy), "utility of carrier=c against").passed is True

    assert failed == 0
    assert passed <= 1
