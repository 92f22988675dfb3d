import multiprocessing
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import boto3
import pytest
from botocore.exceptions import EndpointConnectionError
from helpers_stores import KINDS, s3_settings

from infra.settings import load_settings
from infra.store import (
    MemoryStore,
    NotFoundError,
    ObjectStore,
    evidence_key,
    get_blob,
    get_evidence,
    open_store,
    put_blob,
    put_evidence,
)
from infra.store_folder import FolderStore
from infra.store_s3 import S3Store
from validation.canonical import sha256_hex
from validation.errors import ConfigError, ConflictError, EvidenceError, StoreError

every_store = pytest.mark.parametrize("store", KINDS, indirect=True)
WRITERS = 16


def race(attempt: Callable[[int], bool]) -> list[int]:
    """Run WRITERS attempts at once; the numbers of those that won."""
    with ThreadPoolExecutor(WRITERS) as pool:
        return [number for number, won in enumerate(pool.map(attempt, range(WRITERS))) if won]


def wins(write: Callable[[], object]) -> bool:
    """Whether a conditional write won; any other error is raised."""
    try:
        write()
    except ConflictError:
        return False
    return True


@every_store
def test_what_is_put_is_got(store: ObjectStore) -> None:
    """A body comes back byte for byte, empty ones too."""
    store.put_new("a/b", b"\x00body\n")
    store.put_new("a/empty", b"")

    assert (store.get("a/b"), store.get("a/empty"), store.exists("a/b"), store.exists("a/c")) == (b"\x00body\n", b"", True, False)


@every_store
def test_an_absent_key_says_so(store: ObjectStore) -> None:
    """Getting a key that was never written is NotFoundError, a StoreError."""
    with pytest.raises(NotFoundError, match="no object 'a/b'"):
        store.get("a/b")


@every_store
def test_a_listing_is_sorted_and_by_text_prefix(store: ObjectStore) -> None:
    """list() gives full keys in order, for any beginning of a key."""
    for key in ("r/b/2", "r/b/10", "r/bc", "r/a", "s/x"):
        store.put_new(key, b"x")

    assert store.list("r/b") == ["r/b/10", "r/b/2", "r/bc"]
    assert store.list("r/b/") == ["r/b/10", "r/b/2"]
    assert store.list("nothing/") == []
    assert [key for key in store.list("") if not key.startswith("probe/")] == ["r/a", "r/b/10", "r/b/2", "r/bc", "s/x"]


@every_store
def test_write_once(store: ObjectStore) -> None:
    """The same body again is fine, another one is a conflict and changes nothing."""
    store.put_new("k", b"one")
    store.put_new("k", b"one")

    with pytest.raises(ConflictError, match="Read the object again"):
        store.put_new("k", b"two")
    assert store.get("k") == b"one"


@every_store
def test_compare_and_set(store: ObjectStore) -> None:
    """A write with the current etag wins once; the old etag then loses, and so does `must not exist`."""
    first = store.replace("k", b"1", None)
    second = store.replace("k", b"2", first)

    assert store.get_with_etag("k") == (b"2", second)
    for stale in (first, None):
        with pytest.raises(ConflictError):
            store.replace("k", b"3", stale)
    assert store.get("k") == b"2"


@every_store
def test_an_etag_of_nothing_loses(store: ObjectStore) -> None:
    """Replacing an object that is not there is a conflict, not a creation."""
    with pytest.raises(ConflictError):
        store.replace("k", b"1", '"0123456789abcdef0123456789abcdef"')

    assert not store.exists("k")


