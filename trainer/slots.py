"""Memory through which loader workers hand batches to their rank: nameless files that vanish with the processes that hold them.

torch would pass tensors through sockets and files with names, of which a killed worker leaves some behind; bytes through a pipe are copied
three times, 64 KiB at a time. A slot is written by one worker, then read by the rank, and only then written again: the loader sees to that.
"""

import math
import mmap
import os
from typing import NamedTuple

import torch
from torch import Tensor

from trainer.recipe import Batch

_ALIGN = 64  # bytes between starts of tensors are a multiple of this: a cache line


class Place(NamedTuple):
    """Where in a slot a tensor lies."""

    offset: int  # bytes
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]  # without gaps

    @property
    def end(self) -> int:
        """Byte behind it."""
        return self.offset + math.prod(self.shape) * self.dtype.itemsize


class Slots:
    """Shared by fork: made by the rank before its workers start. A slot grows to the largest batch that it ever held."""

    def __init__(self, count: int) -> None:
        self._files = [os.memfd_create("batch") for _ in range(count)]
        self._maps: dict[int, mmap.mmap] = {}  # slot -> this process's view of it

    def __len__(self) -> int:
        return len(self._files)

    def write(self, slot: int, batch: Batch) -> tuple[Place, ...]:
        """Copy tensors without gaps into a slot. Returns: what `read` needs to find them."""
        places: list[Place] = []
        for value in batch:
            start = -(-places[-1].end // _ALIGN) * _ALIGN if places else 0
            places.append(Place(start, value.dtype, tuple(value.shape), value.stride()))
        for place, value in zip(places, batch, strict=True):
            self._view(slot, place, places[-1].end).copy_(value.detach())
        return tuple(places)

    def read(self, slot: int, places: tuple[Place, ...]) -> Batch:
        """Copy a batch out of its slot."""
        return Batch(*(self._view(slot, place, places[-1].end).clone() for place in places))

    def close(self) -> None:
        """Let go of the memory."""
        self._maps.clear()
        while self._files:
            os.close(self._files.pop())

    def _view(self, slot: int, place: Place, size: int) -> Tensor:
        if not math.prod(place.shape):
            return torch.empty(place.shape, dtype=place.dtype)
        flat = torch.frombuffer(self._map(slot, size), dtype=place.dtype, count=math.prod(place.shape), offset=place.offset)
        return flat.as_strided(place.shape, place.stride)

    def _map(self, slot: int, size: int) -> mmap.mmap:
        """A view of at least `size` bytes."""
        held = self._maps.get(slot)
        if held is None or len(held) < size:
            file = self._files[slot]
            if os.fstat(file).st_size < size:
                os.ftruncate(file, size)
            held = self._maps[slot] = mmap.mmap(file, 0)
        return held
