"""Objects as files in one folder, safe between threads and processes on one machine or on a file system with flock and hard links."""

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path

from infra.store import ANOTHER_BODY, NOT_THE_SAME, checked_folder, checked_key, checked_prefix, conflict, not_found
from infra.store_files import file_chunks, other_file, receive, stream_sha256, sync_folder, wrong_upload
from validation.canonical import sha256_hex
from validation.errors import ConfigError, StoreError

# Both begin with a dot, which no key segment may.
_TEMPORARY = ".tmp"
_LOCKS = ".locks"


class FolderStore:
    """Key = path below the folder; etag = sha256 of the body.

    A body is written to a temporary file, flushed to the disk, then linked (fails if the name is taken: write-once) or renamed over
    the old one under a lock (compare and set). A reader sees a whole old or a whole new body; `kill -9` leaves at most a file in .tmp.
    """

    def __init__(self, root: str | Path) -> None:
        self.root = Path(root)

    def probe(self) -> None:
        """Make the folder and write in it, both ways. Raises ConfigError when that does not work."""
        key = f"probe/{secrets.token_hex(8)}"
        try:
            self.replace(key, b"2", self.replace(key, b"1", None))
            self._path(key).unlink()
            self._lock_path(key).unlink()
        except (StoreError, OSError) as error:
            reason = error.__cause__ or error
            raise ConfigError(
                f"the store folder {self.root} cannot be written ({reason}). Evidence could not be kept, so nothing was started. "
                "Make it writable for this user, or set SEATRIAL_STORE to a folder that is, or to s3://bucket/prefix."
            ) from None

    def get(self, key: str) -> bytes:
        with self._explained("read", key):
            try:
                return self._path(key).read_bytes()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                raise not_found(key, str(self.root)) from None

    def get_with_etag(self, key: str) -> tuple[bytes, str]:
        body = self.get(key)
        return body, sha256_hex(body)

    def exists(self, key: str) -> bool:
        with self._explained("read", key):
            return self._path(key).is_file()

    def folders(self, prefix: str) -> list[str]:
        with self._explained("list", prefix):
            try:
                with os.scandir(self.root / checked_folder(prefix)) as entries:
                    inside = [entry.name for entry in entries if entry.is_dir() and not entry.name.startswith(".")]
            except (FileNotFoundError, NotADirectoryError):
                return []
            # a writer makes the folder first: without a file in it there is no key yet
            return sorted(name for name in inside if any(files for _, _, files in os.walk(self.root / prefix / name)))

    def list(self, prefix: str) -> list[str]:
        checked_prefix(prefix)
        top = self.root / prefix.rpartition("/")[0]
        beyond = len(str(self.root)) + 1
        found = []
        with self._explained("list", prefix):
            for folder, folders, names in os.walk(top, onerror=_raise_unless_absent):
                folders[:] = [name for name in folders if not name.startswith(".")]
                found += [f"{folder}/{name}"[beyond:] for name in names]
        return sorted(key for key in found if key.startswith(prefix))

    def put_new(self, key: str, body: bytes) -> None:
        with self._explained("write", key):
            if not self._link(key, body) and self.get(key) != body:
                raise conflict(key, str(self.root), ANOTHER_BODY)

    def replace(self, key: str, body: bytes, etag: str | None) -> str:
        with self._explained("write", key):
            if etag is None:
                if not self._link(key, body):
                    raise conflict(key, str(self.root), NOT_THE_SAME)
            else:
                self._swap(key, body, etag)
        return sha256_hex(body)

    def put_file_new(self, key: str, path: Path, sha256: str) -> None:
        with path.open("rb"):  # a file that cannot be read is the caller's, not the store's
            pass
        what = f"'{key}' in {self.root}"
        with self._explained("write", key):
            if not self.exists(key):
                with self._temporary(file_chunks(path)) as written:
                    if (found := stream_sha256(file_chunks(written))) != sha256:
                        raise wrong_upload(what, path, sha256, found)
                    if self._link_file(key, written):
                        return
            if stream_sha256(file_chunks(self._path(key))) != sha256:
                raise other_file(what)

    def get_file(self, key: str, path: Path) -> str:
        if not self.exists(key):
            raise not_found(key, str(self.root))
        return receive(file_chunks(self._path(key)), path, what=f"'{key}' in {self.root}")

    def delete(self, key: str) -> None:
        with self._explained("remove", key), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            self._path(key).unlink()
            sync_folder(self._path(key).parent)

    def _swap(self, key: str, body: bytes, etag: str) -> None:
        with self._locked(key), self._temporary([body]) as written:
            if not self.exists(key) or sha256_hex(self.get(key)) != etag:
                raise conflict(key, str(self.root), NOT_THE_SAME)
            written.replace(self._path(key))
            sync_folder(self._path(key).parent)

    def _link(self, key: str, body: bytes) -> bool:
        with self._temporary([body]) as written:
            return self._link_file(key, written)

    def _link_file(self, key: str, written: Path) -> bool:
        # link(2) is atomic and fails when the name exists: of many writers one gets True
        target = self._path(key)
        self._make_folder(target.parent)
        try:
            os.link(written, target)
        except FileExistsError:
            return False
        sync_folder(target.parent)
        return True

    def _make_folder(self, folder: Path) -> None:
        missing = [place for place in (folder, *folder.parents) if not place.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        for place in missing:
            sync_folder(place.parent)  # a name in a folder is on the disk only when that folder is

    @contextlib.contextmanager
    def _temporary(self, chunks: Iterable[bytes]) -> Iterator[Path]:
        place = self.root / _TEMPORARY
        place.mkdir(parents=True, exist_ok=True)
        path = place / secrets.token_hex(16)
        try:
            with path.open("xb") as file:
                for chunk in chunks:
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        # flock belongs to the open file, so it also holds between threads; the kernel drops it when the process dies
        path = self._lock_path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def _lock_path(self, key: str) -> Path:
        return self.root / _LOCKS / sha256_hex(key.encode())

    def _path(self, key: str) -> Path:
        return self.root / checked_key(key)

    @contextlib.contextmanager
    def _explained(self, what: str, key: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise StoreError(
                f"cannot {what} '{key}' in the store folder {self.root} ({error}). The object is as it was before. "
                "Check the folder's permissions and free space, then run the command again."
            ) from error


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error
