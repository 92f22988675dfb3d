"""Objects by key, with conditional writes: a folder, S3 or memory behind one Protocol. Large objects go from and to files in pieces.

Two promises carry the rest: `put_new` never changes what stands under a key, and of any number of writers that call `replace` with the
same etag exactly one wins. Evidence and journals rest on the first, pointers on the second.
"""

import json
import re
import threading
from pathlib import Path
from typing import Any, Protocol

from infra.settings import StoreSettings
from infra.store_files import other_file, receive, wrong_upload
from validation.canonical import canonical_json, sha256_hex
from validation.errors import ConflictError, EvidenceError, StoreError

_SEGMENT = r"[A-Za-z0-9_-][A-Za-z0-9._-]*"
_KEY = re.compile(rf"{_SEGMENT}(/{_SEGMENT})*")
_PREFIX = re.compile(rf"(({_SEGMENT}/)*({_SEGMENT})?)")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_MAX_KEY = 900  # S3 allows 1024 bytes; the rest is for the prefix


class NotFoundError(StoreError):
    """Nothing stands under this key."""


class ObjectStore(Protocol):
    """Whole objects by key. All errors are StoreError; keys are `segment/segment`, letters, digits, dot, underscore and dash."""

    def get(self, key: str) -> bytes:
        """Fetch an object. Raises NotFoundError when there is none."""

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        """Fetch an object and the etag that `replace` takes."""

    def exists(self, key: str) -> bool: ...

    def folders(self, prefix: str) -> list[str]:
        """Names right below `prefix` (it ends with '/') that keys go on from, sorted: cheap where `list` would give thousands of keys."""

    def list(self, prefix: str) -> list[str]:
        """Every key that starts with the text `prefix`, sorted."""

    def put_new(self, key: str, body: bytes) -> None:
        """Write once. Raises ConflictError when another body stands there; the same body again is fine."""

    def replace(self, key: str, body: bytes, etag: str | None) -> str:
        """Compare and set; returns the new etag.

        `etag` is what `get_with_etag` gave; None = nothing may stand there. Raises ConflictError when somebody else wrote first.
        """

    def put_file_new(self, key: str, path: Path, sha256: str) -> None:
        """Write a file once, in parts when it is large; returns when the object was read back and has this sha256.

        One writer a key at a time: parts of an upload that was cut off are dropped. Raises ConflictError when another file stands there,
        StoreError when it did not arrive as it should be (nothing stands there then), OSError when the file cannot be read.
        """

    def get_file(self, key: str, path: Path) -> str:
        """Fetch an object into a file, whole or not at all; returns its sha256. Raises NotFoundError when there is none."""

    def delete(self, key: str) -> None:
        """Remove an object; fine when there is none."""


def open_store(settings: StoreSettings, *, writable: bool = True) -> ObjectStore:
    """Open the store that the settings name and, if `writable`, prove by a probe that it takes conditional writes.

    Raises: ConfigError when a folder cannot be written, StoreError when a bucket cannot be used; both say what to do.
    """
    if settings.store.startswith("s3://"):
        from infra.store_s3 import S3Store  # boto3 costs 0.3 s; a folder does not need it

        bucket = S3Store.connect(settings)
        if writable:
            bucket.probe()
        return bucket
    from infra.store_folder import FolderStore

    folder = FolderStore(settings.store)
    if writable:
        folder.probe()
    return folder


def checked_key(key: str) -> str:
    """Return the key, or raise StoreError when it could name anything outside the store."""
    if len(key) <= _MAX_KEY and _KEY.fullmatch(key):
        return key
    raise StoreError(
        f"key {key[:120]!r} is not a valid object key. Nothing was read or written. Use segments of letters, digits, '.', '_' and '-' "
        "that do not begin with a dot, joined by '/'."
    )


def checked_prefix(prefix: str) -> str:
    """Return a prefix that some valid key could start with, or raise StoreError."""
    if len(prefix) <= _MAX_KEY and _PREFIX.fullmatch(prefix):
        return prefix
    raise StoreError(f"prefix {prefix[:120]!r} cannot start a valid object key. Nothing was listed. Use the beginning of a key, or ''.")


def checked_folder(prefix: str) -> str:
    """Return a prefix that ends where a name begins, or raise StoreError."""
    if checked_prefix(prefix).endswith("/"):
        return prefix
    raise StoreError(f"prefix {prefix[:120]!r} names no folder of keys. Nothing was listed. End it with '/'.")


