"""What is signed: in-toto statements v1 about gates, decisions, baselines, rollbacks, people and monitors, made and read back checked.

A statement says of its subjects (name -> sha256) what its predicate holds. As canonical JSON the same facts are the same bytes.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from validation.canonical import digest, plain
from validation.errors import EvidenceError

PAYLOAD_TYPE = "application/vnd.in-toto+json"
STATEMENT_TYPE = "https://in-toto.io/Statement/v1"

GATE = "urn:sea-trial:gate:1"
DECISION = "urn:sea-trial:decision:1"
BASELINE = "urn:sea-trial:baseline:1"
ROLLBACK = "urn:sea-trial:rollback:1"
APPROVAL = "urn:sea-trial:approval:1"
WAIVER = "urn:sea-trial:waiver:1"
MONITOR = "urn:sea-trial:monitor:1"

_DIGEST = re.compile(r"[0-9a-f]{64}")


def _with_zone(text: str) -> str:
    if datetime.fromisoformat(text).tzinfo is None:
        raise ValueError("has no time zone")
    return text


Name = Annotated[str, StringConstraints(min_length=1)]
Sha256 = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
Time = Annotated[str, AfterValidator(_with_zone)]  # ISO 8601
Version = Annotated[str, StringConstraints(pattern=r"^[0-9]+$")]


class _Said(BaseModel):
    # further facts may stand in a predicate; those named below have to
    model_config = ConfigDict(extra="allow", strict=True, frozen=True)


class GatePredicate(_Said):
    """One attempt at one gate. Subjects: its evidence document, and the candidate's weights where they were judged."""

    release_id: Name
    gate: Name
    attempt: Annotated[int, Field(ge=1)]
    outcome: Literal["pass", "fail", "inconclusive"]
    evidence: Sha256
    digests: dict[str, str]  # code, data, config, policy, machine, ...: what the verdict depends on
    made_at: Time


class GateLink(_Said):
    """A gate as a decision names it."""

    evidence: Sha256
    attestation: Sha256
    outcome: Literal["pass", "fail", "inconclusive"]


class DecisionPredicate(_Said):
    """A release's fate. Subject: the model version it is about; without one, its gates."""

    release_id: Name
    model: Name
    version: Annotated[str, StringConstraints(pattern=r"^[0-9]*$")]
    decision: Literal["promoted", "fell_back", "held"]
    reason: Name
    digests: dict[str, str]
    gates: dict[str, GateLink]
    required: list[str]
    waivers: list[Sha256]
    approval: Annotated[str, StringConstraints(pattern=r"^([0-9a-f]{64})?$")]
    made_at: Time


class BaselinePredicate(_Said):
    """The simple model that serves while nothing better is verified. Subject: that version."""

    release_id: Name
    model: Name
    version: Version
    digests: dict[str, str]
    made_at: Time


class RollbackPredicate(_Said):
    """A version that was admitted before and serves again. Subject: that version; `admission` is the statement that admitted it."""

    act_id: Name
    model: Name
    version: Version
    kind: Literal["candidate", "last_known_good", "baseline"]
    from_version: str
    reason: Name
    by: str
    admission: Sha256
    made_at: Time


class ApprovalPredicate(_Said):
    """A person's yes or no to one release. Subject: what the person was shown (`basis`)."""

    release_id: Name
    by: Name
    reason: Name
    approved: bool
    requested_at: Time
    made_at: Time
    expires_at: Time
    basis: Sha256


class WaiverPredicate(_Said):
    """A person who takes the risk of one gate that did not pass, for a time. Subject: that gate's evidence."""

    release_id: Name
    gate: Name
    by: Name
    reason: Name
    made_at: Time
    expires_at: Time
    evidence: Sha256


class MonitorPredicate(_Said):
    """What a monitor said of a version in service on one day. Subjects: that version, and the evidence it judged by."""

    model: Name
    version: Version
    release_id: Name  # that let it through
    day: Name
    outcome: Literal["pass", "fail", "inconclusive"]
    action: Literal["none", "watch", "roll_back"]
    evidence: Sha256
    made_at: Time


