import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path

import pytest
from helpers_stores import KINDS

from infra.journal import Journal, list_releases, new_release_id
from infra.store import MemoryStore, ObjectStore
from infra.store_folder import FolderStore
from validation.errors import ConfigError, EvidenceError

RELEASE = "flights-20260131-181542-3f9c"
NOW = "2026-01-31T18:15:42Z"
ROOT = f"releases/{RELEASE}"


def written(root: Path, *kinds: str) -> Journal:
    """A journal in a folder, with one record a kind."""
    journal = Journal(FolderStore(root), RELEASE)
    for kind in kinds:
        journal.append(kind, {"of": kind}, time_utc=NOW)
    return journal


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_records_come_back_in_order(store: ObjectStore) -> None:
    """Records are numbered from 1, bound by digests, and named for people."""
    journal = Journal(store, RELEASE)
    first = journal.append("started", {"recipe": "flights", "sizes": (1, 2)}, time_utc=NOW)
    second = journal.append("gate", {"name": "scaling"}, time_utc=NOW)

    assert journal.records() == (first, second)
    assert (first.previous, second.previous, second.sequence) == ("", first.sha256, 2)
    assert first.payload == {"recipe": "flights", "sizes": [1, 2]}
    assert store.list(f"{ROOT}/journal/") == [f"{ROOT}/journal/0001-started", f"{ROOT}/journal/0002-gate"]


def test_the_latest_of_a_kind(tmp_path: Path) -> None:
    """latest() gives the last record of a kind, and None when there is none."""
    journal = written(tmp_path, "started", "gate", "gate", "decided")
    found = journal.latest("gate")

    assert found is not None
    assert (found.sequence, journal.latest("promoted")) == (3, None)


def test_record_10000_comes_after_9999() -> None:
    """Names of four digits and of five do not sort as their numbers do."""
    journal = Journal(store := MemoryStore(), RELEASE)
    for number in range(1, 10_003):
        journal.append("gate", {"n": number}, time_utc=NOW)

    assert [entry.payload["n"] for entry in Journal(store, RELEASE).records()] == list(range(1, 10_003))


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_writers_at_once_lose_no_record(store: ObjectStore) -> None:
    """Threads that append to one journal at the same time all get a number of their own, and the chain holds."""
    with ThreadPoolExecutor(4) as pool:
        made = list(pool.map(lambda n: Journal(store, RELEASE).append("gate", {"n": n}, time_utc=NOW), range(12)))

    records = Journal(store, RELEASE).records()
    assert sorted(entry.sequence for entry in made) == list(range(1, 13))
    assert sorted(entry.payload["n"] for entry in records) == list(range(12))


def test_two_writers_take_turns(tmp_path: Path) -> None:
    """A journal that was open while another writer went on continues after that writer's records, also after an unfinished one."""
    mine, other = written(tmp_path, "started"), Journal(FolderStore(tmp_path), RELEASE)
    for kind in ("gate", "decided"):
        other.append(kind, {}, time_utc=NOW)
    (tmp_path / ROOT / "journal/0003-decided").unlink()

    assert mine.append("rerun", {}, time_utc=NOW).sequence == 4
    assert [entry.kind for entry in mine.records()] == ["started", "gate", "decided", "rerun"]


def test_nothing_is_added_to_a_broken_history(tmp_path: Path) -> None:
    """Appending to a journal that does not verify is refused."""
    written(tmp_path, "started", "gate", "decided")
    edit(tmp_path / ROOT / "numbers/0002")

    with pytest.raises(EvidenceError, match="does not verify"):
        Journal(FolderStore(tmp_path), RELEASE).append("rerun", {}, time_utc=NOW)


def edit(path: Path) -> None:
    """Change a record's payload, keeping it canonical."""
    path.write_bytes(path.read_bytes().replace(b'"of":"gate"', b'"of":"fake"'))


