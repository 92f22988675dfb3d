"""A bucket that answers 500 or 503, resets, hangs, lies or loses answers: a clear error in bounded time, or the right result."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from helpers_faults import FaultyS3, Plan, faulty_s3
from helpers_stores import s3_settings

from infra.pointer import Pointer, move_pointer, read_pointer
from infra.store import ObjectStore, open_store
from validation.errors import StoreError

BOUND_S = 20.0  # two attempts of at most 0.5 s and a pause of at most one; the rest is for a loaded machine
DOWN = ("500", "503", "reset", "hang")
ASKED: dict[str, Callable[[ObjectStore], object]] = {
    "get": lambda store: store.get("a/b"),
    "exists": lambda store: store.exists("a/b"),
    "list": lambda store: store.list("a/"),
    "folders": lambda store: store.folders("a/"),
    "put_new": lambda store: store.put_new("a/new", b"new"),
    "replace": lambda store: store.replace("a/new", b"new", None),
    "delete": lambda store: store.delete("a/b"),
}


@pytest.fixture
def front(s3: str) -> Iterator[FaultyS3]:
    with faulty_s3(s3) as own:
        yield own


@pytest.fixture
def bucket(front: FaultyS3, tmp_path: Path) -> ObjectStore:
    """A store behind the faulty endpoint that holds one object; nothing is spoilt yet."""
    limits = {"store_attempts": 2, "store_connect_timeout_s": 0.5, "store_read_timeout_s": 0.5}
    store = open_store(s3_settings(tmp_path, front.endpoint, f"s3://trial/{uuid4().hex}", **limits))
    store.put_new("a/b", b"whole")
    return store


def always(fault: str) -> Plan:
    """Every request is spoilt."""
    return lambda _method, _path, _number: fault


def once(fault: str, front: FaultyS3) -> Plan:
    """The next request is spoilt, no other."""
    first = len(front.requests)
    return lambda _method, _path, number: fault if number == first else ""


@pytest.mark.parametrize("fault", DOWN)
@pytest.mark.parametrize("asked", ASKED)
def test_a_store_that_is_down_is_a_clear_error_soon(front: FaultyS3, bucket: ObjectStore, asked: str, fault: str) -> None:
    """StoreError with the next step after the store's own attempts, and nothing was written."""
    front.plan = always(fault)
    began = time.monotonic()
    with pytest.raises(StoreError, match="run the command again"):
        ASKED[asked](bucket)
    took = time.monotonic() - began
    front.plan = always("")

    assert took < BOUND_S
    assert bucket.list("a/") == ["a/b"]


@pytest.mark.parametrize("fault", DOWN)
@pytest.mark.parametrize("asked", ASKED)
def test_one_failed_attempt_is_repeated(front: FaultyS3, bucket: ObjectStore, asked: str, fault: str) -> None:
    """A fault that is over at the second attempt costs time and nothing else."""
    front.plan = once(fault, front)

    ASKED[asked](bucket)


def test_a_write_whose_answer_was_lost_counts_once(front: FaultyS3, bucket: ObjectStore) -> None:
    """The repeated request meets its own first attempt, and knows it."""
    front.plan = once("lost", front)
    bucket.put_new("a/new", b"mine")
    front.plan = once("lost", front)
    etag = bucket.replace("a/other", b"mine", None)
    front.plan = once("lost", front)
    moved = bucket.replace("a/other", b"again", etag)

    assert bucket.get("a/new") == b"mine"
    assert bucket.get_with_etag("a/other") == (b"again", moved)


def test_half_an_object_is_no_object(front: FaultyS3, bucket: ObjectStore) -> None:
    """A body that is cut off is never taken for the whole."""
    front.plan = always("half")

    with pytest.raises(StoreError, match="run the command again"):
        bucket.get("a/b")


@pytest.mark.parametrize("asked", [name for name in ASKED if name != "delete"])
def test_a_page_that_is_no_store_is_told(front: FaultyS3, bucket: ObjectStore, asked: str) -> None:
    """A sign-in page in front of the store answers 200 and HTML: an error that names the endpoint's variable, never an empty store."""
    front.plan = always("rubbish")

    with pytest.raises(StoreError, match="SEATRIAL_STORE_ENDPOINT"):
        ASKED[asked](bucket)


@pytest.mark.parametrize("fault", DOWN)
def test_a_pointer_never_moves_by_halves(front: FaultyS3, bucket: ObjectStore, fault: str) -> None:
    """Down in the moment of the move: the old pointer stands whole, and can be moved afterwards with the same etag."""
    first = Pointer(
        model="boat", serving_version="1", serving_kind="baseline", last_known_good="", baseline="1", release_id="boat-1", sequence=1
    )
    etag = move_pointer(bucket, first, None)
    front.plan = always(fault)
    with pytest.raises(StoreError):
        move_pointer(bucket, first, etag)
    front.plan = always("")

    assert read_pointer(bucket, "boat") == (first, etag)


def test_a_store_that_is_down_starts_nothing(front: FaultyS3, bucket: ObjectStore, tmp_path: Path) -> None:
    """The probe at the beginning of every command says so."""
    front.plan = always("503")

    with pytest.raises(StoreError, match=r"probe/conditional-writes.*503"):
        open_store(s3_settings(tmp_path, front.endpoint, "s3://trial/new", store_attempts=1))
