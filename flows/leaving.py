"""The end of a command's process."""

import atexit
import os
import sys
import threading
from typing import NoReturn

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
