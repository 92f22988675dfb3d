"""What was in force and is not any more: a pointer whose process died before it said so, a version that an act took out of service."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from infra.journal import Entry, Journal, list_releases
from infra.pointer import Pointer, read_pointer
from infra.store import ObjectStore


def was_in_force(store: ObjectStore, wanted: Pointer, now: Pointer) -> bool:
    """Whether nobody else can have had its number: every other one that meant to make the same move says that it lost it to this one.

    Raises: EvidenceError when a history of this model does not verify.
    """
    if now.sequence <= wanted.sequence:
        return False
    names = [(root, name) for root in ("releases", "acts") for name in list_releases(store, wanted.model, root=root)]
    histories = (Journal(store, name, root=root).records() for root, name in names if name != wanted.release_id)
    return not any(_may_have_been(entries, wanted) for entries in histories)


def taken_out(store: ObjectStore, model: str, version: str) -> Mapping[str, Any] | None:
    """What the act by which the pointer left this version says of it {version, status, reason}; None when no act did that last.

    Pages have no compare-and-set: whoever calls a version promoted asks this afterwards, since the act may have said its word in between.
    """
    pointer, _ = read_pointer(store, model)
    if pointer is None or pointer.serving_version == version or pointer.release_id not in list_releases(store, model, root="acts"):
        return None
    steps = Journal(store, pointer.release_id, root="acts").records()[0].payload["steps"]
    return next((step["plan"] for step in steps if step["effect"] == "mark" and step["plan"]["version"] == version), None)


def _may_have_been(entries: tuple[Entry, ...], wanted: Pointer) -> bool:
    moves = [entry.payload for entry in entries if entry.kind == "intent" and entry.payload["plan"].get("pointer")]
    same = {(move["effect"], move["of"]) for move in moves if move["plan"]["pointer"]["sequence"] == wanted.sequence}
    results = {(entry.payload["effect"], entry.payload["of"]): entry.payload["result"] for entry in entries if entry.kind == "done"}
    return not all(_lost_to(results.get(move, {}), wanted) for move in same)


def _lost_to(result: Mapping[str, Any], wanted: Pointer) -> bool:
    """Args: result, of a move: a release keeps the pointer that it met, an act says whose it was; {} = it was not ended."""
    if other := result.get("overtaken_by"):
        return bool(other == asdict(wanted))
    return result.get("moved") is False and (result["by"], result["version"]) == (wanted.release_id, wanted.serving_version)
