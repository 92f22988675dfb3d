"""A process that stands between a server and its starter: when the starter is gone, however it went, the server goes too. Linux only.

Run as `python -m infra.server_keeper GRACE_S SIGNAL USER COMMAND...`. It holds the reading end of a pipe as its stdin; the starter holds
the other end and nothing is ever written, so an end of file means that the starter closed it or is dead. Only the standard library.
"""

import ctypes
import os
import pwd
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.2


def keep(command: list[str], *, grace_s: float, signum: int, user: str) -> int:
    """Run a command until it ends or stdin does; leaves none of its descendants behind. Returns its exit code.

    Args: signum, what asks the command to end; grace_s, how long it may take; user, whom it runs as ("" = this one).
    """
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _close_stdin)
    keeper = os.getpid()
    uid, gid = _ids(user)
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=lambda: _die_with(keeper), user=uid, group=gid,
        extra_groups=None if uid is None else [],
    )  # fmt: skip
    while child.poll() is None and not _is_closed():
        _reap_orphans(child)
    if child.poll() is None:
        child.send_signal(signum)
        with suppress(subprocess.TimeoutExpired):
            child.wait(grace_s)
    _kill_descendants(child)
    return child.returncode if child.returncode >= 0 else 128 - child.returncode


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


def _die_with(keeper: int) -> None:
    """In the child, after it changed its user (which clears this): a keeper that is killed takes the command along."""
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os._exit(1)


def _ids(name: str) -> tuple[int | None, int | None]:
    return (pwd.getpwnam(name).pw_uid, pwd.getpwnam(name).pw_gid) if name else (None, None)


def _close_stdin(_number: int, _frame: FrameType | None) -> None:
    with suppress(OSError):
        os.close(0)


def _is_closed() -> bool:
    try:
        return bool(select.select([0], [], [], LOOK_S)[0])
    except OSError:
        return True


def _reap_orphans(child: subprocess.Popen[bytes]) -> None:
    """Take in descendants that ended, but not the command itself: its exit code is asked for later."""
    with suppress(ChildProcessError):
        while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and ended.si_pid != child.pid:
            os.waitpid(ended.si_pid, 0)


def _kill_descendants(child: subprocess.Popen[bytes]) -> None:
    """SIGKILL all that is left; orphans below become children of this process, so nothing hides."""
    own = os.getpid()
    while doomed := [int(word) for word in Path(f"/proc/self/task/{own}/children").read_text().split()]:
        for pid in doomed:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
        child.poll()
        for pid in doomed:
            with suppress(ChildProcessError):
                if pid != child.pid:
                    os.waitpid(pid, os.WNOHANG)


if __name__ == "__main__":
    grace, number, who, *words = sys.argv[1:]
    sys.exit(keep(words, grace_s=float(grace), signum=int(number), user=who))
