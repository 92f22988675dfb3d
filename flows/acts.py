"""Acts: what is done to a model outside a release. The first record of an act holds every step, so that anybody can finish it.

    acts/<act_id>: started {act, model, by, reason, steps}  intent, done  intent, done ...  finished {ok, results}

Each step may be done again without doing more, so a process that finds an act of another, dead or alive, does what is left of it.
"""

import getpass
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any
from uuid import uuid4

from flows.admissions import Proof, pointer_problem, verified
from flows.clock import utc_now
from flows.effects import carry_out
from flows.in_force import taken_out, was_in_force
from infra.attestations import Notary, open_notary
from infra.journal import Journal, list_releases, new_release_id
from infra.markdown import headed
from infra.pointer import Pointer, ServingKind, admission, move_pointer, pointer_key, read_pointer
from infra.registry import STATUS_TAG, Registry, mirror_current
from infra.settings import Settings
from infra.store import NotFoundError, ObjectStore, open_store
from validation.canonical import sha256_hex
from validation.errors import ConflictError, EvidenceError, ReleaseError, StoreError
from validation.statements import ROLLBACK, model_subject

ROOT = "acts"
Say = Callable[[str], None]
Step = Mapping[str, Any]  # {"effect": ..., "plan": {...}}, and "if_moved": true for what only follows a pointer that moved

_MOVE_TRIES = 5


@dataclass(frozen=True, slots=True)
class Desk:
    """What an act is done with."""

    store: ObjectStore
    registry: Registry
    notary: Notary
    say: Say


@dataclass(frozen=True, slots=True, kw_only=True)
class Current:
    """A pointer object as it stands, readable or not."""

    pointer: Pointer | None  # None: there is none, or it cannot be read
    body_sha256: str  # "" = nothing stands there
    problem: str = ""  # why it cannot be read


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Who moves the pointer to what, and why."""

    act_id: str
    proof: Proof  # of the version that will serve
    kind: ServingKind
    last_known_good: str
    baseline: str
    sequence: int
    from_version: str
    by: str
    reason: str


def open_desk(settings: Settings, say: Say) -> Desk:
    """Store, registry and notary of these settings. Raises before anything is written when one of them cannot be used."""
    store = open_store(settings)
    return Desk(store, Registry(settings), open_notary(store, settings), say)


def current(store: ObjectStore, model: str) -> Current:
    """What stands where the pointer has to stand; an unreadable one is described, not raised."""
    try:
        body = store.get(pointer_key(model))
    except NotFoundError:
        return Current(pointer=None, body_sha256="")
    try:
        pointer, _ = read_pointer(store, model)
        return Current(pointer=pointer, body_sha256=sha256_hex(body))
    except EvidenceError as error:
        return Current(pointer=None, body_sha256=sha256_hex(body), problem=str(error))


def new_act(store: ObjectStore, model: str) -> Journal:
    """The journal of a new act on a model."""
    return Journal(store, new_release_id(model, datetime.now(UTC), uuid4().hex[:8]), root=ROOT)


def user() -> str:
    """Who is at this machine, for an act that names nobody."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return "unknown"


def move_step(desk: Desk, model: str, before: Current, change: Change) -> Step:
    """The step that moves the pointer, with the signed statement that it rests on."""
    proof = change.proof
    statement = desk.notary.attest(
        ROLLBACK,
        {model_subject(model, proof.version): proof.files_sha256},
        {
            "act_id": change.act_id, "model": model, "version": proof.version, "kind": change.kind, "from_version": change.from_version,
            "reason": change.reason, "by": change.by, "admission": proof.attestation, "made_at": utc_now(),
        },
    )  # fmt: skip
    pointer = Pointer(
        model=model, serving_version=proof.version, serving_kind=change.kind, last_known_good=change.last_known_good,
        baseline=change.baseline, release_id=change.act_id, sequence=change.sequence, attestation=statement,
    )  # fmt: skip
    return {"effect": "fall_back", "plan": {"before": before.body_sha256, "pointer": asdict(pointer)}}


def begin(desk: Desk, journal: Journal, act: str, steps: Sequence[Step], **facts: Any) -> dict[str, Any]:
    """Write an act down whole, then do it; returns {effect: result} of every step."""
    journal.append("started", {"act": act, **facts, "steps": list(steps)}, time_utc=utc_now())
    return finish(desk, journal)


def finish(desk: Desk, journal: Journal) -> dict[str, Any]:
    """Do what is left of an act; returns {"<number> <effect>": result}, "moved" and, of a lost race, "overtaken"."""
    payload = journal.refreshed()[0].payload
    results: dict[str, Any] = {"moved": False}
    for number, step in enumerate(payload["steps"]):
        if step.get("if_moved") and not results["moved"]:
            continue
        result = carry_out(journal, step["effect"], str(number), step["plan"], partial(_DOERS[step["effect"]], desk, payload["model"]))
        results[f"{number} {step['effect']}"] = dict(result)
        if step["effect"] == "fall_back":
            results |= {"moved": result["moved"], **({} if result["moved"] else {"overtaken": result})}
    if not any(entry.kind == "finished" for entry in journal.refreshed()):
        journal.append("finished", {"results": results}, time_utc=utc_now())
    return results


def open_acts(store: ObjectStore, model: str) -> tuple[Journal, ...]:
    """Acts on a model that nobody finished, oldest first."""
    names = store.list(f"{ROOT}/{model}-")
    over = {key.split("/")[1] for key in names if "/journal/" in key and key.endswith("-finished")}
    return tuple(Journal(store, act_id, root=ROOT) for act_id in list_releases(store, model, root=ROOT) if act_id not in over)