@every_store
@pytest.mark.parametrize(
    "key", ["", "/etc/passwd", "../x", "a/../../x", "a//b", "a/", "a b", "a\\b", ".tmp/x", "a/.hidden", "ä", "x" * 901, "a\n"]
)
def test_no_key_leaves_the_store(store: ObjectStore, key: str) -> None:
    """Keys that could name something outside are refused by every operation."""
    calls: list[Callable[[], object]] = [
        lambda: store.get(key), lambda: store.exists(key), lambda: store.put_new(key, b""), lambda: store.replace(key, b"", None),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(StoreError, match="not a valid object key"):
            call()


@every_store
def test_a_prefix_cannot_leave_either(store: ObjectStore) -> None:
    """Listing `..` is refused."""
    with pytest.raises(StoreError, match="cannot start a valid object key"):
        store.list("../")


SIZES = pytest.mark.parametrize("size", [0, 1000, 5 * 2**20, 11 * 2**20 + 7], ids=["empty", "small", "one part", "three parts"])


def make_file(folder: Path, size: int) -> tuple[Path, str]:
    """A file of so many bytes, no two pieces alike, and its sha256."""
    path = folder / f"given-{size}"
    path.write_bytes(random.Random(size).randbytes(size))
    return path, sha256_hex(path.read_bytes())


@SIZES
@every_store
def test_a_file_comes_back(store: ObjectStore, tmp_path: Path, size: int) -> None:
    """A file of any size arrives, twice is fine, and comes back byte for byte with its sha256, in one piece."""
    given, sha256 = make_file(tmp_path, size)
    store.put_file_new("run/file", given, sha256)
    store.put_file_new("run/file", given, sha256)

    assert store.get_file("run/file", tmp_path / "back") == sha256
    assert (tmp_path / "back").read_bytes() == given.read_bytes() == store.get("run/file")
    assert not (tmp_path / "back.partial").exists()


@pytest.mark.parametrize("size", [1000, 6 * 2**20], ids=["small", "parts"])
@every_store
def test_a_file_is_written_once(store: ObjectStore, tmp_path: Path, size: int) -> None:
    """Another file under the same key is a conflict and changes nothing."""
    store.put_new("k", b"first")
    given, sha256 = make_file(tmp_path, size)

    with pytest.raises(ConflictError, match="another file"):
        store.put_file_new("k", given, sha256)
    assert store.get("k") == b"first"


@pytest.mark.parametrize("size", [1000, 6 * 2**20], ids=["small", "parts"])
@every_store
def test_a_file_that_is_not_what_it_claims_leaves_nothing(store: ObjectStore, tmp_path: Path, size: int) -> None:
    """A file whose bytes do not have the given sha256 is refused, named, and not left in the store."""
    given, _ = make_file(tmp_path, size)

    with pytest.raises(StoreError, match=rf"{given.name} itself has sha256"):
        store.put_file_new("k", given, "0" * 64)
    assert not store.exists("k")


@every_store
def test_a_file_that_is_not_there(store: ObjectStore, tmp_path: Path) -> None:
    """A missing local file is an OSError, a missing object NotFoundError that leaves no file."""
    with pytest.raises(FileNotFoundError):
        store.put_file_new("k", tmp_path / "absent", "0" * 64)
    with pytest.raises(NotFoundError):
        store.get_file("k", tmp_path / "back")

    assert [path.name for path in tmp_path.glob("back*")] == []


@every_store
def test_delete(store: ObjectStore) -> None:
    """A deleted object is gone, deleting it again is fine, and its key can be written anew."""
    store.put_new("a/k", b"1")
    store.delete("a/k")
    store.delete("a/k")
    store.put_new("a/k", b"2")

    assert (store.get("a/k"), store.list("a/")) == (b"2", ["a/k"])


@every_store
def test_one_of_many_creates(store: ObjectStore) -> None:
    """Of many threads that write other bodies once, exactly one wins, and its body stands."""
    won = race(lambda number: wins(lambda: store.put_new("race/k", str(number).encode())))

    assert [store.get("race/k")] == [str(number).encode() for number in won]


@every_store
def test_one_of_many_replaces(store: ObjectStore) -> None:
    """Of many threads that replace the same etag, exactly one wins, and its body stands."""
    etag = store.replace("race/k", b"start", None)

    won = race(lambda number: wins(lambda: store.replace("race/k", str(number).encode(), etag)))

    assert [store.get("race/k")] == [str(number).encode() for number in won]


def _count_up(root: str, times: int) -> None:
    store = FolderStore(root)
    for _ in range(times):
        while True:
            body, etag = store.get_with_etag("count")
            if wins(lambda body=body, etag=etag: store.replace("count", str(int(body) + 1).encode(), etag)):
                break


def test_processes_lose_no_update(tmp_path: Path) -> None:
    """Three processes that count up by compare-and-set in one folder reach the sum."""
    FolderStore(tmp_path).replace("count", b"0", None)
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=_count_up, args=(str(tmp_path), 40)) for _ in range(3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)

    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    assert FolderStore(tmp_path).get("count") == b"120"


