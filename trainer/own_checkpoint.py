"""The recipe's own saving and loading, inside a checkpoint that is either whole and verified, or not there.

    checkpoints/own-step-00000010/  own.json  and whatever hooks.save wrote, in folders too

All ranks write into own-step-00000010.partial; then rank 0 hashes and syncs every file, signs for them in own.json, and renames the folder
(the seal). Training waits for it. Loading verifies before hooks.load opens a file: the signature, the step, the run, the set of files,
their sizes and every sha256. What does not verify is refused on every rank, and the next older checkpoint is taken.
"""

import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.checkpoint import everybodys, file_seal, retired, sealed_folders
from trainer.hooks import Hooks, Living, naming
from trainer.sealing import PARTIAL, sync_folder, write_file
from trainer.world import Emit, World
from validation.errors import ConfigError, DataError, RecipeError
from validation.manifest import FileSeal, authenticate, sign

OWN = "own.json"

_NAME = re.compile(r"own-step-(\d{8,})")

At = Callable[[str, int], None]  # FaultPlan.at(phase, update)


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnResumed:
    """The newest own checkpoint that verifies, and why newer ones do not; the same on every rank."""

    folder: Path | None = None  # None: there is none, start from step 0
    step: int = 0
    position: int = 0  # samples consumed
    extra: Mapping[str, Any] = field(default_factory=dict)  # plain values: what no hook sees (loss scaler, the recipe's own state)
    refused: tuple[str, ...] = ()
    damaged: frozenset[str] = frozenset()  # names of the folders that were refused


def own_name(step: int) -> str:
    """The name of a step's own checkpoint."""
    return f"own-step-{step:08d}"


