"""The deployments of prefect.yaml as a platform engineer uses them: a server, a pool, a worker, a run from the schedule, a gate again.

One server and one release for all facts, since each is expensive; the runs are picked up and executed by the worker's own processes.
"""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from helpers_deployment import REPOSITORY, Harbour, end, harbour, until
from helpers_incidents import make_incident

from flows.automations import CRASHED, INCIDENT, MEND, TELL_INCIDENT, TELL_RUN
from validation.policy import GATES

# Small and honest, as in test_release.py: every gate really runs.
POLICY = """
world_sizes: [1, 2]
scaling: {efficiency_floor: 0.01, confidence: 0.5, repeats: 4, steps: 8, warmup_steps: 2, idle_share_max: 0.7}
kill_and_resume: {steps: 20}
slice_quality: {min_n: 60, min_coverage: 0.7, latency_p95_ms: 500}
"""
POOL = "sea-trial"
RELEASE_S = 240.0  # a release of the example takes 30-60 s on two cores


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Harbour]:
    """A server with the pool that prefect.yaml names."""
    with harbour(tmp_path_factory.mktemp("harbour")) as own:
        own.prefect("work-pool", "create", POOL, "--type", "process")
        yield own


@pytest.fixture(scope="module")
def before(port: Harbour) -> bytes:
    """prefect.yaml as it was before everything in it was deployed."""
    text = (REPOSITORY / "prefect.yaml").read_bytes()
    port.prefect("deploy", "--all")
    return text


@pytest.fixture(scope="module")
def worker(port: Harbour, before: bytes) -> subprocess.Popen[bytes]:
    """A worker of the pool, as prefect.yaml says to start it; the harbour ends it."""
    return port.start("worker", "worker", "start", "--pool", POOL, "--type", "process", "--limit", "1")


@pytest.fixture(scope="module")
def released(port: Harbour, worker: Any) -> dict[str, Any]:
    """The flow run of one release of the example recipe."""
    run_id = port.schedule("release/daily-flights", {"recipe": "digits:recipe", "policy": POLICY})
    return port.ended(run_id, RELEASE_S)


@pytest.fixture(scope="module")
def shown(port: Harbour, released: Any) -> dict[str, Any]:
    """What `seatrial show` says of the worker's home."""
    return show(port)


@pytest.fixture(scope="module")
def rerun(port: Harbour, shown: Any) -> dict[str, Any]:
    """The flow run that held one gate of that release again."""
    run_id = port.schedule("rerun-gate/rerun-gate", {"gate": "readiness", "release_id": shown["releases"][0]["release_id"]})
    return port.ended(run_id, RELEASE_S)


@pytest.fixture(scope="module")
def refused(port: Harbour, rerun: Any) -> dict[str, Any]:
    """The flow run of a release whose data contract does not hold."""
    return port.ended(port.schedule("release/daily-flights", {"recipe": "late_digits:recipe", "policy": POLICY}), RELEASE_S)


