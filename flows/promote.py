"""Make a decision true: move the pointer, publish the pages, let the aliases follow. Any process can do it, from the records alone.

The pointer comes first, so that pages and aliases are never told of a promotion that another release overtook; both are views.
"""

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from flows.clock import utc_now
from flows.deciding import Decided, held_by
from flows.effects import carry_out
from flows.in_force import taken_out, was_in_force
from flows.proving import prove
from flows.reporting import kept_report, write_report
from flows.under_way import Desk
from infra.export import files_sha256, version_uri
from infra.markdown import headed, registry_description
from infra.pointer import Pointer, admission, admit, move_pointer, read_pointer
from infra.registry import REASON_TAG, mirror_current
from infra.report import ReleaseReport, refusing_lines, release_document
from infra.store import get_blob
from validation.errors import ConflictError, EvidenceError
from validation.waivers import expired, shown


def make_true(desk: Desk) -> tuple[dict[str, Any], ReleaseReport]:
    """Carry out the latest decision, or what is left of it; returns the document of `seatrial release --json` and the report."""
    entry = desk.journal.latest("decision")
    if entry is None:
        raise EvidenceError(f"release {desk.journal.release_id} decided nothing yet. Run `seatrial finish {desk.journal.release_id}`.")
    decided, of = Decided.of(dict(entry.payload)), entry.sha256
    report = _as_it_came(kept_report(desk.store, decided.report), decided, *_moved(desk, decided, of))
    page = write_report(desk.folder, report)
    _published(desk, decided, of, report, page)
    carry_out(desk.journal, "mirror", of, {}, lambda _: _mirrored(desk))
    document = {**release_document(report, report_path=str(page)), "decision_sha256": decided.attestation}
    desk.journal.append("decided", document, time_utc=utc_now())
    desk.say(f"{report.decision.replace('_', ' ')}: {report.reason}")
    return document, report


def _moved(desk: Desk, decided: Decided, of: str) -> tuple[Pointer | None, str]:
    """Put the decision's pointer in force; if that could not be, what serves instead and why."""
    desk.still_mine()
    if decided.pointer is None:
        return None, ""
    effect = "promote" if decided.decision.decision == "promoted" else "fall_back"
    plan = {"pointer": asdict(decided.pointer), "expected": decided.expected, "files": decided.candidate.get("files", "")}
    result = carry_out(desk.journal, effect, of, plan, lambda wanted: _move(desk, wanted))
    return Pointer(**result["overtaken_by"]) if result["overtaken_by"] else None, str(result.get("because", ""))


def _move(desk: Desk, plan: Mapping[str, Any]) -> Mapping[str, Any]:
    """Prove, admit, compare and set. Done before: nothing is left to do."""
    wanted = Pointer(**plan["pointer"])
    now, etag = read_pointer(desk.store, wanted.model)
    if now == wanted:
        return {"overtaken_by": None}
    if now is None or etag != plan["expected"]:
        return {"overtaken_by": None if now is not None and _was_in_force(desk, wanted, now) else asdict(now or wanted)}
    actual = files_sha256(version_uri(wanted.model, wanted.serving_version), tracking_uri=desk.registry.tracking_uri)
    proof = prove(desk.notary, desk.store, wanted.attestation, files_sha256=actual)
    if wanted.serving_kind == "candidate" and (gone := expired(proof.waivers, utc_now())):
        words = f"the waiver of {gone[0].gate} by {gone[0].by} expired on {shown(gone[0].expires_at)}, before the candidate came to serve"
        return {"overtaken_by": asdict(now), "because": words}
    admit(desk.store, wanted.model, wanted.serving_version, wanted.attestation)
    try:
        move_pointer(desk.store, wanted, etag)
    except ConflictError:
        return _move(desk, plan)
    return {"overtaken_by": None}


def _was_in_force(desk: Desk, wanted: Pointer, now: Pointer) -> bool:
    """Whether this release put it in service, died before it said so, and the pointer moved on since."""
    return bool(admission(desk.store, wanted.model, wanted.serving_version)) and was_in_force(desk.store, wanted, now)


def _as_it_came(report: ReleaseReport, decided: Decided, faster: Pointer | None, why: str) -> ReleaseReport:
    """The report, held if another release was faster or a waiver expired."""
    if faster is None:
        return report
    held = held_by(decided.decision, faster, why or "another release was faster")
    if why:
        held = replace(held, reason=f"{why}; version {faster.serving_version} serves on", action="hold that gate again, or waive it again")
    return replace(
        report, decision="held", serving_kind=held.serving_kind, serving_version=held.serving_version, reason=held.reason,
        action=held.action,
    )  # fmt: skip


def _published(desk: Desk, decided: Decided, of: str, report: ReleaseReport, page: Path) -> None:
    """Put report, plots and evidence beside the candidate in the registry, and the reason on the version's page."""
    if decided.candidate:
        desk.still_mine()
        carry_out(desk.journal, "publish", of, {}, lambda _: _publish(desk, decided.candidate, report, page))


def _publish(desk: Desk, candidate: Mapping[str, str], report: ReleaseReport, page: Path) -> Mapping[str, Any]:
    """What was deleted in the registry meanwhile gets no page: the report and the evidence do not rest on it."""
    registry, run_id, version = desk.registry, candidate["run_id"], candidate["version"]
    description = registry_description(report, run_id, registry.experiment_id)
    if has_run := registry.has_run(run_id):
        digests = {"sha256.weights": candidate["weights"], "sha256.state": candidate["state"]}
        digests |= {f"sha256.{name}": value for name, value in report.digests.items()}
        registry.publish(
            run_id,
            page=page,
            plots=page.parent / "plots",
            evidence={line.verdict.gate: get_blob(desk.store, line.evidence_sha256) for line in report.gates},
            metrics={f"{line.verdict.gate}.seconds": line.seconds for line in report.gates},
            tags={"mlflow.note.content": description, **digests},
        )
        registry.finish_run(run_id, ok=report.decision == "promoted")
    else:
        desk.say(f"run {run_id} was deleted in the registry, so the report is kept in {page} and in the store alone")
    found = {page.version: page for page in registry.pages(desk.model)}
    if version not in found:
        desk.say(f"version {version} was deleted in the registry, so nothing is said on its page")
        return {"version": version, "status": "deleted", "run": has_run}
    status = {"status": "promoted" if report.decision == "promoted" else "refused", "release_id": report.release_id}
    now = found[version].status
    if now == "rolled_back":
        description = headed(description, now, found[version].tags.get(REASON_TAG, ""))
        del status["status"]  # it served, its release died before the pages, and it was taken out of service since: that stays said
    if now == "promoted" and report.decision == "held" and not refusing_lines(report):
        del status["status"]  # it served, and nothing was found against it since: as the last known-good it can still take over
    gates = {f"gate.{line.verdict.gate}": str(line.verdict.outcome) for line in report.gates}
    registry.describe(desk.model, version, description=description, tags=status | gates)
    if "status" in status and (said := taken_out(desk.store, desk.model, version)):
        registry.describe(desk.model, version, description=headed(description, said["status"], said["reason"]), tags={})
        registry.mark(desk.model, version, said["status"], said["reason"])
        status["status"] = said["status"]
    return {"version": version, "status": status.get("status", now), "run": has_run}


def _mirrored(desk: Desk) -> Mapping[str, Any]:
    return {"changed": mirror_current(desk.registry, desk.store, desk.model)}
