"""What `seatrial show` says of releases that did not simply end, of acts, and how fast it says it."""

import subprocess
import sys

import pytest
from helpers_history import gate_document, started, whole_release

from flows import history
from flows.ownership import own
from infra.journal import Journal
from infra.store import MemoryStore, ObjectStore, put_evidence
from validation.errors import ConfigError

NOW = "2026-01-01T00:00:00+00:00"
RELEASE, ACT = "boat-20260101-000000-aaaa", "boat-20260101-120000-bbbb"
FRAMEWORKS = ("prefect", "mlflow", "torch", "pandas", "boto3", "matplotlib")


def journal_with(store: ObjectStore, *records: tuple[str, dict[str, object]]) -> Journal:
    """A release that began and left these records."""
    journal = Journal(store, RELEASE)
    journal.append("started", started(), time_utc=NOW)
    for kind, payload in records:
        journal.append(kind, payload, time_utc=NOW)
    return journal


def gate_record(store: ObjectStore, outcome: str, attempt: int) -> tuple[str, dict[str, object]]:
    """One attempt of the scaling gate."""
    sha256 = put_evidence(store, gate_document("scaling", attempt=attempt))
    return "gate", {"gate": "scaling", "attempt": attempt, "outcome": outcome, "reason": f"attempt {attempt}", "evidence": sha256}


ASKED = ("approval_requested", {"lapses_at": "2026-01-08"})


@pytest.mark.parametrize(
    ("records", "decision", "says"),
    [
        pytest.param([("abandoned", {"reason": "the machine is gone"})], "abandoned", "the machine is gone", id="abandoned"),
        pytest.param([ASKED], "waiting", "until 2026-01-08", id="nobody answered"),
        pytest.param([ASKED, ("intent", {})], "waiting", "yes since 2026-01-01", id="another record came after the question"),
        pytest.param([ASKED, ("approval", {"attestation": "x"})], "unfinished", "'approval'", id="answered"),
        pytest.param([ASKED, ("approval", {}), ASKED], "waiting", "yes since", id="asked again"),
        pytest.param([ASKED, ("abandoned", {"reason": "too late"})], "abandoned", "too late", id="given up while it waited"),
    ],
)
def test_the_state_of_a_release_without_a_decision(records: list[tuple[str, dict[str, object]]], decision: str, says: str) -> None:
    """Given up, waiting for a person or simply not at its end: each has its word and its reason."""
    store = MemoryStore()
    journal_with(store, *records)
    document = history.release(store, RELEASE)

    assert document["decision"] == decision
    assert says in document["reason"]


def test_a_waiting_release_names_the_command_that_lets_it_go_on() -> None:
    """The next step can be copied."""
    store = MemoryStore()
    journal_with(store, ASKED)

    assert f"seatrial approve {RELEASE} --by NAME" in history.release(store, RELEASE)["action"]


def test_every_attempt_of_a_gate_stays_visible() -> None:
    """The latest counts; the ones before it are listed with their outcomes."""
    store = MemoryStore()
    journal_with(store, gate_record(store, "fail", 1), gate_record(store, "pass", 2))
    document = history.release(store, RELEASE)

    assert [(gate["outcome"], gate["attempt"]) for gate in document["gates"]] == [("pass", 2)]
    assert [item["outcome"] for item in document["attempts"]["scaling"]] == ["fail", "pass"]


def test_one_attempt_a_gate_adds_nothing_to_the_decided_document() -> None:
    """`show ID` is the document that `release --json` printed."""
    store = MemoryStore()
    whole_release(store, RELEASE, day="2026-01-01")

    assert history.release(store, RELEASE) == Journal(store, RELEASE).records()[-1].payload


def test_acts_are_listed_newest_first_and_say_whether_they_ended() -> None:
    """A rollback that finished and what serves by it, and one that is under way."""
    store = MemoryStore()
    begun = ("started", {"act": "rollback", "model": "boat", "by": "Ada", "reason": "late", "steps": []})
    done = ("done", {"effect": "fall_back", "of": "0", "result": {"moved": True, "version": "1"}})
    for act_id, records in ((ACT, (begun, done, ("finished", {"results": {}}))), ("boat-20260102-120000-cccc", (begun,))):
        for kind, payload in records:
            Journal(store, act_id, root="acts").append(kind, payload, time_utc=NOW)
    rows = history.overview(store)["acts"]

    assert [(row["act_id"][-4:], row["act"], row["by"], row["serves"], row["state"]) for row in rows] == [
        ("cccc", "rollback", "Ada", "", "started"), ("bbbb", "rollback", "Ada", "1", "finished"),
    ]  # fmt: skip


def test_an_act_is_no_release() -> None:
    """Its id names no release, so `show` refuses it with the next step."""
    store = MemoryStore()
    Journal(store, ACT, root="acts").append("started", {"act": "rollback", "model": "boat"}, time_utc=NOW)

    with pytest.raises(ConfigError, match="seatrial show"):
        history.release(store, ACT)


def test_a_release_without_a_record_does_not_hide_the_others() -> None:
    """Its process owns it, and has not written yet or died before it could."""
    store = MemoryStore()
    journal_with(store)
    own(store, "boat-20260102-000000-dddd")
    rows = history.overview(store)["releases"]

    assert [row["decision"] for row in rows] == ["empty", "unfinished"]
    assert "release again" in rows[0]["reason"]


def test_the_overview_reads_only_what_it_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a hundred releases in the store, the journals of ten are read."""
    store, read = MemoryStore(), set[str]()
    for number in range(100):
        Journal(store, f"boat-20260101-{number:06d}-aaaa").append("started", started(), time_utc=NOW)
    get = store.get
    monkeypatch.setattr(store, "get", lambda key: read.add(key.split("/")[1]) or get(key))
    rows = history.overview(store)["releases"]

    assert (len(rows), len({name for name in read if name.startswith("boat-")})) == (history.LATEST, history.LATEST)


def test_no_framework_is_imported() -> None:
    """A command that people type often starts at once."""
    code = f"import sys, flows.history; print([name for name in {FRAMEWORKS} if name in sys.modules])"

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
