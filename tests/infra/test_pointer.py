import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from uuid import uuid4

import pytest
from helpers_stores import KINDS

from infra.pointer import Pointer, admission, admit, list_pointers, move_pointer, pointer_key, read_pointer
from infra.settings import load_settings
from infra.store import MemoryStore, ObjectStore, open_store
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


RACERS, ROUNDS, MOVES = 16, 4, 2

RACE = """
import json, multiprocessing, sys
from dataclasses import replace
from infra.pointer import Pointer, move_pointer, read_pointer
from infra.settings import load_settings
from infra.store import open_store
from validation.errors import ConflictError

settings = json.loads(sys.argv[1])
racers, rounds, moves = map(int, sys.argv[2:])
fork = multiprocessing.get_context("fork")
barrier = fork.Barrier(racers)

def race(number, out):
    store = open_store(load_settings(**settings), writable=False)
    won = []
    for turn in range(rounds):  # all read the same pointer, then all move it
        pointer, etag = read_pointer(store, "flights")
        barrier.wait(60)
        try:
            move_pointer(store, replace(pointer, sequence=pointer.sequence + 1, release_id=f"r-{number}"), etag)
            won.append(turn)
        except ConflictError:
            pass
        barrier.wait(60)
    moved = 0
    while moved < moves:  # then each moves it so often, whoever else does
        pointer, etag = read_pointer(store, "flights")
        try:
            move_pointer(store, replace(pointer, sequence=pointer.sequence + 1, release_id=f"r-{number}"), etag)
            moved += 1
        except ConflictError:
            pass
    out.put(won)

out = fork.Queue()
processes = [fork.Process(target=race, args=(number, out)) for number in range(racers)]
for process in processes:
    process.start()
won = [turn for _ in processes for turn in out.get(timeout=120)]
for process in processes:
    process.join(60)
print(json.dumps(sorted(won)))
"""


@pytest.mark.parametrize("kind", ["folder", "s3"])
def test_sixteen_processes_move_it_and_no_move_is_lost(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Real processes on a folder and on an S3 server: each round has one winner, and the sequence counts every move that won."""
    endpoint = request.getfixturevalue("s3") if kind == "s3" else None
    where = {"home": str(tmp_path), "store": f"s3://trial/{uuid4().hex}" if endpoint else str(tmp_path / "a store")}
    settings = where | ({"store_endpoint": endpoint, "store_region": "us-east-1", "store_read_timeout_s": 60.0} if endpoint else {})
    store = open_store(load_settings(**settings))
    move_pointer(store, pointer(), None)
    arguments = [sys.executable, "-c", RACE, json.dumps(settings), str(RACERS), str(ROUNDS), str(MOVES)]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=200, check=False)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [*range(ROUNDS)]
    found, _ = read_pointer(store, "flights")
    assert found is not None
    assert found.sequence == 1 + ROUNDS + RACERS * MOVES


@pytest.mark.parametrize("store", KINDS, indirect=True)
def test_the_first_admission_stands(store: ObjectStore) -> None:
    """What let a version serve is written once; a later statement about it changes nothing."""
    assert admission(store, "flights", "2") == ""
    assert admit(store, "flights", "2", "a" * 64) == "a" * 64
    assert admit(store, "flights", "2", "b" * 64) == "a" * 64
    assert admission(store, "flights", "2") == "a" * 64


@pytest.mark.parametrize("body", [b"", b"[]", b'{"model":"flights"}', b'{"model":"boat","version":"2","attestation":"a"}'])
def test_an_admission_that_was_edited_is_refused(body: bytes) -> None:
    """Bytes that are no admission of this version never let it serve."""
    store = MemoryStore()
    store.put_new("models/flights/admitted/2", body)

    with pytest.raises(EvidenceError, match="Restore the object from a backup"):
        admission(store, "flights", "2")


@pytest.mark.parametrize("version", ["", "two", "../1", "-1"])
def test_only_whole_numbers_are_admitted(version: str) -> None:
    """A version that could lead elsewhere is refused."""
    with pytest.raises(EvidenceError, match="is not a version"):
        admit(MemoryStore(), "flights", version, "a" * 64)
