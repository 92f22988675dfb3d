"""What a rank's program said of itself, and which exception is on its way: by whom it was noticed, and for how long it is told."""

import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.autograd

from trainer.ring import RingWriter

KEPT_STEPS = 2  # an exception that was caught is told for so many steps more
TEXT = 600  # characters of an exception's own text


class Notes:
    """Keeps the ring's note: the program's own words, then the first exception of late and, on a line of its own, the newest.

    An exception is noticed when it leaves a backward pass, when an operation is begun while it is dealt with, when the main thread deals
    with it at a heartbeat (a clean-up that hangs or takes long), and when it ends the program.
    """

    def __init__(self, ring: RingWriter) -> None:
        self._ring = ring
        self._said, self._raised = "", ""
        self._step, self._raised_step = -1, -1
        self._seen = (0, -1)  # the newest exception told, and its step
        self._older = {id(error) for error in _handled().values()}  # dealt with since before recording began: not news
        self._undo: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def watch(self) -> None:
        """Notice exceptions that leave a backward pass or end the program."""
        hook, backward = sys.excepthook, torch.autograd.backward

        def ended(kind: Any, error: Any, trace: Any) -> Any:
            self.raised(error)
            return hook(kind, error, trace)

        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return backward(*args, **kwargs)
            except BaseException as error:
                self.raised(error)
                raise

        sys.excepthook, torch.autograd.backward = ended, watched
        self._undo = [lambda: _put_back(sys, "excepthook", ended, hook), lambda: _put_back(torch.autograd, "backward", watched, backward)]

    def unwatch(self) -> None:
        """Notice nothing more."""
        while self._undo:
            self._undo.pop()()

    def say(self, text: str) -> None:
        """The program's own words."""
        self._said = text
        self._write()

    def raised(self, error: BaseException) -> None:
        """An exception was raised; the same one is told once."""
        news = (id(error), self._step)
        if news == self._seen or id(error) in self._older or isinstance(error, StopIteration | GeneratorExit):
            return
        self._seen, self._raised_step = news, self._step
        first = self._raised.partition("\n")[0]  # a later one may only be what came of it
        fresh = f"exception: {type(error).__name__}: {' '.join(str(error)[:TEXT].splitlines())}{_where(error)}"
        self._raised = "\n".join(dict.fromkeys(filter(None, (first, fresh))))
        self._write()

    def came_to(self, step: int) -> None:
        """The program has come to this step."""
        self._step = step
        if self._raised and step > self._raised_step + KEPT_STEPS:
            self._raised = ""
            self._write()

    def look(self, thread: int) -> None:
        """See which exception a thread deals with right now."""
        error = _handled().get(thread)
        if error is not None:
            self.raised(error)

    def _write(self) -> None:
        with self._lock:
            self._ring.note("; ".join(filter(None, (self._said, self._raised))))


def _handled() -> dict[int, BaseException]:
    """The exception that each thread deals with."""
    found = {}
    with suppress(Exception):
        for thread, value in sys._current_exceptions().items():
            error = value[1] if isinstance(value, tuple) else value  # a triple up to Python 3.11
            if error is not None:
                found[thread] = error
    return found


def _where(error: BaseException) -> str:
    with suppress(Exception):
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if "/torch/" not in frame.filename] or frames
        return f" ({own[-1].filename.rpartition('/')[2]}:{own[-1].lineno} {own[-1].name})"
    return ""


def _put_back(owner: Any, name: str, mine: Any, before: Any) -> None:
    """Unless somebody else has put himself in between."""
    if getattr(owner, name) is mine:
        setattr(owner, name, before)
