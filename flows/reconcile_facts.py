"""What the reconciler compares: the registry's view of a model, what once let its versions serve, and releases that died."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from flows.acts import Desk
from flows.admissions import admitted_versions, read_admission
from flows.ownership import is_alive, owner_of
from infra.journal import Journal, list_releases
from infra.pointer import Pointer, admission
from infra.registry import ALIASES, STATUS_TAG, VersionPage
from infra.store import ObjectStore
from validation.errors import ReleaseError, StoreError
from validation.policy import Policy, parse_policy
from validation.reconcile import FILES_TAG, Admission, Registered, View

ENDED = ("decided", "abandoned")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that `validation.reconcile` judges by."""

    view: View
    admitted: Mapping[str, Admission]
    policy: Policy


def gather(desk: Desk, pointer: Pointer, silent: Mapping[str, str]) -> Facts:
    """Read it all. Files and evidence are verified for the versions that the pointer or an alias of ours names, and no others.

    Args: silent: version -> why it did not answer when it was tried.
    """
    model = pointer.model
    aliases = desk.registry.all_aliases(model)
    named = {pointer.serving_version, pointer.last_known_good, pointer.baseline} | {aliases[name] for name in ALIASES if name in aliases}
    admitted = {
        version: _admission(desk, model, version) if version in named else Admission(problem="not looked at")
        for version in admitted_versions(desk.store, model)
    }
    versions = {
        page.version: _registered(desk, model, page, named=page.version in named, known=page.version in admitted, silent=silent)
        for page in desk.registry.pages(model)
    }
    view = View(aliases=aliases, versions=versions, mirrored=_mirrored(desk, model))
    return Facts(view=view, admitted=admitted, policy=policy_of(desk, pointer))


def policy_of(desk: Desk, pointer: Pointer) -> Policy:
    """The policy under which what serves was released; the default one when that is not known any more."""
    try:
        release_id = read_admission(desk.notary, desk.store, pointer.model, pointer.serving_version).release_id
        started = Journal(desk.store, release_id).latest("started")
        return parse_policy(started.payload["request"]["policy_text"] or None) if started else parse_policy()
    except (ReleaseError, KeyError, TypeError):
        return parse_policy()


def dead_releases(store: ObjectStore, model: str) -> list[dict[str, str]]:
    """Releases of a model that neither decided nor were abandoned, and whose process does not run: what to do about each."""
    last: dict[str, str] = {}
    begun = set[str]()
    for key in store.list(f"releases/{model}-"):  # sorted: the last record of a release comes last
        parts = key.split("/")
        if parts[2] == "numbers":
            begun.add(parts[1])
        if parts[2] == "journal" and last.get(parts[1]) != "abandoned":  # what comes after that wakes nobody
            last[parts[1]] = parts[3].partition("-")[2]
    found = []
    for release_id in list_releases(store, model):
        if release_id not in begun or last.get(release_id) in ENDED:  # whoever died before its first record left nothing to finish
            continue
        owner = owner_of(store, release_id)
        lives = is_alive(owner) if owner else False
        if lives:
            continue
        who = f"{owner.who}, {'cannot be seen from here' if lives is None else 'is gone'}" if owner else "nobody works on it"
        words = (
            f"release {release_id} ended without a decision, at '{last.get(release_id, 'started')}': {who}. `seatrial finish {release_id}` "
            f"brings it to its end, `seatrial abandon {release_id} --reason ...` ends it as it is"
        )
        found.append({"release_id": release_id, "words": words})
    return found


def _admission(desk: Desk, model: str, version: str) -> Admission:
    try:
        proof = read_admission(desk.notary, desk.store, model, version)
    except StoreError:
        raise  # not known is not the same as not proven
    except ReleaseError as error:
        return Admission(problem=str(error))
    return Admission(kind=proof.kind, files=proof.files_sha256)


def _registered(desk: Desk, model: str, page: VersionPage, *, named: bool, known: bool, silent: Mapping[str, str]) -> Registered:
    read: dict[str, Any] = {}
    if named:
        try:
            read["files"] = desk.registry.files(model, page.version)
        except StoreError as error:
            read["unread"] = str(error)
    if not page.tags.get(STATUS_TAG) and not known:
        read["owner"], over = _owner(desk, page)
        read["owner_is_over"] = over and not _spoken_of(desk, model, page.version)  # its last record comes after its pages
    return Registered(
        version=page.version, status=page.status, described=bool(page.description.strip()), files_tag=page.tags.get(FILES_TAG, ""),
        silent=silent.get(page.version, ""), **read,
    )  # fmt: skip


def _owner(desk: Desk, page: VersionPage) -> tuple[str, bool]:
    """The release that registered a version, and whether it is over; unknown is not over: it may have been made by hand."""
    try:
        release_id = desk.registry.run_tags(page.run_id).get("release_id", "") if page.run_id else ""
        if not release_id:
            return "", False
        entries = Journal(desk.store, release_id).records()
        return release_id, bool(entries) and entries[-1].kind in ENDED
    except ReleaseError:
        return "", False


def _spoken_of(desk: Desk, model: str, version: str) -> bool:
    """Whether a release that ended while we looked said by now what became of its version."""
    now = next((page for page in desk.registry.pages(model) if page.version == version), None)
    return now is None or bool(now.tags.get(STATUS_TAG)) or bool(admission(desk.store, model, version))


def _mirrored(desk: Desk, model: str) -> dict[str, tuple[str, ...]]:
    """Alias -> what we last wrote there or were about to replace; nothing when we never did."""
    said = desk.registry.mirrored(model)
    if not said.sequence:
        return {}
    return {alias: (said.after.get(alias, ""), *((said.before.get(alias, ""),) if said.before else ())) for alias in ALIASES}
