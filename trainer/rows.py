"""Rows that all ranks of a machine see: what small gradients travel through when ranks share its memory.

Through sockets every byte is copied into the kernel and out of it, by a thread that takes its time from a rank when there are no more
cores than ranks: of two ranks that swap 350 KB a step, 3 ms of 26. Here a rank writes its row, meets the others in one small
collective, which a rank that is missing or dead breaks as it breaks any other, and reads theirs.
"""

import mmap
import os
import secrets
from collections import Counter

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.world import World

calls: Counter[str] = Counter()  # type -> exchanges of this process, and elements in them: no recorder of torch's sees these
elements: Counter[str] = Counter()

_PLAIN = dist.AllToAllOptions()
_TOKEN_BYTES = 64  # before the rows, so that they begin at a cache line


class SharedRows:
    """A row a rank, twice: one is read while the next is written. Made by `share_rows`."""

    def __init__(self, memory: mmap.mmap, rank: int, world_size: int, size: int, dtype: torch.dtype) -> None:
        self._dtype = str(dtype).removeprefix("torch.")
        self._rows = torch.frombuffer(memory, dtype=dtype, offset=_TOKEN_BYTES).view(2, world_size, size)
        self.own = (self._rows[0][rank], self._rows[1][rank])  # this rank's rows, (n,): which is to be written says `turn`
        self.turn = 0
        assert dist.group.WORLD is not None  # a rank that has peers has joined
        self._group = dist.group.WORLD
        self._steps = torch.zeros(world_size, dtype=torch.int64)
        self._theirs = torch.zeros(world_size, dtype=torch.int64)

    def exchange(self, step: int) -> Tensor:
        """Every rank's row, (W, n), to be read only, and before the next call; `own[turn]` has been written. Collective.

        Args: step, sent along to meet by.
        """
        rows = self._rows[self.turn]
        # the others are past reading the other rows: they met this rank in the exchange in between
        self.turn = 1 - self.turn
        calls[self._dtype] += 1
        elements[self._dtype] += rows.shape[1]
        # what dist.all_to_all_single calls: its wrappers take as long as the rest of this function
        self._group.alltoall_base(self._theirs, self._steps.fill_(step), [], [], _PLAIN).wait()
        return rows


def share_rows(world: World, size: int, dtype: torch.dtype) -> SharedRows | None:
    """Memory for rows of `size` elements; None where the ranks are no processes of one machine. Collective."""
    length = _TOKEN_BYTES + 2 * world.world_size * size * dtype.itemsize
    word = torch.zeros(3, dtype=torch.int64)
    file = -1
    if world.rank == 0:
        file, token = os.memfd_create("rows"), secrets.randbits(62)
        os.truncate(file, length)
        os.pwrite(file, token.to_bytes(8, "little"), 0)
        word = torch.tensor([os.getpid(), file, token])
    dist.broadcast(word, src=0)
    pid, there, token = word.tolist()
    memory = _opened(f"/proc/{pid}/fd/{there}", length, token)
    found = torch.tensor([int(memory is not None)])
    dist.all_reduce(found, dist.ReduceOp.MIN)
    if file >= 0:
        os.close(file)  # what is mapped stays
    return SharedRows(memory, world.rank, world.world_size, size, dtype) if memory is not None and found.item() else None


def _opened(path: str, length: int, token: int) -> mmap.mmap | None:
    """The memory of rank 0; None when it is another process's, on another machine, or may not be opened."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        if os.fstat(file).st_size != length or os.pread(file, 8, 0) != token.to_bytes(8, "little"):
            return None
        return mmap.mmap(file, length)
    except OSError:
        return None
    finally:
        os.close(file)
