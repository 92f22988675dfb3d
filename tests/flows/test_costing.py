"""`seatrial cost`: read from journals and evidence that were really written; nothing made up, bad input refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers_history import decided, gate_document, started, whole_release

from flows import costing
from flows.cost_records import find_story, like, read_story, rest_s, service_times, spent_by, training_s
from infra.journal import Journal
from infra.settings import Settings, load_settings
from infra.store import MemoryStore, ObjectStore, open_store, put_blob, put_evidence
from validation.errors import ConfigError, EvidenceError
from validation.queueing import REST

RELEASE = "boat-20260105-100000-aaaa"


def at(minute: float, day: int = 5) -> str:
    """A time of the release, minutes after ten."""
    return f"2026-01-{day:02d}T10:{int(minute):02d}:{round(minute % 1 * 60):02d}+00:00"


def measured(store: ObjectStore, release_id: str = RELEASE, *, slow: float = 1.0, **more: Any) -> None:
    """A release of two gates: 60 s and 120 s, a minute of training between them, one minute of the rest."""
    journal = Journal(store, release_id)
    journal.append("started", started(**more), time_utc=at(0))
    table = put_blob(store, b"x" * 1000)
    lines = []
    for gate, seconds, minute in (("kill_and_resume", 60.0 * slow, 1.5), ("scaling", 120.0, 4.5)):
        document = gate_document(gate, seconds=seconds) | {"records": {"runs": {"parquet_sha256": table, "rows": 1}}}
        sha256 = put_evidence(store, document | {"release_id": release_id})
        journal.append("gate", {"gate": gate, "attempt": 1, "outcome": "pass", "reason": "", "evidence": sha256}, time_utc=at(minute))
        lines.append({"name": gate, "sha256": sha256})
        if gate == "kill_and_resume":
            journal.append("candidate", {"version": "2", "run_id": "r", "worker_seconds": 90.0, "weights_sha256": "w"}, time_utc=at(2.5))
    journal.append("decided", decided(release_id, lines), time_utc=at(5))


@pytest.fixture
def place(tmp_path: Path) -> Settings:
    """A home with a measured release in its store, and no registry."""
    settings = load_settings(home=tmp_path / "home")
    measured(open_store(settings))
    return settings


def run(settings: Settings, **given: Any) -> dict[str, Any]:
    asked = {"release_id": "", "per_week": "1,50", "devices": "1,2", "seed": 0} | given
    return costing.cost(settings, say=lambda _: None, **asked)


def test_a_release_is_split_into_gates_training_and_the_rest() -> None:
    """Five minutes: 60 s and 120 s of gates, 60 s until the candidate, 60 s of everything else."""
    store = MemoryStore()
    measured(store)
    story = find_story(store, RELEASE)
    spent = spent_by(store, story, None)

    assert (training_s(story), rest_s(story)) == (60.0, 60.0)
    assert {name: gate.seconds for name, gate in spent.gates.items()} == {"kill_and_resume": 60.0, "scaling": 120.0}
    assert (spent.training_worker_s, spent.devices, spent.reviews) == (90.0, 2, 0)
    assert (spent.prepared_s, spent.queued_s, spent.registry_bytes) == (None, None, None)


def test_the_bytes_kept_are_those_of_journal_evidence_and_tables() -> None:
    """The shared table counts once; everything of the release is in the sum, give or take the journal's framing."""
    store = MemoryStore()
    measured(store)
    kept = sum(len(store.get(key)) for key in store.list(""))

    assert spent_by(store, find_story(store, ""), None).stored_bytes == pytest.approx(kept, rel=0.5)
    assert (spent_by(store, find_story(store, ""), None).stored_bytes or 0) > 1000


def test_scheduled_and_prepared_times_are_read_where_the_journal_has_them() -> None:
    """The wait in the queue, and the preparation before the release."""
    store = MemoryStore()
    measured(store, scheduled_at=at(0, day=4), running_at=at(30, day=4), prepared_s=12.5)
    spent = spent_by(store, find_story(store, ""), None)

    assert (spent.queued_s, spent.prepared_s) == (1800.0, 12.5)


