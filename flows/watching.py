"""The flows `predict` and `monitor`: what a schedule runs every day, with pages in Prefect."""

from datetime import UTC, datetime
from typing import Any

from prefect import flow, get_run_logger
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed, Failed

from flows.monitor import gist, monitor, verdict_line
from flows.predict import lines, predict
from flows.surroundings import make_ready
from infra.markdown import artifact_key, gate_artifact_markdown, safe, table_rows


@flow(name="predict", flow_run_name="predict {model} {day}", persist_result=False)
def predict_flow(model: str, day: str = "") -> Any:
    """Score a day's requests with what serves. `day` is YYYY-MM-DD; "" is today, UTC."""
    say = get_run_logger().info
    document = predict(make_ready(), say=say, model=model, day=day or datetime.now(UTC).date().isoformat())
    told = lines(document)
    create_markdown_artifact(key="predictions", markdown="\n\n".join(map(safe, told)), description=told[0])
    if document["ok"]:
        return Completed(name="Scored", message=told[0], data=document)
    return Failed(name="Not answered", message=f"{told[0]}; run the monitor: it falls back", data=document)


@flow(name="monitor", flow_run_name="monitor {model} {day}", persist_result=False)
def monitor_flow(model: str, day: str = "", dry_run: bool = False) -> Any:
    """Judge what serves by what became of its predictions, and fall back from a version that is proven bad. `day` is the day it is."""
    document = monitor(make_ready(), say=get_run_logger().info, model=model, day=day, dry_run=dry_run)
    line, told = verdict_line(document), gist(document)
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
