"""Why a version may serve, proven from the store alone: signature, gates, waivers, approval, and the decision made once more.

    decision  signature -> each gate: its statement, its evidence, one outcome -> waivers, approval -> decided again
    baseline  signature
    rollback  signature -> the decision or baseline that admitted the version before

The first link that does not hold ends the proof.
"""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from infra.attestations import Attestation, Notary
from infra.journal import Entry, Journal
from infra.store import ObjectStore, get_evidence
from validation.canonical import digest
from validation.decision import decide
from validation.errors import ConfigError, EvidenceError
from validation.policy import GATES, DecisionPolicy, parse_policy
from validation.statements import APPROVAL, BASELINE, DECISION, GATE, ROLLBACK, WAIVER, kind_of, model_subject
from validation.verdict import GateVerdict
from validation.waivers import People, Waiver, approval_basis, parse_approval, parse_waiver, why_not

RESTORE = "Restore the store from a backup and find out who can write to it; until then release again, or roll back to another version"

_VERDICT = TypeAdapter(GateVerdict)
_SAME = ("release_id", "gate", "attempt", "digests")  # facts of a gate that its statement and its evidence both hold


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One step of a proof."""

    name: str
    sha256: str  # of what was looked at; "" when it is no single object
    ok: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """A statement and all that it rests on, every link of it whole."""

    attestation: str
    kind: str  # "decision" | "baseline" | "rollback"
    model: str
    version: str
    release_id: str  # or the act's id
    decision: str  # "promoted", "fell_back", "held"; "" for a statement that is no decision
    files_sha256: str  # of the model's files, as signed; "" when the decision names no version
    signed_by: str
    waivers: tuple[Waiver, ...] = ()
    links: tuple[Link, ...] = ()


def prove(notary: Notary, store: ObjectStore, attestation: str, *, files_sha256: str | None = None) -> Proof:
    """Check a decision, baseline or rollback statement whole.

    Args: files_sha256, of the model's files as they lie in the registry now ("" = they are gone): they have to be the signed ones, and the
    statement one that lets this version serve. None: only what is in the store is checked.
    Raises: EvidenceError that names the first broken link; StoreError when the store cannot be read.
    """
    if not attestation:
        raise _broken("signature", "nothing signed stands behind this version", "Release again, so that its evidence is signed")
    chain = _Chain(notary, store)
    proof = chain.of(attestation)
    if files_sha256 is not None:
        chain.demand_serving(proof, files_sha256)
    return replace(proof, links=tuple(chain.links))


@dataclass
class _Chain:
    notary: Notary
    store: ObjectStore
    links: list[Link] = field(default_factory=list)
    before: str = ""  # prefix of the names of links: a rollback's admission has links of its own

    def of(self, sha256: str, allowed: Sequence[str] = (DECISION, BASELINE, ROLLBACK)) -> Proof:
        """Walk a statement's links, in the order in which they would be doubted."""
        said = self.signed("signature", sha256)
        kind, told = kind_of(said.predicate_type), said.predicate
        self.demand(said.predicate_type in allowed, "signature", f"statement {sha256} is a {kind} statement, which lets nothing serve")
        proof = Proof(
            attestation=sha256, kind=kind, model=told["model"], version=told["version"], signed_by=said.signed_by,
            release_id=told["act_id" if kind == "rollback" else "release_id"], decision=told.get("decision", ""),
            files_sha256=said.subjects.get(model_subject(told["model"], told["version"]), ""),
        )  # fmt: skip
        self.holds("signature", sha256, f"{kind} of {proof.release_id}, signed by {said.signed_by}")
        if said.predicate_type == DECISION:
            return replace(proof, waivers=_Deciding(self, said).walk())
        if said.predicate_type == ROLLBACK:
            return replace(proof, waivers=self._admitted(proof, told["admission"]).waivers)
        return proof

    def demand_serving(self, proof: Proof, files_sha256: str) -> None:
        """Demand that the statement lets its version serve, and that the files are the signed ones."""
        serves = proof.decision in ("", "promoted")
        self.demand(serves, "signature", f"the decision of {proof.release_id} is '{proof.decision}', which puts no candidate in service")
        whose = f"{proof.model} version {proof.version}"
        self.demand(
            bool(files_sha256) and files_sha256 == proof.files_sha256, "model files",
            f"the files of {whose} have sha256 {files_sha256 or 'none (they are gone)'}, signed was {proof.files_sha256}; this is not the "
            "model that was judged", f"Restore its artifacts from a backup, or `seatrial rollback {proof.model}`",
        )  # fmt: skip
        self.holds("model files", files_sha256, f"the files of {whose} are the signed ones")

    def _admitted(self, rollback: Proof, sha256: str) -> Proof:
        """What let a rollback's target serve before, proven the same way."""
        self.before = "admission: "
        admitted = self.of(sha256, (DECISION, BASELINE))
        found = (admitted.model, admitted.version, admitted.files_sha256)
        self.demand(
            found == (rollback.model, rollback.version, rollback.files_sha256), "signature",
            f"the rollback serves {rollback.model} version {rollback.version}, but names the admission of {found[0]} version "
            f"{found[1] or '(none)'}, or of other files",
        )  # fmt: skip
        self.demand(admitted.decision in ("", "promoted"), "signature", f"the decision of {admitted.release_id} promoted nothing")
        self.before = ""
        return admitted

    def signed(self, name: str, sha256: str, predicate_type: str = "") -> Attestation:
        with self.naming(name):
            return self.notary.read(sha256, predicate_type)

    def demand(self, holds: bool, name: str, problem: str, action: str = RESTORE) -> None:
        if not holds:
            raise _broken(f"{self.before}{name}", problem, action)

    def holds(self, name: str, sha256: str, detail: str) -> None:
        self.links.append(Link(name=f"{self.before}{name}", sha256=sha256, ok=True, detail=detail))

    @contextlib.contextmanager
    def naming(self, name: str) -> Iterator[None]:
        try:
            yield
        except (EvidenceError, ConfigError) as error:  # a release id that cannot be one is a ConfigError
            raise EvidenceError(f"the link '{self.before}{name}' is broken: {error}") from None


