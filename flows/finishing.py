"""Taking over a release whose process died, or that waited for a person: bring it to its end, or end it without a decision."""

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from flows.clock import utc_now
from flows.deciding import PERSON
from flows.effects import open_effects
from flows.embedded_server import start_early
from flows.orphans import end_orphans
from flows.ownership import check_owner, known_entries, owning
from flows.people import REASON_CHARS, one_line, people_of
from flows.promote import make_true
from flows.under_way import Desk
from infra.attestations import open_notary, open_reader
from infra.journal import Entry, Journal
from infra.pointer import admission, read_pointer
from infra.registry import Registry
from infra.settings import Settings
from infra.store import ObjectStore, open_store
from validation.errors import ConfigError
from validation.policy import parse_policy
from validation.waivers import standing

Say = Callable[[str], None]
ENDS = ("decided", "abandoned")


def finish(settings: Settings, *, say: Say, release_id: str, take_over: bool = False) -> dict[str, Any]:
    """Bring a release to its end: carry out its decision if there is one, else judge what is missing and decide.

    A release that ended is left alone, unless a person approved or waived since.
    Args: take_over, a person says that the process which worked on it on another machine is gone.
    Raises: ConfigError for an unknown or abandoned release; ConflictError when a living process works on it.
    """
    end_orphans(settings, say)
    store = open_store(settings)
    journal = Journal(store, release_id)
    left = _left(settings, journal)
    if left != "nothing":
        with owning(store, release_id, take_over=take_over) as owner:  # refused before a server is started
            left = _left(settings, journal)  # looked at again: whoever had it until now may have ended it, or given it up
            if left == "effects":
                document = _carried_out(settings, say, journal, partial(check_owner, store, owner))
                return {**document, "ok": document["decision"] == "promoted"}
    if left == "nothing":
        say(f"release {release_id} ended already; nothing was left to do")
        last = journal.records()[-1].payload
        return {**last, "ok": last["decision"] == "promoted"}
    start_early(settings)
    from flows.release import go_on  # Prefect and the warm server are needed only here

    document = go_on(release_id)
    return {**document, "ok": document["decision"] == "promoted"}


def _left(settings: Settings, journal: Journal) -> str:
    """As `what_is_left`, and "judging" also when a person has to be asked anew. Raises ConfigError as `known_entries`."""
    entries = known_entries(journal)
    return "judging" if _has_to_ask_anew(settings, journal, entries) else what_is_left(entries)


def _carried_out(settings: Settings, say: Say, journal: Journal, still_mine: Callable[[], None]) -> dict[str, Any]:
    """The document of a decision whose process died on the way."""
    store, release_id = open_store(settings), journal.release_id
    begun = len(open_effects(journal.records()))
    say(f"release {release_id} decided, and its process died: {begun} effects were begun and not ended")
    desk = Desk(
        journal=journal, store=store, notary=open_notary(store, settings), registry=Registry(settings),
        folder=Path(settings.home) / "runs" / release_id, say=say, still_mine=still_mine,
    )  # fmt: skip
    return make_true(desk)[0]


def abandon(settings: Settings, *, say: Say, release_id: str, reason: str, take_over: bool = False) -> dict[str, Any]:
    """End a release that decided nothing, or whose decision nobody could carry out yet. What serves stays; its candidate never serves.

    A decision that took effect is not abandoned.

    Args: take_over, as in `finish`. Raises: ConfigError for an unknown release or one that decided; ConflictError when a living process
    works on it.
    """
    reason = one_line("reason", reason, REASON_CHARS)
    end_orphans(settings, say)
    store = open_store(settings)
    journal = Journal(store, release_id)
    known_entries(journal)
    with owning(store, release_id, take_over=take_over):
        return _abandon(settings, say, journal, reason)


def _abandon(settings: Settings, say: Say, journal: Journal, reason: str) -> dict[str, Any]:
    entries, release_id = known_entries(journal), journal.release_id
    candidate = next((entry.payload["version"] for entry in reversed(entries) if entry.kind == "candidate"), "")
    model = entries[0].payload["model"]
    if _took_effect(open_store(settings), entries, candidate):
        if what_is_left(entries) == "nothing":
            raise ConfigError(
                f"release {release_id} has decided and ended, so nothing is abandoned. `seatrial show {release_id}` says what it did; "
                f'`seatrial rollback {model} --reason "..."` goes back to an earlier version.'
            )
        raise ConfigError(
            f"release {release_id} has decided, so it is not abandoned: what it began has to be ended. Run `seatrial finish {release_id}`."
        )
    registry = Registry(settings)
    if candidate and candidate in {page.version for page in registry.pages(model)}:  # one that was deleted needs no mark
        registry.mark(model, candidate, "abandoned", reason)
    journal.append("abandoned", {"reason": reason, "candidate": candidate}, time_utc=utc_now())
    say(f"release {release_id} is abandoned: {reason}")
    return {"ok": True, "release_id": release_id, "decision": "abandoned", "reason": reason, "candidate_version": candidate}


def _took_effect(store: ObjectStore, entries: tuple[Entry, ...], candidate: str) -> bool:
    """Whether a decision was carried out, or may have been in part. One that cannot be, since its model was altered, may be given up."""
    decided = [entry.payload for entry in entries if entry.kind == "decision"]
    if not decided or what_is_left(entries) == "nothing":
        return bool(decided)
    model = entries[0].payload["model"]
    pointer, _ = read_pointer(store, model)
    in_force = pointer is not None and asdict(pointer) == decided[-1]["pointer"]
    return in_force or bool(candidate and admission(store, model, candidate))


def _has_to_ask_anew(settings: Settings, journal: Journal, entries: tuple[Entry, ...]) -> bool:
    """Whether a release waits for a person who did not answer in time, or whose yes expired unused."""
    decision: dict[str, Any] = next((entry.payload["decision"] for entry in reversed(entries) if entry.kind == "decision"), {})
    if not decision.get("waits_for_person"):
        return False
    policy = parse_policy(entries[0].payload["request"]["policy_text"] or None, name="the release's policy")
    people = people_of(journal, open_reader(open_store(settings), settings), policy, now=utc_now())
    return standing(people).state == "expired"


def what_is_left(entries: tuple[Entry, ...]) -> str:
    """ "nothing", "effects" of a decision that stands, or "judging": gates, or a decision anew since a person spoke."""
    kinds = [entry.kind for entry in entries]
    decision = max((at for at, kind in enumerate(kinds) if kind == "decision"), default=-1)
    said = sum(kind in PERSON for kind in kinds)
    if decision < 0 or said > entries[decision].payload.get("heard", sum(kind in PERSON for kind in kinds[:decision])):
        return "judging"
    if any(at > decision for at, kind in enumerate(kinds) if kind == "gate"):
        return "judging"
    return "nothing" if kinds[-1] in ENDS else "effects"


def lines(document: dict[str, Any]) -> list[str]:
    """What came of it, for people."""
    words = [f"{document['release_id']}: {str(document['decision']).replace('_', ' ')}: {document['reason']}"]
    return words + ([f"next: {document['action']}"] if document.get("action") else [])
