"""What the registry shows against what serves: differences, each with the repair that is safe. Nothing is read or changed here.

The serving pointer decides and the registry's aliases are a view of it. Two things go the other way: a version that cannot serve (deleted,
its files altered, its evidence broken) leaves service for the next one that can, and under the policy "adopt" an alias that a person moved
to an admitted version takes the pointer along. A version that does not verify is never put in service; if none does, everything stays.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

Repair = Literal[
    "set_alias", "delete_alias", "adopt", "roll_back_to", "drop_last_known_good", "set_tag", "describe", "mark_abandoned", "report_only"
]  # fmt: skip
Policy = Literal["put_back", "adopt"]

SERVING_ALIAS, GOOD_ALIAS, BASELINE_ALIAS = "champion", "last-known-good", "baseline"
STATUS_TAG, FILES_TAG = "status", "sha256.model_files"

_LEFT = ("rolled_back", "abandoned", "refused")  # a version of which this was said serves again by a person's `seatrial rollback` only
_STATUS = {"decision": "promoted", "baseline": "baseline"}  # kind of the admission -> what the page has to say


class Serving(Protocol):
    """What a pointer says (infra/pointer.py); versions are text, "" = none."""

    @property
    def model(self) -> str: ...
    @property
    def serving_version(self) -> str: ...
    @property
    def last_known_good(self) -> str: ...
    @property
    def baseline(self) -> str: ...
    @property
    def sequence(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """A version that the registry shows."""

    version: str
    status: str = ""  # its tag; "" = nothing was said of it
    described: bool = True
    files: str = ""  # sha256 of its files as they lie there; "" = there are none
    unread: str = ""  # why the files could not be read, so that nothing is known of them; "" = they were
    silent: str = ""  # why it did not answer when it was tried; "" = it did, or was not tried
    files_tag: str = ""  # what the registry says their sha256 is
    owner: str = ""  # the release or act that registered it; "" = unknown
    owner_is_over: bool = False  # it decided, was abandoned, or was never there


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """What let a version serve, read back and verified."""

    kind: str = ""  # "decision" | "baseline"
    files: str = ""  # sha256 of the model's files, as signed
    problem: str = ""  # why it does not verify; "" = it does


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the registry shows of one model."""

    aliases: Mapping[str, str]  # every alias -> version
    versions: Mapping[str, Registered]  # those that were not deleted; files of those that the pointer or an alias names
    mirrored: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # alias -> what we ourselves last wrote or replaced


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """One thing that is not as it has to be, and what mends it."""

    kind: str  # alias_missing, alias_moved, alias_extra, version_deleted, version_altered, ...
    model: str
    subject: str  # the alias, or "version 3"
    found: str
    wanted: str  # what the repair makes of it; "" = nothing, or nothing can be said
    words: str
    repair: Repair
    needs_person: bool = False
    version: str = ""  # the version that the repair is about
    tag: str = ""  # with set_tag: its name


def reconcile(
    pointer: Serving, view: View, admitted: Mapping[str, Admission], *, moved_alias: Policy = "put_back"
) -> tuple[Difference, ...]:
    """Every difference between what serves and what the registry shows, those that move the pointer first.

    Args: admitted: every version that was ever let through; moved_alias: what becomes of an alias that a person moved to one of them.
    """
    case = _Case(pointer, view, admitted)
    moves = _serving(case) or (_adopted(case) if moved_alias == "adopt" else [])
    moves += _last_known_good(case, moves) + _baseline(case)
    wanted = wanted_aliases(pointer, moves)
    return (*moves, *_aliases(case, wanted, moves), *_pages(case, set(wanted.values())), *_orphans(case))


def wanted_aliases(pointer: Serving, moves: list[Difference] | tuple[Difference, ...] = ()) -> dict[str, str]:
    """Alias -> version once the differences that move the pointer are mended; an empty version has no alias."""
    serving, good, _ = after_moves(pointer, moves)
    wanted = {SERVING_ALIAS: serving, GOOD_ALIAS: good, BASELINE_ALIAS: pointer.baseline}
    return {alias: version for alias, version in wanted.items() if version}


def after_moves(pointer: Serving, moves: list[Difference] | tuple[Difference, ...]) -> tuple[str, str, bool]:
    """Serving version, last known-good, and whether either is another than now, once the moves are made.

    A version that leaves service is the last known-good only if a newer one takes its place.
    """
    serving, good = pointer.serving_version, pointer.last_known_good
    for move in moves:
        if move.repair == "roll_back_to":
            serving = move.version
        elif move.repair == "adopt" and move.subject == SERVING_ALIAS:
            if _number(move.version) > _number(serving) and serving != pointer.baseline:
                good = serving
            serving = move.version
        elif move.repair == "adopt":
            good = move.version
        elif move.repair == "drop_last_known_good":
            good = ""
    good = "" if good == serving else good
    return serving, good, (serving, good) != (pointer.serving_version, pointer.last_known_good)


