"""What the stranger planned faults do to their own rank: each is what a real program does by mistake, in its least form."""

import ctypes
import errno
import gc
import os
import queue
import sys
import time

SIZES = {"argument": (16, 24), "dtype": (16, 16)}  # elements that the others, and this rank, hand to the planned all-reduce


class _Until(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def hold_lock(ms: float) -> None:
    """Block in a C call that keeps the interpreter's lock: no thread of this process runs Python for `ms`, signals change nothing.

    A mutex that this thread holds already is waited for: unlike a sleep, no signal cuts that short.
    """
    library = ctypes.PyDLL(None)  # unlike CDLL it does not let go of the lock
    mutex = ctypes.create_string_buffer(64)  # all zero: PTHREAD_MUTEX_INITIALIZER
    until_ns = time.time_ns() + int(ms * 1e6)
    library.pthread_mutex_lock(mutex)
    library.pthread_mutex_timedlock(mutex, ctypes.byref(_Until(until_ns // 10**9, until_ns % 10**9)))
    library.pthread_mutex_unlock(mutex)


def collect_slowly(ms: float) -> None:
    """Collect garbage, and take `ms` for it with the lock held: whoever listens to gc.callbacks sees one long collection."""

    def dawdle(phase: str, _: object) -> None:
        if phase == "start":
            hold_lock(ms)

    gc.callbacks.append(dawdle)
    try:
        gc.collect()
    finally:
        gc.callbacks.remove(dawdle)


def wait_for_data() -> None:
    """Wait for a batch on a queue that nobody feeds, as a loader does whose workers are gone."""
    queue.Queue[object]().get()


def swallow(text: str) -> None:
    """Raise in a backward pass, catch it and go on, as code does that skips a batch which did not fit; the log hears of it."""
    import torch

    one = torch.ones(1, requires_grad=True)
    one.register_hook(lambda _: _raise(text))  # type: ignore[no-untyped-call]
    try:
        torch.autograd.backward(one * 2)
    except RuntimeError as error:
        sys.stderr.write(f"caught and skipped: RuntimeError: {error}\n")


def _raise(text: str) -> None:
    raise RuntimeError(text)


def disk_is_full() -> None:
    """Say what a full disk says. Raises OSError."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def reduce_once_more(kind: str = "", *, is_wrong: bool = False) -> None:
    """One more all-reduce. Args: kind, "argument" or "dtype" when all ranks make it and only some wrongly; "" on one rank alone."""
    import torch
    import torch.distributed as dist

    right, wrong = SIZES.get(kind, (1, 1))
    type_ = torch.int32 if is_wrong and kind == "dtype" else torch.float32
    dist.all_reduce(torch.ones(wrong if is_wrong else right, dtype=type_))
