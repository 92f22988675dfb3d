"""Statements: what has to be said is demanded when they are made and when they are read."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.canonical import canonical_json, digest
from validation.errors import EvidenceError
from validation.statements import (
    APPROVAL,
    BASELINE,
    DECISION,
    GATE,
    MONITOR,
    PREDICATE_TYPES,
    ROLLBACK,
    STATEMENT_TYPE,
    WAIVER,
    kind_of,
    model_subject,
    parse_statement,
    statement,
)
from validation.verdict import Outcome

A, B, T = "a" * 64, "b" * 64, "2026-01-31T18:15:42+00:00"
R: dict[str, Any] = {"release_id": "flights-20260131-181542-3f9c"}
V: dict[str, Any] = {"model": "flights", "version": "2"}
WORD: dict[str, Any] = {"by": "Ada", "reason": "known", "made_at": T, "expires_at": T}
SUBJECT = {model_subject("flights", "2"): A}

SAID: dict[str, tuple[dict[str, str], dict[str, Any]]] = {
    GATE: ({"evidence": A}, {**R, "gate": "scaling", "attempt": 1, "outcome": "pass", "evidence": A, "digests": {}, "made_at": T}),
    DECISION: (SUBJECT, {
        **R, **V, "decision": "promoted", "reason": "all pass", "digests": {}, "required": ["scaling"], "waivers": [A], "approval": "",
        "gates": {"scaling": {"evidence": A, "attestation": B, "outcome": "pass"}}, "made_at": T,
    }),
    BASELINE: (SUBJECT, {**R, **V, "digests": {}, "made_at": T}),
    ROLLBACK: (SUBJECT, {
        **V, "act_id": "flights-20260131-181542-3f9c", "kind": "baseline", "from_version": "3", "reason": "worse", "by": "", "admission": A,
        "made_at": T,
    }),
    APPROVAL: ({"basis": A}, {**R, **WORD, "approved": True, "requested_at": T, "basis": A}),
    WAIVER: ({"evidence": A}, {**R, **WORD, "gate": "scaling", "evidence": A}),
    MONITOR: ({**SUBJECT, "evidence": B}, {
        **R, **V, "day": "2026-01-31", "outcome": "pass", "action": "none", "evidence": B, "made_at": T,
    }),
}  # fmt: skip


def made(kind: str, changed: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A statement of a kind; name only what the test is about."""
    subjects, said = SAID[kind]
    return statement(kind, subjects, {**said, **(changed or {})})


@pytest.mark.parametrize("kind", PREDICATE_TYPES, ids=kind_of)
def test_a_statement_comes_back_as_it_was(kind: str) -> None:
    """An in-toto statement v1 with sorted subjects, and back."""
    whole = made(kind)
    back = parse_statement(canonical_json(whole))

    assert (whole["_type"], set(whole)) == (STATEMENT_TYPE, {"_type", "subject", "predicateType", "predicate"})
    assert (back.predicate_type, back.subjects, back.predicate) == (kind, *SAID[kind])


@pytest.mark.parametrize(("kind", "field"), [(kind, field) for kind, (_, said) in SAID.items() for field in said])
def test_every_field_has_to_be_there(kind: str, field: str) -> None:
    """A statement that lacks one is neither made nor read."""
    subjects, said = SAID[kind]
    short = {name: value for name, value in said.items() if name != field}
    whole = made(kind)
    del whole["predicate"][field]

    with pytest.raises(EvidenceError, match="Make it anew"):
        statement(kind, subjects, short)
    with pytest.raises(EvidenceError, match="Make it anew"):
        parse_statement(canonical_json(whole))


