"""Incidents in the object store: what a stall or a death of a run left, each file written once, and reading it back.

incidents/<run or release>/<id>/rank0.hang.json ...    the evidence, as it stands in the run's folder
incidents/<run or release>/<id>/FILES.json             every file's size and sha256
incidents/<run or release>/<id>/incident.json          comes last: without it there is no incident
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from infra.store import NotFoundError, ObjectStore, checked_key
from infra.wording import slug
from validation.canonical import canonical_json, sha256_hex
from validation.errors import DataError, StoreError

PREFIX, RECORD, FILES = "incidents", "incident.json", "FILES.json"
MAX_BYTES = 64 * 2**20  # of one file: a rank's full records are 2 MB; more is no evidence of ours


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredIncident:
    """An incident's record and where its evidence lies."""

    place: str  # key in the store, or path of a folder
    record: Mapping[str, Any]  # incident.json, see trainer/incidents.py

    @property
    def finding(self) -> Mapping[str, Any]:
        """What the diagnosis said, as in `seatrial diagnose --json`."""
        found: Mapping[str, Any] = self.record["finding"]
        return found


def keep_incident(store: ObjectStore, owner: str, folder: Path, *, of: str = "") -> str:
    """Copy an incident's folder into the store; the same again is fine.

    Args: owner, name of the run or id of the release; of, which of its runs, where it has several.
    Returns: the key that `load_incident` takes.
    Raises: DataError when the folder holds no whole incident; StoreError when the store does not take it.
    """
    if not (folder / RECORD).is_file():
        raise DataError(f"{folder} holds no {RECORD}, so there is no incident to keep. It comes last: wait for it, or see the run's log.")
    record = _record((folder / RECORD).read_bytes(), str(folder))
    when = datetime.fromtimestamp(record["detected_ns"] / 1e9, UTC)
    name = "-".join((f"{when:%Y%m%d-%H%M%S}", *([slug(of)] if of else []), f"{record['number']:03d}"))
    key = checked_key(f"{PREFIX}/{owner}/{name}")
    files = {}
    for path in sorted(folder.iterdir()):
        if path.name != RECORD and not path.name.startswith(".") and _is_evidence(path):
            body = path.read_bytes()
            files[path.name] = {"bytes": len(body), "sha256": sha256_hex(body)}
            store.put_file_new(f"{key}/{path.name}", path, sha256_hex(body))
    store.put_new(f"{key}/{FILES}", canonical_json(files))
    store.put_new(f"{key}/{RECORD}", (folder / RECORD).read_bytes())
    return key


def list_incidents(store: ObjectStore, owner: str = "") -> tuple[str, ...]:
    """Keys of whole incidents, of one run or release if given, sorted."""
    keys = store.list(f"{PREFIX}/{owner}/" if owner else f"{PREFIX}/")
    return tuple(key.removesuffix(f"/{RECORD}") for key in keys if key.endswith(f"/{RECORD}"))


def load_incident(store: ObjectStore, place: str, *, into: Path) -> tuple[StoredIncident, Path]:
    """Read an incident back.

    Args: place, a key that `keep_incident` gave, or the path of a folder that holds one; into, an empty folder for what the store has.
    Returns: the record, and the folder with its evidence.
    Raises: DataError when there is no such incident, or its files are not those that were kept.
    """
    if (Path(place) / RECORD).is_file():
        record = _record((Path(place) / RECORD).read_bytes(), place)
        return StoredIncident(place=place, record=record), Path(place)
    key = place.strip("/")
    body = _standing(store, f"{key}/{RECORD}")
    if body is None:
        known = list_incidents(store)
        raise DataError(
            f"there is no incident '{place}': neither a folder with {RECORD} nor a key of the store. Give one of the "
            f"{len(known)} that the store has{': ' if known else ''}{', '.join(known[-3:])}, or a folder under incidents/ of a run."
        )
    for name, known_file in json.loads(store.get(f"{key}/{FILES}")).items():
        if (found := store.get_file(f"{key}/{name}", into / name)) != known_file["sha256"]:
            raise DataError(
                f"{key}/{name} was altered: its bytes have sha256 {found}. Nothing may be concluded from it. Restore it from a backup of "
                "the store, and find out who can write to it."
            )
    (into / RECORD).write_bytes(body)
    return StoredIncident(place=key, record=_record(body, key)), into


def _is_evidence(path: Path) -> bool:
    """A file of a size that evidence has; a link could lead to any file of this machine."""
    return path.is_file() and not path.is_symlink() and path.stat().st_size <= MAX_BYTES


def _standing(store: ObjectStore, key: str) -> bytes | None:
    """An object; None when there is none, or none could have this key."""
    try:
        checked_key(key)
    except StoreError:
        return None
    try:
        return store.get(key)
    except NotFoundError:
        return None


def _record(body: bytes, place: str) -> dict[str, Any]:
    """incident.json, with what every reader relies on. Raises DataError."""
    try:
        record = json.loads(body)
        parts = record["finding"]["kind"], record["detected_ns"] + 0, record["number"] + 0, record["mitigation"]["text"]
    except (ValueError, TypeError, KeyError) as error:
        raise DataError(f"{RECORD} of {place} cannot be read ({type(error).__name__}: {error}), so nothing can be shown of it.") from None
    assert parts
    return dict(record)
