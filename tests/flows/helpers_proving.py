"""Releases as signed records, made without training: every gate's evidence and statement, what people said, a decision."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.evidence import keep_gate_evidence
from infra.attestations import Notary, open_notary
from infra.journal import Journal
from infra.settings import Settings, load_settings
from infra.store import ObjectStore, evidence_key, open_store
from validation.canonical import digest
from validation.policy import GATES, parse_policy
from validation.statements import APPROVAL, BASELINE, DECISION, GATE, ROLLBACK, WAIVER, model_subject
from validation.verdict import Control, GateVerdict, Outcome
from validation.waivers import approval_basis

RELEASE = "flights-20260131-181542-3f9c"
MODEL = "flights"
EARLIER, NOW, SOON, LATER = (f"2026-01-31T18:{minute}:42+00:00" for minute in (10, 15, 16, 30))
FILES, WEIGHTS = "f" * 64, "8" * 64
PASSED, FAILED, UNSURE = Outcome.PASS, Outcome.FAIL, Outcome.INCONCLUSIVE


@dataclass
class Case:
    """One release's store, notary and journal, and the gates that it held."""

    settings: Settings
    store: ObjectStore
    notary: Notary
    journal: Journal
    policy_text: str = ""
    links: dict[str, dict[str, str]] = field(default_factory=dict)

    @property
    def digests(self) -> dict[str, str]:
        """What binds the release."""
        policy = parse_policy(self.policy_text or None)
        return {"code": "c", "data": "d", "policy": digest(policy.model_dump(mode="json"))}

    def hold(self, gate: str, outcome: Outcome = PASSED, /, **signed: Any) -> dict[str, str]:
        """Hold a gate. Args: signed, what its statement says unlike its evidence; "caught", whether its control was."""
        control = Control(planted="a defect", expected="check", caught=bool(signed.pop("caught", True)))
        verdict = GateVerdict(gate=gate, outcome=outcome, reason=f"{gate} said so", action="mend it", control=control)
        digests = signed.pop("bound", {"code": gate, "data": "d"})
        evidence = keep_gate_evidence(
            self.store, verdict, None, release_id=signed.pop("evidence_of", RELEASE), attempt=1, digests=digests, made_at=EARLIER,
        )  # fmt: skip
        subjects = {"evidence": evidence} | ({"weights": signed.pop("weights", WEIGHTS)} if gate == "scaling" else {})
        said = {"release_id": RELEASE, "gate": gate, "attempt": 1, "outcome": outcome, "evidence": evidence, "digests": digests}
        attestation = self.notary.attest(GATE, subjects, {**said, "made_at": EARLIER, **signed})
        self.links[gate] = {"evidence": evidence, "attestation": attestation, "outcome": outcome.value}
        self.journal.append("gate", {"gate": gate, "attempt": 1, "reason": "", **self.links[gate]}, time_utc=EARLIER)
        return self.links[gate]

    def waive(self, gate: str, *, made_at: str = EARLIER, expires_at: str = LATER, **changed: str) -> str:
        """Waive a gate's evidence; returns the statement."""
        evidence = self.links[gate]["evidence"]
        said = {"release_id": RELEASE, "gate": gate, "by": "Ada", "reason": "known", "made_at": made_at, "expires_at": expires_at}
        sha256 = self.notary.attest(WAIVER, {"evidence": evidence}, {**said, "evidence": evidence, **changed})
        self.journal.append("waiver", {"attestation": sha256}, time_utc=made_at)
        return sha256

    def answer(self, waivers: tuple[str, ...] = (), *, approved: bool = True, weights: str = WEIGHTS, **changed: str) -> str:
        """Let a person answer for the release as it stands; returns the statement."""
        basis = approval_basis(release_id=RELEASE, weights=weights, gates=self.links, waivers=waivers)
        said = {"release_id": RELEASE, "by": "Ada", "reason": "read it", "approved": approved, "requested_at": EARLIER, "made_at": EARLIER}
        sha256 = self.notary.attest(APPROVAL, {"basis": basis}, {**said, "expires_at": LATER, "basis": basis, **changed})
        self.journal.append("approval", {"attestation": sha256}, time_utc=EARLIER)
        return sha256

    def decide(self, decision: str = "promoted", **changed: Any) -> str:
        """Sign a decision over the gates that were held and write it down; returns the statement."""
        version = changed.pop("version", "2")
        said: dict[str, Any] = {
            "release_id": RELEASE, "model": MODEL, "version": version, "decision": decision, "reason": "as the gates say",
            "digests": self.digests, "gates": self.links, "required": list(GATES), "waivers": [], "approval": "", "made_at": NOW,
        }  # fmt: skip
        subjects = {model_subject(MODEL, version): FILES} if version else {}
        sha256 = self.notary.attest(DECISION, changed.pop("subjects", subjects), {**said, **changed})
        self.journal.append("decision", {"decision": {"decision": decision}, "attestation": sha256}, time_utc=NOW)
        return sha256

    def baseline(self, version: str = "1", files: str = FILES) -> str:
        """Sign for a baseline."""
        said = {"release_id": RELEASE, "model": MODEL, "version": version, "digests": {}, "made_at": EARLIER}
        return self.notary.attest(BASELINE, {model_subject(MODEL, version): files}, said)

    def roll_back(self, admission: str, **changed: str) -> str:
        """Sign a rollback to the version that `admission` is about; returns the statement."""
        said = {
            "act_id": "flights-20260201-101010-0b0b", "model": MODEL, "version": "2", "kind": "last_known_good", "from_version": "3",
            "reason": "worse", "by": "Ada", "admission": admission, "made_at": LATER, **changed,
        }  # fmt: skip
        return self.notary.attest(ROLLBACK, {model_subject(MODEL, said["version"]): FILES}, said)


def release(folder: Path, *, policy: str = "", drill: str = "", outcomes: Mapping[str, Outcome] | None = None) -> Case:
    """A release that held every gate; all pass unless said otherwise."""
    settings = load_settings(home=folder / "home", store=str(folder / "home" / "store"))
    store = open_store(settings)
    case = Case(settings, store, open_notary(store, settings), Journal(store, RELEASE), policy)
    request = {"recipe": "flights", "policy_text": policy, "world_sizes": [], "drill": drill}
    case.journal.append("started", {"request": request, "model": MODEL}, time_utc=EARLIER)
    for gate in GATES:
        case.hold(gate, (outcomes or {}).get(gate, PASSED))
    return case


def alter(store: ObjectStore, sha256: str, old: bytes, new: bytes) -> None:
    """Change bytes of kept evidence by hand."""
    body, etag = store.get_with_etag(evidence_key(sha256))
    assert old in body
    store.replace(evidence_key(sha256), body.replace(old, new), etag)
