"""Files into and out of a store in pieces: a checkpoint never has to fit into memory, and no half file stands under its name."""

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from validation.errors import ConflictError, EvidenceError, StoreError

CHUNK_BYTES = 2**20


def file_chunks(path: Path) -> Iterator[bytes]:
    """A file's bytes in order, piece by piece."""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            yield chunk


def first_bytes(path: Path, size: int) -> Iterator[bytes]:
    """The first `size` bytes of a file, piece by piece; fewer when it is shorter."""
    with path.open("rb") as file:
        while size > 0 and (chunk := file.read(min(CHUNK_BYTES, size))):
            yield chunk
            size -= len(chunk)


def stream_sha256(chunks: Iterable[bytes]) -> str:
    """sha256 of all chunks in order, 64 hex digits."""
    seen = hashlib.sha256()
    for chunk in chunks:
        seen.update(chunk)
    return seen.hexdigest()


def receive(chunks: Iterable[bytes], path: Path, *, what: str, expected: str = "") -> str:
    """Write chunks to `<path>.partial`, wait for the disk, give it its name; returns the sha256.

    Args: `what` names the object in messages; `expected`, its sha256 where the store knows it.
    Raises: EvidenceError when the bytes are not the expected ones, StoreError when the disk takes no more. `path` is then as it was.
    """
    partial = path.with_name(f"{path.name}.partial")
    seen = hashlib.sha256()
    try:
        with _explained(what, path), partial.open("wb") as file:
            for chunk in chunks:
                seen.update(chunk)
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        if expected and seen.hexdigest() != expected:
            raise altered(what, seen.hexdigest(), expected)
        with _explained(what, path):
            partial.replace(path)
            sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):  # a folder that cannot be written to holds no partial file either
            partial.unlink(missing_ok=True)
    return seen.hexdigest()


@contextlib.contextmanager
def _explained(what: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise StoreError(
            f"{what} cannot be brought to {path} ({error}). Nothing stands there. Check the connection, and the free space and permissions "
            "here, then run the command again."
        ) from error


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def altered(what: str, found: str, expected: str) -> EvidenceError:
    """The error for an object whose bytes are not those that were written."""
    return EvidenceError(
        f"{what} is not what was written: sha256 {found}, recorded {expected}. It cannot be trusted. Restore it from a backup or an older "
        "object version, and find out who can write to the store."
    )


def wrong_upload(what: str, path: Path, sha256: str, found: str) -> StoreError:
    """The error for a file that did not arrive as it should be; says whether the file or the way is to blame."""
    here = stream_sha256(file_chunks(path))
    cause = f"the file {path} itself has sha256 {here}" if here != sha256 else f"{path} is sound, so the way or the store altered it"
    return StoreError(
        f"{what} arrived with sha256 {found} instead of {sha256}: {cause}. It was removed from the store. Check disk and network if this "
        "happens again."
    )


def other_file(what: str) -> ConflictError:
    """The error for a write-once key under which another file stands."""
    return ConflictError(f"{what}: another file stands there already, and it is written once. Nothing was changed. Find out who wrote it.")
