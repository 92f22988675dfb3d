from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from helpers_stores import KINDS

from infra.pointer import Pointer, list_pointers, move_pointer, pointer_key, read_pointer
from infra.store import MemoryStore, ObjectStore
from validation.canonical import canonical_json, plain
from validation.errors import ConflictError, EvidenceError


def pointer(**given: object) -> Pointer:
    """A first pointer of the model "flights"; name only what the test is about."""
    first = Pointer(
        model="flights", serving_version="1", serving_kind="baseline", last_known_good="", baseline="1",
        release_id="flights-20260131-181542-3f9c", sequence=1,
    )  # fmt: skip
    return replace(first, **given)  # type: ignore[arg-type]


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_a_pointer_moves_with_its_etag(store: ObjectStore) -> None:
    """Nothing serves at first; then each move needs the etag that was read."""
    assert read_pointer(store, "flights") == (None, None)

    etag = move_pointer(store, pointer(), None)
    moved = pointer(serving_version="2", serving_kind="candidate", sequence=2)
    newer = move_pointer(store, moved, etag)

    assert read_pointer(store, "flights") == (moved, newer)
    with pytest.raises(ConflictError, match="decide anew"):
        move_pointer(store, pointer(serving_version="3", sequence=2), etag)


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_of_many_releases_one_moves_it(store: ObjectStore) -> None:
    """Releases that decide on the same pointer at the same time: one wins, and its version serves."""
    etag = move_pointer(store, pointer(), None)

    def decide(version: int) -> str:
        try:
            move_pointer(store, pointer(serving_version=str(version), serving_kind="candidate", sequence=2), etag)
        except ConflictError:
            return ""
        return str(version)

    with ThreadPoolExecutor(8) as pool:
        won = [version for version in pool.map(decide, range(2, 18)) if version]

    found, _ = read_pointer(store, "flights")
    assert found is not None
    assert won == [found.serving_version]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"serving_kind": "newest"}, id="unknown-kind"),
        pytest.param({"serving_version": 2}, id="version-as-number"),
        pytest.param({"sequence": 0}, id="sequence-zero"),
        pytest.param({"sequence": True}, id="sequence-bool"),
        pytest.param({"model": "other"}, id="another-model"),
        pytest.param({"extra": 1}, id="extra-field"),
    ],
)
def test_what_is_no_pointer_is_refused(change: dict[str, object]) -> None:
    """An object that is not this model's pointer is an EvidenceError, never a version to serve."""
    store = MemoryStore()
    store.put_new(pointer_key("flights"), canonical_json(plain(pointer()) | change))

    with pytest.raises(EvidenceError, match="is not a pointer of flights"):
        read_pointer(store, "flights")


@pytest.mark.parametrize("body", [b"", b"[]", b"null", b'{"model":"flights"}'], ids=["empty", "list", "null", "partial"])
def test_broken_bytes_are_refused(body: bytes) -> None:
    """Truncated or foreign bytes are an EvidenceError."""
    store = MemoryStore()
    store.put_new(pointer_key("flights"), body)

    with pytest.raises(EvidenceError, match="restore it from a backup"):
        read_pointer(store, "flights")


def test_a_wrong_pointer_is_not_written() -> None:
    """A pointer that could not be read back is refused before it is written."""
    store = MemoryStore()
    with pytest.raises(EvidenceError):
        move_pointer(store, pointer(serving_version=3), None)

    assert store.list("") == []


def test_only_model_names_have_pointers() -> None:
    """A name that could lead elsewhere is refused."""
    with pytest.raises(EvidenceError, match="not a model's name"):
        read_pointer(MemoryStore(), "../flights")


def test_every_models_pointer_is_listed() -> None:
    """list_pointers() gives each model's pointer by name, and nothing for other objects below models/."""
    store = MemoryStore()
    for model in ("flights", "bytes"):
        move_pointer(store, pointer(model=model), None)
    store.put_new("models/flights/note", b"x")

    assert [found.model for found in list_pointers(store)] == ["bytes", "flights"]
