"""Sealed checkpoints: a folder that is either whole and verified, or not there.

    checkpoints/  NEWEST.json  step-00000010/  __0_0.distcp  __1_0.distcp ...  .metadata  state.json  MANIFEST.json

Tensors are in DCP's form (one file a rank, `.metadata` says where each part is), so they can be read back at any world size, whole or
sharded. trainer/saver.py writes the folder as step-00000010.partial; the manifest, with each file's size and sha256 and a MAC over all of
it, comes last; then the folder is renamed (the seal). NEWEST.json is signed too and says which step was sealed last.

Loading checks before it parses: the MAC, the step, the run, the set of files, their sizes and every sha256. Only then is `.metadata`, a
pickle, opened, from the very bytes that were checked. A checkpoint that does not verify is refused by name, on every rank, and the next
older one is taken.
"""

import hashlib
import json
import os
import pickle
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from trainer.seal_key import VARIABLE
from trainer.state import State
from trainer.world import World
from validation.errors import ConfigError, DataError
from validation.manifest import (
    MANIFEST,
    FileSeal,
    Manifest,
    OtherRunError,
    authenticate,
    check_identity,
    check_sha256,
    check_sizes,
    parse_manifest,
)

METADATA = ".metadata"
PLAIN = "state.json"
CLAIM = "NEWEST.json"
KEEP = 2  # sealed checkpoints; the older one is the way back when the newest is damaged

_NAME = re.compile(r"step-(\d{8,})")

Like = Callable[[str, torch.Size, torch.dtype], Tensor]  # an empty Tensor or DTensor to be filled, by name, whole shape and type
T = TypeVar("T")


class Resumed(NamedTuple):
    """What could be loaded, and why newer checkpoints could not; the same on every rank."""

    state: State | None  # None: no usable checkpoint, start from step 0
    refused: tuple[str, ...]
    damaged: frozenset[str] = frozenset()  # names of the folders that were refused


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """A checkpoint whose MAC, step, run, files and sizes fit; the two small files as they were when their sha256 was checked."""

    folder: Path
    manifest: Manifest
    facts: Mapping[str, Any]  # state.json
    metadata: bytes  # of DCP, still pickled


def folder_name(step: int) -> str:
    """The name of a step's sealed folder."""
    return f"step-{step:08d}"


def sealed_folders(root: Path) -> list[Path]:
    """Sealed checkpoints, newest first; whether they are whole is asked when they are loaded."""
    found = [(step, path) for path in root.glob("step-*") if (step := step_of(path)) is not None]
    return [path for _, path in sorted(found, reverse=True)]


def step_of(folder: Path) -> int | None:
    """The step in a sealed folder's name; None for any other name."""
    match = _NAME.fullmatch(folder.name)
    return int(match[1]) if match else None


def load_newest(
    root: Path, *, key: bytes, run: Mapping[str, Any], world: World, like: Like, newest_claimed: int | None = None
) -> Resumed:  # fmt: skip
    """Load the newest checkpoint that verifies, the same one on every rank. Collective.

    Args: run, facts that tell this run from others, as they were sealed; newest_claimed, a step known to have been sealed (NEWEST.json is
    asked in any case): when nothing that new is there any more, `refused` says so.
    Raises: DataError when a checkpoint that verifies cannot be read, or when there are only those of other runs; ConfigError when all were
    sealed with another key. Starting over would write over what is good for somebody.
    """
    own = [folder.name for folder in sealed_folders(root)]
    newest_of_mine = _examined(root / own[0], key=key, run=run, world=world) if own else (None, None)
    # the newest is examined before anything is agreed upon: a collective less on the way back from a death
    said = everybodys((own, *_claim(root, key=key, run=run), newest_of_mine[1]), world)
    names, claimed, stranger, _ = said[0]  # rank 0's view
    is_agreed = all(seen[:1] == names[:1] for seen, *_ in said)
    refused = [stranger] if stranger else []
    newest = max((step for step in (claimed, newest_claimed) if step is not None), default=-1)
    if newest > max((step_of(Path(name)) or 0 for name in names), default=-1):
        refused.append(_gone(newest))
    damaged: list[str] = []
    for name in names:
        if name == names[0] and is_agreed:
            found, each = newest_of_mine[0], [problem for *_, problem in said]
        else:
            found, own_problem = _examined(root / name, key=key, run=run, world=world)
            each = everybodys(own_problem, world)
        problems = [problem for problem in each if problem is not None]
        if found is not None and not problems:
            return Resumed(load_tensors(found, like, world), tuple(refused), frozenset(damaged))
        if isinstance(problems[0], OtherRunError) and name == names[-1]:
            raise DataError(_foreign(root, problems[0]))
        refused.append(_refusal(name, problems[0]))
        damaged.append(name)
    if names and stranger:
        raise ConfigError(_another_key(root, len(names)))
    if refused:
        refused.append("No checkpoint that can be used is left: training starts at step 0, and every update is made again.")
    return Resumed(None, tuple(refused), frozenset(damaged))