@dataclass(frozen=True, slots=True)
class _Case:
    pointer: Serving
    view: View
    admitted: Mapping[str, Admission]

    def unfit(self, version: str) -> tuple[str, str]:
        """Why a version may not serve, as kind and words; ("", "") when it may."""
        registered, admission = self.view.versions.get(version), self.admitted.get(version)
        if registered is None and admission is None:
            return "pointer_to_missing_version", f"there is no version {version}, and none was ever let through under this number"
        if registered is None:
            return "version_deleted", f"version {version} was deleted from the registry"
        if admission is None:
            return "version_not_admitted", f"no signed decision ever let version {version} serve"
        if admission.problem:
            return "version_not_proven", f"what let version {version} serve does not verify: {admission.problem}"
        if registered.unread:
            return "files_unread", f"the files of version {version} cannot be read: {registered.unread}"
        if registered.files != admission.files:
            state = "were altered" if registered.files else "are gone"
            sha256s = f"sha256 {registered.files or 'none'}, signed {admission.files}"
            return "version_altered", f"the files of version {version} {state}: {sha256s}"
        if registered.silent:
            return "version_silent", f"version {version} does not answer: {registered.silent}"
        return "", ""

    def difference(self, kind: str, subject: str, found: str, wanted: str, words: str, repair: Repair, **given: object) -> Difference:
        return Difference(
            kind=kind, model=self.pointer.model, subject=subject, found=found, wanted=wanted, words=words, repair=repair,
            **given,  # type: ignore[arg-type]
        )  # fmt: skip


def _serving(case: _Case) -> list[Difference]:
    """What serves has to be able to; else the first of last known-good and baseline that is."""
    now = case.pointer.serving_version
    kind, why = case.unfit(now)
    if not kind:
        return []
    fallbacks = dict.fromkeys(version for version in (case.pointer.last_known_good, case.pointer.baseline) if version not in ("", now))
    reasons = [why]
    for version in fallbacks if kind != "files_unread" else ():
        worse, reason = case.unfit(version)
        if not worse and not _was_left(case, version):
            words = f"{'; '.join(reasons)}; version {version} verifies and takes over"
            return [case.difference(kind, f"version {now}", now, version, words, "roll_back_to", version=version)]
        reasons.append(reason or f"version {version} was taken out of service before ({case.view.versions[version].status})")
    held = "nothing that was verified can take over" if kind != "files_unread" else "it stays until they can be read"
    words = f"{'; '.join(reasons)}; {held}, so what serves is not moved"
    return [case.difference(kind, f"version {now}", now, "", words, "report_only", needs_person=True, version=now)]


def _adopted(case: _Case) -> list[Difference]:
    """The pointer follows an alias that a person moved to a version that verifies and was not taken out of service."""
    moves = []
    wanted = wanted_aliases(case.pointer)
    for alias in (SERVING_ALIAS, GOOD_ALIAS):
        found = case.view.aliases.get(alias, "")
        if not found or found == wanted.get(alias, "") or not _by_hand(case, alias, found):
            continue
        if case.unfit(found)[0] or _was_left(case, found):
            continue  # put back, with the reason, among the aliases
        words = f"{alias} was moved by hand to version {found}, which verifies; the policy lets the pointer follow"
        moves.append(case.difference("alias_moved", alias, found, found, words, "adopt", version=found))
    return moves


def _last_known_good(case: _Case, moves: list[Difference]) -> list[Difference]:
    good = after_moves(case.pointer, moves)[1]
    if not good:
        return []
    kind, why = case.unfit(good)
    if not kind and _was_left(case, good):
        kind, why = "version_left", f"version {good} was taken out of service ({case.view.versions[good].status})"
    if not kind:
        return []
    held = any(move.repair == "report_only" for move in moves)  # what serves does not verify: then nothing of the pointer is rewritten
    if kind == "files_unread" or held:
        return [case.difference(kind, f"version {good}", good, good, why, "report_only", needs_person=True, version=good)]
    words = f"{why}; it is the last known-good no longer"
    return [case.difference(kind, f"version {good}", good, "", words, "drop_last_known_good", version=good)]


