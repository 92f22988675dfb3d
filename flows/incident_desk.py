"""What becomes of an incident while a run goes on: it is kept in the object store, told to people, and an event on the Prefect run."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from infra.incidents import keep_incident
from infra.store import ObjectStore
from trainer.wires import Incident
from validation.errors import ReleaseError

READ = "infra.dumps:read_evidence"  # how ranks' leaders read an incident's folder: as `seatrial diagnose` does
EVENT = "seatrial.incident"


class Desk:
    """Takes in the incidents of one run; to be given to `run_group` as `on_incident`. Never raises: an incident ends no run."""

    def __init__(
        self, say: Callable[[str], None], *, owner: str, of: str = "", store: ObjectStore | Callable[[], ObjectStore] | None,
        with_planned: bool = False
    ) -> None:  # fmt: skip
        """Args: owner, name of the run or id of the release; of, which of its runs; store, or what opens it at the first incident; None:
        nothing is kept; with_planned, planned faults are told and kept like real ones.
        """
        self._say, self._owner, self._of, self._store, self._with_planned = say, owner, of, store, with_planned
        self.kept: list[str] = []  # keys of unplanned ones in the store

    def __call__(self, found: Incident) -> None:
        """Take in one message about an incident."""
        if found.planned and not self._with_planned:
            return
        key = self._keep(found) if found.is_over else ""
        for line in lines_of(found, key):
            self._say(line)
        if found.is_over and not found.planned:
            emit(found, self._owner, key)

    def _keep(self, found: Incident) -> str:
        if self._store is None:
            return ""
        try:
            self._store = self._store() if callable(self._store) else self._store
            key = keep_incident(self._store, self._owner, Path(found.folder), of=self._of)
        except (ReleaseError, OSError) as error:
            self._say(f"incident {found.number} is not in the store: {error}")
            return ""
        if not found.planned:
            self.kept.append(key)
        return key


def lines_of(found: Incident, key: str) -> tuple[str, str]:
    """An incident in two lines. Args: key, in the store; "" = not there."""
    planned = f" (planned: {found.planned})" if found.planned else ""
    where = f"{found.folder}, in the store as {key}" if key else found.folder
    return f"incident {found.number}: {found.verdict}, {found.kind}{planned}. {found.text}", f"  {found.mitigation}. Evidence: {where}"


def show_incidents(keys: Sequence[str]) -> None:
    """Run the flow `incident` for some, below the flow run under way; nothing outside of one."""
    if not keys or not (run := _flow_run()):
        return
    from flows.incident import incident

    for key in keys:
        incident(key, run, return_state=True)  # a page that cannot be made costs the page


def emit(found: Incident, owner: str, key: str) -> None:
    """Send `seatrial.incident.<kind>` to a Prefect server, about the flow run under way if there is one; nothing without a server.

    An automation on it can run the deployment `incident/incident` with the event's payload.
    """
    run = _flow_run()
    if not run and not os.environ.get("PREFECT_API_URL"):
        return
    from prefect.events import emit_event

    emit_event(
        event=f"{EVENT}.{found.kind}",
        resource={
            "prefect.resource.id": f"prefect.flow-run.{run}" if run else f"seatrial.run.{owner}", "prefect.resource.name": owner,
        },
        related=[{"prefect.resource.id": f"seatrial.run.{owner}", "prefect.resource.role": "run"}],
        payload={
            "incident": key or found.folder, "run": run, "verdict": found.verdict, "kind": found.kind, "ranks": list(found.ranks),
            "attempt": found.attempt, "explanation": found.text, "mitigation": found.mitigation,
        },
    )  # fmt: skip


def _flow_run() -> str:
    """Id of the flow run under way, "" outside of one."""
    from prefect.context import FlowRunContext, TaskRunContext

    task, flow = TaskRunContext.get(), FlowRunContext.get()
    found = task.task_run.flow_run_id if task else flow.flow_run.id if flow and flow.flow_run else None
    return str(found or "")