def finish_open_acts(desk: Desk, model: str) -> list[dict[str, Any]]:
    """Do what is left of every act on a model; one that cannot be finished is named with the reason and left open."""
    told = []
    for journal in open_acts(desk.store, model):
        try:
            results = finish(desk, journal)
            if journal.release_id in {left.release_id for left in open_acts(desk.store, model)}:  # its last record has no readable copy
                journal.append("finished", {"results": results}, time_utc=utc_now())
        except ReleaseError as error:
            desk.say(f"act {journal.release_id} cannot be finished: {error}")
            told.append({"act_id": journal.release_id, "ok": False, "words": str(error)})
        else:
            desk.say(f"act {journal.release_id} was left open; it is finished now")
            told.append({"act_id": journal.release_id, "ok": True, "words": "was left open; it is finished now", "results": results})
    return told


def _fall_back(desk: Desk, model: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Move the pointer if it is still the one that was read; a second time it is found moved."""
    wanted = Pointer(**plan["pointer"])
    for _ in range(_MOVE_TRIES):
        found = current(desk.store, model)
        if found.pointer == wanted:
            return {"moved": True, "version": wanted.serving_version}
        if found.body_sha256 != plan["before"]:
            now = found.pointer
            if now is not None and was_in_force(desk.store, wanted, now):  # its process died before it said so
                return {"moved": True, "version": wanted.serving_version}
            return {"moved": False, "by": now.release_id if now else "", "version": now.serving_version if now else ""}
        if why := _unfit(desk, wanted):
            now = found.pointer
            return {"moved": False, "by": now.release_id if now else "", "version": now.serving_version if now else "", "why": why}
        try:
            move_pointer(desk.store, wanted, _etag(desk.store, model, found))
        except ConflictError:
            continue
        return {"moved": True, "version": wanted.serving_version}
    raise ConflictError(
        f"the pointer of {model} was moved {_MOVE_TRIES} times by others meanwhile. Nothing was changed. Let their releases end, then run "
        "the command again."
    )


def _unfit(desk: Desk, wanted: Pointer) -> str:
    """Why a version may not serve any more; "" when it may. An act may have been left open for long since it was chosen."""
    if wanted.serving_version not in _shown(desk, wanted.model):
        return f"version {wanted.serving_version} was deleted from the registry"
    try:
        verified(desk.notary, desk.store, desk.registry, wanted.model, wanted.serving_version)
        return pointer_problem(desk.notary, desk.store, wanted)
    except StoreError:
        raise
    except ReleaseError as error:
        return str(error)


def _etag(store: ObjectStore, model: str, found: Current) -> str | None:
    if not found.body_sha256:
        return None
    body, etag = store.get_with_etag(pointer_key(model))
    if sha256_hex(body) != found.body_sha256:
        raise ConflictError(f"the pointer of {model} moved meanwhile")
    return etag


def _mirror(desk: Desk, model: str, _plan: Mapping[str, Any]) -> dict[str, Any]:
    return {"changed": list(mirror_current(desk.registry, desk.store, model))}


def _mark(desk: Desk, model: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """Say on a version's page what became of it. One that was deleted needs no page, and one of which something was said was not left."""
    said = _shown(desk, model).get(plan["version"])
    if said is None:
        return {"skipped": f"version {plan['version']} is not in the registry"}
    if plan["status"] == "abandoned" and (said or admission(desk.store, model, plan["version"])):
        return {"skipped": f"version {plan['version']} is {said or 'admitted'} meanwhile"}
    _say(desk, model, plan)
    return {}


def _return(desk: Desk, model: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    """A version that serves again is no longer called rolled back."""
    if _shown(desk, model).get(plan["version"]) not in (None, plan["status"]):
        _say(desk, model, plan)
    return {}


def _say(desk: Desk, model: str, plan: Mapping[str, Any]) -> None:
    """In words first, then the status, by which it is known to be done."""
    version, status, reason = plan["version"], plan["status"], plan["reason"]
    page = next(page for page in desk.registry.pages(model) if page.version == version)
    if (text := headed(page.description, status, reason)) != page.description:
        desk.registry.describe(model, version, description=text or f"{status.capitalize()}.", tags={})
    desk.registry.mark(model, version, status, reason)


def _tag(desk: Desk, model: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    if plan["version"] not in _shown(desk, model):
        return {"skipped": f"version {plan['version']} is not in the registry"}
    desk.registry.tag(model, plan["version"], {plan["tag"]: plan["value"]})
    if plan["tag"] == STATUS_TAG and (said := taken_out(desk.store, model, plan["version"])):
        desk.registry.mark(model, plan["version"], said["status"], said["reason"])
    return {}


def _describe(desk: Desk, model: str, plan: Mapping[str, Any]) -> dict[str, Any]:
    if plan["version"] not in _shown(desk, model):
        return {"skipped": f"version {plan['version']} is not in the registry"}
    desk.registry.describe(model, plan["version"], description=plan["text"], tags={})
    return {}


def _shown(desk: Desk, model: str) -> dict[str, str]:
    return {page.version: page.tags.get(STATUS_TAG, "") for page in desk.registry.pages(model)}


_DOERS: dict[str, Callable[[Desk, str, Mapping[str, Any]], dict[str, Any]]] = {
    "fall_back": _fall_back, "mirror": _mirror, "mark": _mark, "return": _return, "tag": _tag, "describe": _describe,
}  # fmt: skip
