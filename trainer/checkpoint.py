"""Sealed checkpoints: a folder that is either whole and verified, or not there.

    checkpoints/step-00000010/  state.safetensors  state.json  MANIFEST.json

It is written as step-00000010.partial; MANIFEST.json, with each file's size and sha256 and its own digest, comes last; then the folder
is renamed (the seal). Every file and the parent folder are fsynced before the next thing happens. Loading checks every digest before a
byte is parsed; nothing is unpickled. A damaged folder is refused with its reason, and the next older one is taken.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load, save

from trainer.state import State
from validation.canonical import canonical_json, digest, sha256_hex
from validation.errors import DataError

TENSORS = "state.safetensors"
PLAIN = "state.json"
MANIFEST = "MANIFEST.json"
FORMAT = 1
KEEP = 2  # sealed checkpoints; the older one is the way back when the newest is damaged

_NAME = re.compile(r"step-(\d{8,})")


class Resumed(NamedTuple):
    """What could be loaded, and why newer checkpoints could not."""

    state: State | None  # None: no usable checkpoint, start from step 0
    refused: tuple[str, ...]


def seal(root: Path, state: State, *, before_seal: Callable[[], None] = lambda: None) -> Path:
    """Write a checkpoint and rename it into place; keeps the newest KEEP. Returns the sealed folder.

    `before_seal` runs when all files but the manifest are on disk: where planned faults of phase "checkpoint" strike.
    """
    sealed = root / f"step-{state.step:08d}"
    partial = sealed.with_name(f"{sealed.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)  # of an attempt that died here
    partial.mkdir(parents=True)
    tensors = save({name: value.cpu().contiguous().clone() for name, value in state.tensors.items()})
    facts = {"step": state.step, "position": state.position, "seed": state.seed, "torch": torch.__version__, "plain": state.plain}
    bodies = {TENSORS: tensors, PLAIN: canonical_json(facts)}
    for name, body in bodies.items():
        _write(partial / name, body)
    before_seal()
    _write(partial / MANIFEST, canonical_json(_manifest(state.step, bodies)))
    _sync_folder(partial)
    shutil.rmtree(sealed, ignore_errors=True)  # only there when it was refused before, or this step is being repeated
    partial.rename(sealed)
    _sync_folder(root)
    _prune(root, sealed)
    return sealed


def _prune(root: Path, sealed: Path) -> None:
    folders = sealed_folders(root)
    newest = folders.index(sealed)
    for other in folders[:newest] + folders[newest + KEEP :]:  # a newer one was refused, else the run would have resumed from it
        shutil.rmtree(other)


def sealed_folders(root: Path) -> list[Path]:
    """Sealed checkpoints, newest first; whether they are whole is asked when they are loaded."""
    found = [(int(match[1]), path) for path in root.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def load_newest(root: Path) -> Resumed:
    """Load the newest checkpoint that verifies."""
    refused: list[str] = []
    for folder in sealed_folders(root):
        try:
            return Resumed(load_sealed(folder), tuple(refused))
        except DataError as error:
            refused.append(str(error))
    return Resumed(None, tuple(refused))


def load_sealed(folder: Path) -> State:
    """Verify one checkpoint and read it. Raises DataError saying which file is damaged and how."""
    manifest = _verified_manifest(folder)
    bodies = {name: _verified(folder, name, entry) for name, entry in manifest["files"].items()}
    facts = json.loads(bodies[PLAIN])
    return State(
        step=facts["step"], position=facts["position"], seed=facts["seed"], tensors=load(bodies[TENSORS]), plain=facts["plain"]
    )  # fmt: skip


def _manifest(step: int, bodies: Mapping[str, bytes]) -> dict[str, Any]:
    files = {name: {"bytes": len(body), "sha256": sha256_hex(body)} for name, body in bodies.items()}
    core = {"format": FORMAT, "step": step, "files": files}
    return core | {"sha256": digest(core)}


def _verified_manifest(folder: Path) -> dict[str, Any]:
    try:
        manifest: dict[str, Any] = json.loads((folder / MANIFEST).read_bytes())
        core = {key: manifest[key] for key in ("format", "step", "files")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(folder, MANIFEST, f"cannot be read ({type(error).__name__})") from None
    if manifest.get("sha256") != digest(core):
        raise _damaged(folder, MANIFEST, "does not match its own digest")
    if folder.name != f"step-{core['step']:08d}":
        raise _damaged(folder, MANIFEST, f"belongs to step {core['step']}")
    if core["format"] != FORMAT or set(core["files"]) != {TENSORS, PLAIN}:
        raise _damaged(folder, MANIFEST, f"is of format {core['format']} with files {sorted(core['files'])}, not format {FORMAT}")
    return manifest


def _verified(folder: Path, name: str, entry: Mapping[str, Any]) -> bytes:
    try:
        body = (folder / name).read_bytes()
    except OSError as error:
        raise _damaged(folder, name, f"cannot be read ({type(error).__name__})") from None
    if len(body) != entry["bytes"]:
        raise _damaged(folder, name, f"has {len(body)} bytes, {entry['bytes']} were sealed")
    if (found := sha256_hex(body)) != entry["sha256"]:
        raise _damaged(folder, name, f"has sha256 {found[:12]}…, {entry['sha256'][:12]}… was sealed")
    return body


def _damaged(folder: Path, name: str, how: str) -> DataError:
    return DataError(
        f"checkpoint {folder.name} is damaged: {name} {how}. Nothing of it was used; the next older sealed checkpoint is. "
        "Check the disk if this happens again."
    )


def _write(path: Path, body: bytes) -> None:
    with path.open("wb") as file:
        file.write(body)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