def test_a_killed_writer_leaves_a_whole_object(tmp_path: Path) -> None:
    """SIGKILL in the middle of writing leaves a body that was written whole, and no lock that blocks the next writer."""
    store = FolderStore(tmp_path)
    store.replace("count", b"0", None)
    writer = multiprocessing.get_context("fork").Process(target=_count_up, args=(str(tmp_path), 10**9))
    writer.start()
    while int(store.get("count")) < 5:
        time.sleep(0.001)
    os.kill(writer.pid or 0, signal.SIGKILL)
    writer.join(10)

    body, etag = store.get_with_etag("count")
    store.replace("count", str(int(body) + 1).encode(), etag)
    assert int(store.get("count")) == int(body) + 1 >= 6


def test_a_folder_keeps_no_temporary_files(tmp_path: Path) -> None:
    """After wins and losses nothing but objects and locks is left."""
    store = open_store(load_settings(home=tmp_path, store=str(tmp_path / "s")))
    etag = store.replace("k", b"1", None)
    store.replace("k", b"2", etag)
    assert not wins(lambda: store.replace("k", b"3", etag))

    assert list((tmp_path / "s" / ".tmp").iterdir()) == []
    assert store.list("") == ["k"]


@pytest.mark.parametrize("where", ["/proc/nowhere", "a file/store"], ids=["proc", "below-a-file"])
def test_an_unwritable_folder_is_a_bad_setting(tmp_path: Path, where: str) -> None:
    """A folder that cannot be written is a ConfigError that names the variable, before anything starts."""
    (tmp_path / "a file").write_text("")

    with pytest.raises(ConfigError, match="set SEATRIAL_STORE to a folder"):
        open_store(load_settings(home=tmp_path, store=str(tmp_path / where)))


def test_reading_does_not_make_a_folder(tmp_path: Path) -> None:
    """A store opened for reading is empty where there is no folder, and leaves none."""
    store = open_store(load_settings(home=tmp_path / "home"), writable=False)

    assert (store.list(""), store.exists("a"), list(tmp_path.iterdir())) == ([], False, [])


def test_a_key_below_an_object_is_a_store_error(tmp_path: Path) -> None:
    """A folder cannot hold `a` and `a/b`; the second is refused with a StoreError."""
    store = FolderStore(tmp_path)
    store.put_new("a", b"")

    with pytest.raises(StoreError, match="cannot write 'a/b'"):
        store.put_new("a/b", b"")


def test_a_missing_bucket_names_the_setting(tmp_path: Path, s3: str) -> None:
    """Opening a bucket that is not there says which setting to correct."""
    with pytest.raises(StoreError, match=r"no bucket 'absent'.*SEATRIAL_STORE"):
        open_store(s3_settings(tmp_path, s3, "s3://absent"))


def test_an_unreachable_endpoint_ends_in_time(tmp_path: Path, s3: str) -> None:
    """A closed port is a StoreError after the bounded number of attempts."""
    settings = s3_settings(tmp_path, "http://127.0.0.1:9", "s3://trial", store_attempts=1, store_connect_timeout_s=0.5)

    with pytest.raises(StoreError, match=r"not reachable.*SEATRIAL_STORE_ENDPOINT"):
        open_store(settings)


def test_a_silent_endpoint_ends_in_time(tmp_path: Path, s3: str) -> None:
    """An endpoint that accepts and never answers is a StoreError after the read time-out."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        settings = s3_settings(tmp_path, endpoint, "s3://trial", store_attempts=1, store_read_timeout_s=0.3)

        with pytest.raises(StoreError, match="may or may not have arrived"):
            open_store(settings)


class _Forbidden(BaseHTTPRequestHandler):
    def do_PUT(self) -> None:
        self.send_response(403)
        self.end_headers()
        self.wfile.write(b"<Error><Code>AccessDenied</Code><Message>no</Message></Error>")

    def log_message(self, format: str, *args: object) -> None:
        """Keep the test's output clean."""


