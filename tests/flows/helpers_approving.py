"""A release's journal as far as a person is asked: every gate signed, one of them inconclusive, a candidate."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flows.clock import utc_now
from infra.attestations import Notary, open_notary
from infra.journal import Journal
from infra.settings import Settings, load_settings
from infra.store import ObjectStore, open_store, put_evidence
from validation.policy import GATES, Policy, parse_policy
from validation.statements import GATE
from validation.verdict import GateVerdict, Outcome

RELEASE_ID = "digits-20260310-110000-ab12"
ASKS = "decision: {approval: true}"


def own_settings(folder: Path) -> Settings:
    """Settings of a home of the test's own."""
    return load_settings(home=folder / "home", store=str(folder / "home" / "store"))


def held(journal: Journal, store: ObjectStore, notary: Notary, gate: str, outcome: Outcome = Outcome.PASS, **document: Any) -> str:
    """One attempt at a gate, signed and journalled; returns the sha256 of its evidence."""
    now, attempt = utc_now(), 1 + sum(entry.kind == "gate" and entry.payload["gate"] == gate for entry in journal.records())
    verdict = GateVerdict(gate=gate, outcome=outcome, reason=f"{gate} said so", action="")
    own = {"release_id": journal.release_id, "gate": gate, "attempt": attempt}
    sha256 = put_evidence(store, {"kind": "gate", **own, "verdict": verdict, **document})
    predicate = {**own, "outcome": outcome, "evidence": sha256, "digests": {}, "made_at": now}
    attestation = notary.attest(GATE, {"evidence": sha256}, predicate)
    journal.append("gate", {**own, "outcome": outcome, "reason": "", "evidence": sha256, "attestation": attestation}, time_utc=now)
    return sha256


def release_of(
    settings: Settings, *, policy: str = "", outcomes: Mapping[str, Outcome] | None = None, drill: str = "", release_id: str = RELEASE_ID
) -> tuple[Journal, Notary, Policy]:
    """A release that held every gate; scaling is inconclusive unless said otherwise."""
    store = open_store(settings)
    notary, journal = open_notary(store, settings), Journal(store, release_id)
    request = {"recipe": "digits:recipe", "policy_text": policy, "world_sizes": [], "drill": drill}
    journal.append("started", {"request": request, "model": "digits", "digests": {}}, time_utc=utc_now())
    for gate in GATES:
        held(journal, store, notary, gate, (outcomes or {"scaling": Outcome.INCONCLUSIVE}).get(gate, Outcome.PASS))
    journal.append("candidate", {"version": "2", "weights_sha256": "8" * 64}, time_utc=utc_now())
    return journal, notary, parse_policy(policy or None)
