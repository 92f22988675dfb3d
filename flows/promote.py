"""From verdicts to what serves: decide, write the report, publish it, move the pointer, mirror it in the registry."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flows.candidate import register_baseline
from flows.clock import utc_now
from flows.drills import costs
from flows.evidence import verdict_of
from flows.gates import Release
from flows.plan import ReleasePlan
from infra.markdown import plot_files, registry_description
from infra.pointer import Pointer, ServingKind, move_pointer, read_pointer
from infra.registry import Registry
from infra.report import CostLine, GateLine, ReleaseReport, ReportCard, release_document, render_html
from infra.store import ObjectStore, get_blob, put_evidence
from validation.decision import ReleaseDecision, decide
from validation.policy import GATES
from validation.verdict import GateVerdict, inconclusive


def ensure_serving(plan: ReleasePlan, store: ObjectStore, registry: Registry, run_id: str) -> tuple[Pointer, str]:
    """What serves now and the etag to move it with; at a model's first release the baseline is registered and put in service.

    The registry's aliases are mended on the way, should an earlier release have died before they followed the pointer.
    """
    pointer, etag = read_pointer(store, plan.model)
    if pointer is not None and etag is not None:
        registry.mirror(pointer)
        return pointer, etag
    version = register_baseline(plan, run_id)
    first = Pointer(
        model=plan.model, serving_version=version, serving_kind="baseline", last_known_good="", baseline=version,
        release_id=plan.release_id, sequence=1,
    )  # fmt: skip
    moved = move_pointer(store, first, etag)
    registry.describe_baseline(plan.model, version, plan.facts.card.question)
    registry.mirror(first)
    return first, moved


def conclude(release: Release, registry: Registry, started_at: str) -> tuple[dict[str, Any], ReleaseReport]:
    """Decide on evidence read back and verified, then make the decision true, one repeatable effect after the other.

    Returns the document that `seatrial release --json` prints, and the report it was made from.
    """
    plan = release.plan
    lines = [release.lines[gate] for gate in GATES if gate in release.lines]
    decision = decide_on(release, [verdict_of(release.store, line.evidence_sha256)[0] for line in lines])
    decision = unless_overtaken(release, decision)
    release.journal.append("intent", {"decision": decision}, time_utc=utc_now())
    report = build_report(release, lines, decision, started_at)
    page = write_report(plan.folder, report)
    gates = {line.verdict.gate: line.evidence_sha256 for line in lines}
    evidence = put_evidence(
        release.store, {"kind": "decision", "release_id": plan.release_id, "decision": decision, "digests": plan.digests, "gates": gates}
    )
    publish(release, registry, report, page)
    serve(release, registry, decision)
    document = {**release_document(report, report_path=str(page)), "decision_sha256": evidence}
    release.journal.append("decided", document, time_utc=utc_now())
    release.say(f"{decision.decision.replace('_', ' ')}: {decision.reason}")
    return document, report


def decide_on(release: Release, verdicts: list[GateVerdict]) -> ReleaseDecision:
    """Decide; the candidate of a drill may never serve, even if every gate were blind to its defect."""
    required, version = release.plan.policy.required, release.candidate.version if release.candidate else ""
    decision = decide(verdicts=verdicts, required=required, fallbacks=release.fallbacks, candidate_version=version)
    drill = release.plan.request.drill
    if not drill or decision.decision != "promoted":
        return decision
    reason = f"no required gate refused the candidate of drill '{drill}', which may never serve"
    blind = inconclusive("drill", reason=reason, action="find out why the planted regression was missed")
    return decide(verdicts=[*verdicts, blind], required=[*required, "drill"], fallbacks=release.fallbacks, candidate_version=version)


def unless_overtaken(release: Release, decision: ReleaseDecision) -> ReleaseDecision:
    """Leave alone what another release put in service: this one's candidate was never compared with it.

    Nor does a candidate that served before come back by holding one of its old gates again: going back is an act of its own.
    """
    now, etag = read_pointer(release.store, release.plan.model)
    if now is None:
        return decision
    version = decision.serving_version
    superseded = decision.decision == "promoted" and version != now.serving_version and _was_promoted(release, version)
    if etag == release.etag and not superseded:
        return decision
    kind: ServingKind = "baseline" if now.serving_kind == "baseline" else "last_known_good"
    if decision.decision != "promoted":
        return replace(decision, serving_kind=kind, serving_version=now.serving_version)
    what = f"candidate version {version} served before and was replaced" if superseded else "what serves changed meanwhile"
    return ReleaseDecision(
        decision="held",
        serving_kind=kind,
        serving_version=now.serving_version,
        reason=f"every required gate passes, but {what}: version {now.serving_version} serves since release {now.release_id}",
        action="release again, so that the candidate is compared with what serves now",
    )


def _was_promoted(release: Release, version: str) -> bool:
    decided = [entry.payload for entry in release.journal.records() if entry.kind == "decided"]
    return any(item["decision"] == "promoted" and item["serving"]["version"] == version for item in decided)


def build_report(release: Release, lines: Sequence[GateLine], decision: ReleaseDecision, started_at: str) -> ReleaseReport:
    """Everything that the report, the registry page and the flow run's page show."""
    plan, card = release.plan, release.plan.facts.card
    machine = plan.machine
    return ReleaseReport(
        release_id=plan.release_id, recipe=plan.request.recipe,
        card=ReportCard(question=card.question, action=card.action, owner=card.owner, utility_unit=card.utility_unit, notes=card.notes),
        decision=decision.decision, serving_kind="" if decision.serving_kind == "none" else decision.serving_kind,
        serving_version=decision.serving_version, candidate_version=release.candidate.version if release.candidate else "",
        reason=decision.reason, action=decision.action, gates=tuple(lines), cost=release_cost(release, lines), started_at=started_at,
        finished_at=utc_now(), digests=plan.digests,
        machine=f"{machine.device}, {machine.devices} devices, {machine.memory_gib:.0f} GiB, {machine.system}, torch {machine.torch}",
    )  # fmt: skip


