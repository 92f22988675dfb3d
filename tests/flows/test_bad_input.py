"""Ids of nothing, evidence edited by hand, a store or a disk that fails, a clock that jumped, a policy that changed: never a promotion."""

import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from helpers_faults import FaultyS3, FillingDisk, contents, faulty_s3
from moto.server import ThreadedMotoServer
from support.rehearsal import MODEL, Part, rehearse

from flows import approving, finishing, history, rollback
from flows.clock import utc_now
from flows.conduct import PLAIN, conduct
from flows.deciding import people_now
from flows.finishing import finish
from flows.people import checked_answer, record_approval, record_waiver, waivers_of
from flows.plan import request_of
from flows.under_way import Release
from flows.verifying import verify
from infra.attestations import open_notary
from infra.journal import Journal, list_releases
from infra.pointer import Pointer, move_pointer, pointer_key, read_pointer
from infra.registry import Registry
from infra.settings import Settings, embedded_environment, load_settings
from infra.store import ObjectStore, evidence_key, open_store
from validation.errors import ConfigError, EvidenceError, ReleaseError, StoreError
from validation.policy import GATES, parse_policy
from validation.waivers import counting

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # MLflow's own

APPROVAL = "decision: {approval: true}"
UNKNOWN = "boat-20200101-000000-dead"
_count = iter(range(10_000))


def quiet(_: str) -> None:
    """Nobody listens."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bad input") / "a home"
    Registry(load_settings(home=folder))
    return folder


@pytest.fixture
def settings(home: Path, tmp_path: Path) -> Settings:
    made = load_settings(home=home, store=str(tmp_path / "store"))
    os.environ.update(embedded_environment(made))
    return made


def begun(settings: Settings, part: Part, store: ObjectStore | None = None) -> Release:
    """A release with its first record."""
    release = rehearse(settings, store or open_store(settings), Registry(settings), part, number=next(_count))
    started = {"request": release.plan.request, "model": MODEL, "digests": release.plan.digests}
    release.journal.append("started", started, time_utc=utc_now())
    return release


def played(settings: Settings, part: Part) -> tuple[Release, dict[str, Any]]:
    """A whole release."""
    release = begun(settings, part)
    return release, conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")[0]


def taken_up(settings: Settings, release: Release, part: Part) -> Release:
    """The same release in another process's hands."""
    return rehearse(settings, open_store(settings), Registry(settings), part, release_id=release.plan.release_id)


def serving(settings: Settings) -> Pointer | None:
    """What serves."""
    return read_pointer(open_store(settings), MODEL)[0]


# Ids

COMMANDS: dict[str, Callable[[Settings, str], object]] = {
    "show": lambda settings, name: history.release(open_store(settings), name),
    "finish": lambda settings, name: finish(settings, say=quiet, release_id=name),
    "abandon": lambda settings, name: finishing.abandon(settings, say=quiet, release_id=name, reason="gone"),
    "approve": lambda settings, name: approving.approve(settings, say=quiet, release_id=name, by="Ada", reason="looked at it"),
    "waive": lambda settings, name: approving.waive(settings, say=quiet, gate="scaling", release_id=name, by="Ada", reason="x", days=1),
    "gate": lambda settings, name: request_of(Journal(open_store(settings), name), "scaling"),
    "verify": lambda settings, name: verify(settings, say=quiet, what=name),
    "rollback": lambda settings, name: rollback.roll_back(settings, say=quiet, model=name, reason="bad"),
}


@pytest.mark.parametrize("name", [UNKNOWN, "boat", "../../etc/passwd", "", "boat\x00", "x" * 5000, "boat-20200101-000000-dead/journal"])
@pytest.mark.parametrize("command", COMMANDS)
def test_an_id_of_nothing_is_told_and_changes_nothing(settings: Settings, command: str, name: str) -> None:
    """An input error (exit 2) with the next step; no record, no folder."""
    store = open_store(settings)
    before = contents(store)
    with pytest.raises(ReleaseError) as caught:
        COMMANDS[command](settings, name)

    assert isinstance(caught.value, ConfigError | EvidenceError)
    assert any(step in str(caught.value) for step in ("`seatrial show`", "Use the recipe's name", "Models: ")), str(caught.value)
    assert contents(store) == before


def test_a_gate_that_there_is_not_is_told_with_those_that_there_are(settings: Settings) -> None:
    """A typing error in a gate's name starts nothing."""
    release = begun(settings, Part())

    with pytest.raises(ConfigError, match="Choose one of: data_contract"):
        request_of(release.journal, "scalling")
    with pytest.raises(ConfigError, match="Choose one of: data_contract"):
        approving.waive(settings, say=quiet, gate="scalling", release_id=release.plan.release_id, by="Ada", reason="x", days=1)


