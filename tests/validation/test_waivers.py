"""What people said counts for the very evidence they saw, within the policy's days, and never when it cannot be told."""

import math
from typing import Any

import pytest
from helpers_people import BASIS, EVIDENCE, NOW, RELEASE_ID, approval, people, waiver

from validation.errors import EvidenceError
from validation.policy import parse_policy
from validation.waivers import (
    approval_basis,
    counting,
    human_review_s,
    lapsed,
    parse_approval,
    parse_waiver,
    standing,
    why_not,
)

POLICY = parse_policy().decision


def test_a_waiver_of_this_evidence_counts() -> None:
    """Named, reasoned, signed, in time and of a gate that may be waived."""
    assert why_not(waiver(), evidence=EVIDENCE, policy=POLICY, now=NOW) == ""
    assert counting([waiver()], evidence=EVIDENCE, policy=POLICY, now=NOW) == (waiver(),)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        pytest.param({"gate": "data_contract", "evidence": EVIDENCE["data_contract"]}, "lets nobody waive data_contract", id="critical"),
        pytest.param({"gate": "nonsense"}, "lets nobody waive nonsense", id="no-gate"),
        pytest.param({"evidence": "0" * 64}, "held again since", id="other-evidence"),
        pytest.param({"evidence": ""}, "held again since", id="no-evidence"),
        pytest.param({"by": "  "}, "no name", id="nobody"),
        pytest.param({"reason": ""}, "no reason", id="no-reason"),
        pytest.param({"attestation": ""}, "no signature", id="unsigned"),
        pytest.param({"expires_at": NOW}, "expired on 2026-03-10 12:00 UTC", id="expires-now"),
        pytest.param({"expires_at": "2026-03-10T11:59:59+00:00"}, "expired on", id="expired"),
        pytest.param({"made_at": "2026-03-10T12:01:01+00:00"}, "a clock jumped", id="from-the-future"),
        pytest.param({"expires_at": "2026-04-09T11:00:01+00:00"}, "the policy allows 30", id="too-long"),
        pytest.param({"expires_at": "2026-03-10T10:00:00+00:00"}, "counts for -0.0417 days", id="ends-before-it-began"),
        pytest.param({"expires_at": "NaN"}, "times cannot be read", id="no-time"),
        pytest.param({"made_at": "2026-03-10T11:00:00"}, "times cannot be read", id="no-zone"),
    ],
)
def test_why_a_waiver_does_not_count(changes: dict[str, str], why: str) -> None:
    """Each lack has its words, and none of them counts."""
    item = waiver(**changes)

    assert why in why_not(item, evidence=EVIDENCE, policy=POLICY, now=NOW)
    assert counting([item], evidence=EVIDENCE, policy=POLICY, now=NOW) == ()


@pytest.mark.parametrize("changes", [{"expires_at": "2026-03-10T12:00:01+00:00"}, {"expires_at": "2026-04-09T11:00:00+00:00"},
                                     {"made_at": "2026-03-10T12:01:00+00:00"}, {"made_at": "2026-03-10T12:00:00+01:00"}])  # fmt: skip
def test_a_waiver_counts_up_to_its_edges(changes: dict[str, str]) -> None:
    """A second before it expires, for exactly the policy's days, and from a clock that is a minute ahead."""
    assert why_not(waiver(**changes), evidence=EVIDENCE, policy=POLICY, now=NOW) == ""


def test_a_now_that_is_no_time_lets_nothing_count() -> None:
    """Without a time nobody can say that a waiver has not expired."""
    assert "cannot be read" in why_not(waiver(), evidence=EVIDENCE, policy=POLICY, now="")


def test_of_two_waivers_of_a_gate_the_longer_one_counts() -> None:
    """One a gate, whatever their order; a broken one does not hide a good one."""
    longer, broken = waiver(by="Grace", expires_at="2026-03-25T11:00:00+00:00"), waiver(expires_at="never")

    assert counting([longer, broken, waiver()], evidence=EVIDENCE, policy=POLICY, now=NOW) == (longer,)