def everybodys(mine: T, world: World) -> list[T]:
    """Every rank's value, by rank. Collective."""
    if world.world_size == 1:
        return [mine]
    values: list[Any] = [None] * world.world_size
    dist.all_gather_object(values, mine)
    return values


def _examined(folder: Path, *, key: bytes, run: Mapping[str, Any], world: World) -> tuple[Verified | None, DataError | None]:
    """Verify this rank's share of a checkpoint; what is wrong with it."""
    try:
        found = verify_all_but_shards(folder, key=key, run=run)
        verify_shards(found, rank=world.rank, world_size=world.world_size)
    except DataError as error:
        return None, error
    return found, None


def verify_all_but_shards(folder: Path, *, key: bytes, run: Mapping[str, Any]) -> Verified:
    """Check manifest, step, run, set of files, sizes, and the files that are not tensors. Raises DataError saying what is wrong."""
    manifest = parse_manifest(_read(folder, MANIFEST), key)
    check_identity(manifest, step=step_of(folder), run=run)
    check_sizes(manifest, _sizes(folder))
    bodies = {name: _read(folder, name) for name in (METADATA, PLAIN)}
    for name, body in bodies.items():
        check_sha256(manifest, name, hashlib.sha256(body).hexdigest())
    return Verified(folder=folder, manifest=manifest, facts=json.loads(bodies[PLAIN]), metadata=bodies[METADATA])


def verify_shards(found: Verified, *, rank: int = 0, world_size: int = 1) -> None:
    """Check the tensors' files, or every `world_size`-th of them from `rank` on. Raises DataError naming the one that is damaged."""
    shards = [name for name in sorted(found.manifest.files) if name not in (METADATA, PLAIN)]
    for name in shards[rank::world_size]:
        try:
            seal = file_seal(found.folder / name)
        except OSError as error:
            raise DataError(f"{name} cannot be read ({error.strerror})") from None
        check_sha256(found.manifest, name, seal.sha256)


def file_seal(path: Path, *, from_disk: bool = False) -> FileSeal:
    """Size and sha256 of a file. `from_disk` drops what memory holds of it first, so that it is the disk that answers."""
    with path.open("rb") as file:
        if from_disk:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        return FileSeal(bytes=file.tell(), sha256=digest)


def load_tensors(found: Verified, like: Like, world: World | None = None) -> State:
    """Read a verified checkpoint: each rank the parts that its tensors need. Raises DataError when it holds more than tensors.

    Args: world, of a joined group: what is the same on every rank is then read by rank 0 and handed on. Collective.
    """
    metadata: Metadata = pickle.loads(found.metadata)  # noqa: S301  # its sha256 is in a manifest whose MAC fits
    entries = metadata.state_dict_metadata
    tensors = {
        name: like(name, entry.size, entry.properties.dtype) for name, entry in entries.items() if isinstance(entry, TensorStorageMetadata)
    }
    if strange := sorted(entries.keys() - tensors.keys()):
        raise DataError(
            f"checkpoint {found.folder.name} holds objects besides tensors ({', '.join(strange[:3])}). They would have to be unpickled, "
            "so it was not loaded. Write it again with this version."
        )
    shared = {name: value for name, value in tensors.items() if not isinstance(value, DTensor)} if _hands_on(world) else {}
    own = tensors.keys() - shared.keys() if world is not None and world.rank > 0 else tensors.keys()
    _read_tensors(found.folder, metadata, {name: tensors[name] for name in sorted(own)})
    if shared:
        _hand_on(list(shared.values()))
    facts = found.facts
    return State(step=facts["step"], position=facts["position"], seed=facts["seed"], tensors=tensors, plain=facts["plain"])


