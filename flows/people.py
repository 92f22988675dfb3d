"""What people said about a release, as its journal has it, and how it is asked for and written down.

approval_requested   what a person is asked to approve (basis), once a basis
approval, waiver     the sha256 of a signed statement; name and reason stand beside it for people, only the statement counts
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from flows.clock import utc_now
from infra.attestations import Notary
from infra.journal import Entry, Journal
from validation.errors import ConfigError, EvidenceError
from validation.policy import Policy
from validation.statements import APPROVAL, WAIVER
from validation.waivers import Approval, People, Waiver, approval_basis, human_review_s, parse_approval, parse_waiver

NAME_CHARS, REASON_CHARS = 120, 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A person's words, checked."""

    by: str
    reason: str
    approved: bool
    days: float  # how long a yes counts
    made_at: str


def people_of(journal: Journal, notary: Notary, policy: Policy, *, now: str) -> People:
    """Everything that people said about a release, ready for `decide`; signatures are verified.

    Raises: EvidenceError when a statement was altered, is signed by nobody who counts, or is about another release.
    """
    entries = journal.refreshed()
    waivers = _waivers(journal, notary, entries)
    basis = _basis(journal, entries, waivers)
    return People(
        policy=policy.decision, now=now, release_id=journal.release_id, basis=basis, waivers=waivers,
        evidence={gate: item["evidence"] for gate, item in judged(entries).items()},
        approval=_approval(journal, notary, entries, basis), requested_at=_requested_at(entries, basis),
    )  # fmt: skip


def basis_of(journal: Journal, notary: Notary) -> str:
    """What a yes binds as the journal stands: each gate's latest evidence, the latest candidate, waivers of that evidence."""
    entries = journal.refreshed()
    return _basis(journal, entries, _waivers(journal, notary, entries))


def waivers_of(journal: Journal, notary: Notary) -> tuple[Waiver, ...]:
    """Every waiver of a release, oldest first, signatures verified; whether they count is for `validation.waivers` to say."""
    return _waivers(journal, notary, journal.refreshed())


def approval_of(journal: Journal, notary: Notary, basis: str) -> Approval | None:
    """The latest yes or no to this basis, signature verified; None when nobody said anything about it."""
    return _approval(journal, notary, journal.refreshed(), basis)


def request_approval(journal: Journal, basis: str, policy: Policy) -> str:
    """Ask for a person, once a basis; anew when nobody answered for as long as the policy says. Returns since when somebody is asked."""
    asked, now, days = _requested_at(journal.refreshed(), basis), utc_now(), policy.decision.approval_days.value
    if asked and now < days_later(asked, days):
        return asked
    journal.append("approval_requested", {"basis": basis, "requested_at": now, "lapses_at": days_later(now, days)}, time_utc=now)
    return now


def record_approval(journal: Journal, notary: Notary, basis: str, answer: Answer) -> Approval:
    """Sign a person's yes or no and write it down. Raises ConfigError when nobody asked about this basis."""
    asked = _requested_at(journal.refreshed(), basis)
    if not asked:
        raise ConfigError(
            f"nobody asked about release {journal.release_id} as it stands, so nothing was recorded. `seatrial finish "
            f"{journal.release_id}` decides as it stands, and asks."
        )
    predicate = {
        "release_id": journal.release_id, "by": answer.by, "reason": answer.reason, "approved": answer.approved, "requested_at": asked,
        "made_at": answer.made_at, "expires_at": days_later(answer.made_at, answer.days), "basis": basis,
    }  # fmt: skip
    said = parse_approval(predicate, notary.attest(APPROVAL, {"basis": basis}, predicate))
    words = {"by": said.by, "reason": said.reason, "approved": said.approved, "human_review_s": human_review_s(said)}
    journal.append("approval", {"attestation": said.attestation, **words}, time_utc=utc_now())
    return said


