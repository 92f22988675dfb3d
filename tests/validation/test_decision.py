"""The release's decision: only passes promote, and the first fallback that answers serves otherwise."""

import pytest
from helpers_gates import fallback, gate_verdict
from helpers_people import EVIDENCE, NOW, approval, people, waiver
from hypothesis import given
from hypothesis import strategies as st

from validation.decision import decide
from validation.policy import GATES
from validation.verdict import Outcome
from validation.waivers import Approval

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


def test_a_waived_gate_is_a_conditional_pass() -> None:
    """The candidate serves; who waived what, until when, why and what the gate said are in the decision."""
    verdicts = tuple(gate_verdict(gate, Outcome.INCONCLUSIVE) if gate == "scaling" else gate_verdict(gate) for gate in GATES)
    decision = decide(
        verdicts=verdicts, required=GATES, fallbacks=FALLBACKS, candidate_version="9", people=people(waivers=(waiver(),))
    )  # fmt: skip

    assert (decision.decision, decision.serving_kind, decision.serving_version) == ("promoted", "candidate", "9")
    assert decision.reason == (
        "5 of 6 required gates pass, scaling waived by Ada until 2026-03-20 11:00 UTC: one device is enough for now"
    )  # fmt: skip
    assert decision.conditions == (
        "scaling waived by Ada until 2026-03-20 11:00 UTC: one device is enough for now (scaling is inconclusive: scaling said so)",
    )
    assert "`seatrial gate scaling --release flights-20260310-110000-ab12`" in decision.action


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.INCONCLUSIVE])
@pytest.mark.parametrize("gate", [gate for gate in GATES if gate not in ("scaling", "readiness")])
def test_a_critical_gate_cannot_be_waived(gate: str, outcome: Outcome) -> None:
    """Even a signed waiver of its very evidence leaves the refusal, and says that it does not count."""
    verdicts = tuple(gate_verdict(gate, outcome) if item.gate == gate else item for item in PASSED)
    said = people(waivers=(waiver(gate=gate, evidence="e" * 64),), evidence={gate: "e" * 64})
    decision = decide(verdicts=verdicts, required=GATES, fallbacks=FALLBACKS, people=said)

    assert decision.decision == "fell_back"
    assert f"the waiver of {gate} by Ada does not count: the policy lets nobody waive {gate}" in decision.reason


@pytest.mark.parametrize(
    ("verdicts", "said"),
    [
        pytest.param((), {}, id="missing"),
        pytest.param((gate_verdict("scaling", Outcome.FAIL), gate_verdict("scaling", Outcome.FAIL)), {}, id="two-verdicts"),
        pytest.param((gate_verdict("scaling", Outcome.FAIL),), {"evidence": {"scaling": "0" * 64}}, id="held-again"),
        pytest.param((gate_verdict("scaling", Outcome.FAIL),), {"now": "2026-03-21T00:00:00+00:00"}, id="expired"),
        pytest.param((gate_verdict("scaling", Outcome.FAIL),), {"now": "nan"}, id="no-clock"),
    ],
)
def test_a_waiver_never_stands_in_for_evidence(verdicts: tuple, said: dict) -> None:  # type: ignore[type-arg]
    """A missing gate, two verdicts, other evidence or a waiver past its day refuse as before, and say why it does not count."""
    decision = decide(
        verdicts=(*verdicts, gate_verdict("readiness")), required=("scaling", "readiness"), fallbacks=FALLBACKS,
        people=people(waivers=(waiver(),), **said),
    )  # fmt: skip

    assert decision.decision == "fell_back"
    assert "does not count" in decision.reason


def test_a_missed_control_of_a_waived_gate_stays_visible() -> None:
    """A waiver of a blind gate says so among the conditions."""
    verdicts = (gate_verdict("scaling", caught=False), gate_verdict("readiness"))
    decision = decide(
        verdicts=verdicts, required=("scaling", "readiness"), fallbacks=FALLBACKS, people=people(waivers=(waiver(),))
    )  # fmt: skip

    assert decision.decision == "promoted"
    assert "its positive control was missed" in decision.conditions[0]


