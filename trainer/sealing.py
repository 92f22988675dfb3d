"""A checkpoint's files: written through DCP's storage writer and hashed on the way to the disk, then signed for and renamed into place.

DCP's writer and planner are driven step by step and not through `dcp.save`: that takes about ten collectives a save, raises a
BaseException, and syncs `.metadata` before its buffer is flushed. What is written is the same and can be read by `dcp.load`.
"""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, cast

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter, _StorageWriterTransforms
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint import CLAIM, METADATA, file_seal, folder_name, verify_all_but_shards
from trainer.staging import Piece
from trainer.world import World
from validation.errors import DataError
from validation.manifest import FORMAT, MANIFEST, FileSeal, Manifest, build_manifest, sign

BUFFER_BYTES = 1 << 18
PARTIAL, REPLACED = ".partial", ".replaced"  # endings of folders that no one loads


def partial_folder(root: Path, step: int) -> Path:
    """Where a step's checkpoint is written before it is sealed."""
    return root / f"{folder_name(step)}{PARTIAL}"


def clear_leftovers(root: Path) -> None:
    """Remove what an attempt that died in a save left behind."""
    for ending in (PARTIAL, REPLACED):
        for folder in root.glob(f"step-*{ending}"):
            shutil.rmtree(folder, ignore_errors=True)


def write_shards(
    folder: Path, pieces: Sequence[Piece], plan: SavePlan, world: World, *, begun: Callable[[], None]
) -> tuple[list[WriteResult], dict[str, FileSeal]]:
    """Write one rank's tensors, synced to the disk, and read them back.

    Args: begun, called when the first bytes are on their way.
    Returns: where each piece is, for the metadata, and each file's seal by name.
    Raises: DataError when the disk does not give back what it was given; what writing raises (a full disk may come as RuntimeError).
    """
    if not pieces:
        begun()
        return [], {}
    writer, files = _writer(folder, world, begun)
    planner = HostPlanner({piece.name: piece.host for piece in pieces}, plan)
    placed = writer.prepare_global_plan([writer.prepare_local_plan(plan)] * world.world_size)[world.rank]  # names the files by rank
    results = writer.write_data(placed, planner).wait()
    read_back(folder, files.seals)
    return results, files.seals


def write_metadata(folder: Path, metadata: Metadata, results: Sequence[list[WriteResult]], world: World) -> FileSeal:
    """Write `.metadata` for the shards of all ranks; its seal."""
    writer, files = _writer(folder, world, lambda: None)
    writer.finish(metadata, list(results))
    return files.seals[METADATA]


def plan_metadata(plans: Sequence[SavePlan]) -> Metadata:
    """DCP's description of a checkpoint out of every rank's plan. Raises ValueError when the pieces do not make up whole tensors."""
    return DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False).create_global_plan(list(plans))[1]


def write_file(path: Path, body: bytes) -> FileSeal:
    """Write one file and sync it; its seal."""
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())
    return FileSeal(bytes=len(body), sha256=hashlib.sha256(body).hexdigest())


def read_back(folder: Path, seals: Mapping[str, FileSeal]) -> None:
    """Ask the disk for what was written. Raises DataError when it is something else."""
    for name, seal in seals.items():
        found = file_seal(folder / name, from_disk=True)
        if found != seal:
            raise DataError(f"{name} reads back with sha256 {found.sha256[:12]}…, {seal.sha256[:12]}… was written")


def seal_folder(partial: Path, manifest: Manifest, key: bytes) -> Path:
    """Sign for a complete folder, put it in place and read the seal back; the sealed folder.

    Raises: DataError when it does not verify where it stands; OSError.
    """
    root = partial.parent
    write_file(partial / MANIFEST, build_manifest(manifest, key))
    sync_folder(partial)
    sealed, replaced = root / folder_name(manifest.step), root / f"{folder_name(manifest.step)}{REPLACED}"
    if sealed.exists():  # it was refused when this run resumed, or the run would have gone on from it
        sealed.rename(replaced)
    partial.rename(sealed)
    sync_folder(root)
    shutil.rmtree(replaced, ignore_errors=True)
    try:
        verify_all_but_shards(sealed, key=key, run=manifest.run)
    except DataError:
        shutil.rmtree(sealed, ignore_errors=True)
        raise
    return sealed