def show(port: Harbour, *arguments: str) -> dict[str, Any]:
    """The document of `seatrial show --json` with the worker's home."""
    command = [sys.executable, "-m", "flows.cli", "show", *arguments, "--json"]
    run = subprocess.run(command, cwd=port.folder, env=port.environment, capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    document: dict[str, Any] = json.loads(run.stdout)
    return document


def key_of(gate: str) -> str:
    """A gate's artifact key."""
    return gate.replace("_", "-")


def test_the_daily_release_stands_with_its_schedule(port: Harbour, before: bytes) -> None:
    """The whole release of flights is due every day at 04:00 UTC, in the queue of the runs that hold the devices."""
    found = port.ask("deployments/name/release/daily-flights")

    assert [(item["schedule"]["cron"], item["schedule"]["timezone"], item["active"]) for item in found["schedules"]] == [
        ("0 4 * * *", "UTC", True)
    ]
    assert found["parameters"] == {"recipe": "flights", "policy": "", "world_sizes": None, "drill": ""}
    assert set(found["tags"]) == {"sea-trial", "release"}
    assert found["global_concurrency_limit"] is None  # its lease would end the release when the server restarts
    assert (found["work_pool_name"], found["work_queue_name"], found["paused"]) == (POOL, "devices", False)


def test_the_re_run_stands_without_a_schedule(port: Harbour, before: bytes) -> None:
    """Holding a gate again is asked for by a person: no schedule, and gate and release have no default."""
    found = port.ask("deployments/name/rerun-gate/rerun-gate")

    assert (found["schedules"], found["parameters"]) == ([], {})
    assert set(found["parameter_openapi_schema"]["required"]) == {"gate", "release_id"}
    assert set(found["tags"]) == {"sea-trial", "rerun"}
    assert found["work_queue_name"] == "devices"


@pytest.mark.parametrize("name", ["predict/predict", "monitor/monitor"])
def test_what_has_no_requests_today_is_shipped_asleep(port: Harbour, before: bytes, name: str) -> None:
    """The shipped recipe's requests are of December 2013: its days are not scored by a schedule until somebody switches it on."""
    found = port.ask(f"deployments/name/{name}")

    assert [item["active"] for item in found["schedules"]] == [False]
    assert (found["paused"], found["parameters"], found["work_queue_name"]) == (False, {"model": "flights"}, "default")


def test_deploying_leaves_the_repository_as_it_is(before: bytes) -> None:
    """Deploying neither rewrites prefect.yaml nor leaves a folder of Prefect's behind."""
    assert (REPOSITORY / "prefect.yaml").read_bytes() == before
    assert not (REPOSITORY / ".prefect").exists()


def test_the_worker_runs_the_release_to_its_promotion(port: Harbour, released: dict[str, Any]) -> None:
    """A scheduled run is picked up by the worker, and its state says what was decided."""
    assert (released["state_name"], released["state_type"]) == ("Promoted", "COMPLETED"), port.log("worker")
    assert released["work_pool_name"] == POOL
    assert released["start_time"] >= released["expected_start_time"]


def test_each_gate_is_a_task_run_with_its_state(port: Harbour, released: dict[str, Any]) -> None:
    """The run's page shows six gates by name, each completed with its reason."""
    tasks = port.task_runs(released["id"])

    assert {gate: tasks[gate]["state"]["type"] for gate in GATES} == dict.fromkeys(GATES, "COMPLETED")
    assert all(tasks[gate]["state"]["message"] for gate in GATES)


@pytest.mark.parametrize("gate", GATES)
def test_each_gate_shows_its_checks_and_plots(port: Harbour, released: dict[str, Any], gate: str) -> None:
    """A gate leaves a table of its checks, and a page that names it, with at least one picture inline."""
    artifacts = port.artifacts(released["id"])
    table, page = artifacts[f"{key_of(gate)}-checks"], artifacts[key_of(gate)]

    assert (table["type"], page["type"]) == ("table", "markdown")
    assert json.loads(table["data"])
    assert gate in page["data"]
    assert "data:image/png;base64," in page["data"]


@pytest.mark.parametrize("key", ["gates", "candidate-training"])
def test_long_work_has_a_bar_that_reached_its_end(port: Harbour, released: dict[str, Any], key: str) -> None:
    """The release as a whole and the candidate's training show how far they are."""
    bar = port.artifacts(released["id"])[key]

    assert (bar["type"], float(bar["data"])) == ("progress", 100.0)


def test_the_summary_says_what_was_decided(port: Harbour, released: dict[str, Any]) -> None:
    """The artifact `release` opens with the decision."""
    summary = port.artifacts(released["id"])["release"]

    assert summary["type"] == "markdown"
    assert "Promoted: six of six gates pass" in summary["data"]


def test_the_command_sees_what_the_worker_released(shown: dict[str, Any]) -> None:
    """`seatrial show` in the worker's home lists the release, promoted, and its candidate serves."""
    assert [(row["recipe"], row["decision"]) for row in shown["releases"]] == [("digits:recipe", "promoted")]
    assert shown["releases"][0]["serving"]["kind"] == "candidate"


def test_one_gate_is_held_again_by_the_worker(port: Harbour, shown: dict[str, Any], rerun: dict[str, Any]) -> None:
    """Readiness runs a second time, the other five keep their evidence, and the decision stands."""
    document = show(port, shown["releases"][0]["release_id"])
    gates = {gate["name"]: gate for gate in document["gates"]}

    assert (rerun["state_name"], rerun["state_type"]) == ("Promoted", "COMPLETED"), port.log("worker")
    assert set(port.task_runs(rerun["id"])) & set(GATES) == {"readiness"}
    assert (gates["readiness"]["attempt"], gates["readiness"]["reused"]) == (2, False)
    assert all(gate["reused"] for name, gate in gates.items() if name != "readiness")


def test_a_refused_release_is_red_in_a_list_of_runs(port: Harbour, refused: dict[str, Any]) -> None:
    """A release that was refused is a failed run, the gate that refused it a failed task, and both say so in few words."""
    gate = port.task_runs(refused["id"])["data_contract"]["state"]

    assert (refused["state_name"], refused["state_type"], gate["name"], gate["type"]) == ("Fell back", "FAILED", "Fail", "FAILED")
    assert refused["state"]["message"] == f"{', '.join(GATES)} did not pass"
    assert "clerk_reading" in gate["message"]


def test_a_refusal_is_no_noise_in_the_log(port: Harbour, refused: dict[str, Any]) -> None:
    """A verdict is logged once, by its gate; the engine's own lines stay short and without the traceback of no exception."""
    lines = port.lines(refused["id"], last="Finished in state Fell back")

    assert not any("failed with state" in line or "NoneType" in line for line in lines)
    assert sum("data_contract: FAIL" in line for line in lines) == 1
    assert "NoneType: None" not in port.log("worker")


def test_an_incident_has_its_page(port: Harbour, worker: Any) -> None:
    """The deployment `incident` shows a folder: a row a rank, a page with finding, picture and files, and the run says what it is."""
    folder = make_incident(port.folder / "003")
    run = port.ended(port.schedule("incident/incident", {"incident": str(folder)}), 60.0)
    artifacts = port.artifacts(run["id"])

    assert (run["state_name"], run["state_type"]) == ("Missing participant", "COMPLETED"), port.log("worker")
    assert [row["part"] for row in json.loads(artifacts["incident-ranks"]["data"])] == ["waits", "culprit"]
    for part in ("Rank 1 never came to all_reduce 2.", "data:image/png;base64,", str(folder)):
        assert part in artifacts["incident"]["data"]


def test_an_unknown_incident_fails_with_a_reason(port: Harbour, worker: Any) -> None:
    """A key that nobody kept."""
    run = port.ended(port.schedule("incident/incident", {"incident": "incidents/none/1"}), 60.0)

    assert run["state_type"] == "FAILED"
    assert "there is no incident 'incidents/none/1'" in run["state"]["message"]


def test_a_release_that_goes_well_has_no_incident(port: Harbour, released: dict[str, Any]) -> None:
    """What gates plan is no news: no event, nothing in the store."""
    wanted = {"filter": {"event": {"prefix": ["seatrial.incident."]}}}

    assert port.ask("events/filter", wanted)["events"] == []
    assert not (port.home / "store" / "incidents").exists()


def test_an_incident_is_an_event(port: Harbour, worker: Any) -> None:
    """What a run's desk says reaches the server by kind, with the key that the deployment takes."""
    code = (
        "from flows.incident_desk import emit; from trainer.wires import Incident; from prefect.events.worker import EventsWorker; "
        "emit(Incident(folder='/f', number=1, attempt=0, verdict='hang', kind='late_rank', ranks=(1,), text='t', mitigation='m', "
        "planned='', is_over=True), 'night', 'incidents/night/1'); EventsWorker.instance().drain()"
    )
    subprocess.run([sys.executable, "-c", code], env=port.environment, cwd=REPOSITORY, check=True, timeout=60)
    wanted = {"filter": {"event": {"name": ["seatrial.incident.late_rank"]}}}
    [event] = until(lambda: port.ask("events/filter", wanted)["events"] or None, 30.0, "the event")

    assert (event["event"], event["resource"]["prefect.resource.id"]) == ("seatrial.incident.late_rank", "seatrial.run.night")
    assert (event["payload"]["incident"], event["payload"]["ranks"]) == ("incidents/night/1", [1])


@pytest.mark.slow
def test_a_worker_that_is_ended_takes_its_release_along(port: Harbour, worker: subprocess.Popen[bytes], refused: Any) -> None:
    """Ending the worker's process group in the middle of a release leaves no process behind, and what serves goes on serving."""
    before = show(port)["serving"]
    run_id = port.schedule("release/daily-flights", {"recipe": "digits:recipe", "policy": POLICY})
    until(lambda: "gradient-equivalence" in port.artifacts(run_id), RELEASE_S, "the end of the second gate")

    end(worker)

    until(
        lambda: {process.pid for process in port.processes()} == {port.started[0].pid},
        15,
        f"the end of all but the server: {port.processes()}",
    )
    assert show(port)["serving"] == before


def test_automations_are_made_once(port: Harbour, before: bytes) -> None:
    """Asked for twice, each stands once, with the webhook in a block and not in any automation."""
    given = port.environment | {"SEATRIAL_NOTIFY_WEBHOOK": "http://127.0.0.1:9/hush"}
    for _ in range(2):
        subprocess.run([sys.executable, "-m", "flows.automations"], cwd=REPOSITORY, env=given, check=True, timeout=120)
    found = port.ask("automations/filter", {})

    assert sorted(item["name"] for item in found) == sorted((CRASHED, MEND, INCIDENT, TELL_RUN, TELL_INCIDENT))
    assert "hush" not in json.dumps(found)
