"""What a small program of this package is given: where it stands, how it tells its recording, and how trouble is made."""

import ctypes
import gc
import os
import select
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

TIMEOUT_S = 8.0  # of every group: `new_group` does not inherit the default group's


class Recorder(Protocol):
    """What `trainer.recording.Recording` does for a program."""

    def step(self, number: int) -> None: ...

    def phase(self, name: str) -> None: ...

    def micro(self, number: int) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(slots=True)
class Scene:
    """One rank's place in a program. Bodies are called `body(rank, W, world)` with this as `world`."""

    rank: int
    world_size: int
    recording: Recorder
    timeout_s: float = TIMEOUT_S
    _kept: list[Any] = field(default_factory=list)  # objects that must not be closed

    def step(self, number: int) -> None:
        """A 0-based optimizer update begins."""
        self.recording.step(number)

    def phase(self, name: str, seconds: float = 0.0) -> None:
        """A phase of the step begins, and takes at least so long."""
        self.recording.phase(name)
        if seconds:
            time.sleep(seconds)

    def micro(self, number: int) -> None:
        """A 0-based micro-batch of the step begins."""
        self.recording.micro(number)

    def note(self, text: str) -> None:
        """The program says something of itself."""
        self.recording.note(text)

    def group(self, ranks: Sequence[int]) -> dist.ProcessGroup:
        """A group with the time-out of all groups. Collective over the world."""
        made: dist.ProcessGroup = dist.new_group(list(ranks), timeout=timedelta(seconds=self.timeout_s))
        return made

    def drop_traffic(self) -> None:
        """From now on nothing that arrives here is read: to its peers this rank looks as if the network swallowed their packets."""
        for poller, watched in _pollers().items():
            epoll = select.epoll.fromfd(poller)
            self._kept.append(epoll)  # closing it would end gloo's own loop
            for fd in watched:
                if str(Path(f"/proc/self/fd/{fd}").readlink()).startswith("socket:"):
                    epoll.unregister(fd)


def hold_interpreter(seconds: float) -> None:
    """Spend the time in a C call that keeps the interpreter's lock, whatever signals come: no other Python thread runs meanwhile."""
    ctypes.PyDLL(None).system(f"exec sleep {seconds}".encode())


class _SlowToDie:
    """Garbage whose finaliser takes its time, as a heap of millions of objects does."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.itself = self

    def __del__(self) -> None:
        hold_interpreter(self.seconds)


def collect_garbage(seconds: float) -> None:
    """A garbage collection that takes so long, with the interpreter's lock held."""
    _SlowToDie(seconds)
    gc.collect()


def ones(size: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """A vector of ones."""
    return torch.ones(size, dtype=dtype)


def gather_all(size: int, world_size: int) -> None:
    """An all_gather of one vector of this size a rank."""
    dist.all_gather([torch.empty(size) for _ in range(world_size)], ones(size))


def _pollers() -> dict[int, list[int]]:
    """This process's epoll descriptors and what each of them watches."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - numbers
        fd = int(name)
        try:
            if "eventpoll" in str(Path(f"/proc/self/fd/{fd}").readlink()):
                lines = Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines()
                found[fd] = [int(line.split()[1]) for line in lines if line.startswith("tfd:")]
        except FileNotFoundError:  # the listing's own descriptor
            continue
    return found
