"""`seatrial predict`: a day's requests scored with exactly what serves, its fallback beside it, and kept (docs/monitoring.md)."""

import tempfile
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed
from pydantic import TypeAdapter

from flows.allowed import check_allowed
from flows.clock import utc_now
from flows.in_service import InService, what_serves
from flows.served import day_before
from flows.serving import Origin, Scored, ScoreOrder
from flows.surroundings import make_ready
from infra.attestations import open_reader
from infra.markdown import safe
from infra.serving_log import Part, ServingLog, checked_day
from infra.settings import Settings
from infra.store import open_store
from trainer import ranks
from validation.canonical import plain
from validation.errors import ConflictError

SCORE_DEADLINE_S = 600.0  # loading two versions on a busy machine takes a minute

Say = Callable[[str], None]
_ORIGIN = TypeAdapter(Origin)


def predict(settings: Settings, *, say: Say, model: str, day: str) -> dict[str, Any]:
    """Score the requests of a day that nobody answered yet, and keep the scores; returns the document of `seatrial predict --json`.

    A day may be scored again, when more was asked or after a rollback: what was answered stays as it is. "ok" is False when the version
    in service answered nothing: then run the monitor, which falls back.
    Raises: ConfigError for a day or model that there is not; ConflictError when another process scored the same day meanwhile.
    """
    checked_day(day)
    store = open_store(settings)
    service = what_serves(store, open_reader(store, settings), model)
    check_allowed(service.request.recipe, settings)
    log = ServingLog(store, model)
    parts = log.parts(day)
    origin = kept_origin(log, service)
    order = ScoreOrder(
        recipe=service.request.recipe, day=day, made_at=utc_now(), answered=_answered(log, parts), serving=service.serving,
        reference=service.reference,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        into = Path(scratch) / "scored.parquet"
        scored: Scored = ranks.call("flows.serving:score_day", order, origin, str(into), deadline_s=SCORE_DEADLINE_S)
        kept = _keep(log, service, order, scored, len(parts) + 1, pd.read_parquet(into)) if scored.requests else None
    if origin is None and scored.origin is not None:
        say(f"version {service.version} is new: its training and judged data were counted")
        _keep_origin(log, service, scored.origin)
    return _document(service, order, scored, kept)


@flow(name="predict", flow_run_name="predict {model} {day}", persist_result=False)
def predict_flow(model: str, day: str = "") -> Any:
    """Score the requests of a day with what serves. `day` is YYYY-MM-DD; "" is yesterday, UTC: the last day that is over."""
    day = day or day_before(datetime.now(UTC).date().isoformat())
    document = predict(make_ready(), say=get_run_logger().info, model=model, day=day)
    return _shown(document)


def _shown(document: dict[str, Any]) -> State[Any]:
    """On the flow run's page; red when nothing was answered."""
    told = lines(document)
    create_markdown_artifact(key="predictions", markdown="\n\n".join(map(safe, told)), description=told[0])
    if document["ok"]:
        return Completed(name="Scored", message=told[0], data=document)
    return Failed(name="Not answered", message=f"{told[0]}; run the monitor: it falls back", data=document)


def lines(document: Mapping[str, Any]) -> list[str]:
    """The document for people."""
    who = f"version {document['version']} ({document['kind'].replace('_', ' ')}) of {document['model']}"
    if not document["requests"]:
        return [f"{document['day']}: nothing new to score; {document['answered_before']} requests were answered before"]
    told = [f"{document['day']}: {who} answered {document['answered']} of {document['requests']} requests"]
    if document["answered_before"]:
        told.append(f"{document['answered_before']} more were answered before")
    if document["reference_version"]:
        told.append(f"version {document['reference_version']} was asked the same in the shadow")
    return [*told, *filter(None, (document["failure"], document["reference_failure"])), f"table sha256 {document['table']}"]


def kept_origin(log: ServingLog, service: InService) -> Origin | None:
    """What the version looked like where it was made, as it was kept at its first prediction; None before."""
    kept = log.reference(service.version, service.reference_version)
    return None if kept is None else _ORIGIN.validate_python({name: kept[name] for name in Origin.__dataclass_fields__})


def origin_of(log: ServingLog, service: InService) -> Origin:
    """The same, made now if need be: a version that was never asked, or that could not be."""
    kept = kept_origin(log, service)
    if kept is not None:
        return kept
    args = (service.request.recipe, service.serving, service.reference)
    made: Origin = ranks.call("flows.serving:origin_of", *args, deadline_s=SCORE_DEADLINE_S)
    _keep_origin(log, service, made)
    return made


def _keep_origin(log: ServingLog, service: InService, made: Origin) -> None:
    """Not while one of the two versions cannot be asked: the scores or the scale would be missing for ever."""
    if not made.failures:
        log.add_reference(service.version, service.reference_version, plain(made))


def _answered(log: ServingLog, parts: tuple[Part, ...]) -> npt.NDArray[np.int64]:
    tables = [log.table(part) for part in parts]
    return np.concatenate([np.zeros(0, np.int64), *(table.loc[table["answered"], "row_id"].to_numpy(np.int64) for table in tables)])


def _keep(log: ServingLog, service: InService, order: ScoreOrder, scored: Scored, number: int, table: pd.DataFrame) -> Part:
    shadow = service.fallbacks[0] if service.fallbacks else None
    part = Part(
        model=service.model, day=order.day, number=number, version=service.version, kind=service.pointer.serving_kind,
        model_sha256=service.proof.files_sha256, reference_version=service.reference_version,
        reference_kind=shadow.kind if shadow else "", reference_sha256=shadow.proof.files_sha256 if shadow else "",
        recipe=order.recipe, release_id=service.proof.release_id, made_at=order.made_at, rows=scored.requests, answered=scored.answered,
        failure=scored.failure, reference_failure=scored.reference_failure, counts=scored.counts,
    )  # fmt: skip
    try:
        return log.add(part, table)
    except ConflictError:
        raise ConflictError(
            f"another process scored requests of {order.day} in the same moment, and what it wrote stands. These {scored.requests} scores "
            "were thrown away. Run the command again: it scores what is left."
        ) from None


def _document(service: InService, order: ScoreOrder, scored: Scored, kept: Part | None) -> dict[str, Any]:
    return {
        "ok": not scored.requests or scored.answered > 0, "model": service.model, "day": order.day, "version": service.version,
        "kind": service.pointer.serving_kind, "model_sha256": service.proof.files_sha256, "release_id": service.proof.release_id,
        "reference_version": service.reference_version, "requests": scored.requests, "answered": scored.answered,
        "answered_before": len(order.answered), "failure": scored.failure, "reference_failure": scored.reference_failure,
        "part": kept.number if kept else 0, "table": kept.table if kept else "", "made_at": order.made_at,
    }  # fmt: skip
