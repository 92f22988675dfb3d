"""From verdicts to a decision that is signed and written down before anything is done about it."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from flows.clock import utc_now
from flows.evidence import verdict_of
from flows.people import people_of, request_approval
from flows.reporting import build_report, keep_report
from flows.under_way import Release
from infra.journal import Journal
from infra.pointer import Pointer, ServingKind, admission, read_pointer
from infra.report import GateLine, with_waivers
from validation.decision import ReleaseDecision, decide
from validation.policy import GATES
from validation.statements import DECISION, model_subject
from validation.verdict import GateVerdict, inconclusive
from validation.waivers import People, standing

PERSON = ("approval", "waiver")  # records of what people said: each calls for deciding anew

Ask = Callable[[Release, People], object]  # asks a person, and writes down what was said; where nobody can be asked, nothing


def nobody_asked(_release: Release, _people: People) -> None:
    """Where no form can be shown: the release is held, with the command to type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """A decision as its journal record has it, with all that is needed to make it true."""

    decision: ReleaseDecision
    attestation: str  # of the signed statement; "" when it puts nothing in service
    report: str  # sha256 of the kept report
    pointer: Pointer | None  # to put in force; None: what serves stays
    expected: str | None  # etag that the pointer has to have for that
    candidate: dict[str, str]  # run_id, version, weights and state digests; empty when there is none
    heard: int = 0  # how many waivers and answers stood in the journal when it was made

    @classmethod
    def of(cls, payload: dict[str, Any]) -> "Decided":
        """Read back from the journal."""
        given = payload["decision"]
        decision = ReleaseDecision(**{**given, "conditions": tuple(given.get("conditions", ()))})
        pointer = Pointer(**payload["pointer"]) if payload["pointer"] else None
        return cls(**{**payload, "decision": decision, "pointer": pointer})


def record_decision(release: Release, started_at: str, *, ask: Ask) -> Decided:
    """Decide on evidence read back and verified; sign; keep the report; write the `decision` record."""
    lines = [release.lines[gate] for gate in GATES if gate in release.lines]
    verdicts = [verdict_of(release.store, line.evidence_sha256)[0] for line in lines]
    heard, people = words_said(release.journal), people_now(release)
    decision = decide_on(release, verdicts, people)
    if waits(release, verdicts, people):
        request_approval(release.journal, people.basis, release.plan.policy)
        ask(release, people)
        heard, people = words_said(release.journal), people_now(release)
        decision = decide_on(release, verdicts, people)
    decision = unless_overtaken(release, decision)
    signed = _signed(release, decision, lines, people)
    report = build_report(release, with_waivers(lines, people.counting), decision, started_at, people.approval)
    decided = Decided(
        decision=decision, attestation=signed, report=keep_report(release.store, report), expected=release.etag,
        pointer=pointer_after(release, decision, signed), candidate=_candidate_of(release), heard=heard,
    )  # fmt: skip
    entry = release.journal.append("decision", asdict(decided), time_utc=utc_now())
    if words_said(release.journal, before=entry.sequence) > heard:  # a person spoke meanwhile: nothing was done about it yet
        return record_decision(release, started_at, ask=ask)
    return decided


def words_said(journal: Journal, *, before: int = 1_000_000) -> int:
    """How many waivers and answers of people stand in a journal."""
    return sum(entry.kind in PERSON for entry in journal.refreshed() if entry.sequence < before)


def people_now(release: Release) -> People:
    """What people said about this release as it stands."""
    people = people_of(release.journal, release.notary, release.plan.policy, now=utc_now())
    pointer, _ = read_pointer(release.store, release.plan.model)
    return replace(people, serving_kind=pointer.serving_kind, serving_version=pointer.serving_version) if pointer else people


def waits(release: Release, verdicts: Sequence[GateVerdict], people: People) -> bool:
    """Whether nothing but a person's yes is missing."""
    unasked = replace(people, policy=people.policy.model_copy(update={"approval": False}), approval=None)
    would_serve = decide_on(release, verdicts, unasked).decision == "promoted"
    return would_serve and standing(people).state in ("waiting", "expired")