def _read_tensors(folder: Path, metadata: Metadata, tensors: dict[str, Tensor]) -> None:
    """Fill tensors from DCP's files."""
    if not tensors:
        return
    planner, reader = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False), FileSystemReader(folder)
    planner.set_up_planner(tensors, metadata, is_coordinator=True)
    reader.set_up_storage_reader(metadata, is_coordinator=True)
    reader.read_data(planner.finish_plan(planner.create_local_plan()), planner).wait()


def _hands_on(world: World | None) -> bool:
    """Whether rank 0 reads for all: eight ranks on two cores would unpack the same files eight times. (nccl takes no host tensors.)"""
    return world is not None and world.world_size > 1 and dist.get_backend() == "gloo"


def _hand_on(tensors: Sequence[Tensor]) -> None:
    """Rank 0's values to every rank, as bytes in one message. Collective."""
    pieces = [value.reshape(-1).view(torch.uint8) for value in tensors]
    flat = torch.cat(pieces)
    dist.broadcast(flat, src=0)
    for piece, part in zip(pieces, torch.split(flat, [piece.numel() for piece in pieces]), strict=True):
        piece.copy_(part)


def _read(folder: Path, name: str) -> bytes:
    try:
        return (folder / name).read_bytes()
    except FileNotFoundError:
        raise DataError(f"{name} is missing") from None
    except OSError as error:
        raise DataError(f"{name} cannot be read ({error.strerror})") from None


def _sizes(folder: Path) -> dict[str, int]:
    """Size of every file but the manifest, by name. Raises DataError for what is no file."""
    sizes = {}
    for path in folder.iterdir():
        facts = path.lstat()
        if not stat.S_ISREG(facts.st_mode):
            raise DataError(f"{path.name} is no plain file")
        sizes[path.name] = facts.st_size
    sizes.pop(MANIFEST, None)
    return sizes


def _claim(root: Path, *, key: bytes, run: Mapping[str, Any]) -> tuple[int | None, str]:
    """The step that NEWEST.json says was sealed last, and what is wrong with that file."""
    try:
        core = authenticate((root / CLAIM).read_bytes(), key, name=CLAIM)
    except OSError:
        return None, ""
    except DataError as error:
        return None, f"{error}. It cannot be told whether the newest checkpoint is still there; the newest that is left is taken."
    return (core["step"], "") if core.get("run") == run else (None, "")


def _gone(step: int) -> str:
    return (
        f"checkpoint {folder_name(step)} was sealed and is gone. Training goes on from the newest one that is left. If nobody removed it "
        "on purpose, look for what did (a clean-up job, a failing disk)."
    )


def _foreign(root: Path, error: DataError) -> str:
    return (
        f"{root} holds no checkpoint of this run ({error}). Training from the start would write over that run's, so nothing was started. "
        "Give this run an empty folder, or start the run that the folder belongs to."
    )


def _another_key(root: Path, count: int) -> str:
    return (
        f"none of the {count} checkpoints in {root} fits the seal key, and neither does {CLAIM}: they were sealed with another one. "
        f"Training from the start would write over them, so nothing was started. Set {VARIABLE} (or the file seal.key) to that "
        "installation's key, or give this run an empty folder."
    )


def _refusal(name: str, how: DataError) -> str:
    return (
        f"checkpoint {name} is damaged: {how}. Nothing of it was used; the next older sealed checkpoint is. "
        "Check the disk if this happens again."
    )


def retired(folders: Sequence[Path], sealed: Path, damaged: frozenset[str]) -> list[Path]:
    """Which folders may go now that `sealed` stands and was read back; `folders` newest first.

    The newest KEEP - 1 good ones before it stay; what was refused goes. A newer one was refused too (else the run would have gone on from
    it); it stays until training has passed its step, since this run cannot make it again before.
    """
    older = folders[folders.index(sealed) + 1 :]
    good = [folder for folder in older if folder.name not in damaged]
    return [folder for folder in older if folder not in good[: KEEP - 1]]