def test_every_attempt_is_paid_but_only_the_first_run_is_drawn_from() -> None:
    """A gate held again adds to the bill; a later release does not do that by itself."""
    store = MemoryStore()
    measured(store)
    again = put_evidence(store, gate_document("scaling", seconds=30.0, attempt=2) | {"records": {}})
    payload = {"gate": "scaling", "attempt": 2, "outcome": "pass", "reason": "", "evidence": again}
    Journal(store, RELEASE).append("gate", payload, time_utc=at(20))
    story = find_story(store, RELEASE)

    assert (spent_by(store, story, None).gates["scaling"].seconds, spent_by(store, story, None).gates["scaling"].attempts) == (150.0, 2)
    assert service_times([story]).gates["scaling"] == (120.0,)


@pytest.mark.parametrize(
    ("records", "reviews", "seconds"),
    [
        pytest.param([], 0, 0.0, id="nobody was asked"),
        pytest.param([("approval_requested", {}), ("approval", {"human_review_s": 90.0})], 1, 90.0, id="answered"),
        pytest.param([("approval_requested", {})], 1, None, id="nobody answered"),
        pytest.param([("approval_requested", {}), ("approval", {})], 1, None, id="answered, not timed"),
        pytest.param([("approval_requested", {}), ("approval", {"human_review_s": 1.0}), ("approval_requested", {})], 2, None, id="again"),
    ],
)
def test_time_of_people_is_known_only_when_all_have_answered(
    records: list[tuple[str, dict[str, Any]]], reviews: int, seconds: float | None
) -> None:
    """An open question has no length yet: missing, not zero."""
    store = MemoryStore()
    measured(store)
    for kind, payload in records:
        Journal(store, RELEASE).append(kind, payload, time_utc=at(30))
    spent = spent_by(store, find_story(store, RELEASE), None)

    assert (spent.reviews, spent.review_s) == (reviews, seconds)


def test_an_answer_counts_once_though_the_end_repeats_it() -> None:
    """`decided` is the document of `release --json`: it has the wait again, and null where nobody was asked."""
    store = MemoryStore()
    journal = Journal(store, RELEASE)
    journal.append("started", started(), time_utc=at(0))
    journal.append("approval_requested", {}, time_utc=at(1))
    journal.append("approval", {"human_review_s": 60.0}, time_utc=at(2))
    journal.append("decided", decided(RELEASE, []) | {"human_review_s": 60.0}, time_utc=at(5))
    story = find_story(store, RELEASE)

    assert (rest_s(story), service_times([story]).human_s) == (240.0, (60.0,))


def test_times_are_drawn_from_releases_of_this_model_on_this_machine() -> None:
    """Another machine's and another model's seconds say nothing; nor do those of an altered journal."""
    store = MemoryStore()
    measured(store)
    measured(store, "boat-20260106-100000-bbbb", slow=2.0)
    measured(store, "boat-20260107-100000-cccc", slow=3.0, machine={"devices": 64})
    measured(store, "boat-20260108-100000-dddd", slow=4.0)
    body, etag = store.get_with_etag("releases/boat-20260108-100000-dddd/numbers/0002")
    store.replace("releases/boat-20260108-100000-dddd/numbers/0002", body + b" ", etag)
    times = service_times(like(store, find_story(store, RELEASE)))

    assert times.gates["kill_and_resume"] == (60.0, 120.0)
    assert set(times.others) == {"training", REST}


def test_the_latest_decided_release_is_taken_by_itself() -> None:
    """One that is under way measured nothing whole."""
    store = MemoryStore()
    measured(store)
    Journal(store, "boat-20260109-100000-eeee").append("started", started(), time_utc=at(0))

    assert find_story(store, "").release_id == RELEASE
    assert read_story(store, "boat-20260110-100000-ffff") is None