_PREDICATES: dict[str, type[_Said]] = {
    GATE: GatePredicate,
    DECISION: DecisionPredicate,
    BASELINE: BaselinePredicate,
    ROLLBACK: RollbackPredicate,
    APPROVAL: ApprovalPredicate,
    WAIVER: WaiverPredicate,
    MONITOR: MonitorPredicate,
}
_SUBJECT_OF = {GATE: "evidence", WAIVER: "evidence", APPROVAL: "basis"}  # the subject that the predicate names as well
PREDICATE_TYPES = tuple(_PREDICATES)


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A statement read back."""

    predicate_type: str
    subjects: Mapping[str, str]  # name -> sha256
    predicate: Mapping[str, Any]


def kind_of(predicate_type: str) -> str:
    """A predicate type as people say it: "gate", "decision", ..."""
    return predicate_type.split(":")[2] if predicate_type in _PREDICATES else f"unknown ({predicate_type[:80]!r})"


def model_subject(model: str, version: str) -> str:
    """The name under which a model version is a subject; its sha256 is that of the model's files."""
    return f"models/{model}/{version}"


def statement(predicate_type: str, subjects: Mapping[str, str], predicate: Mapping[str, Any]) -> dict[str, Any]:
    """An in-toto statement as plain values. A decision without a model version, and so without subjects, is about its gates.

    Raises: EvidenceError when something that this type has to say is missing or wrong: such a statement is never signed.
    """
    body = plain(predicate)
    named = dict(subjects)
    if predicate_type == DECISION and not named and body.get("version") == "":
        named = {"gates": digest(body.get("gates"))}
    _demand(Statement(predicate_type=predicate_type, subjects=named, predicate=body))
    return {
        "_type": STATEMENT_TYPE,
        "subject": [{"name": name, "digest": {"sha256": named[name]}} for name in sorted(named)],
        "predicateType": predicate_type,
        "predicate": body,
    }


def parse_statement(payload: bytes) -> Statement:
    """A statement from its bytes, everything checked that `statement` checks. Raises EvidenceError when it is none."""
    try:
        found = json.loads(payload)
        if found["_type"] != STATEMENT_TYPE or set(found) != {"_type", "subject", "predicateType", "predicate"}:
            raise ValueError(f"its type is {found['_type']!r}")
        subjects = {item["name"]: item["digest"]["sha256"] for item in found["subject"]}
        if len(subjects) != len(found["subject"]):
            raise ValueError("it names a subject twice")
        made = Statement(predicate_type=found["predicateType"], subjects=subjects, predicate=dict(found["predicate"]))
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"the signed payload is no in-toto statement v1 ({type(error).__name__}: {error}). It says nothing about a release. Use the "
            "sha256 that the journal or the pointer names."
        ) from None
    _demand(made)
    return made


def _demand(made: Statement) -> None:
    """Refuse a statement that lacks what its type has to say, or contradicts itself."""
    shape = _PREDICATES.get(made.predicate_type)
    if shape is None:
        raise EvidenceError(
            f"predicate type {str(made.predicate_type)[:80]!r} is unknown, so the statement cannot be judged. Known are "
            f"{', '.join(PREDICATE_TYPES)}; a newer Sea Trial may have written it."
        )
    kind = kind_of(made.predicate_type)
    try:
        shape.model_validate(made.predicate)
    except ValidationError as error:
        where = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()[:5])
        raise EvidenceError(
            f"a {kind} statement cannot be used ({where}). It would not show what it has to. Make it anew with the fields that "
            "validation/statements.py names."
        ) from None
    if problem := _subject_problem(made):
        raise EvidenceError(f"a {kind} statement cannot be used: {problem}. It binds nothing. Make it anew with the sha256 it is about.")


def _subject_problem(made: Statement) -> str:
    """Why the subjects do not fit the predicate; "" when they do."""
    predicate, subjects = made.predicate, made.subjects
    wrong = [name for name, sha256 in subjects.items() if not name or not isinstance(sha256, str) or not _DIGEST.fullmatch(sha256)]
    if not subjects or wrong:
        return f"subject {wrong[0]!r} has no sha256" if wrong else "it has no subject"
    if (named := _SUBJECT_OF.get(made.predicate_type)) is not None:
        return "" if subjects.get(named) == predicate[named] else f"its subject {named!r} is not the {named} that its predicate names"
    if not predicate["version"]:
        return "a promotion names no version" if predicate["decision"] == "promoted" else ""
    name = model_subject(predicate["model"], predicate["version"])
    return "" if name in subjects else f"it is about {name}, which is not among its subjects ({', '.join(subjects)})"