def own_folders(root: Path) -> list[Path]:
    """Own checkpoints, newest first; whether they are whole is asked when they are loaded."""
    found = [(int(match[1]), path) for path in root.glob("own-step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, reverse=True)]


def check_same_saving(root: Path, *, is_own: bool) -> None:
    """Refuse a folder whose checkpoints were all saved the other way: they would be left behind. Raises ConfigError."""
    own, sealed = own_folders(root), sealed_folders(root)
    if (sealed and not own) if is_own else (own and not sealed):
        whose, now = ("the trainer", "brings hooks.save") if is_own else ("the recipe's hooks.save", "brings no hooks.save")
        raise ConfigError(
            f"the checkpoints in {root} were written by {whose}, and the recipe {now} now. They cannot be read that way, and starting over "
            "would leave them behind, so nothing was started. Give this run an empty folder, or go back to the recipe that wrote them."
        )


class OwnSaver:
    """One rank's hand in every own checkpoint of an attempt. All ranks make the same calls in the same order."""

    def __init__(
        self, root: Path, world: World, hooks: Hooks, *, key: bytes, run: Mapping[str, Any], at: At, emit: Emit,
        damaged: frozenset[str] = frozenset(),
    ) -> None:  # fmt: skip
        """Clear away what a dead attempt left.

        Args: key, of the seal; run, what tells this run from others; at, called in the phases of a save; emit, told "sealed" or "unsaved"
        on rank 0; damaged, folders that were refused when this attempt resumed.
        """
        self._root, self._world, self._hooks = root, world, hooks
        self._key, self._run, self._at, self._emit, self._damaged = key, run, at, emit, damaged
        if world.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            for left in root.glob(f"own-step-*{PARTIAL}"):
                shutil.rmtree(left, ignore_errors=True)

    def save(self, living: Living, *, position: int, extra: Mapping[str, Any], refused: str = "") -> None:
        """Have the recipe write its state into a fresh folder, and seal it. Collective.

        A disk that refuses is told, and training goes on; whatever else hooks.save raises ends this rank.
        Args: position, samples consumed; extra, plain values that come back with it; refused, why this rank cannot vouch for what lies
        before the state: the checkpoint is then given up by all ranks.
        """
        began, update = time.perf_counter(), living.step - 1
        self._at("staging", update)
        partial = self._root / f"{own_name(living.step)}{PARTIAL}"
        problem = refused or self._opened(partial)
        problems = everybodys(problem, self._world)  # the folder is there, and empty, before anybody writes
        if not any(problems):
            problems = everybodys(self._written(partial, living), self._world)
        reason = next(filter(None, problems), "")
        if self._world.rank == 0:
            facts = {"run": self._run, "step": living.step, "position": position, "extra": extra}
            self._close(partial, facts, reason, began)
        else:
            self._at("seal", update)
        everybodys(0, self._world)  # nobody trains on before the checkpoint stands: a death afterwards comes back to it

    def _opened(self, partial: Path) -> str:
        """Make the folder, on rank 0; why it could not be made, or ""."""
        if self._world.rank > 0:
            return ""
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
        except OSError as error:
            return f"rank 0: {error}"
        return ""

    def _written(self, partial: Path, living: Living) -> str:
        """Let this rank write; why the disk refused, or ""."""
        try:
            with naming("save", self._world, living.step - 1):
                self._hooks.save(partial, living)
        except OSError as error:
            return f"rank {self._world.rank}: {error}"
        self._at("write", living.step - 1)  # this rank has written, and nobody has signed for it
        return ""

    def _close(self, partial: Path, facts: Mapping[str, Any], reason: str, began: float) -> None:
        """On rank 0: seal the folder, or clear it away, and say which."""
        step = facts["step"]
        try:
            size = 0 if reason else self._seal(partial, facts)
        except OSError as error:
            reason = f"rank 0: {error}"
        if reason:
            shutil.rmtree(partial, ignore_errors=True)
            self._emit("unsaved", step=step, reason=reason)
        else:
            self._emit("sealed", step=step, bytes=size, seconds=time.perf_counter() - began)

    def _seal(self, partial: Path, facts: Mapping[str, Any]) -> int:
        """Hash, sync and sign for every file; rename; then older checkpoints may go. Returns: bytes of the files."""
        files = {name: file_seal(path, from_disk=True) for name, path in _synced(partial)}
        if not files:
            raise RecipeError(
                f"hooks.save left no file in the folder that it was given ({partial.name}). A run could not go on from it. Write "
                "everything that the future depends on into that folder, on rank 0 or on every rank."
            )
        write_file(partial / OWN, sign({**facts, "files": files}, self._key))
        sync_folder(partial)
        self._at("seal", facts["step"] - 1)
        sealed = self._root / own_name(facts["step"])
        shutil.rmtree(sealed, ignore_errors=True)  # it was refused when this run resumed, or the run would have gone on from it
        partial.rename(sealed)
        sync_folder(self._root)
        self._damaged -= {sealed.name}
        for folder in retired(own_folders(self._root), sealed, self._damaged):
            shutil.rmtree(folder, ignore_errors=True)
        return sum(seal.bytes for seal in files.values())


def _synced(folder: Path) -> Iterator[tuple[str, Path]]:
    """Every file under a folder by its name relative to it, once its bytes and its name are on the disk."""
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise RecipeError(
                f"hooks.save left {path.name} in its folder, which is no plain file: what it stands for may change after the checkpoint is "
                "sealed. Write plain files."
            )
        sync_folder(path)
        if path.is_file():
            yield path.relative_to(folder).as_posix(), path


def newest_own(root: Path, *, key: bytes, run: Mapping[str, Any], world: World, newest_claimed: int | None = None) -> OwnResumed:
    """Find the newest own checkpoint that verifies, the same one on every rank. Collective.

    Args: run, as it was sealed; newest_claimed, a step known to have been sealed: when nothing that new is there, `refused` says so.
    Raises: DataError when a checkpoint is another run's.
    """
    names: list[str] = everybodys([folder.name for folder in own_folders(root)], world)[0]
    refused: list[str] = []
    damaged: list[str] = []
    if newest_claimed is not None and own_name(newest_claimed) > max(names, default=""):
        refused.append(f"checkpoint {own_name(newest_claimed)} was sealed and is gone. Training goes on from the newest one that is left.")
    for name in names:
        facts, problem = _examined(root / name, key=key, run=run, world=world)
        problem = next(filter(None, everybodys(problem, world)), "")
        if not problem and facts is not None:
            step, position = facts["step"], facts["position"]
            return OwnResumed(
                folder=root / name, step=step, position=position, extra=facts["extra"], refused=tuple(refused), damaged=frozenset(damaged)
            )
        refused.append(f"checkpoint {name} is damaged: {problem}. Nothing of it was used; the next older sealed checkpoint is.")
        damaged.append(name)
    if refused:
        refused.append("No checkpoint that can be used is left: training starts at step 0, and every update is made again.")
    return OwnResumed(refused=tuple(refused), damaged=frozenset(damaged))


def load_own(hooks: Hooks, found: OwnResumed, living: Living) -> None:
    """Have the recipe put back what it wrote. Collective, as far as hooks.load is."""
    assert found.folder is not None  # asked only where something was found
    with naming("load", living.world):
        hooks.load(found.folder, living)


def _examined(folder: Path, *, key: bytes, run: Mapping[str, Any], world: World) -> tuple[Mapping[str, Any] | None, str]:
    """What own.json says, and what is wrong with this rank's share of the files, or ""."""
    try:
        facts = authenticate((folder / OWN).read_bytes(), key, name=OWN)
        seals = {name: FileSeal(**seal) for name, seal in facts["files"].items()}
        there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()} - {OWN}
        if folder.name != own_name(facts["step"]) or there != seals.keys():
            return None, f"{OWN} is of step {facts['step']} and lists {len(seals)} files, {len(there)} are there"
        for name in sorted(seals)[world.rank :: world.world_size]:
            if file_seal(folder / name) != seals[name]:
                return None, f"{name} is not what was written"
    except (OSError, DataError, KeyError, TypeError) as error:
        return None, f"{error}"
    if facts["run"] != run:
        raise DataError(
            f"{folder} is another run's checkpoint ({facts['run']}, this run is {dict(run)}). Training would write over that run's, so "
            "nothing was started. Give this run an empty folder, or start the run that the folder belongs to."
        )
    return facts, ""