def _baseline(case: _Case) -> list[Difference]:
    version = case.pointer.baseline
    kind, why = case.unfit(version) if version else ("baseline_missing", "no baseline is named")
    if not kind or version == case.pointer.serving_version:
        return []
    words = f"{why}; nothing could take over if the others could not serve. Restore the version and its files from a backup of the registry"
    return [case.difference(kind, f"version {version}", version, version, words, "report_only", needs_person=True, version=version)]


def _aliases(case: _Case, wanted: Mapping[str, str], moves: list[Difference]) -> list[Difference]:
    found = []
    for alias in (SERVING_ALIAS, GOOD_ALIAS, BASELINE_ALIAS):
        shown, right = case.view.aliases.get(alias, ""), wanted.get(alias, "")
        if shown == right or (right and right not in case.view.versions):
            continue  # a version that is not there was reported as such, and can have no alias
        if any(move.repair == "adopt" and move.subject == alias for move in moves):
            continue
        found.append(_alias(case, alias, shown, right))
    own = (SERVING_ALIAS, GOOD_ALIAS, BASELINE_ALIAS)
    for alias, shown in sorted(case.view.aliases.items()):
        if alias not in own:
            words = f"{alias} was made by hand and names version {shown}; nothing here reads or moves it"
            found.append(case.difference("alias_extra", alias, shown, shown, words, "report_only"))
    return found


def _alias(case: _Case, alias: str, shown: str, right: str) -> Difference:
    if not right:
        words = f"{alias} names version {shown}, but there is none; the alias goes"
        return case.difference("alias_extra", alias, shown, "", words, "delete_alias")
    if not shown:
        return case.difference("alias_missing", alias, "", right, f"{alias} is missing; it has to name version {right}", "set_alias")
    if not _by_hand(case, alias, shown):
        words = f"{alias} still names version {shown}: whoever moved the pointer to version {right} died before the alias followed"
        return case.difference("alias_behind", alias, shown, right, words, "set_alias")
    why = case.unfit(shown)[1] or (f"it was taken out of service ({case.view.versions[shown].status})" if _was_left(case, shown) else "")
    words = f"{alias} was moved by hand to version {shown}; version {right} is put back" + (f", since {why}" if why else "")
    return case.difference("alias_moved", alias, shown, right, words, "set_alias")


def _pages(case: _Case, shown: set[str]) -> list[Difference]:
    """The pages of what serves or may serve say what let it through, and its sha256."""
    found = []
    for version in sorted(shown, key=_number):
        if case.unfit(version)[0]:
            continue
        registered, admission = case.view.versions[version], case.admitted[version]
        found += _tags(case, registered, _STATUS.get(admission.kind, ""), admission.files)
        if not registered.described:
            words = f"version {version} has no description; it is written again"
            found.append(case.difference("description_missing", f"version {version}", "", "", words, "describe", version=version))
    return found


def _tags(case: _Case, registered: Registered, status: str, files: str) -> list[Difference]:
    found, version = [], registered.version
    for tag, said, right in ((STATUS_TAG, registered.status, status), (FILES_TAG, registered.files_tag, files)):
        if said == right:
            continue
        words = f"the page of version {version} says {tag} {said or '(nothing)'}; signed is {right}"
        if tag == STATUS_TAG and said in _LEFT:  # said by a release or an act that may not be over
            words += ". It is left as it is: whoever wrote it moves the pointer next, or a person puts the version back"
            found.append(case.difference("tag_wrong", f"version {version}", said, said, words, "report_only", version=version, tag=tag))
        else:
            found.append(case.difference("tag_wrong", f"version {version}", said, right, words, "set_tag", version=version, tag=tag))
    return found


def _orphans(case: _Case) -> list[Difference]:
    """Versions that a release left behind when it died: nothing was said of them, and nobody will."""
    found = []
    for version, registered in case.view.versions.items():
        if registered.status or version in case.admitted or not registered.owner_is_over:
            continue
        words = f"version {version} was registered by {registered.owner or 'nobody known'}, which is over and never judged it"
        found.append(
            case.difference("version_abandoned", f"version {version}", "", "abandoned", words, "mark_abandoned", version=version)
        )  # fmt: skip
    return found


def _number(version: str) -> int:
    return int(version) if version.isdecimal() else 0


def _was_left(case: _Case, version: str) -> bool:
    registered = case.view.versions.get(version)
    return registered is not None and registered.status in _LEFT


def _by_hand(case: _Case, alias: str, shown: str) -> bool:
    """Whether somebody else set this alias: we never wrote that, or it was read back as ours after we had replaced it.

    With nothing on record about the alias it is taken for a lag, which is put back under either policy.
    """
    ours = case.view.mirrored.get(alias)
    return ours is not None and shown not in ours
