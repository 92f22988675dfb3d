"""Reading back what releases and acts left in the store. Fast: no framework is imported, and only what is shown is read."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from infra.journal import Entry, Journal, list_releases
from infra.pointer import list_pointers, read_pointer
from infra.store import ObjectStore, get_evidence
from validation.errors import ConfigError, EvidenceError

LATEST = 10
BRIEF = ("release_id", "recipe", "decision", "serving", "reason")


def release(store: ObjectStore, release_id: str) -> dict[str, Any]:
    """The document of one release: its last decision, or how far it came; every attempt of its gates if one was held again.

    Raises: ConfigError for an unknown id; EvidenceError when its journal or the evidence it rests on was altered.
    """
    entries = Journal(store, release_id).records()
    if not entries:
        raise ConfigError(f"there is no release '{release_id}' in this store. See `seatrial show` for their ids.")
    document = dict(entries[-1].payload) if entries[-1].kind == "decided" else _undecided(store, release_id, entries)
    for gate in document["gates"]:
        get_evidence(store, gate["sha256"])
    again = {gate: held for gate, held in _attempts(entries).items() if len(held) > 1}
    return document | ({"attempts": again} if again else {})


def overview(store: ObjectStore) -> dict[str, Any]:
    """What serves for each model; the latest releases and the latest acts (rollbacks, reconciliations), newest first."""
    with ThreadPoolExecutor(LATEST) as pool:  # a bucket answers in tens of milliseconds, and a journal is fifty requests
        releases = list(pool.map(partial(_or_why_not, release, store), reversed(list_releases(store)[-LATEST:])))
        acts = list(pool.map(partial(_or_why_not, act, store), reversed(list_releases(store, root="acts")[-LATEST:])))
    return {
        "serving": list_pointers(store),
        "releases": [{key: document.get(key, "") for key in BRIEF} for document in releases],
        "acts": [{("act_id" if key == "release_id" else key): value for key, value in row.items()} for row in acts],
    }


def act(store: ObjectStore, act_id: str) -> dict[str, Any]:
    """One line on what was done to a model outside a release, and whether it came to its end."""
    entries = Journal(store, act_id, root="acts").records()
    began = entries[0].payload if entries else {}
    moved = [entry.payload["result"].get("version", "") for entry in entries if entry.kind == "done" and "moved" in entry.payload["result"]]
    kept = {key: began.get(key, "") for key in ("act", "model", "by", "reason")}
    return {"release_id": act_id, **kept, "serves": moved[-1] if moved else "", "state": entries[-1].kind if entries else "empty"}


def _undecided(store: ObjectStore, release_id: str, entries: Sequence[Entry]) -> dict[str, Any]:
    """A release without a decision in force: given up, waiting for a person, at work, or dead on its way."""
    serving, effect = _its_effect(store, release_id, entries)
    decision, reason, action = _state(entries, release_id, effect)
    latest = {gate: held[-1] for gate, held in _attempts(entries).items()}
    gates = [{"name": gate, **{key: item[key] for key in ("outcome", "reason", "attempt", "sha256")}} for gate, item in latest.items()]
    return {
        "release_id": release_id, "recipe": entries[0].payload["request"]["recipe"], "decision": decision, "serving": serving,
        "reason": reason, "action": action, "gates": gates,
    }  # fmt: skip


def _its_effect(store: ObjectStore, release_id: str, entries: Sequence[Entry]) -> tuple[dict[str, str], str]:
    """What it put in service, and that in words."""
    pointer, _ = read_pointer(store, entries[0].payload["model"])
    if pointer is not None and pointer.release_id == release_id:
        return {"kind": pointer.serving_kind, "version": pointer.serving_version}, "it moved the serving pointer"
    return {"kind": "unchanged", "version": ""}, "nothing it did changed what serves"


def _state(entries: Sequence[Entry], release_id: str, effect: str) -> tuple[str, str, str]:
    """Decision, reason and next step of a release that has not decided."""
    last = next((entry for entry in entries if entry.kind == "abandoned"), entries[-1])  # a word may have come a moment later
    if last.kind == "abandoned":
        return "abandoned", f"{last.payload.get('reason', 'no reason given')}; {effect}", "release again"
    if (asked := _unanswered(entries)) is not None:
        until = f" until {asked.payload['lapses_at']}" if asked.payload.get("lapses_at") else ""
        say_so = f'seatrial approve {release_id} --by NAME --reason "..."'
        return "waiting", f"waits for a person's yes since {asked.time_utc}{until}; {effect}", f"`{say_so}`, with --refuse to say no"
    action = f"`seatrial finish {release_id}` if its process died, or hold its next gate with `seatrial gate`"
    return "unfinished", f"its last journal record is '{last.kind}'; {effect}", action


def _unanswered(entries: Sequence[Entry]) -> Entry | None:
    """The question to a person that nobody has answered yet."""
    told = [entry for entry in entries if entry.kind in ("approval_requested", "approval", "decision")]
    return told[-1] if told and told[-1].kind == "approval_requested" else None


def _attempts(entries: Sequence[Entry]) -> dict[str, list[dict[str, Any]]]:
    """Every attempt of every gate, oldest first: one that passed on its second attempt did not pass on its first."""
    held: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        if entry.kind == "gate":
            line = {key: entry.payload.get(key, "") for key in ("attempt", "outcome", "reason")}
            held.setdefault(entry.payload["gate"], []).append({**line, "at": entry.time_utc, "sha256": entry.payload["evidence"]})
    return held


def _or_why_not(read: Callable[[ObjectStore, str], Mapping[str, Any]], store: ObjectStore, journal_id: str) -> Mapping[str, Any]:
    """One journal that cannot be verified, or has no record, does not hide the others."""
    try:
        return read(store, journal_id)
    except EvidenceError as error:
        return {"release_id": journal_id, "decision": "unverifiable", "reason": str(error)}
    except ConfigError:  # an owner comes before the first record
        reason = "it has no record: its process begins just now, or died before it wrote one. Then release again"
        return {"release_id": journal_id, "decision": "empty", "reason": reason}
