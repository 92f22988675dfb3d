"""The machine's devices, held by one gate of one release at a time, whatever its home and user: timings beside other work mean nothing.

<device_lock>           an OS lock; the kernel gives it back when its process dies, however it dies
<device_lock>.holder    who has it, for those who wait; a note that nothing depends on
"""

import contextlib
import getpass
import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

import psutil
from filelock import FileLock, Timeout

from infra.settings import DeviceSettings
from validation.canonical import canonical_json
from validation.errors import ConfigError, ConflictError

SAY_EVERY_S = 30.0
POLL_S = 0.2
_EVERYONE = 0o666  # other users of the machine wait for the same lock


@contextlib.contextmanager
def devices_held(settings: DeviceSettings, of: str, say: Callable[[str], None]) -> Iterator[float]:
    """Hold the devices until the block ends; gives the seconds waited for them.

    A process that has them has them for all of its threads: a block inside a block waits for nothing. Who waits is not served in order.
    Args: of, for whom, e.g. "scaling of flights-20260131-181542-3f9c"; say is told who has them, at once and every 30 s.
    Raises: ConflictError when they were not free within device_wait_s; ConfigError when the lock's file cannot be used.
    """
    lock, note = _lock(settings.device_lock), settings.device_lock.with_name(f"{settings.device_lock.name}.holder")
    waited_s = _acquire(lock, note, settings.device_wait_s, say)
    is_outermost = lock.lock_counter == 1
    if is_outermost:
        _write(note, {"of": of, "pid": os.getpid(), "user": _user(), "since": datetime.now(UTC).isoformat(timespec="seconds")})
    try:
        yield waited_s
    finally:
        if is_outermost:
            _write(note, {})
        lock.release()


def holder_of(settings: DeviceSettings) -> str:
    """Who wrote down last that the devices are theirs, and lives; "" = nobody, or one who could not write it down."""
    return _holder(settings.device_lock.with_name(f"{settings.device_lock.name}.holder"))


def _lock(path: Path) -> FileLock:
    """This process's one lock on the file: a second one would wait for the first."""
    if not path.exists():
        _touch(path)
    try:
        return FileLock(path, thread_local=False, is_singleton=True, preserve_lock_file=True)
    except (OSError, ValueError) as error:
        raise _unusable(path, error) from None


def _acquire(lock: FileLock, note: Path, timeout_s: float, say: Callable[[str], None]) -> float:
    begun = time.monotonic()
    turn_s = 0.0  # the first look does not wait
    while True:
        try:
            lock.acquire(timeout=turn_s, poll_interval=POLL_S)
        except Timeout:
            waited_s = time.monotonic() - begun
        except OSError as error:
            raise _unusable(Path(lock.lock_file), error) from None
        else:
            return time.monotonic() - begun if turn_s else 0.0
        holder = _holder(note) or "somebody who left no note"
        if waited_s >= timeout_s:
            raise ConflictError(
                f"the devices of this machine were not free within {timeout_s:g} s; {holder} has them. Nothing was run on them. Wait for "
                "that work to end and run the command again, or give it longer with SEATRIAL_DEVICE_WAIT_S."
            )
        say(f"waiting for the devices of this machine, {waited_s:.0f} s so far: {holder} has them")
        turn_s = min(SAY_EVERY_S, timeout_s - waited_s)


def _holder(note: Path) -> str:
    try:
        found = json.loads(note.read_bytes())
        text = f"{found['of']} (process {found['pid']} of {found['user']}, since {found['since']})"
        return text if psutil.pid_exists(found["pid"]) else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""


def _write(note: Path, holder: dict[str, str | int]) -> None:
    """Best effort: nothing depends on it."""
    with contextlib.suppress(OSError):
        _touch(note)
        # without O_CREAT: in a sticky folder the kernel may refuse it on another user's file
        fd = os.open(note, os.O_WRONLY | os.O_TRUNC | os.O_NOFOLLOW)
        try:
            os.write(fd, canonical_json(holder))
        finally:
            os.close(fd)


def _touch(path: Path) -> None:
    """Make a file that everybody may open, unless it is there."""
    with contextlib.suppress(OSError):  # what it means that there is none is said where it is opened
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, _EVERYONE)
        try:
            os.fchmod(fd, _EVERYONE)  # the umask has taken some away
        finally:
            os.close(fd)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container may run a number without a name
        return str(os.getuid())


def _unusable(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"the lock on this machine's devices, {path}, cannot be used ({error}). Two releases could spoil each other's timings, so nothing "
        "was run. Let this user read and write that file, or set SEATRIAL_DEVICE_LOCK to a file that all who release here can write."
    )