def test_the_grid_holds_every_case_and_the_page_its_pictures(place: Settings) -> None:
    """Three patterns, two rates, two numbers of machines; a page and a picture a pattern, one of cost."""
    document = run(place)
    page = Path(document["page"])

    assert document["ok"]
    assert [(row["pattern"], row["per_week"], row["devices"]) for row in document["grid"]] == [
        (pattern, rate, count) for pattern in ("steady", "office", "nightly") for rate in (1.0, 50.0) for count in (1, 2)
    ]
    assert [Path(name).name for name in document["pictures"]] == [
        "cost.png", "waiting-nightly.png", "waiting-office.png", "waiting-steady.png",
    ]  # fmt: skip
    assert all(f"({Path(name).name})" in page.read_text() for name in document["pictures"])
    json.dumps(document)


def test_what_is_not_there_is_called_missing(place: Settings) -> None:
    """No registry, no schedule, no preparation time: named, and the reason of the first is told."""
    document = run(place)
    told = "\n".join(costing.lines(document))

    assert document["missing"] == [
        "storage: model files, report and plots", "preprocessing: data preparation", "queueing: scheduled until running",
    ]  # fmt: skip
    assert "missing, so in no sum" in told
    assert "there is no registry at" in told


def test_the_same_seed_gives_the_same_document(place: Settings) -> None:
    """Another seed moves what was drawn by chance."""
    assert run(place)["grid"] == run(place)["grid"] != run(place, seed=50)["grid"]


def test_a_store_with_many_releases_replays_their_own_times_too(tmp_path: Path) -> None:
    """Twenty releases are a pattern; their times stand in their ids."""
    settings = load_settings(home=tmp_path / "home")
    store = open_store(settings)
    measured(store)
    for number in range(costing.RECORDED_MIN - 1):
        Journal(store, f"boat-20260101-{number:02d}0000-{number:04d}").append("started", started(), time_utc=at(0))

    assert {row["pattern"] for row in run(settings, per_week="5", devices="1")["grid"]} == {"steady", "office", "nightly", "recorded"}


def test_a_policy_of_its_own_prices_the_release(tmp_path: Path) -> None:
    """Prices are those of the policy that the release was asked with."""
    settings = load_settings(home=tmp_path / "home")
    text = "scaling: {price_per_device_hour: {value: 36, source: ours}}"
    request = {"recipe": "boat:recipe", "policy_text": text, "world_sizes": [], "drill": ""}
    measured(open_store(settings), request=request)
    priced = {part["name"]: part["usd"] for part in run(settings, per_week="1", devices="1")["parts"]}

    assert priced["scaling"] == pytest.approx(120 / 3600 * 2 * 36)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"per_week": "0"}, "--per-week"), ({"per_week": "many"}, "--per-week"), ({"per_week": ""}, "--per-week"),
        ({"per_week": "nan"}, "--per-week"), ({"per_week": "1e9"}, "--per-week"), ({"devices": "1.5"}, "--devices"),
        ({"devices": "-1"}, "--devices"), ({"devices": "65"}, "--devices"), ({"release_id": "boat-20990101-000000-aaaa"}, "seatrial show"),
        ({"release_id": "typo"}, "not a release id"),
    ],
)  # fmt: skip
def test_bad_input_is_refused_with_the_next_step(place: Settings, given: dict[str, Any], says: str) -> None:
    """Numbers that are none, and releases that are not there; nothing is written."""
    with pytest.raises(ConfigError, match=says):
        run(place, **given)
    assert not (place.home / "costs").exists()


def test_an_empty_store_has_nothing_to_cost(tmp_path: Path) -> None:
    """The next step is a release; no folder is made."""
    settings = load_settings(home=tmp_path / "home")

    with pytest.raises(ConfigError, match="seatrial release"):
        run(settings)
    assert not settings.home.exists()


def test_a_release_whose_gates_were_never_held_is_not_replayed(tmp_path: Path) -> None:
    """Skipped gates took no time because they did not run: no queue is made of them."""
    settings = load_settings(home=tmp_path / "home")
    whole_release(open_store(settings), RELEASE, day="2026-01-05")  # its evidence has no records

    with pytest.raises(EvidenceError, match="Give the id of a release"):
        run(settings)
