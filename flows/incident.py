"""The flow `incident`: one incident's page in Prefect: what happened, a row a rank, a picture, links to the run and to the files."""

import os
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import flow
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.client.schemas.objects import State
from prefect.states import Completed
from prefect.utilities.urls import url_for

from flows.embedded_server import MARK
from infra.dumps import read_evidence
from infra.incident_view import gist, incident_markdown, rank_rows
from infra.incidents import StoredIncident, load_incident
from infra.settings import load_settings
from infra.store import open_store
from validation.errors import DataError
from validation.flight import Evidence


@flow(name="incident", flow_run_name="incident {incident}", persist_result=False)
def incident(incident: str, run: str = "") -> Any:
    """Show one incident. `incident` is its key in the store or a folder; `run` the id of the flow run that it happened in."""
    store = open_store(load_settings(), writable=False)
    with tempfile.TemporaryDirectory() as into:
        stored, folder = load_incident(store, incident, into=Path(into))
        try:
            evidence = read_evidence(folder)
        except DataError as error:  # the record stands without it
            evidence = Evidence(world_size=stored.record["world_size"], ranks={}, problems=(str(error),))
    return _shown(stored, evidence, _links(stored, run))


def _shown(stored: StoredIncident, evidence: Evidence, links: Sequence[str]) -> State[Any]:
    line = gist(stored)
    create_markdown_artifact(key="incident", markdown=incident_markdown(stored, evidence, links=links), description=line)
    create_table_artifact(key="incident-ranks", table=rank_rows(stored, evidence), description=line)
    return Completed(name=stored.finding["kind"].replace("_", " ").capitalize(), message=line, data=dict(stored.record))


def _links(stored: StoredIncident, run: str) -> list[str]:
    """To the flow run, and where the files lie."""
    address = ""
    with suppress(ValueError):  # of a server that ends with this command there would be nothing to follow
        address = url_for("flow-run", obj_id=run) or "" if run and MARK not in os.environ else ""
    return [*([f"[the run]({address})"] if address else []), f"files: `{stored.place}`"]