@pytest.mark.parametrize(
    ("given", "state", "words"),
    [
        pytest.param({}, "none", "", id="nobody-is-asked"),
        pytest.param({"asked": True}, "waiting", "waits for a person", id="not-asked-yet"),
        pytest.param({"asked": True, "requested_at": "2026-03-09T12:00:00+00:00"}, "waiting", "since 2026-03-09 12:00 UTC", id="asked"),
        pytest.param({"asked": True, "requested_at": "2026-03-03T12:00:00+00:00"}, "expired", "nobody answered within 7 days", id="late-q"),
        pytest.param({"asked": True, "requested_at": "?"}, "expired", "nobody answered", id="asked-at-no-time"),
        pytest.param({"asked": True, "approval": approval()}, "approved", "approved by Grace on 2026-03-10 11:00 UTC: read", id="yes"),
        pytest.param({"asked": True, "approval": approval(approved=False)}, "refused", "refused by Grace", id="no"),
        pytest.param({"approval": approval(approved=False)}, "refused", "refused by Grace", id="no-unasked"),
        pytest.param({"approval": approval()}, "none", "", id="yes-unasked"),
        pytest.param({"asked": True, "approval": approval(expires_at=NOW)}, "expired", "by Grace expired on 2026-03-10 12:00", id="late"),
        pytest.param(
            {"asked": True, "approval": approval(approved=False, expires_at=NOW)}, "refused", "refused by Grace", id="a-no-stays"
        ),
        pytest.param({"asked": True, "approval": approval(basis="0" * 64)}, "waiting", "evidence or waivers changed", id="other-basis"),
        pytest.param({"asked": True, "approval": approval(basis=""), "basis": ""}, "waiting", "changed after it", id="no-basis"),
        pytest.param({"asked": True, "approval": approval(attestation="")}, "waiting", "no signature", id="unsigned"),
        pytest.param({"asked": True, "approval": approval(by=" ")}, "waiting", "no name", id="nobody"),
        pytest.param({"asked": True, "approval": approval(made_at="2026-03-10T13:00:00+00:00")}, "waiting", "a clock jumped", id="future"),
        pytest.param(
            {"asked": True, "approval": approval(requested_at="2026-03-10T11:30:00+00:00")}, "waiting", "a clock jumped", id="before-asked"
        ),
        pytest.param(
            {"asked": True, "approval": approval(requested_at="2026-03-03T10:59:59+00:00")}, "waiting", "allows 7 days", id="too-late"
        ),
        pytest.param({"asked": True, "approval": approval(expires_at="2027-03-10T11:00:00+00:00")}, "waiting", "allows 7 days", id="ever"),
        pytest.param({"asked": True, "approval": approval(expires_at="NaN")}, "waiting", "cannot be read", id="no-time"),
    ],
)  # fmt: skip
def test_where_an_approval_stands(given: dict[str, Any], state: str, words: str) -> None:
    """Only a yes to this very basis, in time, approves; a no needs no policy and does not expire."""
    found = standing(people(**given))

    assert found.state == state
    assert words in found.words


@pytest.mark.parametrize(
    "changes",
    [{"release_id": "other"}, {"weights": "1"}, {"gates": {"scaling": {"evidence": "1", "attestation": "3"}}},
     {"gates": {"scaling": {"evidence": "2", "attestation": "4"}}}, {"gates": {}}, {"waivers": ["w"]}],
)  # fmt: skip
def test_a_basis_changes_with_all_that_is_approved(changes: dict[str, Any]) -> None:
    """Another candidate, other evidence, another signature, a gate fewer, a waiver more: another yes."""
    given: dict[str, Any] = {"release_id": "r", "weights": "0", "gates": {"scaling": {"evidence": "2", "attestation": "3"}}}

    assert approval_basis(**given) != approval_basis(**{**given, **changes})
    assert approval_basis(**given, waivers=("a", "b")) == approval_basis(**given, waivers=("b", "a"))


def test_human_review_is_the_time_from_question_to_answer() -> None:
    """In seconds; clocks that run backwards wait no negative time, and what is no time is NaN."""
    assert human_review_s(approval()) == 3600.0
    assert human_review_s(approval(made_at="2026-03-10T09:00:00+00:00")) == 0.0
    assert math.isnan(human_review_s(approval(made_at="soon")))


def test_a_version_that_serves_on_an_expired_waiver_is_told() -> None:
    """Who, which gate, since when; an unreadable waiver is told too, and one that counts is not."""
    decision = {"waivers": ["9" * 64]}

    assert lapsed(decision, [waiver()], NOW) == ()
    assert lapsed(decision, [waiver()], "2026-03-20T11:00:00+00:00") == (
        "serves on a waiver that expired on 2026-03-20 11:00 UTC: scaling, waived by Ada: one device is enough for now",
    )
    assert lapsed(decision, [], NOW) == ("serves on a waiver that cannot be read back (999999999999…)",)
    assert lapsed(decision, [waiver(expires_at="never")], NOW)[0].startswith("serves on a waiver that expired on never")
    assert lapsed({"waivers": []}, [waiver()], "2030-01-01T00:00:00+00:00") == lapsed({}, [], NOW) == ()


def test_signed_words_are_read_back_strictly() -> None:
    """Every field of its own type; a yes in words is no yes."""
    given = {"by": "Ada", "reason": "r", "approved": "yes", "requested_at": NOW, "made_at": NOW, "expires_at": NOW, "basis": BASIS}

    assert parse_approval({**given, "approved": True, "release_id": RELEASE_ID}, "a").approved is True
    with pytest.raises(EvidenceError, match=r"is no approval \(approved: .*seatrial approve"):
        parse_approval(given, "a" * 64)
    with pytest.raises(EvidenceError, match=r"is no waiver \(gate: "):
        parse_waiver({"by": "Ada"}, "a" * 64)
