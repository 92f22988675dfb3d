"""Who works on a release: one process at a time, and of a dead one the next.

    releases/<release_id>/owner     changed by compare-and-set
    flow-runs/<flow_run_id>         the release that a flow run works on, write-once: Prefect's own retry goes on with the same one

The journal is safe with any number of writers; this saves the work of doing everything twice. Whether an owner lives is asked of the
kernel: by process number and start, counted from boot, so that neither a reused number nor a clock that jumped can deceive.
"""

import contextlib
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path

from flows.clock import utc_now
from infra.journal import Entry, Journal
from infra.store import NotFoundError, ObjectStore
from trainer.children import pid_of, state_of
from validation.canonical import canonical_json
from validation.errors import ConfigError, ConflictError, EvidenceError

worked_on: list[str] = []  # the release that this process asked for last, for the last words of one that is told to go
_TRIES = 20  # each lost write means that somebody else took the release or gave it back


@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """One process that works, or worked, on a release."""

    release_id: str
    host: str
    machine_id: str  # of the operating system's installation; "" = it has none
    boot_id: str  # another one on the same machine: that process died with the boot
    pid_space: str  # the kernel's process namespace; another one cannot be looked into
    uid: int
    pid: int
    started: int  # clock ticks after boot
    flow_run_id: str  # "" = no Prefect flow run
    since: str  # UTC
    until: str  # UTC; "" = it has not given the release back

    @property
    def who(self) -> str:
        """For people: which process, where, since when."""
        run = f" (flow run {self.flow_run_id})" if self.flow_run_id else ""
        return f"process {self.pid} on {self.host}{run}, since {self.since}"


@contextlib.contextmanager
def owning(
    store: ObjectStore, release_id: str, *, flow_run_id: str = "", take_over: bool = False, root: str = "releases"
) -> Iterator[Owner]:
    """Work on a release, alone, until the block ends. Arguments and errors as in `own`."""
    owner = own(store, release_id, flow_run_id=flow_run_id, take_over=take_over, root=root)
    try:
        yield owner
    finally:
        release_owner(store, owner, root=root)


def own(store: ObjectStore, release_id: str, *, flow_run_id: str = "", take_over: bool = False, root: str = "releases") -> Owner:
    """Become the one process that works on a release: when nobody does, or whoever did is dead. Owning it already is fine.

    Args: take_over, a person says that an owner who cannot be seen from here is gone; one who is seen alive keeps the release all the same.
    Raises: ConflictError naming who works on it; EvidenceError when the record cannot be read.
    """
    mine = _this_process(release_id, flow_run_id)
    if root == "releases":
        worked_on[:] = [release_id]
    for _ in range(_TRIES):
        found, etag = _read(store, _key(release_id, root))
        if found is not None and not found.until and not _is_same(found, mine):
            _check_gone(found, mine, take_over=take_over)
        try:
            store.replace(_key(release_id, root), canonical_json(mine), etag)
        except ConflictError:
            continue
        return mine
    raise ConflictError(
        f"release {release_id} changed hands {_TRIES} times while this process asked for it, so nothing was done. Let the others end, "
        "then run the command again."
    )


def owner_of(store: ObjectStore, release_id: str, *, root: str = "releases") -> Owner | None:
    """Who works on a release; None = nobody, or a process that gave it back. Ask `is_alive` whether it still does."""
    found, _ = _read(store, _key(release_id, root))
    return found if found is not None and not found.until else None


def check_owner(store: ObjectStore, owner: Owner, *, root: str = "releases") -> None:
    """Raise ConflictError unless `owner` still has its release: to be asked before each effect, since another host may have taken over."""
    found, _ = _read(store, _key(owner.release_id, root))
    if found is None or found.until or not _is_same(found, owner):
        by = f"was taken over by {found.who}" if found is not None and not found.until else "was given back"
        raise ConflictError(
            f"release {owner.release_id} {by}, while {owner.who}, worked on it. What it would do now would be done twice, so it stops "
            f"here. `seatrial show {owner.release_id}` says how far the release is."
        )


def release_owner(store: ObjectStore, owner: Owner, *, root: str = "releases") -> bool:
    """Give a release back; False when somebody else has it by now."""
    found, etag = _read(store, _key(owner.release_id, root))
    if found is None or not _is_same(found, owner):
        return False
    try:
        store.replace(_key(owner.release_id, root), canonical_json(replace(found, until=utc_now())), etag)
    except ConflictError:
        return False
    return True


