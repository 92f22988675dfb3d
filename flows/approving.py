"""What a named person says about a release: `seatrial approve` and `seatrial waive`. Checked, signed, journalled, then decided on."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flows.clock import utc_now
from flows.people import checked_answer, days_later, judged, people_of, record_approval, record_waiver
from infra.attestations import Notary, open_notary
from infra.journal import Entry, Journal
from infra.settings import Settings
from infra.store import ObjectStore, get_evidence, open_store
from validation.errors import ConfigError, ConflictError, EvidenceError
from validation.policy import GATES, Policy, parse_policy
from validation.statements import GATE
from validation.verdict import Outcome
from validation.waivers import People, human_review_s, shown

SHORTEST_DAYS = 60 / 86_400  # records have whole seconds

Say = Callable[[str], Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """A release that can still be talked about."""

    store: ObjectStore
    journal: Journal
    notary: Notary
    policy: Policy


def approve(settings: Settings, *, say: Say, release_id: str, by: str, reason: str, refuse: bool = False) -> dict[str, Any]:
    """Say yes, or no, to a release that waits for a person; then decide it again."""
    case, now = _case(settings, release_id), utc_now()
    days = case.policy.decision.approval_days.value
    answer = checked_answer(by, reason, approved=not refuse, days=days, made_at=now)
    people = _asked(case, now)
    said = record_approval(case.journal, case.notary, people.basis, answer)
    say(f"{release_id}: {'approved' if said.approved else 'refused'} by {said.by} after {human_review_s(said):.0f} s, signed as "
        f"{said.attestation[:12]}… ({case.notary.signs_as})")  # fmt: skip
    document = {
        "release_id": release_id, "said": "approved" if said.approved else "refused", "by": said.by, "reason": said.reason,
        "made_at": said.made_at, "expires_at": said.expires_at if said.approved else "", "basis": said.basis,
        "attestation": said.attestation, "human_review_s": human_review_s(said),
    }  # fmt: skip
    decided = _decided_again(settings, say, release_id)
    return {**document, "decision": decided, "next": _next(case, decided), "ok": refuse or decided is None or bool(decided["ok"])}


def waive(settings: Settings, *, say: Say, gate: str, release_id: str, by: str, reason: str, days: float) -> dict[str, Any]:
    """Let one gate that did not pass count as a conditional pass, for a while; then decide the release again."""
    if gate not in GATES:
        raise ConfigError(f"there is no gate '{gate}', so nothing was waived. Choose one of: {', '.join(GATES)}.")
    case, now = _case(settings, release_id), utc_now()
    answer = checked_answer(by, reason, approved=True, days=_days(case.policy, days), made_at=now)
    evidence, verdict = _waivable(case, gate)
    said = record_waiver(case.journal, case.notary, gate, evidence, answer)
    say(
        f"{release_id}: {gate} waived by {said.by} until {shown(said.expires_at)}, signed as {said.attestation[:12]}… "
        f"({case.notary.signs_as})"
    )
    decided = _decided_again(settings, say, release_id)
    document = {
        "release_id": release_id, "gate": gate, "outcome": str(verdict["outcome"]), "gate_said": str(verdict["reason"]), "by": said.by,
        "reason": said.reason, "made_at": said.made_at, "expires_at": said.expires_at, "evidence": evidence,
        "attestation": said.attestation,
    }  # fmt: skip
    return {**document, "decision": decided, "next": _next(case, decided), "ok": decided is None or bool(decided["ok"])}


def lines(document: Mapping[str, Any]) -> list[str]:
    """What `approve` and `waive` did, for people."""
    if "gate" in document:
        first = f"{document['gate']} ({document['outcome']}) is waived by {document['by']} until {shown(document['expires_at'])}."
        return [first, f"It said: {document['gate_said']}", f"next: {document['next']}"]
    until = f", and counts until {shown(document['expires_at'])}" if document["expires_at"] else ""
    return [
        f"{document['release_id']} is {document['said']} by {document['by']}{until}.",
        f"It had waited for a person for {document['human_review_s']:.0f} s.",
        f"next: {document['next']}",
    ]


def _case(settings: Settings, release_id: str) -> _Case:
    """Open a release for a person's word. Raises ConfigError when it is unknown, promoted already or abandoned."""
    store = open_store(settings)
    journal = Journal(store, release_id)
    entries = journal.records()
    if not entries or entries[0].kind != "started":
        raise ConfigError(f"there is no release '{release_id}' in this store, so nothing was recorded. `seatrial show` lists them.")
    if any(entry.kind == "abandoned" for entry in entries):
        raise ConfigError(f"release {release_id} was abandoned, so nobody's word can change it. Release again.")
    if _last_decision(entries) == "promoted":
        raise ConfigError(
            f"release {release_id} is already promoted, so there is nothing to approve or waive. To take it out of service: "
            f"`seatrial rollback {entries[0].payload['model']} --by NAME --reason ...`."
        )
    request = entries[0].payload["request"]
    if request.get("drill"):
        raise ConfigError(
            f"release {release_id} is the drill '{request['drill']}': its candidate is broken on purpose and may never serve, whatever "
            "anybody says. Nothing was recorded."
        )
    return _Case(
        store=store, journal=journal, notary=open_notary(store, settings),
        policy=parse_policy(request.get("policy_text") or None, name="the release's policy"),
    )  # fmt: skip


