"""What becomes of an incident while a run goes on, and its page."""

from pathlib import Path
from typing import Any

import pytest
from helpers_incidents import make_incident

from flows import incident as page
from flows import incident_desk
from flows.cli import main
from flows.incident_desk import Desk
from infra.incidents import list_incidents
from infra.settings import load_settings
from infra.store import MemoryStore, open_store
from trainer.wires import Incident
from validation.errors import DataError, StoreError

Patch = pytest.MonkeyPatch


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: Patch) -> Path:
    """A home of its own, and no server."""
    monkeypatch.setenv("SEATRIAL_HOME", str(tmp_path / "home"))
    for name in ("SEATRIAL_STORE", "PREFECT_API_URL"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path / "home"


def told(folder: Path, **changes: Any) -> Incident:
    """A leader's message."""
    usual = {
        "folder": str(folder), "number": 3, "attempt": 0, "verdict": "hang", "kind": "missing_participant", "ranks": (1,),
        "text": "Rank 1 never came.", "mitigation": "restarted on 2 ranks", "planned": "", "is_over": True,
    }  # fmt: skip
    return Incident(**(usual | changes))


def test_an_incident_is_kept_and_told_in_two_lines(tmp_path: Path) -> None:
    """What, why, what was done, and where to read on."""
    store, lines = MemoryStore(), []
    Desk(lines.append, owner="night", store=store)(told(make_incident(tmp_path / "003")))

    assert lines == [
        "incident 3: hang, missing_participant. Rank 1 never came.",
        f"  restarted on 2 ranks. Evidence: {tmp_path / '003'}, in the store as incidents/night/20260101-000000-003",
    ]
    assert list_incidents(store) == ("incidents/night/20260101-000000-003",)


def test_a_stall_that_goes_on_is_told_and_not_kept(tmp_path: Path) -> None:
    """Its record changes until it is over."""
    store, lines = MemoryStore(), []
    Desk(lines.append, owner="night", store=store)(told(make_incident(tmp_path / "003"), is_over=False))

    assert (len(lines), list_incidents(store)) == (2, ())


@pytest.mark.parametrize("with_planned", [False, True])
def test_planned_faults_are_told_to_who_planned_them(tmp_path: Path, with_planned: bool) -> None:
    """A gate's own kills are no news; `seatrial train --fault` shows what was made of them, and no event is sent."""
    desk = Desk((lines := []).append, owner="night", store=MemoryStore(), with_planned=with_planned)
    desk(told(make_incident(tmp_path / "003"), planned="kill:rank=1,step=7"))

    assert (bool(lines), desk.kept) == (with_planned, [])


def test_a_store_that_is_away_costs_the_copy(tmp_path: Path) -> None:
    """The run goes on, and says where the evidence is."""
    lines: list[str] = []

    def away() -> MemoryStore:
        raise StoreError("not reachable")

    Desk(lines.append, owner="night", store=away)(told(make_incident(tmp_path / "003")))

    assert lines[0] == "incident 3 is not in the store: not reachable"
    assert lines[-1].endswith(f"Evidence: {tmp_path / '003'}")


def test_an_event_names_kind_run_and_key(tmp_path: Path, monkeypatch: Patch) -> None:
    """With a server, every unplanned incident is an event that an automation can act on."""
    sent: list[dict[str, Any]] = []
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:9/api")
    monkeypatch.setattr("prefect.events.emit_event", lambda **event: sent.append(event))
    Desk(lambda _: None, owner="night", store=MemoryStore())(told(make_incident(tmp_path / "003")))

    [event] = sent
    assert (event["event"], event["resource"]["prefect.resource.id"]) == ("seatrial.incident.missing_participant", "seatrial.run.night")
    assert event["payload"]["incident"] == "incidents/night/20260101-000000-003"


def test_outside_of_a_flow_run_nothing_is_shown(monkeypatch: Patch) -> None:
    """A command without Prefect starts no server for a page."""
    shown: list[object] = []
    monkeypatch.setattr(page, "incident", lambda *given, **_: shown.append(given))
    incident_desk.show_incidents(["incidents/night/1"])
    assert not shown
    monkeypatch.setattr(incident_desk, "_flow_run", lambda: "night")
    incident_desk.show_incidents(["incidents/night/1"])
    assert shown == [("incidents/night/1", "night")]


def test_the_flow_reads_the_store_and_makes_the_page(tmp_path: Path, monkeypatch: Patch) -> None:
    """From a key: a row a rank, the finding with its picture, the record as the run's result."""
    made: dict[str, Any] = {}
    monkeypatch.setattr(page, "create_table_artifact", lambda **given: made.update(table=given))
    monkeypatch.setattr(page, "create_markdown_artifact", lambda **given: made.update(page=given))
    desk = Desk(lambda _: None, owner="night", store=open_store(load_settings()))
    desk(told(make_incident(tmp_path / "003")))

    state = page.incident.fn(desk.kept[0])

    assert (state.name, state.message) == ("Missing participant", "hang: missing_participant by rank 1 in attempt 0")
    assert [row["part"] for row in made["table"]["table"]] == ["waits", "culprit"]
    assert f"files: `{desk.kept[0]}`" in made["page"]["markdown"]


def test_the_flow_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    """A typing error is a mistake of the input."""
    with pytest.raises(DataError, match="there is no incident 'incidents/x'"):
        page.incident.fn("incidents/x")


def test_the_command_reads_the_same_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`seatrial diagnose` takes an incident's folder; one that is not there ends with exit code 2."""
    assert main(["diagnose", str(make_incident(tmp_path / "003")), "--json"]) == 0
    assert '"verdict"' in capsys.readouterr().out
    assert main(["diagnose", str(tmp_path / "none")]) == 2


def test_train_tells_of_an_incident_and_keeps_it(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A killed rank: two lines while the run goes on, and the record in the store under the run's name."""
    command = ["train", "tiny_recipe:long", "--run", "night", "--steps", "8", "--world-size", "2", "--checkpoint-every", "3"]
    assert main([*command, "--fault", "kill:rank=1,step=5"]) == 0

    said = " ".join(capsys.readouterr().err.split())
    assert "incident 1: crash, dead_process (planned: kill:rank=1,step=5,phase=backward,attempt=0). Rank 1 died first" in said
    [key] = list_incidents(open_store(load_settings()), "night")
    assert key in said
