"""The readiness gate: a rubric scored from evidence, no critical item open, and an ownerless mode caught in every run."""

from dataclasses import replace

import pytest
from helpers_gates import READINESS_POLICY, drills, fallback, readiness_records
from hypothesis import given
from hypothesis import strategies as st

from validation.failure_modes import default_modes
from validation.policy import parse_policy
from validation.readiness import judge_readiness, rubric
from validation.records import Drill, FailureMode, FallbackCheck, ReadinessRecords
from validation.verdict import GateVerdict, Outcome

MODES = [mode.name for mode in default_modes("the team")]
# fired by every release; bad_release_served is read off the fallbacks
DRILLED = [mode.name for mode in default_modes("the team") if mode.in_release and mode.name != "bad_release_served"]
CRITICAL = [mode.name for mode in default_modes("the team") if mode.critical]
ELSEWHERE = len(MODES) - len(DRILLED) - 1  # modes that no release drills
FULL = len(MODES) + len(DRILLED) + 1 + 3  # words, drills, costs and fallbacks


def judged(**changes: object) -> GateVerdict:
    """Judge an operable release, changed."""
    return judge_readiness(readiness_records(**changes), READINESS_POLICY)


def modes(name: str, **changes: object) -> tuple[FailureMode, ...]:
    """The default modes, one of them changed."""
    return tuple(replace(mode, **changes) if mode.name == name else mode for mode in default_modes("the team"))  # type: ignore[arg-type]