def test_a_statement_of_another_release_promotes_nothing(settings: Settings) -> None:
    """A pointer that names another model's or release's statement does not verify, and nothing is put in service by it."""
    _, first = played(settings, Part(weights=b"first"))
    played(settings, Part(weights=b"second"))
    store = open_store(settings)
    pointer, etag = read_pointer(store, MODEL)
    assert pointer is not None
    move_pointer(store, replace(pointer, attestation=first["decision_sha256"]), etag)
    document = verify(settings, say=quiet, what=MODEL)

    assert not document["ok"]
    assert any("version" in problem for problem in document["problems"]), document["problems"]


# Evidence edited by hand


def journal_record(release: Release) -> str:
    return f"releases/{release.plan.release_id}/numbers/0002"


def gate_evidence(release: Release) -> str:
    return evidence_key(release.lines["scaling"].evidence_sha256)


def gate_statement(release: Release) -> str:
    return evidence_key(release.attestations["scaling"])


EDITED: dict[str, tuple[Callable[[Release], str], str]] = {
    "journal record": (journal_record, "journal"),
    "gate evidence": (gate_evidence, "gate scaling"),
    "gate statement": (gate_statement, "gate scaling"),
}


@pytest.mark.parametrize("what", EDITED)
@pytest.mark.parametrize("how", ["altered", "gone"])
def test_edited_evidence_is_named_and_promotes_nothing(settings: Settings, what: str, how: str) -> None:
    """A release that waits for a person is edited and then approved: verify says what is broken, and nothing moves."""
    part = Part(weights=b"second", policy=APPROVAL)
    played(settings, Part(weights=b"first"))
    before = serving(settings)
    release, document = played(settings, part)
    answer(release)
    key, link = EDITED[what][0](release), EDITED[what][1]
    edit(open_store(settings), key, how)
    found = verify(settings, say=quiet, what=release.plan.release_id)

    assert document["decision"] == "held"
    assert not found["ok"]
    assert any(problem.startswith(link) for problem in found["problems"]), found["problems"]
    with pytest.raises(EvidenceError):
        conduct(taken_up(settings, release, part), PLAIN, keep="any")
    assert serving(settings) == before


def edit(store: ObjectStore, key: str, how: str) -> None:
    """What somebody who can write to the store does."""
    body, etag = store.get_with_etag(key)
    if how == "gone":
        store.delete(key)
    else:
        store.replace(key, body.replace(b'"pass"', b'"fail"').replace(b'"payload":"', b'"payload":"A') + b" ", etag)


def answer(release: Release, *, made_at: str = "", days: float = 1.0) -> None:
    """A person's yes."""
    said = checked_answer("Ada", "I looked at it", approved=True, days=days, made_at=made_at or utc_now())
    record_approval(release.journal, release.notary, people_now(release).basis, said)


@pytest.mark.parametrize("key", ["pointer", "admitted/2"])
def test_an_edited_pointer_or_admission_is_named(settings: Settings, key: str) -> None:
    """Rubbish in place of what says who serves, or why it may."""
    _, document = played(settings, Part())
    store = open_store(settings)
    key = f"models/{MODEL}/{key.replace('2', document['candidate_version'])}"
    _, etag = store.get_with_etag(key)
    store.replace(key, b'{"model": "boat"}', etag)
    found = verify(settings, say=quiet, what=MODEL)

    assert not found["ok"]
    assert any(key in problem for problem in found["problems"])


def test_a_pointer_to_a_missing_version_is_named_and_a_release_mends_it(settings: Settings) -> None:
    """Its statement is of another version, so it does not verify; no release falls back to it, the next promotion replaces it."""
    played(settings, Part(weights=b"first"))
    store = open_store(settings)
    pointer, etag = read_pointer(store, MODEL)
    assert pointer is not None
    move_pointer(store, replace(pointer, serving_version="4711", sequence=pointer.sequence + 1), etag)
    found = verify(settings, say=quiet, what=MODEL)
    refused = played(settings, Part(weights=b"second", floats={"scaling": 0.1}, loads=False))[1]
    promoted = played(settings, Part(weights=b"third"))[1]

    assert not found["ok"]
    assert any("4711" in problem for problem in found["problems"])
    assert refused["serving"]["version"] != "4711"
    assert promoted["decision"] == "promoted"
    assert verify(settings, say=quiet, what=MODEL)["ok"]


# A store that fails