@dataclass
class _Deciding:
    """The links of a decision."""

    chain: _Chain
    said: Attestation
    weights: set[str] = field(default_factory=set)  # that the gates judged

    def walk(self) -> tuple[Waiver, ...]:
        """Check gates, people and the decision itself; returns the waivers it rests on."""
        chain, told = self.chain, self.said.predicate
        with chain.naming("journal"):
            entries = Journal(chain.store, told["release_id"]).records()
        self.weights |= {self.said.subjects["weights"]} if "weights" in self.said.subjects else set()
        inorder = sorted(told["gates"], key=lambda gate: GATES.index(gate) if gate in GATES else len(GATES))
        verdicts = [self._gate(gate, told["gates"][gate]) for gate in inorder]
        self._weights()
        people = self._people(entries)
        self._again(verdicts, people, drill=_request(entries).get("drill", ""))
        return people.waivers

    def _gate(self, gate: str, link: Mapping[str, str]) -> GateVerdict:
        """One gate: its statement's signature, its evidence's digest, and one outcome in all three places."""
        chain, name = self.chain, f"gate {gate}"
        verdict, said = gate_link(chain.notary, chain.store, gate, link, self.said.predicate["release_id"], naming=chain.naming(name))
        ours = self.said.predicate["digests"].get("data")
        theirs = said.predicate["digests"].get("data", ours)
        chain.demand(theirs == ours, name, f"{gate} judged data {theirs}, but the release is of data {ours}")
        self.weights |= {said.subjects["weights"]} if "weights" in said.subjects else set()
        chain.holds(name, link["evidence"], f"{verdict.outcome}, attempt {said.predicate['attempt']}, signed by {said.signed_by}")
        return verdict

    def _people(self, entries: Sequence[Entry]) -> People:
        told = self.said.predicate
        evidence = {gate: link["evidence"] for gate, link in told["gates"].items()}
        waivers = tuple(parse_waiver(self._word("waiver", sha256, WAIVER), sha256) for sha256 in told["waivers"])
        policy = self._rules(entries, waivers)
        for item in waivers:
            why = why_not(item, evidence=evidence, policy=policy, now=told["made_at"])
            self.chain.demand(not why, "waiver", f"the waiver of {item.gate} by {item.by} did not count when it was decided: {why}")
            self.chain.holds("waiver", item.attestation, f"{item.gate} waived by {item.by} until {item.expires_at}: {item.reason}")
        said = parse_approval(self._word("approval", told["approval"], APPROVAL), told["approval"]) if told["approval"] else None
        if said is not None:
            bases = self._bases(entries)
            self.chain.demand(said.basis in bases, "approval", f"what {said.by} said is about another candidate, evidence or waivers")
            verb = "approved" if said.approved else "refused"
            self.chain.holds("approval", said.attestation, f"{verb} by {said.by} at {said.made_at}: {said.reason}")
        return People(
            policy=policy, now=told["made_at"], release_id=told["release_id"], evidence=evidence, waivers=waivers, approval=said,
            basis=said.basis if said else "",
        )  # fmt: skip

    def _word(self, name: str, sha256: str, predicate_type: str) -> Mapping[str, Any]:
        """What a person signed about this very release."""
        predicate = self.chain.signed(name, sha256, predicate_type).predicate
        about, mine = predicate["release_id"], self.said.predicate["release_id"]
        self.chain.demand(about == mine, name, f"statement {sha256[:12]}… is about release {about}, not {mine}: it was copied here")
        return predicate

    def _bases(self, entries: Sequence[Entry]) -> set[str]:
        """What a person may have been asked about, so that the answer is about this decision.

        Waivers that had expired already were shown too, though the decision does not rest on them: the journal names those.
        """
        told = self.said.predicate
        weights = self._weights()
        earlier: list[str] = []
        for entry in entries:
            if entry.kind == "candidate" and not weights:
                weights = str(entry.payload["weights_sha256"])
            if entry.kind == "waiver":
                found = self.chain.signed("waiver", entry.payload["attestation"], WAIVER).predicate
                if found["evidence"] == told["gates"].get(found["gate"], {}).get("evidence"):
                    earlier.append(str(entry.payload["attestation"]))
            if entry.kind == "approval" and entry.payload["attestation"] == told["approval"]:
                break
        about = {"release_id": told["release_id"], "weights": weights, "gates": told["gates"]}
        return {approval_basis(**about, waivers=told["waivers"]), approval_basis(**about, waivers=tuple(dict.fromkeys(earlier)))}

    def _weights(self) -> str:
        """The weights that every gate judged, as signed; "" when no gate judged a candidate."""
        found = sorted(self.weights)
        self.chain.demand(len(found) < 2, "gates", f"the gates judged {len(found)} different candidates: {', '.join(found)}")
        return found[0] if found else ""

    def _rules(self, entries: Sequence[Entry], waivers: Sequence[Waiver]) -> DecisionPolicy:
        """The policy of then, if the release's request still gives it; else what the statement says was asked for."""
        told = self.said.predicate
        text = _request(entries).get("policy_text") or None
        try:
            policy = parse_policy(text, name="the release's policy")
        except ConfigError:  # written for an older version
            policy = parse_policy()
        if digest(policy.model_dump(mode="json")) == told["digests"].get("policy"):
            same = list(policy.required) == list(told["required"])
            self.chain.demand(same, "decision", f"the policy requires {', '.join(policy.required)}, the decision {told['required']}")
            return policy.decision
        unlimited = policy.decision.approval_days.model_copy(update={"value": math.inf})
        waived = tuple(item.gate for item in waivers)
        asked = {"approval": bool(told["approval"]), "approval_days": unlimited, "waivable": waived, "waiver_days": unlimited}
        return policy.decision.model_copy(update=asked)

    def _again(self, verdicts: Sequence[GateVerdict], people: People, *, drill: str) -> None:
        """Decide once more. Whatever was refused may have been refused for more than the gates: another release, a fallback, a drill."""
        told, chain = self.said.predicate, self.chain
        again = decide(verdicts=verdicts, required=told["required"], fallbacks=(), candidate_version=told["version"], people=people)
        recorded = told["decision"]
        if recorded == "promoted":
            chain.demand(again.decision == "promoted", "decision", f"'promoted' is recorded, but the evidence says: {again.reason}")
            chain.demand(not drill, "decision", f"'promoted' is recorded, but this is the drill '{drill}', which may never serve")
        elif recorded == "fell_back" and not drill:
            chain.demand(again.decision != "promoted", "decision", f"'fell_back' is recorded, but the evidence says: {again.reason}")
        chain.holds("decision", self.said.sha256, f"made again from the evidence: {recorded}: {told['reason']}")