def failed(verdict: GateVerdict) -> list[str]:
    """Names of the failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


def test_an_operable_release_passes_with_full_points() -> None:
    """Every mode has its words and a drill that was seen, costs are measured, the baseline answers; the control is caught."""
    verdict = judged()

    assert verdict.outcome is Outcome.PASS
    assert verdict.reason.startswith(f"{FULL} of {FULL} points, no critical item open")
    assert verdict.control is not None
    assert verdict.control.caught
    assert verdict.control.expected.startswith("rank_killed has")


@pytest.mark.parametrize("word", ["detector", "owner", "mitigation", "stop_condition", "drill"])
@pytest.mark.parametrize("text", ["", "  ", "TBD", "n/a", "?"], ids=["empty", "blank", "tbd", "na", "question"])
def test_a_critical_mode_without_one_of_its_words_fails_by_name(word: str, text: str) -> None:
    """A blank or a placeholder is no owner; the score alone would still be high enough."""
    verdict = judged(modes=modes("fabric", **{word: text}))

    assert verdict.outcome is Outcome.FAIL
    assert failed(verdict) == ["fabric has detector, owner, mitigation, stop condition, drill and page"]
    assert f"lacks {word}" in verdict.reason


@pytest.mark.parametrize(
    "part", [{"wait": ""}, {"act": ()}, {"confirm": ("seatrial show", "?")}, {"over": "TBD"}], ids=["wait", "act", "confirm", "over"]
)
def test_a_page_with_a_hole_fails_by_name(part: dict[str, object]) -> None:
    """At night nobody guesses what a page left out."""
    page = next(mode for mode in default_modes("the team") if mode.name == "fabric").page
    verdict = judged(modes=modes("fabric", page=replace(page, **part)))  # type: ignore[arg-type]

    assert failed(verdict) == ["fabric has detector, owner, mitigation, stop condition, drill and page"]
    assert f"page ({next(iter(part))})" in verdict.reason


@pytest.mark.parametrize("name", [name for name in DRILLED if name in CRITICAL])
@pytest.mark.parametrize("how", ["without", "unseen", "unfired", "unmitigated"])
def test_a_critical_mode_that_was_not_drilled_and_seen_fails_by_name(name: str, how: str) -> None:
    """Not run, not fired, fired and not seen, seen and not mitigated: each leaves the mode open."""
    verdict = judged(drills=drills(**{how: name}))

    assert verdict.outcome is Outcome.FAIL
    assert failed(verdict) == [f"{name} was drilled, detected and mitigated"]
    assert name in verdict.action


def test_modes_that_no_release_drills_are_open_and_cost_nothing() -> None:
    """Their drills were not run with this code: the rows say so, the score does not."""
    verdict = judged()
    rows = [row for row in verdict.tables[0].rows if row[2] == 0]

    assert len(rows) == ELSEWHERE
    assert all("was not run with this code" in str(row[4]) for row in rows)
    assert f"{len(DRILLED) + 1} of {len(MODES)} failure modes drilled with this code" in verdict.reason


def test_drills_on_record_count() -> None:
    """With all drills on record every mode has its two points."""
    verdict = judged(drills=drills(recorded=True))
    full = 2 * len(MODES) + 3

    assert verdict.reason.startswith(f"{full} of {full} points")
    assert f"{len(MODES)} of {len(MODES)} failure modes drilled" in verdict.reason


@pytest.mark.parametrize("how", ["unseen", "unmitigated"])
def test_a_drill_on_record_that_went_wrong_fails_its_critical_mode(how: str) -> None:
    """Nobody asked for that drill; but it was run, and it showed that the detector or the mitigation does not work."""
    verdict = judged(drills=drills(recorded=True, **{how: "point_to_point"}))

    assert failed(verdict) == ["point_to_point was drilled, detected and mitigated"]
    assert "on 2030-01-01" in verdict.reason


@pytest.mark.parametrize(("recorded", "outcome"), [(True, Outcome.PASS), (False, Outcome.FAIL)])
def test_a_policy_may_demand_every_drill(recorded: bool, outcome: Outcome) -> None:
    """drilled_floor 1: a release waits until `seatrial drill --all` was run with its code."""
    policy = parse_policy("readiness: {drilled_floor: 1}").readiness
    verdict = judge_readiness(readiness_records(drills=drills(recorded=recorded)), policy)

    assert verdict.outcome is outcome
    assert failed(verdict) == ([] if recorded else ["failure modes drilled with this code"])


def test_one_unseen_repetition_of_a_drill_is_enough_to_fail() -> None:
    """A detector that saw the failure once and missed it once is not awake."""
    again = Drill(name="hang", fired=True, detected=False, mitigated=False, detail="second time")

    assert judged(drills=(*drills(), again)).outcome is Outcome.FAIL


def test_an_open_mode_that_is_not_critical_costs_a_point_only() -> None:
    """A straggler that went unseen lowers the score by one."""
    verdict = judged(drills=drills(unseen="straggler"))

    assert verdict.outcome is Outcome.PASS
    assert verdict.reason.startswith(f"{FULL - 1} of {FULL} points, no critical item open")


EXTRAS = FULL // 8 + 1  # enough to bring the score under 80%


def with_open_extras(count: int) -> ReadinessRecords:
    """A release with `count` more modes of its own, not critical, without owner and drill: two open points each."""
    like = next(mode for mode in default_modes("") if mode.name == "straggler")
    extra = tuple(replace(like, name=f"extra-{number}", drill=f"extra-{number}") for number in range(count))
    return readiness_records(modes=(*default_modes("the team"), *extra))


@pytest.mark.parametrize(
    ("floor", "outcome"),
    [(FULL / (FULL + 6), Outcome.PASS), (FULL / (FULL + 6) + 1e-9, Outcome.FAIL)],
    ids=["at-the-floor", "just-above"],
)
def test_the_score_may_equal_the_floor(floor: float, outcome: Outcome) -> None:
    """So many of so many points pass at a floor of exactly that share."""
    policy = parse_policy(f"readiness: {{score_floor: {floor!r}}}").readiness
    verdict = judge_readiness(with_open_extras(3), policy)

    assert verdict.outcome is outcome


def test_enough_open_items_fail_by_score_without_any_critical_one() -> None:
    """Under 80% of the points the release is not operable, and the action names the open items."""
    verdict = judge_readiness(with_open_extras(EXTRAS), READINESS_POLICY)

    assert failed(verdict) == ["rubric score"]
    assert f"{FULL} of {FULL + 2 * EXTRAS}" in verdict.reason
    assert "extra-0" in verdict.action


@pytest.mark.parametrize("name", MODES)
def test_a_known_mode_cannot_leave_the_rubric(name: str) -> None:
    """Leaving a failure mode off the list is an open critical item, not a smaller rubric."""
    kept = tuple(mode for mode in default_modes("the team") if mode.name != name)

    assert f"{name} is listed" in failed(judged(modes=kept))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0], ids=["nan", "inf", "negative"])
def test_a_cost_that_is_no_cost_fails(value: float) -> None:
    """Costs have to be measured, finite and not negative; the bad one is named."""
    verdict = judged(costs={"wall_s": 12.0, "storage_mib": value})

    assert failed(verdict) == ["costs are measured"]
    assert "storage_mib" in verdict.reason


def test_no_costs_at_all_fail() -> None:
    """An unmeasured release has no known price."""
    assert failed(judged(costs={})) == ["costs are measured"]


@pytest.mark.parametrize(
    "given_fallbacks",
    [
        pytest.param((), id="none"),
        pytest.param((fallback(version=""),), id="no-version"),
        pytest.param((fallback(loaded=False, predicted=False),), id="does-not-load"),
        pytest.param((fallback(predicted=False),), id="gives-nothing-finite"),
    ],
)
def test_without_a_fallback_that_answers_it_fails(given_fallbacks: tuple[FallbackCheck, ...]) -> None:
    """Somebody has to be able to serve when the candidate may not; that is the drill of a bad release as well."""
    names = failed(judged(fallbacks=given_fallbacks))

    assert names[:2] == ["bad_release_served was drilled, detected and mitigated", "a fallback is named and answers"]


def test_a_second_fallback_that_does_not_load_costs_a_point() -> None:
    """The baseline answers, so the release is operable; the broken last known-good one is an open item."""
    verdict = judged(fallbacks=(fallback("last_known_good", "7", loaded=False), fallback()))

    assert verdict.outcome is Outcome.PASS
    assert verdict.reason.startswith(f"{FULL - 1} of {FULL}")


@pytest.mark.parametrize("empty", ["modes", "drills"])
def test_without_modes_or_drills_it_is_inconclusive(empty: str) -> None:
    """Nothing to score is not a full score."""
    assert judged(**{empty: ()}).outcome is Outcome.INCONCLUSIVE


def test_without_a_critical_mode_the_control_cannot_be_caught() -> None:
    """If no mode is critical, removing an owner fails nothing: the gate calls itself blind."""
    tame = tuple(replace(mode, critical=False) for mode in default_modes("the team"))

    verdict = judged(modes=tame)

    assert verdict.outcome is Outcome.INCONCLUSIVE
    assert "positive control was missed" in verdict.reason


def test_the_rubric_table_shows_every_item_with_its_points() -> None:
    """Points in the table add up to the score."""
    verdict = judged(drills=drills(unseen="straggler"))
    table = verdict.tables[0]

    assert len(table.rows) == len(rubric(readiness_records()))
    assert sum(int(row[1] or 0) for row in table.rows) == FULL - 1
    assert sum(int(row[2] or 0) for row in table.rows) == FULL


@given(st.sets(st.sampled_from(DRILLED)))
def test_more_unseen_drills_never_score_better(unseen: set[str]) -> None:
    """The score falls by one point a drill, and any unseen critical drill fails."""
    seen = tuple(replace(drill, detected=drill.name not in unseen) for drill in drills())
    verdict = judged(drills=seen)

    points = sum(item.satisfied is True for item in rubric(readiness_records(drills=seen)))
    assert points == FULL - len(unseen)
    assert (verdict.outcome is Outcome.PASS) == (unseen <= {"straggler"})
