"""A copy of the training state in host memory: the only part of a checkpoint that training waits for."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor, Shard

from trainer.world import World

MIN_SHARE_BYTES = 2**20  # of one rank: below, another file costs more (open, fsync, read back, 0.2 ms a tensor) than it spreads

MAX_THREADS = 4  # of one rank's copy: they saturate the memory of a socket
SPLIT_BYTES = 2**20  # tensors below are copied by one thread; a copy of 16 of them is worth a second thread


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One tensor's part that this rank saves."""

    name: str
    size: torch.Size  # of the whole tensor
    offset: torch.Size  # of this part in it
    host: Tensor  # (this part's shape) on the CPU, in storage of its own


class HostCopy:
    """This rank's share of the state, copied into buffers that are made once and used again by every save.

    A shard is saved by the rank that has it. What is the same on every rank is spread over them by size, so that each copies and writes
    its share and every byte is saved once; who saves what follows from names, sizes and the world size, without a word between ranks.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._layout: Any = None
        self._threads = max(1, min(MAX_THREADS, len(os.sched_getaffinity(0)) // world.world_size))  # cores that no other rank needs
        self._pool = ThreadPoolExecutor(MAX_THREADS, thread_name_prefix="staging")  # starts its threads when they have work
        self.pieces: tuple[Piece, ...] = ()  # in the order of the state; another tuple whenever names, shapes, types or shards change

    def take(self, tensors: Mapping[str, Tensor]) -> tuple[Piece, ...]:
        """Copy the living tensors; the pieces hold until the next call. Waits for the GPU when there is one."""
        layout = [(name, value.shape, value.dtype, value.device, getattr(value, "placements", None)) for name, value in tensors.items()]
        if layout != self._layout:
            self.pieces = tuple(_pieces(tensors, self._world))
            self._layout = layout
        sources = [_local(tensors[piece.name]) for piece in self.pieces]
        self._copy([piece.host for piece in self.pieces], sources)
        if any(source.device.type == "cuda" for source in sources):
            torch.cuda.synchronize()
        return self.pieces

    def _copy(self, hosts: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        """All at once, by rows over the threads when it is worth it."""
        on_cpu = all(source.device.type == "cpu" for source in sources)
        parts = self._threads if on_cpu and sum(host.nbytes for host in hosts) >= 16 * SPLIT_BYTES else 1
        others = [self._pool.submit(_copy_part, hosts, sources, part, parts) for part in range(1, parts)]
        _copy_part(hosts, sources, 0, parts)
        for other in others:
            other.result()  # raises what the thread raised


def save_plan(pieces: tuple[Piece, ...]) -> SavePlan:
    """What DCP is to write for these pieces."""
    return SavePlan([_write_item(piece) for piece in pieces])


def _copy_part(hosts: Sequence[Tensor], sources: Sequence[Tensor], part: int, parts: int) -> None:
    """Copy one part of the rows of every large tensor; part 0 takes the small ones."""
    pairs = [(_rows(host, part, parts), _rows(source, part, parts)) for host, source in zip(hosts, sources, strict=True)]
    some = [(host, source) for host, source in pairs if host is not None and source is not None]
    if some:
        torch._foreach_copy_([host for host, _ in some], [source for _, source in some], non_blocking=True)


def _rows(value: Tensor, part: int, parts: int) -> Tensor | None:
    if parts == 1 or value.dim() == 0 or value.nbytes < SPLIT_BYTES:
        return value if part == 0 else None
    rows = len(value)
    return value[rows * part // parts : rows * (part + 1) // parts]


def _write_item(piece: Piece) -> WriteItem:
    chunk = ChunkStorageMetadata(offsets=piece.offset, sizes=piece.host.shape)
    facts = TensorWriteData(chunk=chunk, properties=TensorProperties.create_from_tensor(piece.host), size=piece.size)
    return WriteItem(index=MetadataIndex(piece.name, piece.offset), type=WriteItemType.SHARD, tensor_data=facts)


def _pieces(tensors: Mapping[str, Tensor], world: World) -> list[Piece]:
    shared = _shared_by_rank({name: value.nbytes for name, value in tensors.items() if not _is_sharded(value)}, world.world_size)
    mine = shared[world.rank]
    return [_piece(name, value) for name, value in tensors.items() if name in mine or (_is_sharded(value) and _local(value).numel())]


def _shared_by_rank(sizes: Mapping[str, int], world_size: int) -> list[set[str]]:
    """Deal names out to ranks: the largest first, each to the rank that has least. No more ranks than are worth a file of their own.

    The last ranks come first: rank 0 signs for the checkpoint.
    """
    writers = min(world_size, max(1, sum(sizes.values()) // MIN_SHARE_BYTES))
    shares: list[set[str]] = [set() for _ in range(world_size)]
    loads = [0] * writers
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        place = loads.index(min(loads))
        shares[world_size - 1 - place].add(name)
        loads[place] += sizes[name]
    return shares


def _piece(name: str, value: Tensor) -> Piece:
    local = _local(value)
    offset = torch.Size([0] * value.dim())
    if isinstance(value, DTensor) and _is_sharded(value):
        offset = torch.Size(value.__create_chunk_list__()[0].offsets)  # type: ignore[no-untyped-call]  # DCP's own protocol for it
    # the same memory layout as the source's: a plain copy; pinned: a GPU copies without a bounce
    host = torch.empty_like(local, device="cpu", pin_memory=local.device.type == "cuda")
    return Piece(name=name, size=value.shape, offset=offset, host=host)


def _local(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def _is_sharded(value: Tensor) -> bool:
    return isinstance(value, DTensor) and any(isinstance(placement, Shard) for placement in value.placements)