def gate_link(
    notary: Notary,
    store: ObjectStore,
    gate: str,
    link: Mapping[str, Any],
    release_id: str,
    *,
    naming: contextlib.AbstractContextManager[None],
) -> tuple[GateVerdict, Attestation]:
    """A gate's verdict and its signed statement, which agree with each other and with `link` {evidence, attestation, outcome}.

    Raises: EvidenceError under the name that `naming` gives.
    """
    with naming:
        said = notary.read(str(link["attestation"]), GATE)
        document = get_evidence(store, str(link["evidence"]))
        told = dict(said.predicate)
        if (told["release_id"], told["gate"], told["evidence"]) != (release_id, gate, link["evidence"]):
            raise _wrong(
                f"the statement is about {told['gate']} of {told['release_id']} and evidence {told['evidence'][:12]}…, not this one"
            )
        if other := [name for name in _SAME if document.get(name) != told[name]]:
            raise _wrong(f"{', '.join(other)} of its evidence differ from what was signed")
        try:
            verdict = _VERDICT.validate_python(document.get("verdict"))
        except ValidationError as error:
            raise _wrong(f"its evidence holds no verdict ({error.error_count()} fields are wrong)") from None
        outcomes = {"decision": str(link["outcome"]), "statement": told["outcome"], "evidence": str(verdict.outcome)}
        if verdict.gate != gate or len(set(outcomes.values())) != 1:
            raise _wrong(f"its outcome is {', '.join(f'{value} in the {name}' for name, value in outcomes.items())}, of {verdict.gate}")
        return verdict, said


def _request(entries: Sequence[Entry]) -> Mapping[str, Any]:
    found = entries[0].payload.get("request") if entries else None
    return found if isinstance(found, Mapping) else {}


def _wrong(problem: str) -> EvidenceError:
    return EvidenceError(f"{problem}. It says nothing for this release. {RESTORE}.")


def _broken(name: str, problem: str, action: str) -> EvidenceError:
    return EvidenceError(f"the link '{name}' is broken: {problem}. The statement does not let this version serve. {action}.")