def release_cost(release: Release, lines: Sequence[GateLine]) -> tuple[CostLine, ...]:
    """Cost of the gates and of the candidate's training; a reused gate's cost was paid by an earlier attempt."""
    price = release.plan.policy.scaling.price_per_device_hour
    by_gate = {line.verdict.gate: line for line in lines}
    spent = costs(by_gate, price=price.value, devices=release.plan.machine.devices)
    training = release.candidate.worker_seconds if release.candidate else None
    return (
        CostLine(name="gates, wall clock", amount=spent["wall_s"], unit="s", note="probe and judgement of every gate, all attempts' last"),
        CostLine(name="gates, worker-seconds", amount=spent["worker_seconds"], unit="worker-s", note="ranks x seconds they existed"),
        CostLine(name="training the candidate", amount=training, unit="worker-s"),
        CostLine(name="devices held", amount=spent["device_hours"], unit="device-h", note="a gate holds every device of the machine"),
        CostLine(name="price of that", amount=spent["usd"], unit="USD", note=f"{price.value:g} USD a device-hour: {price.source}"),
    )


def write_report(folder: Path, report: ReleaseReport) -> Path:
    """report.html and plots/*.png in the release's folder."""
    for name, picture in plot_files(report).items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(picture)
    page = folder / "report.html"
    page.write_text(render_html(report), encoding="utf-8")
    return page


def publish(release: Release, registry: Registry, report: ReleaseReport, page: Path) -> None:
    """Put report, plots and evidence beside the candidate in the registry, and the reason on the version's page."""
    candidate = release.candidate
    if candidate is None:
        return
    description = registry_description(report, candidate.run_id, registry.experiment_id)
    digests = {"sha256.weights": candidate.weights_sha256, "sha256.state": candidate.state_sha256}
    digests |= {f"sha256.{name}": value for name, value in report.digests.items()}
    registry.publish(
        candidate.run_id,
        page=page,
        plots=page.parent / "plots",
        evidence={line.verdict.gate: get_blob(release.store, line.evidence_sha256) for line in report.gates},
        metrics={f"{line.verdict.gate}.seconds": line.seconds for line in report.gates},
        tags={"mlflow.note.content": description, **digests},
    )
    status = {"status": "promoted" if report.decision == "promoted" else "refused", "release_id": report.release_id}
    gates = {f"gate.{line.verdict.gate}": str(line.verdict.outcome) for line in report.gates}
    registry.describe(release.plan.model, candidate.version, description=description, tags=status | gates)
    registry.finish_run(candidate.run_id, ok=report.decision == "promoted")


def serve(release: Release, registry: Registry, decision: ReleaseDecision) -> None:
    """Move the serving pointer if the decision asks for it, then let the registry's aliases follow.

    Raises: ConflictError when another release moved it since this one decided.
    """
    pointer, etag = read_pointer(release.store, release.plan.model)
    if pointer is None:
        return  # nothing was ever put in service: the data contract refused the first release
    moved = pointer
    if decision.decision == "promoted" and pointer.serving_version != decision.serving_version:
        good = pointer.serving_version if pointer.serving_kind != "baseline" else ""
        moved = replace(pointer, serving_version=decision.serving_version, serving_kind="candidate", last_known_good=good)
    elif decision.decision == "fell_back" and etag == release.etag and decision.serving_version != pointer.serving_version:
        moved = replace(pointer, serving_version=decision.serving_version, serving_kind=_kind(decision))
    if moved != pointer:
        moved = replace(moved, release_id=release.plan.release_id, sequence=pointer.sequence + 1)
        move_pointer(release.store, moved, release.etag)
    registry.mirror(moved)


def _kind(decision: ReleaseDecision) -> ServingKind:
    return "baseline" if decision.serving_kind == "baseline" else "last_known_good"