def test_a_forbidden_bucket_names_the_rights(tmp_path: Path, s3: str) -> None:
    """A 403 says which rights are needed."""
    with ThreadingHTTPServer(("127.0.0.1", 0), _Forbidden) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with pytest.raises(StoreError, match=r"status 403, AccessDenied.*Grant s3:GetObject"):
            open_store(s3_settings(tmp_path, f"http://127.0.0.1:{server.server_port}", "s3://trial"))
        server.shutdown()


def test_missing_credentials_are_a_bad_setting(tmp_path: Path, s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without credentials S3 is a ConfigError that says how to give them."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))

    with pytest.raises(ConfigError, match="AWS_PROFILE"):
        open_store(s3_settings(tmp_path, s3, "s3://trial/x"))


def test_an_object_altered_in_the_bucket_is_noticed(tmp_path: Path, s3: str) -> None:
    """A body that differs from the sha256 it was written with is not handed out."""
    store = open_store(s3_settings(tmp_path, s3, "s3://trial/altered"))
    store.put_new("k", b"good")
    client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1")
    metadata = client.head_object(Bucket="trial", Key="altered/k")["Metadata"]
    client.put_object(Bucket="trial", Key="altered/k", Body=b"evil", Metadata=metadata)

    with pytest.raises(EvidenceError, match="not what was written"):
        store.get("k")


class _Breaking:
    """A client that changes or loses the second part of an upload; `dies` = it also cannot clean up after itself."""

    def __init__(self, client: object, how: str) -> None:
        self._client, self.how = client, how

    def upload_part(self, **request: object) -> object:
        if request["PartNumber"] == 2 and self.how == "flips":
            return self._client.upload_part(**request | {"Body": b"x" * 5 * 2**20})  # type: ignore[attr-defined]
        if request["PartNumber"] == 2:
            raise EndpointConnectionError(endpoint_url="http://store")
        return self._client.upload_part(**request)  # type: ignore[attr-defined]

    def abort_multipart_upload(self, **request: object) -> object:
        if self.how == "dies":
            raise EndpointConnectionError(endpoint_url="http://store")
        return self._client.abort_multipart_upload(**request)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)


def open_uploads(client: object, prefix: str) -> int:
    """Multipart uploads that were begun and neither finished nor dropped."""
    return len(client.list_multipart_uploads(Bucket="trial", Prefix=prefix).get("Uploads", []))  # type: ignore[attr-defined]


@pytest.mark.parametrize(("how", "says", "left"), [("loses", "not reachable", 0), ("dies", "store", 1), ("flips", "is sound", 0)])
def test_an_upload_that_breaks_leaves_nothing(tmp_path: Path, s3: str, how: str, says: str, left: int) -> None:
    """An upload that breaks or arrives altered leaves no object; what even its cleaning-up left is dropped by the next one."""
    given, sha256 = make_file(tmp_path, 11 * 2**20)
    client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1")
    broken = S3Store(_Breaking(client, how), "trial", f"broken-{how}", part_mib=5)  # type: ignore[arg-type]
    with pytest.raises(StoreError, match=says):
        broken.put_file_new("k", given, sha256)
    assert (broken.exists("k"), open_uploads(client, f"broken-{how}/")) == (False, left)

    S3Store(client, "trial", f"broken-{how}", part_mib=5).put_file_new("k", given, sha256)

    assert (sha256_hex(broken.get("k")), open_uploads(client, f"broken-{how}/")) == (sha256, 0)


def test_a_large_file_is_sent_in_parts_and_only_once(tmp_path: Path, s3: str) -> None:
    """Two writers of one large key: the one that completes last loses, and no parts stay behind."""
    given, sha256 = make_file(tmp_path, 11 * 2**20)
    client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1")
    store = S3Store(client, "trial", "parts", part_mib=5)
    store._drop_unfinished = lambda key: client.put_object(Bucket="trial", Key=f"parts/{key}", Body=b"first")  # type: ignore[method-assign]

    with pytest.raises(ConflictError):
        store.put_file_new("k", given, sha256)
    assert (store.get("k"), open_uploads(client, "parts/")) == (b"first", 0)