def decide_on(release: Release, verdicts: Sequence[GateVerdict], people: People | None = None) -> ReleaseDecision:
    """Decide; the candidate of a drill may never serve, even if every gate were blind to its defect."""
    required, version = release.plan.policy.required, release.candidate.version if release.candidate else ""
    fallbacks = release.fallbacks
    decision = decide(verdicts=verdicts, required=required, fallbacks=fallbacks, candidate_version=version, people=people)
    drill = release.plan.request.drill
    if not drill or decision.decision != "promoted":
        return decision
    reason = f"no required gate refused the candidate of drill '{drill}', which may never serve"
    blind = inconclusive("drill", reason=reason, action="find out why the planted regression was missed")
    return decide(verdicts=[*verdicts, blind], required=[*required, "drill"], fallbacks=fallbacks, candidate_version=version)


def unless_overtaken(release: Release, decision: ReleaseDecision) -> ReleaseDecision:
    """Leave alone what another release put in service: this one's candidate was never compared with it.

    Nor does a candidate that served before come back by holding one of its old gates again: going back is an act of its own.
    """
    now, etag = read_pointer(release.store, release.plan.model)
    if now is None:
        return decision
    version = decision.serving_version
    superseded = decision.decision == "promoted" and version != now.serving_version and _was_promoted(release.journal, version)
    if etag == release.etag and not superseded:
        return decision
    kind: ServingKind = "baseline" if now.serving_kind == "baseline" else "last_known_good"
    if decision.decision != "promoted":
        return replace(decision, serving_kind=kind, serving_version=now.serving_version)
    what = f"candidate version {version} served before and was replaced" if superseded else "what serves changed meanwhile"
    return held_by(decision, now, what)


def held_by(decision: ReleaseDecision, now: Pointer, what: str) -> ReleaseDecision:
    """The decision of a release that another one overtook: it says by whom."""
    return replace(
        decision,
        decision="held",
        serving_kind="baseline" if now.serving_kind == "baseline" else "last_known_good",
        serving_version=now.serving_version,
        reason=f"every required gate passes, but {what}: version {now.serving_version} serves since release {now.release_id}",
        action="release again, so that the candidate is compared with what serves now",
    )


def pointer_after(release: Release, decision: ReleaseDecision, signed: str) -> Pointer | None:
    """The pointer that a decision asks for; None when what serves stays. Args: signed, the decision's statement."""
    pointer, _ = read_pointer(release.store, release.plan.model)
    if pointer is None or decision.decision == "held" or decision.serving_version == "":
        return None
    moved = replace(pointer, serving_version=decision.serving_version, release_id=release.plan.release_id, sequence=pointer.sequence + 1)
    if decision.serving_version == pointer.serving_version:  # held again: it serves by the word that was said last, or on as it did
        return replace(moved, serving_kind="candidate", attestation=signed) if decision.decision == "promoted" else None
    if decision.decision == "promoted":
        good = pointer.serving_version if pointer.serving_kind != "baseline" else ""
        return replace(moved, serving_kind="candidate", last_known_good=good, attestation=signed)
    kind: ServingKind = "baseline" if decision.serving_kind == "baseline" else "last_known_good"
    return replace(moved, serving_kind=kind, attestation=admission(release.store, pointer.model, decision.serving_version))


def _signed(release: Release, decision: ReleaseDecision, lines: Sequence[GateLine], people: People) -> str:
    plan, candidate = release.plan, release.candidate
    gates = {
        line.verdict.gate: {
            "evidence": line.evidence_sha256, "attestation": release.attestations[line.verdict.gate], "outcome": line.verdict.outcome,
        }
        for line in lines
    }  # fmt: skip
    said = {
        "release_id": plan.release_id, "model": plan.model, "version": candidate.version if candidate else "",
        "decision": decision.decision, "reason": decision.reason, "digests": plan.digests, "gates": gates,
        "required": list(plan.policy.required), "waivers": [waiver.attestation for waiver in people.counting],
        "approval": people.approval.attestation if people.approval else "", "made_at": people.now,
    }  # fmt: skip
    about = {model_subject(plan.model, candidate.version): candidate.files_sha256, "weights": candidate.weights_sha256} if candidate else {}
    return release.notary.attest(DECISION, about, said)


def _candidate_of(release: Release) -> dict[str, str]:
    found = release.candidate
    if found is None:
        return {}
    weights, state = found.weights_sha256, found.state_sha256
    return {"run_id": found.run_id, "version": found.version, "weights": weights, "state": state, "files": found.files_sha256}


def _was_promoted(journal: Journal, version: str) -> bool:
    decided = [entry.payload for entry in journal.refreshed() if entry.kind == "decided"]
    return any(item["decision"] == "promoted" and item["serving"]["version"] == version for item in decided)
