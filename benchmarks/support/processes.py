"""Doing something in a process of its own, forked from this one, that may be killed."""

import contextlib
import gc
import importlib
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any

REGISTRY = (
    "mlflow.store.tracking.sqlalchemy_store", "mlflow.store.model_registry.sqlalchemy_store", "sqlalchemy.dialects.sqlite",
    "alembic.command",
)  # fmt: skip


def warm_up() -> None:
    """Import here, once, what the registry imports when it is first asked: half of a short process's time."""
    for name in REGISTRY:
        importlib.import_module(name)
    from sqlalchemy.orm import configure_mappers

    configure_mappers()
    gc.collect()
    gc.freeze()  # a child does not touch these pages to look for garbage


def apart(act: Callable[[], Any], *, kill_after_s: float | None = None) -> tuple[str, Any]:
    """Do something in a process of its own. Returns "done" and its value, "killed", or "error" and the words."""
    pid, pipe = started(act)
    if kill_after_s is not None:
        time.sleep(kill_after_s)
        os.kill(pid, signal.SIGKILL)
    return answered(pid, pipe)


def started(act: Callable[[], Any]) -> tuple[int, int]:
    """Begin something in a process of its own; returns its number, and the pipe that its answer comes through."""
    read, write = os.pipe()
    if (pid := os.fork()) == 0:
        with contextlib.suppress(BaseException):
            os.close(read)
            try:
                answer = {"word": "done", "value": act()}
            except BaseException as error:
                answer = {"word": "error", "value": f"{type(error).__name__}: {error}"}
            with os.fdopen(write, "w") as pipe:
                json.dump(answer, pipe)
        os._exit(0)
    os.close(write)
    return pid, read


def answered(pid: int, pipe: int) -> tuple[str, Any]:
    """What came of it, once it is over; as `apart`."""
    with os.fdopen(pipe) as lines:
        text = lines.read()
    os.waitpid(pid, 0)
    if not text:
        return "killed", None
    answer = json.loads(text)
    return answer["word"], answer["value"]


def demand(word: str, value: Any) -> Any:
    """The value of something that had to end well."""
    if word != "done":
        raise RuntimeError(f"{word}: {value}")
    return value
