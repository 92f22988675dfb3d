"""Reading releases back: what cannot be verified is said, and hides nothing else."""

import pytest

from flows import history
from infra.journal import Journal
from infra.pointer import Pointer, move_pointer
from infra.store import MemoryStore, evidence_key, put_evidence
from validation.errors import EvidenceError

NOW = "2026-01-01T00:00:00+00:00"
FIRST, SECOND = "boat-20260101-000000-aaaa", "boat-20260102-000000-bbbb"


def store_with(*release_ids: str) -> tuple[MemoryStore, str]:
    """Decided releases of one gate each, and the sha256 of the evidence they share."""
    store = MemoryStore()
    sha256 = put_evidence(store, {"verdict": {"outcome": "pass"}})
    for release_id in release_ids:
        journal = Journal(store, release_id)
        journal.append("started", {"request": {"recipe": "boat:recipe"}, "model": "boat"}, time_utc=NOW)
        document = {
            "release_id": release_id,
            "recipe": "boat:recipe",
            "decision": "promoted",
            "gates": [{"name": "scaling", "sha256": sha256}],
        }
        journal.append("decided", document, time_utc=NOW)
    return store, sha256


def alter(store: MemoryStore, key: str) -> None:
    body, etag = store.get_with_etag(key)
    store.replace(key, body.replace(b"p", b"q"), etag)


def test_one_altered_journal_does_not_hide_the_other_releases() -> None:
    """It is listed as unverifiable, with the reason; the others are as they were."""
    store, _ = store_with(FIRST, SECOND)
    alter(store, f"releases/{FIRST}/numbers/0002")

    assert [row["decision"] for row in history.overview(store)["releases"]] == ["promoted", "unverifiable"]


def test_a_release_whose_evidence_was_altered_is_not_shown_as_decided() -> None:
    """The document rests on evidence; one changed byte, and it is refused."""
    store, sha256 = store_with(FIRST)
    alter(store, evidence_key(sha256))

    with pytest.raises(EvidenceError):
        history.release(store, FIRST)


def test_a_release_that_died_after_it_moved_the_pointer_says_so() -> None:
    """Its last record is the intent; the pointer is its own."""
    store = MemoryStore()
    journal = Journal(store, FIRST)
    journal.append("started", {"request": {"recipe": "boat:recipe"}, "model": "boat"}, time_utc=NOW)
    journal.append("intent", {"decision": "promoted"}, time_utc=NOW)
    moved = Pointer(
        model="boat", serving_version="3", serving_kind="candidate", last_known_good="2", baseline="1", release_id=FIRST, sequence=2
    )  # fmt: skip
    move_pointer(store, moved, None)
    document = history.release(store, FIRST)

    assert (document["decision"], document["serving"]["version"]) == ("unfinished", "3")
    assert "it moved the serving pointer" in document["reason"]
