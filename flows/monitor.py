"""`seatrial monitor`: what serves, judged by what became of its predictions; a version proven bad is rolled back (docs/monitoring.md).

pointer -> does it answer? -> its days from the serving log -> outcomes that are mature -> judge -> signed verdict -> fall back
"""

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.acts import Desk, finish_open_acts, open_desk
from flows.allowed import check_allowed
from flows.clock import utc_now
from flows.in_service import InService, what_serves
from flows.people import waivers_of
from flows.predict import origin_of
from flows.rollback import fall_back, refusal
from flows.served import Scene, day_before, records_of
from flows.surroundings import make_ready
from infra.journal import Journal
from infra.markdown import artifact_key, gate_artifact_markdown, safe, table_rows
from infra.pointer import read_pointer
from infra.report import GateLine
from infra.serving_log import Part, ServingLog, checked_day, parquet_bytes
from infra.settings import Settings
from infra.store import put_blob, put_evidence
from infra.wording import number
from validation.canonical import plain
from validation.errors import ReleaseError
from validation.monitoring import NAME, MonitorVerdict, judge_monitoring
from validation.served import MonitorRecords
from validation.statements import DECISION, MONITOR, model_subject
from validation.verdict import Check, GateVerdict, Outcome, sentence
from validation.waivers import lapsed

REASON_CHARS = 1500  # a rollback's reason is signed and stands on the version's page
REMEDY = "the fallback serves; find out why this version does not load or answer"

Say = Callable[[str], None]


def monitor(settings: Settings, *, say: Say, model: str, day: str = "", dry_run: bool = False) -> dict[str, Any]:
    """Judge what serves on everything up to the day before `day`, keep the signed verdict, and fall back where it asks for that.

    An act that a dead process left open (an earlier monitor's rollback, say) is finished first, so that what serves is what was decided. A
    version that does not load or answer right now is not waited for. Returns the document of `seatrial monitor --json`; "ok" is False
    when the version is degraded, whether or not something else serves by now.
    Args: day, the day it is, "" = today, UTC.
    Raises: ConfigError for a day or model that there is not; EvidenceError when what let the version serve does not verify.
    """
    day = checked_day(day or datetime.now(UTC).date().isoformat())
    began = time.monotonic()
    desk = open_desk(settings, say)
    finished = [] if dry_run else finish_open_acts(desk, model)
    service = what_serves(desk.store, desk.notary, model)
    check_allowed(service.request.recipe, settings)
    silent = refusal(desk, model, service.proof)
    records, parts = _records(desk, service, day)
    found = judge_monitoring(records, service.policy.monitoring)
    if silent:
        found = _silent(found, service, silent)
    say(f"{model} version {service.version}: {found.health}: {found.reason}")
    document = {
        "ok": found.health != "degraded", "model": model, "day": day, "judged_up_to": records.today, "since": records.since,
        "version": service.version, "kind": service.pointer.serving_kind, "release_id": service.proof.release_id,
        "reference_version": service.reference_version, "health": found.health, "action": found.action, "reason": found.reason,
        "verdict": found.verdict, "warnings": [sentence(item) for item in found.warnings], "dry_run": dry_run,
        "finished": [f"act {item['act_id']} {item['words']}" for item in finished],
        "predictions": int((records.predictions["version"] == service.version).sum()), "outcomes": len(records.matured),
        **_kept(desk, service, found, records, parts, day, dry_run=dry_run),
    }  # fmt: skip
    rollback = _fallen_back(settings, say, service, found) if found.action == "roll_back" and not dry_run else None
    pointer, _ = read_pointer(desk.store, model)
    serving = {"version": pointer.serving_version, "kind": pointer.serving_kind} if pointer else {"version": "", "kind": "none"}
    return document | {"rollback": rollback, "serving": serving, "seconds": time.monotonic() - began}


@flow(name="monitor", flow_run_name="monitor {model} {day}", persist_result=False)
def monitor_flow(model: str, day: str = "", dry_run: bool = False) -> Any:
    """Judge what serves by what became of its predictions, and fall back from a version that is proven bad. `day` is the day it is."""
    document = monitor(make_ready(), say=get_run_logger().info, model=model, day=day, dry_run=dry_run)
    line, told = _line(document), _gist(document)
    key = artifact_key(line.verdict)
    create_table_artifact(key=f"{key}-checks", table=table_rows(line.verdict), description=told)
    create_markdown_artifact(key=key, markdown=f"{safe(told)}\n\n{gate_artifact_markdown(line)}", description=told)
    return _state(document, told)


def _state(document: dict[str, Any], told: str) -> State[Any]:
    """Green while the version may stay, red when it was found bad, so that this is seen in a list of runs."""
    if document["ok"]:
        return Completed(name="Healthy" if document["action"] == "none" else "Watch", message=told, data=document)
    fell = document["rollback"] is not None and document["rollback"]["ok"]
    return Failed(name="Rolled back" if fell else "Degraded", message=told, data=document)


def lines(document: Mapping[str, Any]) -> list[str]:
    """The document for people."""
    verdict: GateVerdict = document["verdict"]
    told = [f"{document['model']} version {document['version']} is {document['health']}: {document['reason']}"]
    told += [f"  {_word(item)} {sentence(item)}" for item in verdict.checks]
    told += [f"  warning: {warning}" for warning in document["warnings"]]
    told.append(
        f"judged from {document['since']} up to {document['judged_up_to']}: {document['predictions']:,} predictions, "
        f"{document['outcomes']:,} mature outcomes; signed verdict {document['attestation'][:12]}…"
    )
    return [*document["finished"], *told, _ending(document)]