@pytest.mark.parametrize(
    ("tamper", "named"),
    [
        pytest.param(lambda f: edit(f / "numbers/0002"), "record 3 was written after", id="edited-number"),
        pytest.param(lambda f: edit(f / "journal/0002-gate"), "0002-gate was altered", id="edited-copy"),
        pytest.param(lambda f: (f / "numbers/0002").unlink(), "record 2 is missing", id="gap"),
        pytest.param(lambda f: (f / "numbers/0001").unlink(), "record 1 is missing", id="first-removed"),
        pytest.param(lambda f: (f / "numbers/0003").unlink(), "end of the history was removed", id="end-removed"),
        pytest.param(lambda f: (f / "journal/0001-started").unlink(), "0001-started was removed", id="copy-removed"),
        pytest.param(lambda f: (f / "numbers/0003").write_bytes(b"{}"), "cannot be read", id="no-record"),
        pytest.param(lambda f: (f / "numbers/0003").write_bytes((f / "numbers/0002").read_bytes()), "not a record of this", id="repeated"),
        pytest.param(
            lambda f: (f / "numbers/0003").write_bytes((f / "numbers/0003").read_bytes() + b"\n"), "bytes were altered", id="padded"
        ),
        pytest.param(lambda f: (f / "numbers/0004").write_bytes(b"\xff"), "cannot be read", id="garbage"),
    ],
)
def test_tampering_is_evidence_error(tmp_path: Path, tamper: Callable[[Path], object], named: str) -> None:
    """Whatever is changed in a journal's objects, reading it says that it does not verify."""
    journal = written(tmp_path, "started", "gate", "decided")
    tamper(tmp_path / ROOT)

    with pytest.raises(EvidenceError, match=named):
        journal.records()


def test_a_record_of_another_release_is_refused(tmp_path: Path) -> None:
    """A journal copied under another release's id does not verify there."""
    written(tmp_path, "started")
    (tmp_path / ROOT).rename(tmp_path / "releases/flights-20260131-181542-0000")

    with pytest.raises(EvidenceError, match="not a record of this journal"):
        Journal(FolderStore(tmp_path), "flights-20260131-181542-0000").records()


def test_a_writer_may_die_between_its_two_writes(tmp_path: Path) -> None:
    """A record whose readable copy was never written counts, and the next writer adds the copy."""
    written(tmp_path, "started", "gate")
    (tmp_path / ROOT / "journal/0002-gate").unlink()
    journal = Journal(FolderStore(tmp_path), RELEASE)
    assert len(journal.records()) == 2

    journal.append("decided", {}, time_utc=NOW)

    assert (tmp_path / ROOT / "journal/0002-gate").read_bytes() == (tmp_path / ROOT / "numbers/0002").read_bytes()


def test_a_record_is_plain_json(tmp_path: Path) -> None:
    """What stands in the store is canonical JSON that anybody can read."""
    written(tmp_path, "started")
    value = json.loads((tmp_path / ROOT / "journal/0001-started").read_text())

    assert value == {
        "sequence": 1, "kind": "started", "time_utc": NOW, "payload": {"of": "started"}, "previous": "", "release_id": RELEASE,
    }  # fmt: skip


@pytest.mark.parametrize("kind", ["", "Started", "a/b", "../x", "a b"])
def test_kinds_are_plain_words(kind: str) -> None:
    """A kind that could not be part of a key is a programming error."""
    with pytest.raises(ValueError, match="journal kind"):
        Journal(MemoryStore(), RELEASE).append(kind, {}, time_utc=NOW)


@pytest.mark.parametrize("name", ["", "flights", "../x-20260131-181542-3f9c", "flights-20260131-181542-"])
def test_only_release_ids_have_journals(name: str) -> None:
    """A text that is no release id is refused before the store is asked."""
    with pytest.raises(ConfigError, match="not a release id"):
        Journal(MemoryStore(), name)


def test_a_release_is_named_in_utc() -> None:
    """The id carries recipe, UTC time and token, whatever zone the clock is in."""
    now = datetime(2026, 1, 31, 20, 15, 42, tzinfo=timezone(timedelta(hours=2)))

    assert new_release_id("flights", now, "3f9c") == RELEASE


def test_releases_are_listed_oldest_first_and_by_recipe() -> None:
    """Releases sort by time over all recipes; a recipe whose name begins with another's is not mixed up with it."""
    store = MemoryStore()
    times = {"flights": 3, "flights-eu": 2, "bytes": 1}
    ids = {name: new_release_id(name, datetime(2026, 1, day, tzinfo=UTC), "aa") for name, day in times.items()}
    for release_id in ids.values():
        Journal(store, release_id).append("started", {}, time_utc=NOW)

    assert list_releases(store) == (ids["bytes"], ids["flights-eu"], ids["flights"])
    assert list_releases(store, "flights") == (ids["flights"],)
    assert list_releases(store, "none") == ()
