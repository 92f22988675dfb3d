"""The report of a release as a value, and as files in its folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from flows.clock import utc_now
from flows.drills import costs
from flows.under_way import Release
from infra import plots
from infra.markdown import plot_files
from infra.report import CostLine, GateLine, ReleaseReport, ReportCard, render_html
from infra.store import ObjectStore, get_evidence, put_evidence
from validation.canonical import plain
from validation.decision import ReleaseDecision
from validation.waivers import Approval, human_review_s

_REPORT = TypeAdapter(ReleaseReport)


def build_report(
    release: Release, lines: Sequence[GateLine], decision: ReleaseDecision, started_at: str, approval: Approval | None
) -> ReleaseReport:
    """Everything that the report, the registry page and the flow run's page show. Args: lines, with the waivers that count."""
    plan, card = release.plan, release.plan.facts.card
    machine = plan.machine
    return ReleaseReport(
        release_id=plan.release_id, recipe=plan.request.recipe,
        card=ReportCard(question=card.question, action=card.action, owner=card.owner, utility_unit=card.utility_unit, notes=card.notes),
        decision=decision.decision, serving_kind="" if decision.serving_kind == "none" else decision.serving_kind,
        serving_version=decision.serving_version, candidate_version=release.candidate.version if release.candidate else "",
        reason=decision.reason, action=decision.action, gates=tuple(lines), cost=release_cost(release, lines, approval), approval=approval,
        started_at=started_at, finished_at=utc_now(), digests=plan.digests, drill=plan.request.drill,
        machine=f"{machine.device}, {machine.devices} devices, {machine.memory_gib:.0f} GiB, {machine.system}, torch {machine.torch}",
    )  # fmt: skip


def release_cost(release: Release, lines: Sequence[GateLine], approval: Approval | None) -> tuple[CostLine, ...]:
    """Cost of the gates and of the candidate's training; a reused gate's cost was paid by an earlier attempt."""
    price = release.plan.policy.scaling.price_per_device_hour
    by_gate = {line.verdict.gate: line for line in lines}
    spent = costs(by_gate, price=price.value, devices=release.plan.machine.devices)
    training = release.candidate.worker_seconds if release.candidate else None
    person = human_review_s(approval) if approval else 0.0
    return (
        CostLine(name="human review", amount=person, unit="s", note="from the question to the answer; 0 when nobody was asked"),
        CostLine(name="gates, wall clock", amount=spent["wall_s"], unit="s", note="probe and judgement of every gate, all attempts' last"),
        CostLine(name="gates, worker-seconds", amount=spent["worker_seconds"], unit="worker-s", note="ranks x seconds they existed"),
        CostLine(name="training the candidate", amount=training, unit="worker-s"),
        CostLine(name="devices held", amount=spent["device_hours"], unit="device-h", note="a gate holds every device of the machine"),
        CostLine(name="price of that", amount=spent["usd"], unit="USD", note=f"{price.value:g} USD a device-hour: {price.source}"),
    )


def keep_report(store: ObjectStore, report: ReleaseReport) -> str:
    """Keep a report as evidence, so that any process can show it later; returns its sha256."""
    return put_evidence(store, {"kind": "report", "report": plain(report)})


def kept_report(store: ObjectStore, sha256: str) -> ReleaseReport:
    """A report as it was kept. Raises EvidenceError when it is absent or was altered."""
    found: dict[str, Any] = get_evidence(store, sha256)
    return _REPORT.validate_python(found["report"])


def write_report(folder: Path, report: ReleaseReport) -> Path:
    """report.html and plots/*.png in the release's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    plots.keep(folder, plot_files(report))
    page = folder / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    return page
