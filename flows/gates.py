"""Judge: each gate's probe makes records, its judge reads them, the verdict and the records become signed evidence."""

import time
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from flows.clock import utc_now
from flows.code_digests import code_changed
from flows.drill_records import on_record
from flows.evidence import Spent, keep_gate_evidence, verdict_of
from flows.probes import Bench
from flows.proving import gate_link
from flows.under_way import Release
from infra.journal import Journal
from infra.report import GateLine
from validation.canonical import digest
from validation.errors import InputError, ReleaseError
from validation.statements import GATE
from validation.verdict import GateVerdict, Outcome, inconclusive

WITHOUT_DEVICES = ("data_contract",)
ON_CANDIDATE = ("scaling", "slice_quality")  # gates that judge the trained candidate


def hold_gate(release: Release, gate: str) -> GateLine:
    """Run one gate: probe, judge, keep the evidence, journal it. A probe that breaks makes the gate inconclusive, never a pass."""
    release.still_mine()
    if gate in WITHOUT_DEVICES:
        return _held(release, gate, 0.0)
    with release.hands.devices(f"{gate} of {release.plan.release_id}", release.say) as queued_s:
        return _held(release, gate, queued_s)


def _held(release: Release, gate: str, queued_s: float) -> GateLine:
    bench = fresh_bench(release, gate)
    started = time.monotonic()
    try:
        records, verdict = release.hands.probe(release, gate, bench)
    except InputError:
        raise
    except ReleaseError as error:
        again = f"mend the cause, then run `seatrial gate {gate} --release {release.plan.release_id}`"
        records, verdict = None, inconclusive(gate, reason=f"its probe could not be run: {error}", action=again)
    spent = Spent(seconds=time.monotonic() - started, worker_seconds=bench.worker_seconds, queued_s=queued_s)
    return _keep(release, verdict, records, spent)


def skip_gate(release: Release, gate: str, because: str) -> GateLine:
    """A gate that was not held: inconclusive, in the evidence like any other."""
    verdict = inconclusive(gate, reason=f"not run: {because}", action="mend what came before it, then release again")
    return _keep(release, verdict, None, Spent())


def fresh_bench(release: Release, gate: str) -> Bench:
    """A bench with a folder of its own for each attempt, so that no attempt reads another's files."""
    base = release.plan.folder / gate
    base.mkdir(exist_ok=True)
    attempt = 1 + len(list(base.iterdir()))
    folder = base / f"attempt-{attempt}"
    folder.mkdir()
    return Bench(plan=release.plan, gate=gate, say=release.say, folder=folder, store=release.store)


def attempts(journal: Journal, gate: str) -> list[Mapping[str, Any]]:
    """The journal's payloads of a gate, oldest first."""
    return [entry.payload for entry in journal.refreshed() if entry.kind == "gate" and entry.payload["gate"] == gate]


def _keep(release: Release, verdict: GateVerdict, records: Any, spent: Spent) -> GateLine:
    """Evidence first, then the signed statement over it, then the journal entry that points to both."""
    now, attempt, gate = utc_now(), 1 + len(attempts(release.journal, verdict.gate)), verdict.gate
    digests = binding(release, gate)
    sha256 = keep_gate_evidence(
        release.store, verdict, records, release_id=release.plan.release_id, attempt=attempt, digests=digests,
        sources=release.plan.sources[gate], spent=spent, made_at=now,
    )  # fmt: skip
    subjects = {"evidence": sha256} | ({"weights": digests["candidate"]} if "candidate" in digests else {})
    said = {"release_id": release.plan.release_id, "gate": gate, "attempt": attempt, "outcome": verdict.outcome, "evidence": sha256}
    signed = release.notary.attest(GATE, subjects, {**said, "digests": digests, "made_at": now})
    told = {"gate": gate, "attempt": attempt, "outcome": verdict.outcome, "reason": verdict.reason}
    release.journal.append("gate", {**told, "evidence": sha256, "attestation": signed}, time_utc=now)
    release.attestations[gate] = signed
    release.lines[gate] = GateLine(
        verdict=verdict, attempt=attempt, reused=False, reuse_reason="", seconds=spent.seconds, worker_seconds=spent.worker_seconds,
        evidence_sha256=sha256,
    )  # fmt: skip
    release.say(f"{gate}: {verdict.outcome.upper()} in {spent.seconds:.1f} s: {verdict.reason}")
    return release.lines[gate]


def binding(release: Release, gate: str) -> dict[str, str]:
    """Digests of everything that a gate's verdict depends on; any change makes the verdict stale."""
    plan = release.plan
    section = getattr(plan.policy, gate, None)
    digests = {**plan.digests, "code": digest(plan.sources[gate]), "policy": digest(section.model_dump(mode="json") if section else {})}
    if gate in ON_CANDIDATE and release.candidate is not None:
        digests["candidate"] = release.candidate.weights_sha256
    if gate == "slice_quality" and release.candidate is not None:
        digests["last_known_good"] = digest(release.candidate.last_known_good_uri)
    if gate == "readiness":
        digests["fallbacks"] = digest([(item.kind, item.version) for item in release.fallbacks])
        digests["drills"] = digest([(item.name, item.made_at) for item in on_record(release.plan.home)])
    return digests


def reusable(release: Release, gate: str, *, whatever: bool) -> tuple[GateLine | None, str]:
    """The gate's latest evidence if every digest still matches and it may stand, and why or why not.

    Args: whatever, evidence that did not pass may stand too; else only a pass, or what a person waived.
    """
    entries = attempts(release.journal, gate)
    if not entries:
        return None, "it was never judged"
    latest = entries[-1]
    verdict, document = verdict_of(release.store, latest["evidence"])
    gate_link(release.notary, release.store, gate, latest, release.plan.release_id, naming=nullcontext())
    wanted, attempt = binding(release, gate), latest["attempt"]
    changed = sorted(name for name in wanted.keys() | document["digests"].keys() if document["digests"].get(name) != wanted.get(name))
    if changed:
        code = code_changed(document.get("sources", {}), release.plan.sources[gate]) if "code" in changed else ""
        words = [name for name in changed if name != "code" or not code] + ([code.removesuffix(" changed")] if code else [])
        return None, f"stale since attempt {attempt}: {', '.join(words)}" + ("" if code and len(words) == 1 else " changed")
    is_waived = any(waiver.evidence == latest["evidence"] for waiver in release.waivers)
    if not (whatever or is_waived or verdict.outcome is Outcome.PASS):
        return None, f"attempt {attempt} is {verdict.outcome}"
    release.attestations[gate] = latest["attestation"]
    why = f"attempt {attempt} is {verdict.outcome} and the digests of {', '.join(wanted)} all match"
    line = GateLine(
        verdict=verdict, attempt=attempt, reused=True, reuse_reason=why, seconds=document["seconds"],
        worker_seconds=document["worker_seconds"], evidence_sha256=latest["evidence"],
    )  # fmt: skip
    return line, why
