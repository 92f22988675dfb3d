"""Releases on real servers: Prefect and MLflow on PostgreSQL, evidence in S3; servers that restart, a run that is killed, people told.

One stack and two releases for all facts, since each is expensive.
"""

import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from helpers_deployment import until
from helpers_stack import Fleet, fleet
from test_deployment import POLICY

from flows.automations import CRASHED, INCIDENT, MEND, SILENT_S, TELL_INCIDENT, TELL_RUN
from flows.device_slots import DEVICES
from flows.registering import POOL, QUEUE
from validation.policy import GATES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

RELEASE_S = 600.0  # 60-150 s on two cores, and three restarts
TOLD_S = 60.0
STALL_S = 15.0
# sends heartbeats, then stands still until it is killed
SLEEPER = (
    "import time; from prefect import flow, tags\n"
    "@flow(name='sleeper', flow_run_name='a run that is killed')\n"
    "def sleeper():\n"
    "    from prefect.context import FlowRunContext\n"
    "    print(FlowRunContext.get().flow_run.id, flush=True); time.sleep(3600)\n"
    "with tags('sea-trial', 'release'): sleeper()\n"
)
INCIDENT_EVENT = (
    "from flows.incident_desk import emit; from trainer.wires import Incident; from prefect.events.worker import EventsWorker; "
    "emit(Incident(folder='/f', number=1, attempt=0, verdict='hang', kind='late_rank', ranks=(1,), text='Rank 1 \"waits\".', "
    "mitigation='m', planned='', is_over=True), 'night', 'incidents/night/1'); EventsWorker.instance().drain()"
)


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The stack with its worker."""
    with fleet(tmp_path_factory.mktemp("fleet")) as own:
        yield own


@pytest.fixture(scope="module")
def released(port: Fleet) -> dict[str, Any]:
    """A release in whose course each server was restarted, and the database then stood still for some seconds."""
    run_id = port.prefect.schedule("release/daily-flights", {"recipe": "digits:recipe", "policy": POLICY})
    moments = {"gradient_equivalence: running": "prefect", "kill_and_resume: PASS": "mlflow", "scaling: running": "postgres"}
    for word, server in moments.items():
        until(lambda word=word: word in port.worker_log(), RELEASE_S, f"'{word}' in the worker's log")
        port.stack.stop(server)
        port.stack.start_again(server)
    until(lambda: "slice_quality: running" in port.worker_log(), RELEASE_S, "slice_quality in the worker's log")
    port.stall("postgres", STALL_S)
    return port.prefect.ended(run_id, RELEASE_S)


@pytest.fixture(scope="module")
def killed(port: Fleet, released: Any) -> tuple[str, float]:
    """A flow run whose process was killed after its first heartbeat, and when; nobody but the automation can notice.

    After the restarts: Prefect holds an event back for 15 minutes when the one before it was lost with a server's memory.
    """
    process = port.python(SLEEPER)
    assert process.stdout is not None
    run_id = process.stdout.readline().strip()
    wanted = {"filter": {"event": {"name": ["prefect.flow-run.heartbeat"]}, "any_resource": {"id": [f"prefect.flow-run.{run_id}"]}}}
    until(lambda: port.prefect.ask("events/filter", wanted)["events"] or None, 60.0, "a heartbeat")
    process.kill()
    process.wait()
    return run_id, time.monotonic()


@pytest.fixture(scope="module")
def refused(port: Fleet, killed: Any) -> dict[str, Any]:
    """A release whose data contract does not hold."""
    return port.prefect.ended(port.prefect.schedule("release/daily-flights", {"recipe": "late_digits:recipe", "policy": POLICY}), RELEASE_S)


def test_everything_is_registered(port: Fleet) -> None:
    """One command: pool, queue and limit for the devices, every deployment, every automation."""
    queues = {item["name"]: item["concurrency_limit"] for item in port.prefect.ask(f"work_pools/{POOL}/queues/filter", {})}
    deployments = {item["name"] for item in port.prefect.ask("deployments/filter", {})}
    automations = {item["name"] for item in port.prefect.ask("automations/filter", {})}

    assert queues == {"default": None, QUEUE: 1}
    assert port.prefect.ask(f"v2/concurrency_limits/{DEVICES}")["limit"] == 1
    assert deployments == {"daily-flights", "rerun-gate", "predict", "monitor", "rollback", "reconcile", "incident"}
    assert automations == {CRASHED, MEND, INCIDENT, TELL_RUN, TELL_INCIDENT}


def test_registering_again_changes_nothing(port: Fleet) -> None:
    """Automations are updated, not doubled, and a limit that a person raised stays raised."""
    port.prefect.ask("v2/concurrency_limits/", {"name": "mine", "limit": 3})
    before = {item["id"] for item in port.prefect.ask("automations/filter", {})}
    code = "from flows.automations import ensure_automations; ensure_automations()"
    assert port.python(code).wait(120) == 0

    assert {item["id"] for item in port.prefect.ask("automations/filter", {})} == before


def test_a_release_survives_the_restart_of_every_server(port: Fleet, released: dict[str, Any]) -> None:
    """Prefect, MLflow and PostgreSQL each went away in mid-release, and the database was slow: it ends promoted, as without."""
    assert (released["state_name"], released["state_type"]) == ("Promoted", "COMPLETED"), port.worker_log()[-4000:]


def test_its_promotion_is_true(port: Fleet, released: dict[str, Any]) -> None:
    """What serves is the release's candidate, and signatures and evidence in S3 verify."""
    document = port.command("show")
    verified = port.command("verify", "digits")

    [row] = [row for row in document["releases"] if row["recipe"] == "digits:recipe"]
    assert (row["decision"], row["serving"]["kind"]) == ("promoted", "candidate")
    assert verified["ok"] is True


