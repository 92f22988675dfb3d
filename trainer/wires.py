"""Messages between the flow process, a leader and its children: length-prefixed pickles over sockets and pipes. Torch-free."""

import importlib
import mmap
import os
import pickle
import select
import struct
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from trainer.config import TrainJob
from validation import errors

HEADER = struct.Struct("!Q")
COUNT = struct.Struct("q")
CHUNK_BYTES = 1 << 20
USUAL, EARLY = b"L", b"E"  # words with which a request's link is handed to the warm server
TRACE_LINES = 12
# What every warm process has in its environment, from the server's start: it is read when the libraries are loaded.
WARM_ENVIRON = {
    "OMP_NUM_THREADS": "1",  # ranks share the machine
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    # glibc: a step frees and asks for the same megabytes again; handed back to the system each time they cost up to a tenth of the step in
    # page faults, by the luck of where the heap lies. Blocks above 64 MiB are still handed back.
    "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # a process that forks must have no other thread
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",  # asking for a GPU must not initialise CUDA: a fork could not use it any more
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What a process sees around it. The warm server started earlier than the request, so the request brings its own."""

    environ: dict[str, str]
    cwd: str
    path: list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """A leader that went away without a word; monotonic ns."""

    noticed_ns: int
    gone_ns: int  # from then on nothing of its group was alive


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """Run a rank group, or go on with it."""

    job: TrainJob
    entry: str  # "module:function" called as function(job, world, rendezvous, emit) in every rank
    collect: str  # "module:function" that makes the RunRecord
    asked_ns: int  # monotonic; also the name of this run_group call in the folder's history
    read: str = ""  # "module:function" that makes evidence of an incident's folder; "": the ranks' rings alone are read
    lost: tuple[Loss, ...] = ()  # the leaders that this call had before


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRequest:
    """Run one function."""

    target: str  # "module:function"
    arguments: bytes  # pickled (args, kwargs): read where the function runs, not in the leader
    deadline_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The leader has taken the request; the deadline counts from here."""

    pid: int  # of the leader, also its session and process group


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A function returned."""

    body: bytes  # the pickled value; only the flow process unpacks it


@dataclass(frozen=True, slots=True, kw_only=True)
class Incident:
    """A stall or a death, and what the diagnosis says of it. A stall that goes on is told once before its end."""

    folder: str  # with the evidence; incident.json is the record
    number: int  # in the run's folder
    attempt: int
    verdict: str
    kind: str
    ranks: tuple[int, ...]  # culprits
    text: str  # the explanation
    mitigation: str  # what was done, in words
    planned: str  # the planned fault behind it; "" = none
    is_over: bool  # nothing more will be said about it


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """An exception, as text: it is raised again on the other side without unpickling anybody's class."""

    kind: str  # nearest class of validation.errors, "" for any other exception
    text: str  # the message; for other exceptions with their type in front
    trace: str = ""  # last lines of the traceback


def failure_of(error: BaseException) -> Failure:
    """Describe an exception so that `raised` can make it again in another process."""
    kind = next((base.__name__ for base in type(error).__mro__ if getattr(errors, base.__name__, None) is base), "")
    text = str(error) if kind else "".join(traceback.format_exception_only(error)).strip()
    lines = "".join(traceback.format_exception(error)).strip().splitlines()
    return Failure(kind=kind, text=text, trace="\n".join(lines[-TRACE_LINES:]))


def raised(failure: Failure) -> errors.ReleaseError:
    """The exception that a failure describes; RankError with the traceback's end when it is none of the release's own."""
    if failure.kind:
        made: errors.ReleaseError = getattr(errors, failure.kind)(failure.text)
        return made
    return errors.RankError(f"{failure.text}\n{failure.trace}".rstrip())


def load_target(target: str) -> Callable[..., Any]:
    """Import "module:function". Raises ConfigError when the text or the function is not there to be found."""
    module, _, name = target.partition(":")
    found = getattr(importlib.import_module(module), name, None) if module and name else None
    if not callable(found):
        raise errors.ConfigError(f"'{target}' names no function, so there is nothing to run. Write it like package.module:function.")
    return found  # type: ignore[no-any-return]


def frame(message: Any) -> bytes:
    """Encode one message."""
    body = pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)
    return HEADER.pack(len(body)) + body


def voice(fd: int) -> Callable[[Any], None]:
    """A function that writes whole messages to a blocking descriptor, from any thread."""
    lock = threading.Lock()

    def say(message: Any) -> None:
        rest = memoryview(frame(message))
        with lock:
            while rest:
                rest = rest[os.write(fd, rest) :]

    return say


def is_readable(fd: int, timeout_s: float | None = None) -> bool:
    """Wait until there is something to read, or its end; False when it took too long. (select() refuses descriptors above 1023.)"""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    return bool(poller.poll(None if timeout_s is None else max(0.0, timeout_s * 1000)))


class Pulse:
    """A rank's updates, counted in memory that it shares with its leader, who may look at any moment, also after the rank's death."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, COUNT.size)  # anonymous: made before the fork

    @property
    def updates(self) -> int:
        """Updates done; 0 before the first."""
        return int(COUNT.unpack_from(self._memory)[0])

    @updates.setter
    def updates(self, updates: int) -> None:
        COUNT.pack_into(self._memory, 0, updates)


class Inbox:
    """Whole messages out of a non-blocking descriptor, whose writer may stop or die in the middle of one."""

    def __init__(self, fd: int) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.closed = False  # the writer is gone
        self._buffer = bytearray()

    def read(self) -> list[Any]:
        """Take every whole message that has arrived, without waiting."""
        while not self.closed:
            try:
                chunk = os.read(self.fd, CHUNK_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                chunk = b""
            self._buffer += chunk
            self.closed = not chunk
        return self._messages()

    def _messages(self) -> list[Any]:
        found = []
        while len(self._buffer) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
            if len(self._buffer) < end:
                break
            # S301: the bytes come from a process of our own tree over an anonymous pipe
            found.append(pickle.loads(self._buffer[HEADER.size : end]))  # noqa: S301
            del self._buffer[:end]
        return found