def not_found(key: str, where: str) -> NotFoundError:
    """The error for an absent object."""
    return NotFoundError(
        f"no object '{key}' in {where}. It was never written, or was removed. Check the id; `seatrial show` lists releases."
    )


def conflict(key: str, where: str, meaning: str) -> ConflictError:
    """The error for a lost conditional write."""
    return ConflictError(f"'{key}' in {where}: {meaning}. Nothing was changed by this write. Read the object again and decide anew.")


ANOTHER_BODY = "another body stands there already, and this object is written once"
NOT_THE_SAME = "somebody else wrote first, so the object is not the one that was read"


class MemoryStore:
    """A store that lives as long as the process: tests and previews."""

    def __init__(self) -> None:
        self._bodies: dict[str, bytes] = {}
        self._lock = threading.Lock()

    def get(self, key: str) -> bytes:
        return self.get_with_etag(key)[0]

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        body = self._bodies.get(checked_key(key))
        if body is None:
            raise not_found(key, "memory")
        return body, sha256_hex(body)

    def exists(self, key: str) -> bool:
        return checked_key(key) in self._bodies

    def folders(self, prefix: str) -> list[str]:
        below = (key.removeprefix(prefix) for key in self.list(checked_folder(prefix)))
        return sorted({key.partition("/")[0] for key in below if "/" in key})

    def list(self, prefix: str) -> list[str]:
        checked_prefix(prefix)
        with self._lock:
            return sorted(key for key in self._bodies if key.startswith(prefix))

    def put_new(self, key: str, body: bytes) -> None:
        with self._lock:
            if self._bodies.setdefault(checked_key(key), bytes(body)) != body:
                raise conflict(key, "memory", ANOTHER_BODY)

    def replace(self, key: str, body: bytes, etag: str | None) -> str:
        with self._lock:
            present = self._bodies.get(checked_key(key))
            if (None if present is None else sha256_hex(present)) != etag:
                raise conflict(key, "memory", NOT_THE_SAME)
            self._bodies[key] = bytes(body)
        return sha256_hex(body)

    def put_file_new(self, key: str, path: Path, sha256: str) -> None:
        body = path.read_bytes()
        with self._lock:
            if sha256_hex(self._bodies.get(checked_key(key), body)) != sha256:
                what = f"'{key}' in memory"
                raise other_file(what) if key in self._bodies else wrong_upload(what, path, sha256, sha256_hex(body))
            self._bodies.setdefault(key, body)

    def get_file(self, key: str, path: Path) -> str:
        return receive([self.get(key)], path, what=f"'{key}' in memory")

    def delete(self, key: str) -> None:
        with self._lock:
            self._bodies.pop(checked_key(key), None)


def evidence_key(digest: str) -> str:
    """Where evidence with this digest stands. Raises EvidenceError when it is no sha256."""
    if not _DIGEST.fullmatch(digest):
        raise EvidenceError(f"{digest[:80]!r} is not a sha256 (64 hex digits), so it names no evidence. Copy the digest from the journal.")
    return f"evidence/sha256/{digest}"


def put_blob(store: ObjectStore, body: bytes) -> str:
    """Keep bytes under their own sha256, which is returned."""
    digest = sha256_hex(body)
    store.put_new(evidence_key(digest), body)
    return digest


def get_blob(store: ObjectStore, digest: str) -> bytes:
    """Fetch bytes and verify them against their digest. Raises EvidenceError when they are absent or altered."""
    try:
        body = store.get(evidence_key(digest))
    except NotFoundError:
        raise EvidenceError(
            f"evidence {digest} is not in the store. The decision that names it cannot be checked. Restore it from a backup of the store, "
            "or run the gate again."
        ) from None
    if (actual := sha256_hex(body)) != digest:
        raise EvidenceError(
            f"evidence {digest} was altered: its bytes have sha256 {actual}. It proves nothing any more. Restore the object from a backup, "
            "find out who can write to the store, and run the gate again."
        )
    return body


def put_evidence(store: ObjectStore, value: Any) -> str:
    """Keep a value as canonical JSON under its own sha256, which is returned."""
    return put_blob(store, canonical_json(value))


def get_evidence(store: ObjectStore, digest: str) -> dict[str, Any]:
    """Fetch a JSON document and verify it against its digest. Raises EvidenceError when it is absent, altered or no JSON object."""
    body = get_blob(store, digest)
    try:
        value = json.loads(body)
    except ValueError:
        value = body
    if not isinstance(value, dict):
        raise EvidenceError(
            f"evidence {digest} holds {type(value).__name__}, not a JSON object. It was not written by a gate. Check the id."
        )
    return value