@pytest.mark.parametrize(
    ("kind", "changed"),
    [
        (GATE, {"outcome": "passed"}),
        (GATE, {"attempt": 0}),
        (GATE, {"attempt": True}),
        (GATE, {"attempt": "1"}),
        (GATE, {"evidence": "e"}),
        (GATE, {"evidence": B}),
        (GATE, {"made_at": "2026-01-31T18:15:42"}),
        (GATE, {"made_at": "yesterday"}),
        (GATE, {"digests": {"code": None}}),
        (DECISION, {"decision": "maybe"}),
        (DECISION, {"version": ""}),
        (DECISION, {"version": "3"}),
        (DECISION, {"version": "latest"}),
        (DECISION, {"approval": "yes"}),
        (DECISION, {"waivers": ["a"]}),
        (DECISION, {"gates": {"scaling": {"evidence": A, "outcome": "pass"}}}),
        (BASELINE, {"version": "3"}),
        (BASELINE, {"model": "other"}),
        (ROLLBACK, {"admission": ""}),
        (ROLLBACK, {"kind": "newest"}),
        (APPROVAL, {"approved": "yes"}),
        (APPROVAL, {"approved": 1}),
        (APPROVAL, {"basis": B}),
        (APPROVAL, {"by": ""}),
        (WAIVER, {"reason": ""}),
        (WAIVER, {"expires_at": ""}),
    ],
)
def test_a_wrong_value_is_refused(kind: str, changed: dict[str, Any]) -> None:
    """Of the wrong type, out of range, or unlike the subject."""
    with pytest.raises(EvidenceError, match=f"a {kind_of(kind)} statement cannot be used"):
        made(kind, changed)


def test_an_outcome_may_be_the_enum() -> None:
    """Records are made plain first."""
    assert made(GATE, {"outcome": Outcome.FAIL})["predicate"]["outcome"] == "fail"


def test_further_facts_may_be_said() -> None:
    """A later version may say more; it is signed and kept."""
    assert parse_statement(canonical_json(made(GATE, {"more": [1]}))).predicate["more"] == [1]


def test_a_decision_without_a_version_is_about_its_gates() -> None:
    """A release that trained nothing has no model to name."""
    said = {**SAID[DECISION][1], "version": "", "decision": "held"}

    assert parse_statement(canonical_json(statement(DECISION, {}, said))).subjects == {"gates": digest(said["gates"])}
    with pytest.raises(EvidenceError, match="a promotion names no version"):
        statement(DECISION, {}, {**said, "decision": "promoted"})


@pytest.mark.parametrize(
    "subjects", [{}, {"evidence": "e"}, {"other": A}, {"": A, "evidence": A}], ids=["none", "short", "other", "nameless"]
)
def test_a_subject_has_to_be_bound(subjects: dict[str, str]) -> None:
    """A statement about nothing binds nothing."""
    with pytest.raises(EvidenceError, match="subject"):
        statement(GATE, subjects, SAID[GATE][1])


def test_an_unknown_type_is_refused() -> None:
    """It may be of a newer version, or of somebody else."""
    with pytest.raises(EvidenceError, match="newer Sea Trial"):
        statement("urn:sea-trial:gate:2", {"evidence": A}, SAID[GATE][1])


@pytest.mark.parametrize(
    "change",
    [
        lambda whole: whole.update(_type="https://in-toto.io/Statement/v0.1"),
        lambda whole: whole.update(extra=1),
        lambda whole: whole.pop("subject"),
        lambda whole: whole.update(subject=whole["subject"] * 2),
        lambda whole: whole.update(subject=[{"name": "evidence"}]),
        lambda whole: whole.update(predicate=7),
        lambda whole: whole.update(subject=None),
    ],
    ids=["version", "extra", "no-subject", "twice", "no-digest", "predicate", "null"],
)
def test_what_is_no_statement_is_refused(change: Any) -> None:
    """Signed, and still not one of ours."""
    whole = made(GATE)
    change(whole)
    with pytest.raises(EvidenceError, match="no in-toto statement v1"):
        parse_statement(json.dumps(whole).encode())


@given(st.binary(max_size=60) | st.from_regex(rb"\A[\[{\"0-9a-z:,}\]]{0,40}\Z"))
def test_any_bytes_are_a_statement_or_an_evidence_error(body: bytes) -> None:
    """No other error ever comes out."""
    with pytest.raises(EvidenceError):
        parse_statement(body)