@pytest.fixture(scope="module")
def bucket_server() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(bucket_server: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Settings, FaultyS3]]:
    """Settings of a bucket behind an endpoint that can be spoilt."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    name = f"b{next(_count)}-{os.getpid()}"
    boto3.client("s3", endpoint_url=bucket_server, region_name="us-east-1").create_bucket(Bucket=name)
    with faulty_s3(bucket_server) as front:
        limits = {"store_attempts": 1, "store_connect_timeout_s": 5.0, "store_read_timeout_s": 8.0}
        made = load_settings(home=home, store=f"s3://{name}/x", store_endpoint=front.endpoint, store_region="us-east-1", **limits)
        os.environ.update(embedded_environment(made))
        yield made, front


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("fault", "at"),
    [
        pytest.param("500", "gate", marks=SLOW),
        pytest.param("hang", "gate", marks=SLOW),
        pytest.param("503", "promote", marks=SLOW),
        ("reset", "promote"),
    ],
)
def test_a_store_that_fails_in_mid_release_is_told_and_the_release_is_finished_later(
    bucket: tuple[Settings, FaultyS3], fault: str, at: str
) -> None:
    """StoreError in bounded time, what served before serves on; when the store is back the same release ends as it should."""
    settings, front = bucket
    release = begun(settings, Part(weights=b"second"))
    written, times = {"gate": (f"{release.plan.release_id}/numbers/0003", 1), "promote": (f"models/{MODEL}/pointer", 2)}[at]

    def plan(_method: str, _path: str, _number: int) -> str:
        puts = sum(method == "PUT" and path.endswith(written) for method, path in front.requests)
        return fault if puts >= times else ""

    front.plan = plan
    began = time.monotonic()
    with pytest.raises(StoreError, match="run the command again"):
        conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    took = time.monotonic() - began
    front.plan = lambda _method, _path, _number: ""

    left = serving(settings)
    assert took < 90
    assert (left.serving_kind if left else "nothing") == ("nothing" if at == "gate" else "baseline")
    document, _ = conduct(taken_up(settings, release, Part(weights=b"second")), PLAIN, keep="any")
    assert document["decision"] == "promoted"
    assert verify(settings, say=quiet, what=release.plan.release_id)["ok"]


@pytest.mark.parametrize("room", [0, 3, 9, 17, 25, 33])
def test_a_disk_that_is_full_in_mid_release_loses_nothing(settings: Settings, room: int) -> None:
    """After so many writes there is no space: told with what to do, never half a record, and the release is finished afterwards."""
    played(settings, Part(weights=b"first"))
    before = serving(settings)
    release = begun(settings, Part(weights=b"second"))
    full = rehearse(
        settings, FillingDisk(settings.store, room=room), Registry(settings), Part(weights=b"second"), release_id=release.plan.release_id
    )  # fmt: skip
    with pytest.raises(StoreError, match=r"No space left.*free space, then run the command again"):
        conduct(full, PLAIN, fresh=frozenset(GATES), keep="none")

    assert serving(settings) == before
    assert verify(settings, say=quiet, what=release.plan.release_id)["ok"]
    document, _ = conduct(taken_up(settings, release, Part(weights=b"second")), PLAIN, keep="any")
    assert (document["decision"], verify(settings, say=quiet, what=MODEL)["ok"]) == ("promoted", True)


# A clock that jumped


def jump(monkeypatch: pytest.MonkeyPatch, **by: float) -> None:
    """From now on this machine's clock is wrong."""

    class Jumped(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> datetime:  # type: ignore[override]
            return datetime.now(tz) + timedelta(**by)

    monkeypatch.setattr("flows.clock.datetime", Jumped)


@pytest.mark.parametrize("days", [-1, 365])
def test_a_clock_that_jumped_between_records_breaks_no_journal(settings: Settings, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """The order of records is their numbers', not their times'; the release ends and verifies."""
    release = begun(settings, Part())
    jump(monkeypatch, days=days)
    document, _ = conduct(release, PLAIN, fresh=frozenset(GATES), keep="none")
    monkeypatch.undo()

    assert document["decision"] == "promoted"
    assert verify(settings, say=quiet, what=release.plan.release_id)["ok"]
    assert verify(settings, say=quiet, what=MODEL)["ok"]


@pytest.mark.parametrize(("days", "decision"), [(-2, "held"), (365, "held"), (0, "promoted")])
def test_a_yes_counts_only_in_its_time(settings: Settings, monkeypatch: pytest.MonkeyPatch, days: int, decision: str) -> None:
    """Decided by a clock a year ahead the yes has expired, by one two days behind it is still to come: neither promotes."""
    part = Part(policy=APPROVAL)
    release, _ = played(settings, part)
    answer(release)
    jump(monkeypatch, days=days)
    document, _ = conduct(taken_up(settings, release, part), PLAIN, keep="any")

    assert document["decision"] == decision


@pytest.mark.parametrize("days", [-2, 365])
def test_a_waiver_counts_only_in_its_time(settings: Settings, monkeypatch: pytest.MonkeyPatch, days: int) -> None:
    """A waiver that is still to come, or has expired, lets no gate pass."""
    part = Part(floats={"scaling": 0.1})
    release, _ = played(settings, part)
    said = checked_answer("Ada", "one machine only", approved=True, days=7.0, made_at=utc_now())
    record_waiver(release.journal, release.notary, "scaling", release.lines["scaling"].evidence_sha256, said)
    jump(monkeypatch, days=days)
    document, _ = conduct(taken_up(settings, release, part), PLAIN, keep="any")
    evidence = {"scaling": release.lines["scaling"].evidence_sha256}

    assert document["decision"] == "fell_back"
    assert not counting(waivers_of(release.journal, release.notary), evidence=evidence, policy=parse_policy().decision, now=utc_now())


def test_a_yes_of_a_clock_ahead_does_not_outlive_the_policy(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """Signed by a machine a year ahead it is still to come, and is not stored up for later."""
    part = Part(policy=APPROVAL)
    release, _ = played(settings, part)
    answer(release, made_at=(datetime.now(UTC) + timedelta(days=365)).isoformat(timespec="seconds"))
    document, _ = conduct(taken_up(settings, release, part), PLAIN, keep="any")

    assert document["decision"] == "held"


# A policy that changed between two attempts


@pytest.mark.parametrize(
    ("changed", "stale"),
    [
        ("scaling: {repeats: 9}", ["scaling"]),
        ("kill_and_resume: {steps: 30}", ["kill_and_resume"]),
        ("slice_quality: {min_n: 77}", ["slice_quality"]),
        ("decision: {waiver_days: 3}", []),
    ],
)
def test_a_policy_that_changed_makes_stale_what_it_judges(settings: Settings, changed: str, stale: list[str]) -> None:
    """The gate whose section changed is held again and says why; the others keep their evidence."""
    release, _ = played(settings, Part(weights=b"first"))
    later = taken_up(settings, release, Part(weights=b"first", policy=changed))
    told: list[str] = []
    later.say = told.append
    document, _ = conduct(later, PLAIN, keep="good")

    assert [gate["name"] for gate in document["gates"] if not gate["reused"]] == stale
    assert all(any(line.startswith(f"{gate}: running (stale") and "policy" in line for line in told) for gate in stale)


def test_a_stricter_policy_cannot_be_passed_with_old_evidence(settings: Settings) -> None:
    """The gate that is held again under the new policy fails now: nothing is promoted by the pass of then."""
    release, _ = played(settings, Part(weights=b"first", policy=APPROVAL))
    before = serving(settings)
    strict = f"{APPROVAL}\nscaling: {{repeats: 9}}"
    later = taken_up(settings, release, Part(weights=b"first", policy=strict, floats={"scaling": 0.1}))
    document, _ = conduct(later, PLAIN, keep="any")

    assert (document["decision"], serving(settings)) == ("fell_back", before)


# Everything that is left of a refused input


def test_what_was_refused_left_every_release_as_it_was(settings: Settings) -> None:
    """A store with one release has one release after every refusal."""
    release, _ = played(settings, Part())
    store = open_store(settings)
    before = contents(store)
    for command in COMMANDS.values():
        with pytest.raises(ReleaseError):
            command(settings, UNKNOWN)

    assert list_releases(store) == (release.plan.release_id,)
    assert contents(store) == before


def test_a_key_that_is_not_trusted_promotes_nothing(settings: Settings, tmp_path: Path) -> None:
    """Whoever can write to the store and signs with a key of their own is not believed."""
    part = Part(weights=b"second", policy=APPROVAL)
    played(settings, Part(weights=b"first"))
    before = serving(settings)
    release, _ = played(settings, part)
    stranger = load_settings(home=tmp_path / "stranger", store=settings.store)
    release.notary = open_notary(open_store(settings), stranger)
    said = checked_answer("Eve", "trust me", approved=True, days=1.0, made_at=utc_now())
    record_approval(release.journal, release.notary, people_basis(release), said)

    with pytest.raises(EvidenceError, match="trusted"):
        conduct(taken_up(settings, release, part), PLAIN, keep="any")
    assert serving(settings) == before


def people_basis(release: Release) -> str:
    """What the release asks a person about."""
    entry = release.journal.latest("approval_requested")
    assert entry is not None
    return str(entry.payload["basis"])


def test_a_pointer_key_is_never_a_path() -> None:
    """A model's name goes into a key, so it is checked before."""
    for name in ("../x", "a/b", "", "A", "a" * 2 + "\x00"):
        with pytest.raises(EvidenceError, match="not a model's name"):
            pointer_key(name)
    assert json.dumps(pointer_key("boat")) == '"models/boat/pointer"'
