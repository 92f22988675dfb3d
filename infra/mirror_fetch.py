"""A run from the store alone: the newest checkpoint that verifies and the rows that belong to it, into a folder on a fresh node."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.mirror_layout import PARTS, Claim, Segment, file_key, read_claim, stored_segments, stored_steps
from infra.store import NotFoundError, ObjectStore
from infra.store_files import first_bytes, stream_sha256, sync_folder
from validation.canonical import sha256_hex
from validation.errors import DataError, EvidenceError
from validation.manifest import MANIFEST, Manifest, authenticate, check_identity, check_sha256, parse_manifest


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched:
    """What could be brought here."""

    step: int | None  # of the checkpoint; None: the run never had one in the store
    refused: tuple[int, ...]  # newer steps whose copy in the store does not verify
    messages: tuple[str, ...]  # what a person should know: what was refused, and how much older this is than the store claims


def fetch(store: ObjectStore, run_name: str, run_folder: Path, *, key: bytes) -> Fetched:
    """Bring a run into `run_folder`, which must not exist yet and appears whole or not at all.

    Args: key, that the run's checkpoints are sealed with.
    Raises: StoreError when the store cannot be read, DataError when it claims or has checkpoints and none of them verifies.
    """
    partial = run_folder.with_name(f"{run_folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of a fetch that was cut off
    partial.mkdir(parents=True)
    try:
        fetched = _fetch(store, run_name, partial, key)
        partial.rename(run_folder)
        sync_folder(run_folder.parent)
        return fetched
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _fetch(store: ObjectStore, run: str, folder: Path, key: bytes) -> Fetched:
    claim, _ = read_claim(store, run)
    segments = stored_segments(store, run)
    lengths = {name: _fetch_rows(store, folder / name, chain) for name, chain in segments.items()}
    refused: dict[int, str] = {}
    steps = sorted((step for step, sealed in stored_steps(store, run).items() if sealed), reverse=True)
    for step in steps:
        try:
            _fetch_checkpoint(store, run, step, folder, key, claim, lengths)
        except (DataError, EvidenceError, NotFoundError) as error:
            refused[step] = f"checkpoint step {step} in the store was refused: {error}"
            continue
        return Fetched(step=step, refused=tuple(refused), messages=(*refused.values(), *_older(claim, step)))
    if claim is not None or refused:
        claimed = f"the store claims step {claim.step} of run {run}" if claim else f"the store has checkpoints of run {run}"
        raise DataError(
            f"{claimed}, and no checkpoint there verifies: {'; '.join(refused.values()) or 'none is complete'}. Nothing was brought here, "
            "since the run would silently begin again. If all are said to be sealed with another key, set SEATRIAL_SEAL_KEY to the key of "
            "the node that wrote them; otherwise restore older object versions, or begin a run of another name."
        )
    return Fetched(step=None, refused=(), messages=())


def _older(claim: Claim | None, step: int) -> list[str]:
    if claim is None or claim.step <= step:
        return []
    return [f"step {step} is older than step {claim.step}, which was complete in the store once: the steps between are trained again"]


def _fetch_rows(store: ObjectStore, path: Path, segments: list[Segment]) -> int:
    """Join a row file from its segments; returns its bytes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for segment in segments:
            body = store.get(segment.key)
            if len(body) != segment.end - segment.first:
                raise DataError(
                    f"'{segment.key}' has {len(body)} bytes. The rows behind it cannot be placed, so the run was not brought here. "
                    "Restore the object from an older version."
                )
            file.write(body)
    return path.stat().st_size


def _fetch_checkpoint(
    store: ObjectStore, run: str, step: int, folder: Path, key: bytes, claim: Claim | None, lengths: Mapping[str, int]
) -> None:
    body = store.get(file_key(run, step, MANIFEST))
    if claim is not None and claim.step == step and sha256_hex(body) != claim.manifest_sha256:
        raise DataError("its manifest is not the one that the store claims")
    manifest = parse_manifest(body, key)
    check_identity(manifest, step=step)
    _check_rows(store.get(file_key(run, step, PARTS)), step, folder, key, lengths)
    _fetch_files(store, run, manifest, body, folder / "checkpoints" / f"step-{step:08d}")


def _fetch_files(store: ObjectStore, run: str, manifest: Manifest, body: bytes, sealed: Path) -> None:
    partial = sealed.with_name(f"{sealed.name}.partial")
    partial.mkdir(parents=True)
    try:
        for name in sorted(manifest.files):
            check_sha256(manifest, name, store.get_file(file_key(run, manifest.step, name), partial / name))
        (partial / MANIFEST).write_bytes(body)
        sync_folder(partial)
        partial.rename(sealed)
        sync_folder(sealed.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _check_rows(body: bytes, step: int, folder: Path, key: bytes, lengths: Mapping[str, int]) -> None:
    """The rows that the checkpoint vouches for have to be here; later ones may be too."""
    facts: dict[str, Any] = authenticate(body, key, name=PARTS)
    if facts.get("step") != step:
        raise DataError(f"{PARTS} belongs to step {facts.get('step')}")
    for name, entry in facts["rows"].items():
        wanted = int(entry["bytes"])
        if lengths.get(name, 0) < wanted:
            raise DataError(f"{name} has {lengths.get(name, 0)} bytes in the store, and {wanted} belong to the checkpoint")
        if stream_sha256(first_bytes(folder / name, wanted)) != entry["sha256"]:
            raise DataError(f"{name} was altered: its first {wanted} bytes are not those that belong to the checkpoint")
