"""A command's process: how it begins, and how it ends."""

import atexit
import contextlib
import os
import sys
import threading
from typing import NoReturn

RARELY = 10_000  # new objects between two looks for garbage, not 700: modules leave none, and 3,000 load in four fifths of the time
EXIT_UNREAD = 120  # as the interpreter's own: nobody took what was written


def leave(code: int) -> NoReturn:
    """End this process as the interpreter does, without taking its memory apart first: of a release that takes two seconds.

    Threads that are no daemons are waited for, and every exit function runs.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = EXIT_UNREAD
    os._exit(code)


def end_at_once(why: str) -> NoReturn:
    """Say why, end the servers that were started here, go. Ranks end with this process.

    Raising would not do: Prefect turns an interrupt into a crashed run and then waits for minutes to report it to a server that the same
    interrupt has ended.
    """
    import psutil

    print(why, file=sys.stderr, flush=True)  # noqa: T201
    children = psutil.Process().children(recursive=True)
    for child in children:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.terminate()
    for child in psutil.wait_procs(children, timeout=3)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    os._exit(1)
