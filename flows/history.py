"""Reading back what releases left in the store. Fast: no framework is imported."""

from collections.abc import Sequence
from typing import Any

from infra.journal import Entry, Journal, list_releases
from infra.pointer import list_pointers, read_pointer
from infra.store import ObjectStore, get_evidence
from validation.errors import ConfigError, EvidenceError

LATEST = 10


def release(store: ObjectStore, release_id: str) -> dict[str, Any]:
    """The document of one release: its last decision, or how far it came.

    Raises: ConfigError for an unknown id; EvidenceError when its journal or the evidence it rests on was altered.
    """
    entries = Journal(store, release_id).records()
    if not entries:
        raise ConfigError(f"there is no release '{release_id}' in this store. See `seatrial show` for their ids.")
    if entries[-1].kind == "decided":
        document = dict(entries[-1].payload)
        for gate in document["gates"]:
            get_evidence(store, gate["sha256"])
        return document
    return _unfinished(store, release_id, entries)


def _unfinished(store: ObjectStore, release_id: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """How far a release came that has not decided yet, or whose process died."""
    pointer, _ = read_pointer(store, entries[0].payload["model"])
    serving, effect = {"kind": "unchanged", "version": ""}, "nothing it did changed what serves"
    if pointer is not None and pointer.release_id == release_id:
        serving, effect = {"kind": pointer.serving_kind, "version": pointer.serving_version}, "it moved the serving pointer"
    gates = {entry.payload["gate"]: entry.payload for entry in entries if entry.kind == "gate"}
    return {
        "release_id": release_id,
        "recipe": entries[0].payload["request"]["recipe"],
        "decision": "unfinished",
        "serving": serving,
        "reason": f"its last journal record is '{entries[-1].kind}'; {effect}",
        "action": "release again, or hold its next gate with `seatrial gate`",
        "gates": [
            {"name": name, "outcome": gate["outcome"], "reason": gate["reason"], "attempt": gate["attempt"], "sha256": gate["evidence"]}
            for name, gate in gates.items()
        ],
    }


def overview(store: ObjectStore) -> dict[str, Any]:
    """What serves for each model, and the latest releases, newest first."""
    documents = [_or_why_not(store, release_id) for release_id in reversed(list_releases(store)[-LATEST:])]
    brief = ("release_id", "recipe", "decision", "serving", "reason")
    return {"serving": list_pointers(store), "releases": [{key: document.get(key, "") for key in brief} for document in documents]}


def _or_why_not(store: ObjectStore, release_id: str) -> dict[str, Any]:
    """One release that cannot be verified does not hide the others."""
    try:
        return release(store, release_id)
    except EvidenceError as error:
        return {"release_id": release_id, "decision": "unverifiable", "reason": str(error)}
