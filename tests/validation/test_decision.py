"""The release's decision: only passes promote, and the first fallback that answers serves otherwise."""

import pytest
from helpers_gates import fallback, gate_verdict
from hypothesis import given
from hypothesis import strategies as st

from validation.decision import decide
from validation.policy import GATES
from validation.verdict import Outcome

PASSED = tuple(gate_verdict(gate) for gate in GATES)
FALLBACKS = (fallback("last_known_good", "7"), fallback("baseline", "1"))


def test_a_release_whose_required_gates_all_pass_is_promoted() -> None:
    """The candidate's own version serves, and there is nothing left to do."""
    decision = decide(verdicts=PASSED, required=GATES, fallbacks=FALLBACKS, candidate_version="9")

    assert (decision.decision, decision.serving_kind, decision.serving_version, decision.action) == ("promoted", "candidate", "9", "")


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.INCONCLUSIVE])
@pytest.mark.parametrize("gate", GATES)
def test_any_gate_that_does_not_pass_falls_back_in_its_own_words(gate: str, outcome: Outcome) -> None:
    """The reason quotes the gate by name; the action is the gate's."""
    verdicts = tuple(gate_verdict(gate, outcome) if item.gate == gate else item for item in PASSED)
    decision = decide(verdicts=verdicts, required=GATES, fallbacks=FALLBACKS)

    assert (decision.decision, decision.serving_kind, decision.serving_version) == ("fell_back", "last_known_good", "7")
    assert decision.reason == f"{gate} is {outcome}: {gate} said so"
    assert decision.action == "mend it"


@pytest.mark.parametrize("gate", GATES)
def test_a_missing_gate_did_not_pass(gate: str) -> None:
    """A required gate without a verdict stops the release."""
    decision = decide(verdicts=tuple(item for item in PASSED if item.gate != gate), required=GATES, fallbacks=FALLBACKS)

    assert decision.decision == "fell_back"
    assert decision.reason == f"{gate} has no verdict"


def test_the_first_gate_in_the_policys_order_is_quoted() -> None:
    """Of several failures the one that comes first in `required` is the reason, whatever the order of the verdicts."""
    verdicts = (gate_verdict("readiness", Outcome.FAIL), gate_verdict("scaling", Outcome.FAIL))
    decision = decide(verdicts=verdicts, required=("scaling", "readiness"), fallbacks=FALLBACKS)

    assert decision.reason.startswith("scaling is fail")


def test_no_required_gate_promotes_nothing() -> None:
    """All of nothing is true; a release needs somebody to speak for it."""
    assert decide(verdicts=PASSED, required=(), fallbacks=FALLBACKS).decision == "fell_back"


def test_a_gate_that_is_not_required_cannot_stop_a_release() -> None:
    """A failing gate outside the policy's list is reported elsewhere and decides nothing."""
    verdicts = (gate_verdict("scaling"), gate_verdict("readiness", Outcome.FAIL))

    assert decide(verdicts=verdicts, required=("scaling",), fallbacks=()).decision == "promoted"


def test_a_pass_with_a_missed_control_does_not_promote() -> None:
    """A gate known to be blind says nothing, whatever its outcome reads."""
    decision = decide(verdicts=(gate_verdict("scaling", caught=False),), required=("scaling",), fallbacks=FALLBACKS)

    assert decision.decision == "fell_back"
    assert "missed its control" in decision.reason


def test_two_verdicts_of_one_gate_both_have_to_pass() -> None:
    """A failed verdict cannot be outvoted by another one of the same gate."""
    verdicts = (gate_verdict("scaling"), gate_verdict("scaling", Outcome.FAIL))

    assert decide(verdicts=verdicts, required=("scaling",), fallbacks=FALLBACKS).decision == "fell_back"


@pytest.mark.parametrize(
    ("fallbacks", "serves"),
    [
        pytest.param(FALLBACKS[::-1], ("fell_back", "last_known_good", "7"), id="order-is-ours"),
        pytest.param((fallback("last_known_good", ""), FALLBACKS[1]), ("fell_back", "baseline", "1"), id="first-release"),
        pytest.param((fallback("last_known_good", "7", loaded=False), FALLBACKS[1]), ("fell_back", "baseline", "1"), id="does-not-load"),
        pytest.param((fallback("last_known_good", "7", predicted=False), FALLBACKS[1]), ("fell_back", "baseline", "1"), id="no-answer"),
        pytest.param(
            (fallback("last_known_good", "7", loaded=False), fallback("last_known_good", "6"), FALLBACKS[1]),
            ("fell_back", "last_known_good", "6"), id="an-older-good-one",
        ),
        pytest.param((fallback("baseline", "1", predicted=False),), ("held", "none", ""), id="nobody"),
        pytest.param((), ("held", "none", ""), id="none-named"),
    ],
)  # fmt: skip
def test_the_first_fallback_that_answers_serves(fallbacks: tuple, serves: tuple[str, str, str]) -> None:  # type: ignore[type-arg]
    """Last known-good before baseline; without either the release is held."""
    decision = decide(verdicts=(), required=("scaling",), fallbacks=fallbacks)

    assert (decision.decision, decision.serving_kind, decision.serving_version) == serves


def test_a_held_release_says_why_nothing_can_serve() -> None:
    """The reason has both: the gate that stopped it and the fallback that does not answer."""
    decision = decide(verdicts=(), required=("scaling",), fallbacks=(fallback("baseline", "1", loaded=False),))

    assert decision.reason == "scaling has no verdict; no fallback can serve (baseline 1: asked for one row)"
    assert decision.action.startswith("restore a fallback")


@given(st.lists(st.sampled_from(list(Outcome)), min_size=len(GATES), max_size=len(GATES)))
def test_promotion_means_that_every_gate_passed(outcomes: list[Outcome]) -> None:
    """Over all combinations of outcomes, promoted is the same as all pass."""
    verdicts = [gate_verdict(gate, outcome) for gate, outcome in zip(GATES, outcomes, strict=True)]
    decision = decide(verdicts=verdicts, required=GATES, fallbacks=FALLBACKS)

    assert (decision.decision == "promoted") == all(outcome is Outcome.PASS for outcome in outcomes)
