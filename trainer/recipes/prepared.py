"""What a recipe prepares once a machine: a folder that is seen whole or not at all, however many processes ask for it at once."""

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path


def prepared_once(folder: Path, prepare: Callable[[Path], None]) -> Path:
    """Give back the folder, made by `prepare(building)` when it is not there yet.

    The first process holds a lock (freed by the system when it dies), builds beside the place and renames; the others wait and find it
    done. Raises: what `prepare` raises; nothing stands then.
    """
    if folder.is_dir():
        return folder
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            building = folder.with_suffix(".building")
            shutil.rmtree(building, ignore_errors=True)  # left by a process that was killed while it built
            building.mkdir()
            prepare(building)
            os.replace(building, folder)  # noqa: PTH105  # one atomic step
    return folder
