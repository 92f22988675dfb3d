"""The history of a release: numbered, write-once, each record bound to the one before by its digest.

    releases/<release_id>/numbers/0007         the record; writing it takes the number, so no two writers can both hold it
    releases/<release_id>/journal/0007-<kind>  the same bytes under a name that people can read in a listing

A writer that dies between the two leaves a record without its readable copy; the next writer adds it. Anything else that differs
between the two places, and any gap or broken chain, is reported as altered evidence.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from infra.store import NotFoundError, ObjectStore
from validation.canonical import canonical_json, plain, sha256_hex
from validation.errors import ConfigError, ConflictError, EvidenceError

_TRIES = 50  # each lost number means that another writer of this release got on
_KIND = re.compile(r"[a-z0-9][a-z0-9_-]{0,79}")
_RELEASE_ID = re.compile(r"(?P<recipe>[a-z0-9-]+)-(?P<day>\d{8})-(?P<time>\d{6})-(?P<token>[0-9a-z]+)")
_FIELDS = {"sequence", "kind", "time_utc", "payload", "previous", "release_id"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One verified record of a journal."""

    sequence: int  # 1, 2, 3, ...
    kind: str  # e.g. "started", "gate", "decided"
    time_utc: str  # ISO 8601, as the writer gave it
    payload: Mapping[str, Any]
    previous: str  # sha256 of the record before; "" for the first
    sha256: str  # of this record's bytes


class Journal:
    """Append to and read one release's history.

    `records` reads and verifies the whole history each time; `append` does so once, then only reads what others wrote meanwhile: with
    25 records in S3 that saves a thousand requests a release.
    """

    def __init__(self, store: ObjectStore, release_id: str, *, root: str = "releases") -> None:
        """Args: root: "releases", or "acts" for what is done to a model outside a release: a rollback, a reconciliation."""
        if not _RELEASE_ID.fullmatch(release_id):
            raise ConfigError(
                f"{release_id[:120]!r} is not a release id, so it has no journal. Ids look like flights-20260131-181542-3f9c; "
                "`seatrial show` lists them."
            )
        self._store = store
        self._root = f"{root}/{release_id}"
        self.release_id = release_id
        self._known: tuple[Entry, ...] | None = None  # a verified beginning of the history

    def append(self, kind: str, payload: Mapping[str, Any], *, time_utc: str) -> Entry:
        """Write the next record. Safe against other writers: a number that is taken is tried again, one higher.

        Raises: EvidenceError when the history so far does not verify; ConflictError when other writers keep taking the numbers.
        """
        if not _KIND.fullmatch(kind):
            raise ValueError(f"journal kind {kind!r} has to be lower-case letters, digits, '_' and '-'")
        known = self._beginning()
        for _ in range(_TRIES):
            body = self._body(known, kind, payload, time_utc)
            number = self._number(len(known) + 1)
            try:
                self._store.put_new(number, body)
            except ConflictError:
                known = (*known, self._verified(number, len(known) + 1, _tail(known)))
                self._publish(known[-1])  # its writer may have died before it could
                continue
            entry = _entry(body)
            self._publish(entry)
            self._known = (*known, entry)
            return entry
        raise ConflictError(
            f"record '{kind}' of release {self.release_id} lost its number {_TRIES} times. Other writers work on this release, so it was "
            "not written. Let them end, then run the command again."
        )

    def records(self) -> tuple[Entry, ...]:
        """Every record in order. Raises EvidenceError when one is missing, altered or not bound to the one before."""
        # copies are listed first: one that appears while we read has its number on the list that is read after it
        names = self._store.list(f"{self._root}/journal/")
        numbers = sorted(self._store.list(f"{self._root}/numbers/"), key=lambda key: (len(key), key))  # 10000 comes after 9999
        entries: list[Entry] = []
        for at, key in enumerate(numbers, start=1):
            if key != self._number(at):
                raise self._broken(f"record {at} is missing (found {key.rpartition('/')[2]} in its place)")
            entries.append(self._verified(key, at, _tail(entries)))
        self._compare_names(entries, names)
        return tuple(entries)

    def latest(self, kind: str) -> Entry | None:
        """The last record of a kind, or None."""
        return next((entry for entry in reversed(self.refreshed()) if entry.kind == kind), None)

    def refreshed(self) -> tuple[Entry, ...]:
        """Every record in order, as `records`; of what this object verified before, only newer records are read."""
        known = self._beginning()
        while self._store.exists(number := self._number(len(known) + 1)):
            known = (*known, self._verified(number, len(known) + 1, _tail(known)))
            self._publish(known[-1])  # its writer may have died before it could
        self._known = known
        return known

    def _beginning(self) -> tuple[Entry, ...]:
        if self._known is None:
            self._known = self.records()
            if self._known:
                self._publish(self._known[-1])  # as in `append`
        return self._known

    def _verified(self, key: str, at: int, previous: str) -> Entry:
        body = self._store.get(key)
        try:
            entry = _entry(body)
        except EvidenceError as error:
            raise self._broken(f"record {at} is not whole: {error}") from None
        if canonical_json(_document(entry, self.release_id)) != body or entry.sequence != at:
            raise self._broken(f"record {at} is not a record of this journal, or its bytes were altered")
        if entry.previous != previous:
            raise self._broken(
                f"record {at} was written after a record with sha256 {entry.previous[:12]}…, but record {at - 1} has another"
            )
        return entry

    def _compare_names(self, entries: list[Entry], names: list[str]) -> None:
        expected = {self._name(entry): entry for entry in entries}
        if unknown := sorted(set(names) - set(expected)):
            raise self._broken(f"{unknown[0].rpartition('/')[2]} has no numbered record; the end of the history was removed or replaced")
        for key, entry in expected.items():
            try:
                body = self._store.get(key)
            except NotFoundError:
                if entry is entries[-1]:
                    continue
                raise self._broken(f"{key.rpartition('/')[2]} was removed") from None
            if sha256_hex(body) != entry.sha256:
                raise self._broken(f"{key.rpartition('/')[2]} was altered: it differs from the numbered record")

    def _publish(self, entry: Entry) -> None:
        self._store.put_new(self._name(entry), canonical_json(_document(entry, self.release_id)))

    def _body(self, before: tuple[Entry, ...], kind: str, payload: Mapping[str, Any], time_utc: str) -> bytes:
        entry = Entry(
            sequence=len(before) + 1, kind=kind, time_utc=time_utc, payload=plain(payload),
            previous=_tail(before), sha256="",
        )  # fmt: skip
        return canonical_json(_document(entry, self.release_id))

    def _number(self, sequence: int) -> str:
        return f"{self._root}/numbers/{sequence:04d}"

    def _name(self, entry: Entry) -> str:
        return f"{self._root}/journal/{entry.sequence:04d}-{entry.kind}"

    def _broken(self, what: str) -> EvidenceError:
        return EvidenceError(
            f"the journal of release {self.release_id} does not verify: {what}. What this release did can no longer be shown. "
            "Restore releases/ from a backup of the store and find out who can write to it."
        )