def test_a_waiver_of_everything_promotes_nothing() -> None:
    """Somebody other than the one who waives has to speak for the candidate."""
    verdicts = (gate_verdict("scaling", Outcome.FAIL),)
    decision = decide(verdicts=verdicts, required=("scaling",), fallbacks=FALLBACKS, people=people(waivers=(waiver(),)))

    assert decision.decision == "fell_back"
    assert decision.reason == "every required gate is waived, so nothing speaks for the candidate"


def test_a_release_waits_for_a_person() -> None:
    """Held, what serves stays, and the command that answers stands in the action."""
    decision = decide(verdicts=PASSED, required=GATES, fallbacks=FALLBACKS, candidate_version="9", people=people(asked=True))

    assert (decision.decision, decision.serving_kind, decision.serving_version) == ("held", "last_known_good", "7")
    assert decision.waits_for_person
    assert decision.reason.endswith("; waits for a person")
    assert decision.action.startswith("`seatrial approve flights-20260310-110000-ab12 --by NAME --reason ...` (or --refuse), within 7 days")


def test_nobody_is_asked_about_a_release_that_is_refused_anyway() -> None:
    """A person's time is asked for last: not while a gate stands in the way, even where no fallback can serve."""
    decision = decide(verdicts=PASSED[1:], required=GATES, fallbacks=(), people=people(asked=True))

    assert (decision.decision, decision.waits_for_person) == ("held", False)


def test_what_serves_while_a_person_is_waited_for_is_told_as_it_is() -> None:
    """A fallback that does not load is not named when something else serves."""
    said = people(asked=True, serving_kind="candidate", serving_version="8")
    decision = decide(verdicts=PASSED, required=GATES, fallbacks=FALLBACKS, candidate_version="9", people=said)

    assert (decision.decision, decision.serving_kind, decision.serving_version) == ("held", "candidate", "8")


def test_a_persons_yes_promotes_and_is_quoted() -> None:
    """Name, time and reason stand in the decision."""
    said = people(asked=True, approval=approval())
    decision = decide(verdicts=PASSED, required=GATES, fallbacks=FALLBACKS, candidate_version="9", people=said)

    assert (decision.decision, decision.serving_version) == ("promoted", "9")
    assert decision.reason.endswith("; approved by Grace on 2026-03-10 11:00 UTC: read the report")


def test_a_persons_no_falls_back_with_their_reason() -> None:
    """All gates pass, and still what serves goes on serving."""
    said = people(asked=True, approval=approval(approved=False, reason="a freeze until Monday"))
    decision = decide(verdicts=PASSED, required=GATES, fallbacks=FALLBACKS, people=said)

    assert (decision.decision, decision.serving_kind, decision.serving_version) == ("fell_back", "last_known_good", "7")
    assert decision.reason.startswith("refused by Grace on 2026-03-10 11:00 UTC: a freeze until Monday")


@pytest.mark.parametrize("said", [approval(expires_at=NOW), approval(basis="0" * 64), approval(made_at="2027-01-01T00:00:00+00:00")])
def test_a_yes_that_does_not_count_waits_for_a_new_one(said: Approval) -> None:
    """Expired, of other evidence or from a clock that jumped: the release is held."""
    assert decide(verdicts=PASSED, required=GATES, fallbacks=FALLBACKS, people=people(asked=True, approval=said)).decision == "held"


@given(st.lists(st.sampled_from(list(Outcome)), min_size=len(GATES), max_size=len(GATES)), st.booleans(), st.booleans())
def test_no_word_of_a_person_turns_a_critical_gate(outcomes: list[Outcome], is_approved: bool, asked: bool) -> None:
    """Over all outcomes and with both waivable gates waived: promoted means that every critical gate passed and nobody has to be asked."""
    verdicts = [gate_verdict(gate, outcome) for gate, outcome in zip(GATES, outcomes, strict=True)]
    both = (waiver(), waiver(gate="readiness", evidence=EVIDENCE["readiness"]))
    said = people(asked=asked, waivers=both, approval=approval() if is_approved else None)
    decision = decide(verdicts=verdicts, required=GATES, fallbacks=FALLBACKS, people=said)
    critical = [v.outcome is Outcome.PASS for v in verdicts if v.gate not in ("scaling", "readiness")]

    assert (decision.decision == "promoted") == (all(critical) and (is_approved or not asked))