def _ending(document: Mapping[str, Any]) -> str:
    serving = document["serving"]
    serves = f"version {serving['version']} ({serving['kind'].replace('_', ' ')}) serves"
    if document["rollback"] is not None:
        return f"rolled back: {serves}" if document["rollback"]["ok"] else f"NOT rolled back: {document['rollback']['words']}"
    if document["action"] == "roll_back":
        return f"it would be rolled back; this is a dry run, and {serves} still"
    if document["action"] != "watch":
        return f"{serves}; nothing to do"
    verdict: GateVerdict = document["verdict"]
    late = f"; a day that was not scored is made good by `seatrial predict {document['model']} --day {document['judged_up_to']}`"
    return f"{serves}; look at what is BAD or open above{late if any(item.passed is None for item in verdict.checks) else ''}"


def _word(item: Check) -> str:
    return {True: "ok  ", False: "BAD ", None: "open"}[item.passed]


def _records(desk: Desk, service: InService, day: str) -> tuple[MonitorRecords, tuple[Part, ...]]:
    log = ServingLog(desk.store, service.model)
    origin = origin_of(log, service)
    scene = Scene(service=service, origin=origin, today=day_before(day), waiver_lapsed=_waiver_lapsed(desk, service))
    return records_of(log, scene)


def _waiver_lapsed(desk: Desk, service: InService) -> str:
    """What is wrong with the waivers that the version serves on, in a sentence; "" = nothing."""
    said = desk.notary.read(service.proof.attestation)
    with suppress(ReleaseError):  # the pointer's own word, if it is one: there a gate that was held again is waived no longer
        now = desk.notary.read(service.pointer.attestation, DECISION)
        said = now if now.predicate["version"] == service.version else said
    if said.predicate_type != DECISION or not said.predicate.get("waivers"):
        return ""
    try:
        waivers = waivers_of(Journal(desk.store, service.proof.release_id), desk.notary)
    except ReleaseError as error:
        return f"its waivers cannot be read back: {error}"
    return "; ".join(lapsed(said.predicate, waivers, utc_now()))


def _silent(found: MonitorVerdict, service: InService, why: str) -> MonitorVerdict:
    """The verdict on a version that does not load or answer, whatever its past says."""
    check = Check(name="answers now", observed=why, threshold="an answer", unit="", passed=False, action=REMEDY)
    verdict = GateVerdict(
        gate=NAME, outcome=Outcome.FAIL, reason=f"version {service.version} does not load or answer: {why}", action=REMEDY,
        checks=(check, *found.verdict.checks), control=found.verdict.control, tables=found.verdict.tables, plots=found.verdict.plots,
        notes=found.verdict.notes,
    )  # fmt: skip
    return MonitorVerdict(action="roll_back", verdict=verdict, warnings=found.warnings)


def _kept(
    desk: Desk, service: InService, found: MonitorVerdict, records: MonitorRecords, parts: tuple[Part, ...], day: str, *,
    dry_run: bool,
) -> dict[str, str]:  # fmt: skip
    """The evidence and the signed statement about it: {"evidence": sha256, "attestation": sha256}.

    The evidence says whether the run was dry, so that a verdict nobody acted on is never the same record as one that took a version down.
    """
    now, verdict = utc_now(), found.verdict
    evidence = put_evidence(desk.store, {
        "kind": "monitor", "model": service.model, "version": service.version, "model_sha256": service.proof.files_sha256,
        "release_id": service.proof.release_id, "day": day, "judged_up_to": records.today, "since": records.since,
        "reference_version": records.reference_version, "reference_kind": records.reference_kind, "utility_scale": records.utility_scale,
        "policy": service.policy.monitoring.model_dump(mode="json"), "verdict": plain(verdict), "action": found.action,
        "parts": [{"day": part.day, "number": part.number, "version": part.version, "table": part.table} for part in parts],
        "matured": put_blob(desk.store, parquet_bytes(records.matured)), "waiver_lapsed": records.waiver_lapsed, "dry_run": dry_run,
        "made_at": now,
    })  # fmt: skip
    attestation = desk.notary.attest(
        MONITOR,
        {model_subject(service.model, service.version): service.proof.files_sha256, "evidence": evidence},
        {
            "model": service.model, "version": service.version, "release_id": service.proof.release_id, "day": day,
            "outcome": str(verdict.outcome), "action": found.action, "evidence": evidence, "made_at": now,
        },
    )  # fmt: skip
    ServingLog(desk.store, service.model).add_verdict(day, attestation)
    return {"evidence": evidence, "attestation": attestation}


def _fallen_back(settings: Settings, say: Say, service: InService, found: MonitorVerdict) -> dict[str, Any]:
    """Put the fallback in service; a version that another process took out of service meanwhile is left as it is."""
    reason = f"monitor: {found.reason}"
    reason = reason if len(reason) <= REASON_CHARS else f"{reason[: REASON_CHARS - 1]}…"
    return fall_back(settings, service.model, reason, by="monitor", leaving=service.version, say=say)


def _line(document: Mapping[str, Any]) -> GateLine:
    """The verdict as pages show it."""
    return GateLine(
        verdict=document["verdict"], attempt=1, reused=False, reuse_reason="", seconds=document["seconds"], worker_seconds=0.0,
        evidence_sha256=document["evidence"],
    )  # fmt: skip


def _gist(document: Mapping[str, Any]) -> str:
    """One sentence for a list of runs."""
    rows = f"{number(document['outcomes'])} outcomes up to {document['judged_up_to']}"
    return f"version {document['version']} is {document['health']} after {rows}; {_ending(document)}"