def record_waiver(journal: Journal, notary: Notary, gate: str, evidence: str, answer: Answer) -> Waiver:
    """Sign the waiver of one gate's evidence and write it down."""
    predicate = {
        "release_id": journal.release_id, "gate": gate, "by": answer.by, "reason": answer.reason, "made_at": answer.made_at,
        "expires_at": days_later(answer.made_at, answer.days), "evidence": evidence,
    }  # fmt: skip
    said = parse_waiver(predicate, notary.attest(WAIVER, {"evidence": evidence}, predicate))
    words = {"gate": gate, "by": said.by, "reason": said.reason}
    journal.append("waiver", {"attestation": said.attestation, **words}, time_utc=utc_now())
    return said


def checked_answer(by: str, reason: str, *, approved: bool, days: float, made_at: str) -> Answer:
    """A person's words, each on one line. Raises ConfigError when there is no name or no reason."""
    name, why = one_line("name", by, NAME_CHARS), one_line("reason", reason, REASON_CHARS)
    return Answer(by=name, reason=why, approved=approved, days=days, made_at=made_at)


def one_line(what: str, text: str, limit: int) -> str:
    """A person's words on one line. Raises ConfigError when there are none, too many, or some that cannot be printed."""
    shown_text = " ".join(str(text).split())
    if not shown_text or len(shown_text) > limit or not shown_text.isprintable():
        found = "is empty" if not shown_text else f"has {len(shown_text)} characters, of which all have to be printable"
        raise ConfigError(
            f"the {what} {found}, so nothing was recorded. A release names who let it through and why: give a {what} of 1 to {limit} "
            "characters."
        )
    return shown_text


def judged(entries: Sequence[Entry]) -> dict[str, dict[str, str]]:
    """Gate -> sha256 of evidence and attestation of its latest attempt; an attempt from before attestations has "" for one."""
    found = {entry.payload["gate"]: entry.payload for entry in entries if entry.kind == "gate"}
    return {gate: {"evidence": str(item["evidence"]), "attestation": str(item.get("attestation", ""))} for gate, item in found.items()}


def days_later(iso: str, days: float) -> str:
    """A time so many days after another one."""
    return (datetime.fromisoformat(iso) + timedelta(days=days)).isoformat(timespec="seconds")


def _basis(journal: Journal, entries: Sequence[Entry], waivers: Sequence[Waiver]) -> str:
    gates = judged(entries)
    weights = [str(entry.payload["weights_sha256"]) for entry in entries if entry.kind == "candidate"]
    waived = [item.attestation for item in waivers if item.evidence == gates.get(item.gate, {}).get("evidence")]
    return approval_basis(release_id=journal.release_id, weights=weights[-1] if weights else "", gates=gates, waivers=waived)


def _waivers(journal: Journal, notary: Notary, entries: Sequence[Entry]) -> tuple[Waiver, ...]:
    found = dict.fromkeys(str(entry.payload["attestation"]) for entry in entries if entry.kind == "waiver")
    return tuple(parse_waiver(_own(journal, notary, sha256, WAIVER), sha256) for sha256 in found)


def _approval(journal: Journal, notary: Notary, entries: Sequence[Entry], basis: str) -> Approval | None:
    for entry in reversed(entries):
        if entry.kind == "approval":
            sha256 = str(entry.payload["attestation"])
            said = parse_approval(_own(journal, notary, sha256, APPROVAL), sha256)
            if said.basis == basis:
                return said
    return None


def _requested_at(entries: Sequence[Entry], basis: str) -> str:
    asked = [entry for entry in entries if entry.kind == "approval_requested" and entry.payload["basis"] == basis]
    return str(asked[-1].payload["requested_at"]) if asked else ""


def _own(journal: Journal, notary: Notary, sha256: str, predicate_type: str) -> Mapping[str, object]:
    """A signed statement that is about this very release."""
    predicate = notary.read(sha256, predicate_type).predicate
    if predicate["release_id"] != journal.release_id:
        raise EvidenceError(
            f"statement {sha256[:12]}… in the journal of release {journal.release_id} is about release {predicate['release_id']}. It was "
            "copied here and counts for nothing. Find out who can write to the store, and release again."
        )
    return predicate