def new_release_id(recipe: str, now: datetime, token: str) -> str:
    """Name a release: recipe, UTC time and a short random token, e.g. "flights-20260131-181542-3f9c"."""
    release_id = f"{recipe}-{now.astimezone(UTC):%Y%m%d-%H%M%S}-{token}"
    if not _RELEASE_ID.fullmatch(release_id):
        raise ValueError(f"{release_id!r} is no release id: recipe [a-z0-9-]+, token [0-9a-z]+")
    return release_id


def list_releases(store: ObjectStore, recipe: str | None = None, *, root: str = "releases") -> tuple[str, ...]:
    """Ids of all releases that have a journal, of one recipe if given, oldest first."""
    found = filter(None, (_RELEASE_ID.fullmatch(name) for name in store.folders(f"{root}/")))
    kept = [match for match in found if recipe in (None, match["recipe"])]
    return tuple(match.string for match in sorted(kept, key=lambda match: (match["day"], match["time"], match.string)))


def _tail(entries: Sequence[Entry]) -> str:
    return entries[-1].sha256 if entries else ""


def _document(entry: Entry, release_id: str) -> dict[str, Any]:
    return {
        "sequence": entry.sequence, "kind": entry.kind, "time_utc": entry.time_utc, "payload": entry.payload,
        "previous": entry.previous, "release_id": release_id,
    }  # fmt: skip


def _entry(body: bytes) -> Entry:
    try:
        value = json.loads(body)
        if set(value) != _FIELDS or not isinstance(value["payload"], dict):
            raise ValueError(f"fields {sorted(value)}")
        return Entry(**{name: value[name] for name in _FIELDS - {"release_id"}}, sha256=sha256_hex(body))
    except (ValueError, TypeError) as error:
        raise EvidenceError(
            f"a journal record cannot be read ({error}). It was altered or written by something else. Restore releases/ from a backup."
        ) from None