def _last_decision(entries: Sequence[Entry]) -> str:
    """The last word of a journal on what becomes of its release; "" = none yet."""
    said = [entry.payload["decision"] for entry in entries if entry.kind in ("decision", "decided")]
    return "" if not said else str(said[-1]["decision"] if isinstance(said[-1], Mapping) else said[-1])


def _asked(case: _Case, now: str) -> People:
    """What people said so far, of a release that waits for a person as it stands. Raises ConfigError when it does not."""
    release_id = case.journal.release_id
    if not case.policy.decision.approval:
        raise ConfigError(
            f"the policy of release {release_id} asks for no approval, so nothing was recorded. `seatrial waive` lets a gate pass; "
            "decision.approval: true in a policy file makes the next release wait for a person."
        )
    people = people_of(case.journal, case.notary, case.policy, now=now)
    if not people.requested_at:
        asked = case.journal.latest("approval_requested")
        what = "has not come so far that it waits for a person" if asked is None else "changed since a person was asked"
        last = case.journal.records()[-1].kind
        raise ConfigError(f"release {release_id} {what} (its last record is '{last}'), so nothing was recorded. {_finish(case.journal)}.")
    if not now < days_later(people.requested_at, people.policy.approval_days.value):
        raise ConfigError(
            f"release {release_id} was asked about on {shown(people.requested_at)}, longer ago than the policy's "
            f"{people.policy.approval_days.value:g} days, so nothing was recorded. {_finish(case.journal)}."
        )
    for gate, item in judged(case.journal.records()).items():
        _verified_gate(case, gate, item)
    return people


def _waivable(case: _Case, gate: str) -> tuple[str, Mapping[str, Any]]:
    """sha256 and verdict of the gate's latest evidence, verified. Raises ConfigError when it cannot be waived."""
    release_id, policy = case.journal.release_id, case.policy
    if gate not in policy.decision.waivable:
        raise ConfigError(
            f"{gate} cannot be waived under the policy of release {release_id} (it lets {', '.join(policy.decision.waivable) or 'no gate'} "
            f"be waived). If {gate} did not pass, mend what it says, then `seatrial gate {gate} --release {release_id}`."
        )
    if gate not in policy.required:
        raise ConfigError(f"the policy of release {release_id} does not require {gate}, so there is nothing to waive.")
    item = judged(case.journal.records()).get(gate)
    if item is None:
        raise ConfigError(
            f"{gate} was not held in release {release_id}, and what is missing cannot be waived. Run `seatrial gate {gate} --release "
            f"{release_id}` first."
        )
    verdict = _verified_gate(case, gate, item)
    if verdict["outcome"] == Outcome.PASS:
        raise ConfigError(f"{gate} passed in release {release_id}, so there is nothing to waive.")
    return item["evidence"], verdict


def _verified_gate(case: _Case, gate: str, item: Mapping[str, str]) -> Mapping[str, Any]:
    """The verdict in a gate's evidence, digest and signature verified. Raises EvidenceError when it is not this release's."""
    document = get_evidence(case.store, item["evidence"])
    signed = case.notary.read(item["attestation"], GATE).predicate if item["attestation"] else {"evidence": item["evidence"]}
    if document["release_id"] != case.journal.release_id or document["gate"] != gate or signed["evidence"] != item["evidence"]:
        raise EvidenceError(
            f"the evidence {item['evidence'][:12]}… that release {case.journal.release_id} names for {gate} is of {document['gate']} in "
            f"release {document['release_id']}. Nobody can vouch for it. Run `seatrial gate {gate} --release {case.journal.release_id}`."
        )
    verdict: Mapping[str, Any] = document["verdict"]
    return verdict


def _days(policy: Policy, days: float) -> float:
    limit = policy.decision.waiver_days.value
    if not (math.isfinite(days) and SHORTEST_DAYS <= days <= limit):
        raise ConfigError(
            f"a waiver of {days:g} days is not possible, so nothing was waived. Give --days of at least a minute ({SHORTEST_DAYS:.1g}) and "
            f"at most {limit:g}."
        )
    return days


def _decided_again(settings: Settings, say: Say, release_id: str) -> dict[str, Any] | None:
    """What the release becomes with what was just said; None while another process works on it, which will read it."""
    from flows.finishing import finish  # only an answer that was taken pays for the registry and the workflow engine

    try:
        return finish(settings, say=say, release_id=release_id)
    except ConflictError as error:
        say(f"recorded, but not decided here: {error}")
        return None


def _next(case: _Case, decided: Mapping[str, Any] | None) -> str:
    if decided is None:
        return f"`seatrial finish {case.journal.release_id}`, unless the process that works on it decides with this"
    return str(decided.get("action") or decided.get("reason") or f"`seatrial show {case.journal.release_id}` says what was decided")


def _finish(journal: Journal) -> str:
    return f"`seatrial finish {journal.release_id}` decides as it stands, and asks anew if a person has to be asked"