class _AnswerLost:
    """A client whose first put reaches the bucket, and is then repeated because its answer was lost."""

    def __init__(self, client: object) -> None:
        self._client = client

    def put_object(self, **request: object) -> object:
        self._client.put_object(**request)  # type: ignore[attr-defined]
        return self._client.put_object(**request)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)


def test_a_repeated_winning_write_is_still_a_win(tmp_path: Path, s3: str) -> None:
    """When the answer to a won compare-and-set is lost and the request repeated, the writer learns that it won."""
    client = boto3.client("s3", endpoint_url=s3, region_name="us-east-1")
    store = S3Store(_AnswerLost(client), "trial", "lost-answer")  # type: ignore[arg-type]

    etag = store.replace("k", b"1", None)
    etag = store.replace("k", b"2", etag)
    store.put_new("once", b"x")

    assert store.get_with_etag("k") == (b"2", etag)


class _Careless:
    """A client of a store that ignores conditions, as some S3-compatible ones do."""

    def __init__(self, client: object) -> None:
        self._client = client

    def put_object(self, **request: object) -> object:
        kept = {name: value for name, value in request.items() if name not in ("IfMatch", "IfNoneMatch")}
        return self._client.put_object(**kept)  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> object:
        return getattr(self._client, name)


def test_a_store_that_ignores_conditions_is_refused(s3: str) -> None:
    """The probe notices a bucket whose conditional writes are not conditional."""
    store = S3Store(_Careless(boto3.client("s3", endpoint_url=s3, region_name="us-east-1")), "trial", "careless")  # type: ignore[arg-type]

    with pytest.raises(StoreError, match="ignores conditional writes"):
        store.probe()


@every_store
def test_evidence_is_addressed_by_content(store: ObjectStore) -> None:
    """Equal values have one digest and one object; it comes back as written."""
    one = put_evidence(store, {"b": float("nan"), "a": (1, 2)})
    again = put_evidence(store, {"a": [1, 2], "b": float("nan")})

    assert one == again
    assert get_evidence(store, one) == {"a": [1, 2], "b": "NaN"}
    assert store.list("evidence/") == [f"evidence/sha256/{one}"]


def test_altered_evidence_is_refused() -> None:
    """Evidence whose bytes do not have the digest in its name is an EvidenceError."""
    store = MemoryStore()
    digest = put_evidence(store, {"outcome": "fail"})
    _, etag = store.get_with_etag(evidence_key(digest))
    store.replace(evidence_key(digest), b'{"outcome":"pass"}', etag)

    with pytest.raises(EvidenceError, match="was altered"):
        get_evidence(store, digest)


@pytest.mark.parametrize("digest", ["0" * 64, "../../models/x/pointer", "", "0" * 63 + "G"], ids=["absent", "path", "empty", "no-hex"])
def test_absent_evidence_is_refused(digest: str) -> None:
    """Evidence that is not there, and names that are no digest, are EvidenceErrors."""
    with pytest.raises(EvidenceError):
        get_evidence(MemoryStore(), digest)


def test_a_blob_is_not_a_document() -> None:
    """Bytes come back verified; asked for as a JSON document they are refused."""
    store = MemoryStore()
    digest = put_blob(store, b"PAR1\xff")

    assert get_blob(store, digest) == b"PAR1\xff"
    with pytest.raises(EvidenceError, match="not a JSON object"):
        get_evidence(store, digest)


@every_store
def test_folders_are_the_names_that_keys_go_on_from(store: ObjectStore) -> None:
    """Only whole names, only one level, and only where a key stands below."""
    for key in ("releases/b/numbers/0001", "releases/b/numbers/0002", "releases/a/x", "releases/plain", "others/c/x"):
        store.put_new(key, b"1")
    store.put_new("releases/gone/x", b"1")
    store.delete("releases/gone/x")

    assert (store.folders("releases/"), store.folders("releases/b/"), store.folders("absent/")) == (["a", "b"], ["numbers"], [])


def test_folders_asks_for_a_folder() -> None:
    """The beginning of a name would give halves of names."""
    with pytest.raises(StoreError, match="End it with '/'"):
        MemoryStore().folders("releases/fl")
