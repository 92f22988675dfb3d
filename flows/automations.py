"""What a Prefect server does by itself: calls a run without a heartbeat crashed, mends after a crash, tells people, shows incidents.

Run as `python -m flows.automations` against the server of PREFECT_API_URL, after `prefect deploy --all` (docs/deployments.md).
"""

import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast
from uuid import UUID

from prefect.blocks.webhook import Webhook
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import StateType
from prefect.events.actions import CallWebhook, ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound
from pydantic import SecretStr

from infra.settings import Settings, load_settings
from validation.errors import ConfigError

HEARTBEAT = "prefect.flow-run.heartbeat"
SILENT_S = 100  # three heartbeats of 30 s that are missing, and one that is late
BLOCK = "sea-trial-webhook"
OWNER_TAG = "sea-trial"
# Events after which no heartbeat is due: ends by Prefect's names and by ours, and waiting for a person or for the next attempt.
QUIET = (
    "Completed", "Failed", "Crashed", "Cancelled", "Cancelling", "Promoted", "Fell back", "Held", "Paused", "Suspended", "AwaitingRetry",
    "Scheduled", "AwaitingApproval",
)  # fmt: skip
CHANGES_WHAT_SERVES = ("release", "rerun", "rollback", "monitor")  # tags of prefect.yaml; never of reconcile: it would call itself

CRASHED = "sea-trial: a run without heartbeats has crashed"
MEND = "sea-trial: reconcile after a crash"
INCIDENT = "sea-trial: show every incident"
TELL_RUN = "sea-trial: tell of refused, failed and crashed runs"
TELL_INCIDENT = "sea-trial: tell of incidents"

_RUN_TEXT = "{{ flow_run.name }}: {{ flow_run.state.name }}. {{ flow_run.state.message or '' }} {{ flow_run|ui_url }}"
_INCIDENT_TEXT = (
    "Incident of {{ event.resource.name }}: {{ event.payload.verdict }}, {{ event.payload.kind }}. {{ event.payload.explanation }} "
    "{{ event.payload.mitigation }} Evidence: {{ event.payload.incident }}"
)


def ensure_automations(*, webhook: str = "", say: Callable[[str], None] = lambda _line: None) -> list[str]:
    """Create the automations on the server of PREFECT_API_URL, or make those that are there as they are here; returns their names.

    Args: webhook, the address that is told (kept in the block "sea-trial-webhook"); "": the block as it is, and without one nobody is told.
    Raises: ConfigError when the deployments that they run are not there.
    """
    block = _block(webhook)
    with get_client(sync_client=True) as client:
        wanted = _mending(client) + ([] if block is None else _telling(block))
        for automation in wanted:
            found = client.read_automations_by_name(automation.name)
            for extra in found[1:]:
                client.delete_automation(extra.id)
            if found:
                client.update_automation(found[0].id, AutomationCore(**automation.model_dump(exclude={"owner_resource"})))
            else:
                client.create_automation(automation)
            say(f"automation {'updated' if found else 'made'}: {automation.name}")
    return [automation.name for automation in wanted]


def _mending(client: SyncPrefectClient) -> list[AutomationCore]:
    silent = EventTrigger(
        posture=Posture.Proactive, after={HEARTBEAT}, expect={HEARTBEAT, *(f"prefect.flow-run.{name}" for name in QUIET)},
        match=_resources("prefect.flow-run.*"), for_each={"prefect.resource.id"}, threshold=1, within=timedelta(seconds=SILENT_S),
    )  # fmt: skip
    crash = EventTrigger(
        posture=Posture.Reactive, expect={"prefect.flow-run.Crashed"}, match=_resources("prefect.flow-run.*"),
        match_related=_resources(*(f"prefect.tag.{tag}" for tag in CHANGES_WHAT_SERVES)), for_each={"prefect.resource.id"}, threshold=1,
    )  # fmt: skip
    incident = EventTrigger(posture=Posture.Reactive, expect={"seatrial.incident.*"}, for_each={"prefect.resource.id"}, threshold=1)
    message = f"no heartbeat for {SILENT_S} s: its process is gone, or its machine. What serves is not touched by that"
    shown = {"incident": _template("{{ event.payload.incident }}"), "run": _template("{{ event.payload.run }}")}
    return [
        _automation(CRASHED, silent, ChangeFlowRunState(state=StateType.CRASHED, message=message)),
        _automation(MEND, crash, RunDeployment(deployment_id=_deployment(client, "reconcile/reconcile"))),
        _automation(INCIDENT, incident, RunDeployment(deployment_id=_deployment(client, "incident/incident"), parameters=shown)),
    ]


def _telling(block: UUID) -> list[AutomationCore]:
    bad = EventTrigger(
        posture=Posture.Reactive, expect={"prefect.flow-run.*"},
        match=ResourceSpecification({"prefect.resource.id": "prefect.flow-run.*", "prefect.state-type": ["FAILED", "CRASHED"]}),
        match_related=_resources(f"prefect.tag.{OWNER_TAG}"), for_each={"prefect.resource.id"}, threshold=1,
    )  # fmt: skip
    incident = EventTrigger(posture=Posture.Reactive, expect={"seatrial.incident.*"}, for_each={"prefect.resource.id"}, threshold=1)
    return [
        _automation(TELL_RUN, bad, CallWebhook(block_document_id=block, payload=_json(_RUN_TEXT))),
        _automation(TELL_INCIDENT, incident, CallWebhook(block_document_id=block, payload=_json(_INCIDENT_TEXT))),
    ]


def _block(webhook: str) -> UUID | None:
    if webhook:
        headers: Any = {"Content-Type": "application/json"}
        Webhook(url=SecretStr(webhook), headers=headers).save(BLOCK, overwrite=True)
    try:
        return cast(Webhook, Webhook.load(BLOCK))._block_document_id
    except ValueError:
        return None


def _deployment(client: SyncPrefectClient, name: str) -> UUID:
    try:
        return client.read_deployment_by_name(name).id
    except ObjectNotFound:
        raise ConfigError(
            f"there is no deployment '{name}' on this server, so no automation was made. Run `prefect deploy --all` in the folder of "
            "prefect.yaml first."
        ) from None


def _automation(name: str, trigger: EventTrigger, action: Any) -> AutomationCore:
    return AutomationCore(name=name, description="Made by flows/automations.py.", enabled=True, trigger=trigger, actions=[action])


def _resources(*ids: str) -> ResourceSpecification:
    return ResourceSpecification({"prefect.resource.id": list(ids)})


def _template(text: str) -> dict[str, str]:
    return {"__prefect_kind": "jinja", "template": text}


def _json(text: str) -> str:
    """A payload `{"text": ...}` whose text is a template; what it renders to is quoted as JSON."""
    return '{"text": {% set said %}' + text + "{% endset %}{{ said|tojson }}}"


def tell(line: str) -> None:
    """Say a line on stderr."""
    sys.stderr.write(f"{line}\n")


def webhook_of(settings: Settings) -> str:
    """The address to tell, from SEATRIAL_NOTIFY_WEBHOOK; "" = none given."""
    return settings.notify_webhook.get_secret_value() if settings.notify_webhook else ""


if __name__ == "__main__":
    ensure_automations(webhook=webhook_of(load_settings()), say=tell)
