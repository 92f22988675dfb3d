"""Stores full of releases, written through the real journal."""

from typing import Any

from infra.journal import Journal
from infra.store import ObjectStore, put_evidence
from validation.policy import GATES

EFFECTS = ("register", "publish", "promote", "mirror")


def gate_document(gate: str, *, seconds: float = 10.0, attempt: int = 1, checks: int = 0) -> dict[str, Any]:
    """A gate's evidence, as far as histories and costs read it."""
    filled = [{"name": f"check {n}", "x": "y" * 300} for n in range(checks)]
    verdict = {"gate": gate, "outcome": "pass", "reason": "as it should be", "checks": filled}
    return {
        "kind": "gate", "gate": gate, "attempt": attempt, "verdict": verdict, "records": None, "seconds": seconds,
        "worker_seconds": 2 * seconds,
    }  # fmt: skip


def started(model: str = "boat", **more: Any) -> dict[str, Any]:
    """The payload of a release's first record."""
    request = {"recipe": f"{model}:recipe", "policy_text": "", "world_sizes": [], "drill": ""}
    return {"request": request, "model": model, "machine": {"devices": 2}, **more}


def decided(release_id: str, gates: list[dict[str, Any]], model: str = "boat") -> dict[str, Any]:
    """The payload of a release's last record: the document of `release --json`."""
    return {
        "release_id": release_id, "recipe": f"{model}:recipe", "decision": "promoted", "serving": {"kind": "candidate", "version": "2"},
        "reason": "six of six gates pass", "gates": gates, "approval": None, "human_review_s": None,
    }  # fmt: skip


def whole_release(store: ObjectStore, release_id: str, *, day: str, checks: int = 0) -> None:
    """A promoted release of 22 records: gates, candidate, decision, effects with intent and done, the document."""
    journal, lines = Journal(store, release_id), []

    def write(kind: str, payload: Any, at: str) -> None:
        journal.append(kind, payload, time_utc=f"{day}T{at}+00:00")

    write("started", started(), "10:00:00")
    for number, gate in enumerate(GATES):
        document = gate_document(gate, checks=checks)
        sha256 = put_evidence(store, {**document, "release_id": release_id})
        write("gate", {"gate": gate, "attempt": 1, "outcome": "pass", "reason": "as it should be", "evidence": sha256}, f"10:0{number}:10")
        lines.append({"name": gate, "sha256": sha256, "outcome": "pass", "attempt": 1, "checks": document["verdict"]["checks"]})
        if gate == "kill_and_resume":
            write("candidate", {"version": "2", "run_id": "r", "worker_seconds": 40.0, "weights_sha256": "w"}, f"10:0{number}:30")
    write("decision", {"decision": "promoted"}, "10:06:00")
    for effect in ("register_baseline", "serve_baseline", *EFFECTS):
        write("intent", {"effect": effect, "of": "x", "plan": {}}, "10:06:01")
        write("done", {"effect": effect, "of": "x", "result": {}}, "10:06:02")
    write("decided", decided(release_id, lines), "10:06:03")