def test_its_gates_are_on_the_runs_page(port: Fleet, released: dict[str, Any]) -> None:
    """A server that was away costs no page: every gate's is there."""
    keys = port.prefect.artifacts(released["id"]).keys()

    assert {gate.replace("_", "-") for gate in GATES} | {"release"} <= keys


def test_its_version_has_a_page_in_mlflow(port: Fleet, released: dict[str, Any]) -> None:
    """The version's text says why; the report is served by MLflow out of S3."""
    api = f"{port.stack.mlflow_url}/api/2.0/mlflow"
    version = httpx.get(f"{api}/registered-models/alias", params={"name": "digits", "alias": "champion"}).json()["model_version"]
    report = httpx.get(f"{port.stack.mlflow_url}/get-artifact", params={"path": "report.html", "run_uuid": version["run_id"]})

    assert version["description"].startswith("Promoted")
    assert (report.status_code, "Promoted" in report.text) == (200, True)


def test_a_refusal_is_told(port: Fleet, refused: dict[str, Any]) -> None:
    """A refused release is red, and the webhook gets its name, its state, why, and a link."""
    assert (refused["state_name"], refused["state_type"]) == ("Fell back", "FAILED"), port.worker_log()[-4000:]
    said = until(lambda: [text for text in port.told.said if "late_digits" in text] or None, TOLD_S, f"a message: {port.told.said}")

    assert re.fullmatch(rf'\{{"text": "release late_digits:recipe: Fell back\. .*did not pass {port.stack.prefect_url}/.*"\}}', said[0])


def test_an_incident_is_told_and_shown(port: Fleet) -> None:
    """An event of a run that stands still: people are told, and the deployment `incident` runs with its key."""
    assert port.python(INCIDENT_EVENT).wait(120) == 0
    said = until(lambda: [text for text in port.told.said if "Incident of night" in text] or None, TOLD_S, f"{port.told.said}")
    wanted = {"flows": {"name": {"any_": ["incident"]}}}
    [run] = until(lambda: port.prefect.ask("flow_runs/filter", wanted) or None, TOLD_S, "a run of `incident`")

    assert "hang, late_rank" in said[0]
    assert run["parameters"] == {"incident": "incidents/night/1", "run": ""}


def test_a_killed_run_is_called_crashed(port: Fleet, killed: tuple[str, float], refused: Any) -> None:
    """SIGKILL leaves a run RUNNING; without heartbeats it is crashed within two minutes, people are told, and reconcile runs."""
    run_id, since = killed
    run = port.prefect.ended(run_id, max(1.0, since + SILENT_S + 90 - time.monotonic()))
    said = until(lambda: [text for text in port.told.said if "a run that is killed" in text] or None, TOLD_S, f"{port.told.said}")
    runs = port.prefect.ask("flow_runs/filter", {"deployments": {"name": {"any_": ["reconcile"]}}})

    assert (run["state_type"], "no heartbeat" in run["state"]["message"]) == ("CRASHED", True)
    assert "Crashed. no heartbeat" in said[0]
    assert [item for item in runs if (item["created_by"] or {}).get("type") == "AUTOMATION"]


def test_a_registry_that_is_away_starts_no_release(port: Fleet, refused: Any) -> None:
    """MLflow does not come back: after a minute of asking the run fails, says what to do, and what serves goes on serving."""
    before = port.command("show")
    port.stack.stop("mlflow")
    run = port.prefect.ended(port.prefect.schedule("release/daily-flights", {"recipe": "digits:recipe", "policy": POLICY}), RELEASE_S)
    after = port.command("show")
    port.stack.start_again("mlflow")

    assert run["state_type"] == "FAILED"
    assert "Check SEATRIAL_MLFLOW_TRACKING_URI" in run["state"]["message"]
    assert after == before


def test_no_secret_is_in_any_log(port: Fleet, refused: Any) -> None:
    """Passwords, keys and the webhook's address reach no log, no flow run's log and no notification."""
    assert port.stack.cluster is not None
    secrets = (port.stack.cluster.password, port.stack.environment["AWS_SECRET_ACCESS_KEY"], "secret-path")
    texts = [path.read_text(errors="replace") for path in port.stack.folder.rglob("*.log")]
    texts += [item["message"] for item in port.prefect.ask("logs/filter", {"limit": 200})] + port.told.said

    assert not [text for text in texts for secret in secrets if secret in text]
