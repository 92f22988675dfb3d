"""Stacks of all threads, written by the process itself at a signal, also while the interpreter is held by a C call. Torch-free."""

import faulthandler
import os
import signal
from pathlib import Path

SIGNAL = signal.SIGUSR2  # SIGUSR1 has the main thread's stack in the log, see trainer/warm.py
_KEPT: list[int] = []  # faulthandler writes to this descriptor: it has to stay open


def answer_with_stacks(path: Path) -> int:
    """Have this process append its stacks to a file whenever SIGNAL comes.

    Returns: the signal; 0 where the program uses it, or the file cannot be made.
    """
    if signal.getsignal(SIGNAL) is not signal.SIG_DFL:
        return 0
    try:
        path.unlink(missing_ok=True)
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        faulthandler.register(SIGNAL, file=fd, all_threads=True, chain=False)
    except (OSError, ValueError, RuntimeError):
        return 0
    for old in _KEPT:
        os.close(old)
    _KEPT[:] = [fd]
    return int(SIGNAL)