def is_alive(owner: Owner) -> bool | None:
    """Whether the process still runs; None = that cannot be seen from here."""
    here = _this_process(owner.release_id, "")
    if (owner.host, owner.machine_id) != (here.host, here.machine_id):
        return None
    if owner.boot_id != here.boot_id:
        return False
    if owner.pid_space != here.pid_space or (owner.uid != here.uid and not _sees_others()):
        return None
    try:
        return pid_of(owner.pid).started == owner.started and state_of(owner.pid) not in ("", "Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def remember_flow_run(store: ObjectStore, flow_run_id: str, release_id: str) -> str:
    """Write down, once, which release a flow run works on; returns the one that stands (an earlier one wins)."""
    try:
        store.put_new(f"flow-runs/{flow_run_id}", canonical_json({"flow_run_id": flow_run_id, "release_id": release_id}))
    except ConflictError:
        return flow_run_release(store, flow_run_id)
    return release_id


def flow_run_release(store: ObjectStore, flow_run_id: str) -> str:
    """The release that a flow run works on; "" = none yet."""
    key = f"flow-runs/{flow_run_id}"
    try:
        found = json.loads(store.get(key))
        if found["flow_run_id"] != flow_run_id or not isinstance(found["release_id"], str):
            raise ValueError(f"it is of flow run {found['flow_run_id']}")
        return str(found["release_id"])
    except NotFoundError:
        return ""
    except (ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"the object {key} does not say which release this flow run works on ({error}), so it cannot go on. Start a new release, or "
            "`seatrial finish ID`."
        ) from None


def _check_gone(found: Owner, mine: Owner, *, take_over: bool) -> None:
    lives = is_alive(found)
    if lives:
        raise ConflictError(
            f"release {found.release_id} is worked on by {found.who}. The same work would be done twice, so nothing was done. Wait for its "
            f"end, or end that process (kill {found.pid}), then run the command again."
        )
    if lives is None and not take_over:
        raise ConflictError(
            f"release {found.release_id} is worked on by {found.who}. From {mine.host}, process {mine.pid}, it cannot be seen whether that "
            "process lives, so nothing was done. Look on its host; if it is gone for certain: "
            f"`seatrial finish {found.release_id} --take-over`."
        )


def _is_same(one: Owner, other: Owner) -> bool:
    """The same process at the same work: two flow runs in one process are two."""
    return replace(one, since="", until="") == replace(other, since="", until="")


def _this_process(release_id: str, flow_run_id: str) -> Owner:
    me = pid_of(os.getpid())
    return Owner(
        release_id=release_id, host=socket.gethostname(), machine_id=_text("/etc/machine-id"),
        boot_id=_text("/proc/sys/kernel/random/boot_id"), pid_space=str(Path("/proc/self/ns/pid").readlink()), uid=os.getuid(), pid=me.pid,
        started=me.started, flow_run_id=flow_run_id, since=utc_now(), until="",
    )  # fmt: skip


def _text(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return ""


def _sees_others() -> bool:
    """Whether processes of other users can be seen at all: /proc may be mounted with hidepid."""
    return bool(_text("/proc/1/stat"))


def _key(release_id: str, root: str) -> str:
    return f"{root}/{release_id}/owner"


def _read(store: ObjectStore, key: str) -> tuple[Owner | None, str | None]:
    try:
        body, etag = store.get_with_etag(key)
    except NotFoundError:
        return None, None
    try:
        owner = Owner(**json.loads(body))
        if any(type(getattr(owner, field.name)) is not field.type for field in fields(Owner)):
            raise ValueError("fields of the wrong type")
    except (ValueError, TypeError) as error:
        raise EvidenceError(
            f"the object {key} does not say who works on this release ({error}), so nothing was done. Once nobody works on it for certain, "
            "remove that object from the store and run the command again."
        ) from None
    return owner, etag


def known_entries(journal: Journal) -> tuple[Entry, ...]:
    """The records of a release that may go on. Raises ConfigError when there is none, or it was abandoned."""
    entries = journal.refreshed()
    if not entries or entries[0].kind != "started":
        raise ConfigError(f"there is no release '{journal.release_id}' in this store, so nothing was done. `seatrial show` lists them.")
    given_up = next((entry for entry in entries if entry.kind == "abandoned"), None)  # a word or a gate may have come a moment later
    if given_up is not None:
        raise ConfigError(f"release {journal.release_id} was abandoned ({given_up.payload['reason']}), so nothing was done. Release again.")
    return entries
