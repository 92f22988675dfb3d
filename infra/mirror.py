"""The second tier of checkpoints: what a run sealed on local disk is copied to the object store, with the rows it vouches for.

The order makes it safe: files, rows, the signed list of rows, then the manifest (a conditional write). A reader that finds a manifest finds
all the rest; whatever breaks on the way leaves no manifest, and the next `sync` goes on. `infra.mirror_fetch` is the way back.
"""

import hashlib
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from infra.mirror_layout import (
    KEEP,
    PARTS,
    Claim,
    checkpoint_prefix,
    file_key,
    read_claim,
    row_files,
    step_of,
    stored_segments,
    stored_steps,
)
from infra.store import ObjectStore
from infra.store_files import first_bytes, stream_sha256
from validation.canonical import canonical_json, sha256_hex
from validation.errors import ConflictError
from validation.manifest import MANIFEST, Manifest, authenticate, parse_manifest, sign

SEGMENT_BYTES = 8 * 2**20
PROBLEMS = 20  # kept; a store that is down for a night says the same thing all night


@dataclass(slots=True)
class _Sent:
    """How much of a row file is in the store."""

    bytes: int = 0
    seen: Any = field(default_factory=hashlib.sha256)


class Mirror:
    """Copies one run's folder to the store. Used by one thread; nothing that goes wrong is raised, all of it stands in `problems`."""

    def __init__(self, store: ObjectStore, run_folder: Path, run_name: str, *, key: bytes, refused: Collection[int] = ()) -> None:
        """`key` seals the run's checkpoints; `refused` are steps whose copy in the store was found damaged and is to be replaced."""
        self.uploaded: list[int] = []  # steps, in the order they became complete in the store
        self.problems: list[str] = []
        self._store, self._folder, self._run, self._key = store, Path(run_folder), run_name, key
        self._refused = set(refused)
        self._settled: set[int] = set()  # steps that need no copy
        self._sent: dict[str, _Sent] | None = None  # None: ask the store before the next upload

    def sync(self, *, last: bool = False) -> None:
        """Copy every sealed checkpoint that is not in the store yet, newest first; `last`: also the rows behind the newest one.

        What cannot be done now is tried again by the next call; a checkpoint that retention removes meanwhile is left out.
        """
        try:
            before = len(self.uploaded)
            for folder in self._waiting():
                if len(self.uploaded) - before < KEEP:  # what is older than these would be removed at once
                    self._attempt(folder)
            if last:
                self._copy_rows()
        except Exception as error:  # whatever it is, it may not end a training
            self._sent = None
            self._note(error)

    def _waiting(self) -> list[Path]:
        """Sealed folders to copy, newest first. The store is asked only when there may be one."""
        local = {step: path for path in self._folder.glob("checkpoints/step-*") if (step := step_of(path.name)) is not None}
        if not local.keys() - self._settled:
            return []
        complete = self._complete()
        oldest_kept = complete[KEEP - 1] if len(complete) >= KEEP else -1
        self._settled.update(complete, (step for step in local if step < oldest_kept))
        return [path for step, path in sorted(local.items(), reverse=True) if step not in self._settled]

    def _complete(self) -> list[int]:
        """Steps that stand complete in the store, newest first."""
        return sorted(
            (step for step, sealed in stored_steps(self._store, self._run).items() if sealed and step not in self._refused), reverse=True
        )

    def _attempt(self, folder: Path) -> None:
        try:
            self._copy(folder)
        except Exception as error:
            self._sent = None
            if (folder / MANIFEST).exists():  # otherwise retention took it, and a newer one is there
                self._note(error)

    def _copy(self, folder: Path) -> None:
        body = (folder / MANIFEST).read_bytes()
        manifest = parse_manifest(body, self._key)
        self._sent = self._known() if self._sent is None else self._sent
        if manifest.step in self._refused:
            self._remove(manifest.step)
        self._copy_files(folder, manifest)
        self._copy_rows()
        rows = {name: {"bytes": sent.bytes, "sha256": sent.seen.hexdigest()} for name, sent in (self._sent or {}).items()}
        self._put_unsealed(file_key(self._run, manifest.step, PARTS), sign({"step": manifest.step, "rows": rows}, self._key))
        self._store.put_new(file_key(self._run, manifest.step, MANIFEST), body)
        self._refused.discard(manifest.step)
        self._settled.add(manifest.step)
        self.uploaded.append(manifest.step)
        self._claim(Claim(step=manifest.step, manifest_sha256=sha256_hex(body)))
        self._retain()

    def _copy_files(self, folder: Path, manifest: Manifest) -> None:
        for name, seal in sorted(manifest.files.items()):
            key = file_key(self._run, manifest.step, name)
            try:
                self._store.put_file_new(key, folder / name, seal.sha256)
            except ConflictError:  # of an upload that was never sealed: the step was done again since
                self._store.delete(key)
                self._store.put_file_new(key, folder / name, seal.sha256)

    def _put_unsealed(self, key: str, body: bytes) -> None:
        self._store.delete(key)
        self._store.put_new(key, body)

    def _copy_rows(self) -> None:
        """Send what the row files have grown by. Their sizes are taken after the seal, so all it vouches for is in them."""
        self._sent = self._known() if self._sent is None else self._sent
        for path in row_files(self._folder):
            name = path.relative_to(self._folder).as_posix()
            sent, size = self._sent.setdefault(name, _Sent()), path.stat().st_size
            with path.open("rb") as file:
                file.seek(sent.bytes)
                while body := _whole(file.read(min(SEGMENT_BYTES, size - sent.bytes)), path.suffix):
                    file.seek(sent.bytes + len(body))
                    self._store.put_new(f"runs/{self._run}/{name}/{sent.bytes:012d}-{sent.bytes + len(body):012d}", body)
                    sent.bytes += len(body)
                    sent.seen.update(body)

    def _known(self) -> dict[str, _Sent]:
        """What the store has of each row file. Raises ConflictError when this folder has less of it, or other bytes."""
        known = {}
        vouched = self._vouched()
        for name, segments in stored_segments(self._store, self._run).items():
            path = self._folder / name
            size = path.stat().st_size if path.is_file() else 0
            known[name] = sent = _Sent(bytes=segments[-1].end if segments else 0)
            entry = vouched.get(name, {"bytes": 0, "sha256": sha256_hex(b"")})
            if sent.bytes > size or stream_sha256(first_bytes(path, entry["bytes"])) != entry["sha256"]:
                raise ConflictError(
                    f"the store has {sent.bytes} bytes of {name} of run {self._run}, and the {size} in {self._folder} are not "
                    "these and more: the run went on somewhere else. Nothing more is copied from here. End one of the two, or give one "
                    "another name."
                )
            for chunk in first_bytes(path, sent.bytes):
                sent.seen.update(chunk)
        return known

    def _vouched(self) -> dict[str, Any]:
        """The signed list of rows of the newest complete checkpoint."""
        complete = self._complete()
        if not complete:
            return {}
        body = self._store.get(file_key(self._run, complete[0], PARTS))
        return dict(authenticate(body, self._key, name=PARTS)["rows"])

    def _claim(self, claim: Claim) -> None:
        """Move the pointer forward, by compare-and-set."""
        standing, etag = read_claim(self._store, self._run)
        if standing is None or standing.step <= claim.step:
            self._store.replace(f"runs/{self._run}/newest", canonical_json(claim), etag)

    def _retain(self) -> None:
        """Remove all but the newest complete checkpoints, and what broken uploads left below them."""
        kept = self._complete()[:KEEP]
        for step in stored_steps(self._store, self._run):
            if step not in kept and step < kept[0] and step not in self._refused:
                self._remove(step)

    def _remove(self, step: int) -> None:
        self._store.delete(file_key(self._run, step, MANIFEST))  # first: nobody may find a manifest whose files are going
        for key in self._store.list(checkpoint_prefix(self._run, step)):
            self._store.delete(key)

    def _note(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}"
        if text not in self.problems and len(self.problems) < PROBLEMS:
            self.problems.append(text)


def _whole(body: bytes, suffix: str) -> bytes:
    """What of these bytes may be copied: whole lines, where a later attempt appends to the same file."""
    return body[: body.rfind(b"\n") + 1] if suffix == ".jsonl" else body
