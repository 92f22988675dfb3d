"""Reading back what releases left in the store. Fast: no framework is imported."""

from collections.abc import Sequence
from typing import Any

from infra.journal import Entry, Journal, list_releases
from infra.pointer import list_pointers
from infra.store import ObjectStore
from validation.errors import ConfigError

LATEST = 10


def release(store: ObjectStore, release_id: str) -> dict[str, Any]:
    """The document of one release: its last decision, or how far it came. Raises ConfigError for an unknown id."""
    entries = Journal(store, release_id).records()
    if not entries:
        raise ConfigError(f"there is no release '{release_id}' in this store. See `seatrial show` for their ids.")
    decided = [entry.payload for entry in entries if entry.kind == "decided"]
    return dict(decided[-1]) if decided else _unfinished(release_id, entries)


def _unfinished(release_id: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """How far a release came that has not decided yet, or whose process died."""
    gates = {entry.payload["gate"]: entry.payload for entry in entries if entry.kind == "gate"}
    return {
        "release_id": release_id,
        "recipe": entries[0].payload["request"]["recipe"],
        "decision": "unfinished",
        "serving": {"kind": "unchanged", "version": ""},
        "reason": f"its last journal record is '{entries[-1].kind}'; nothing it did changed what serves",
        "action": "release again, or hold its next gate with `seatrial gate`",
        "gates": [
            {"name": name, "outcome": gate["outcome"], "reason": gate["reason"], "attempt": gate["attempt"], "sha256": gate["evidence"]}
            for name, gate in gates.items()
        ],
    }


def overview(store: ObjectStore) -> dict[str, Any]:
    """What serves for each model, and the latest releases, newest first."""
    documents = [release(store, release_id) for release_id in reversed(list_releases(store)[-LATEST:])]
    brief = ("release_id", "recipe", "decision", "serving", "reason")
    return {"serving": list_pointers(store), "releases": [{key: document.get(key, "") for key in brief} for document in documents]}
