"""Everything that a Prefect server has to know of Sea Trial: work pool, queue, limits, deployments, automations. Repeatable.

Run as `python -m flows.registering` in the environment of the worker (docs/deployments.md).
"""

import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists

from flows.automations import ensure_automations, tell, webhook_of
from flows.device_slots import DEVICES, ensure_limit
from infra.settings import load_settings
from validation.errors import ConfigError, ReleaseError

POOL = "sea-trial"
QUEUE = "devices"  # of the runs that need the machine's devices; all others are in "default"
DEPLOYMENTS = Path(__file__).resolve().parents[1] / "prefect.yaml"
DEPLOY_S = 300.0


def register(*, webhook: str = "", say: Callable[[str], None] = lambda _line: None) -> None:
    """Make what is not there, on the server of PREFECT_API_URL. Limits that a person changed stay as they are.

    Raises: ConfigError without prefect.yaml; ReleaseError when Prefect refuses a deployment.
    """
    with get_client(sync_client=True) as client:
        _ensure_pool(client)
        ensure_limit(client, DEVICES, 1)
    say(f"work pool {POOL}, its queue {QUEUE} and the limit {DEVICES}: one at a time")
    say(f"deployments: {', '.join(deploy(DEPLOYMENTS))}")
    ensure_automations(webhook=webhook, say=say)


def deploy(file: Path) -> list[str]:
    """Register every deployment of a prefect.yaml, as `prefect deploy --all` does; returns FLOW/NAME of all on the server."""
    if not file.exists():
        raise ConfigError(f"{file} is not there, so nothing was deployed. Run from a checkout of the repository.")
    command = [str(Path(sys.executable).with_name("prefect")), "--no-prompt", "deploy", "--all"]
    run = subprocess.run(command, cwd=file.parent, capture_output=True, text=True, timeout=DEPLOY_S)
    if run.returncode:
        raise ReleaseError(f"Prefect refused the deployments of {file}:\n{(run.stdout + run.stderr)[-2000:]}\nCorrect it and start again.")
    with get_client(sync_client=True) as client:
        flows = {flow.id: flow.name for flow in client.read_flows()}
        return sorted(f"{flows[found.flow_id]}/{found.name}" for found in client.read_deployments())


def _ensure_pool(client: SyncPrefectClient) -> None:
    with suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process"))
    with suppress(ObjectAlreadyExists):
        client.create_work_queue(QUEUE, work_pool_name=POOL, concurrency_limit=1, description="Runs that hold the machine's devices.")


if __name__ == "__main__":
    register(webhook=webhook_of(load_settings()), say=tell)