def claim_newest(root: Path, manifest: Manifest, key: bytes) -> None:
    """Say in NEWEST.json, whole or not at all, which step was sealed last."""
    partial = root / f"{CLAIM}{PARTIAL}"
    write_file(partial, sign({"format": FORMAT, "run": manifest.run, "step": manifest.step}, key))
    partial.rename(root / CLAIM)
    sync_folder(root)


def sync_folder(path: Path) -> None:
    """Make a folder's names durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class HostPlanner(DefaultSavePlanner):
    """DCP's planner for pieces in host memory, whose plan is made already."""

    def __init__(self, hosts: Mapping[str, Tensor], plan: SavePlan) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.plan = plan
        self._hosts = hosts

    def lookup_object(self, index: MetadataIndex) -> Any:
        """The piece itself: a rank has at most one of a tensor."""
        return self._hosts[index.fqn]


def _writer(folder: Path, world: World, begun: Callable[[], None]) -> tuple[FileSystemWriter, "SealingFiles"]:
    writer = FileSystemWriter(folder, thread_count=1, per_thread_copy_ahead=0)  # 0: the pieces are on the host, no GPU is to be asked
    writer.fs = files = SealingFiles(begun)
    writer.transforms = Untransformed()
    writer.set_up_storage_writer(is_coordinator=world.rank == 0, rank=world.rank, use_collectives=True)
    return writer, files


class Untransformed(_StorageWriterTransforms):
    """DCP's hook for compression and the like, with none: its own makes a class for every tensor, the dearest part of a small save."""

    def transform_save_stream(self, write_item: WriteItem, raw_stream: Any) -> tuple[Any, list[str]]:  # noqa: ARG002 - DCP's signature
        """The stream itself, whose `close` does nothing."""
        return raw_stream, []


class SealingFiles(FileSystem):
    """DCP's file system, which also keeps the size and sha256 of what went into each file."""

    def __init__(self, begun: Callable[[], None]) -> None:
        self.seals: dict[str, FileSeal] = {}
        self._begun: Callable[[], None] | None = begun

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """Open a file as DCP does; leaving it means that its bytes are on the disk."""
        with super().create_stream(path, mode) as raw:
            stream = SealingStream(cast(IO[bytes], raw), self._first_bytes)
            yield stream
            stream.sync()
        self.seals[Path(path).name] = stream.seal()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file that was written here."""
        super().rename(path, new_path)
        self.seals[Path(new_path).name] = self.seals.pop(Path(path).name)

    def _first_bytes(self) -> None:
        if self._begun is not None:
            begun, self._begun = self._begun, None
            begun()


class SealingStream:
    """A file being written by DCP. What is small is kept until it is worth a hash and a write: torch.save writes 13 times a tensor."""

    def __init__(self, raw: IO[bytes], written: Callable[[], None]) -> None:
        self._raw = raw
        self._written = written
        self._sha256 = hashlib.sha256()
        self._waiting = bytearray()
        self._bytes = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self._bytes += size
        if size < BUFFER_BYTES:
            self._waiting += data
            if len(self._waiting) >= BUFFER_BYTES:
                self._pass_on()
        else:
            self._pass_on()
            self._put(data)
        return size

    def _pass_on(self) -> None:
        if self._waiting:
            waiting, self._waiting = self._waiting, bytearray()
            self._put(waiting)

    def _put(self, data: Any) -> None:
        self._raw.write(data)
        self._sha256.update(data)
        self._written()

    def tell(self) -> int:
        return self._bytes

    def flush(self) -> None:
        """Nothing yet: torch.save flushes after every tensor."""

    def fileno(self) -> int:
        self._pass_on()
        self._raw.flush()  # DCP asks in order to sync
        return self._raw.fileno()

    def close(self) -> None:
        """Nothing yet: DCP closes a file before its context is left, and `sync` wants it open."""

    def sync(self) -> None:
        if not self._raw.closed:
            self._pass_on()
            self._raw.flush()
            os.fsync(self._raw.fileno())

    def seal(self) -> FileSeal:
        return FileSeal(bytes=self._bytes, sha256=self._sha256.hexdigest())
