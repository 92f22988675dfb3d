"""Saving without stopping: training waits for a copy in memory; a thread behind it writes, seals, reads back and clears away.

    every rank:  copy | write own pieces, sync, read back | -> report    -> outcome
    rank 0:                                               | gather, metadata, manifest, rename, verify, clear away | broadcast

One gather and one broadcast a save, in a process group of their own: training's collectives go on beside them.
"""

import platform
import queue
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from trainer.checkpoint import METADATA, PLAIN, retired, sealed_folders
from trainer.recording import current
from trainer.sealing import (
    claim_newest,
    clear_leftovers,
    partial_folder,
    plan_metadata,
    seal_folder,
    sync_folder,
    write_file,
    write_metadata,
    write_shards,
)
from trainer.staging import HostCopy, Piece, save_plan
from trainer.state import State
from trainer.world import Emit, World
from validation.canonical import canonical_json
from validation.manifest import FORMAT, FileSeal, Manifest

At = Callable[[str, int], None]  # FaultPlan.at(phase, update)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Save:
    """One save under way on this rank."""

    step: int
    pieces: tuple[Piece, ...]
    facts: bytes  # of state.json
    rows: Callable[[], None]  # waits for this rank's rows to be on disk
    began: float  # time.perf_counter() when training stopped for it
    refused: str  # why this rank cannot vouch for it; "" = it can


@dataclass(frozen=True, slots=True, kw_only=True)
class _Report:
    """What one rank tells rank 0 about its part."""

    error: str = ""  # why it could not be written
    plan: SavePlan | None = None  # None: as told before
    results: list[WriteResult] = field(default_factory=list)
    files: Mapping[str, FileSeal] = field(default_factory=dict)


class Saver:
    """One rank's hand in every checkpoint of an attempt. All ranks make the same calls in the same order."""

    def __init__(
        self,
        root: Path,
        world: World,
        *,
        key: bytes,
        run: Mapping[str, Any],
        at: At,
        emit: Emit,
        timeout_s: float = 120.0,
        damaged: frozenset[str] = frozenset(),
        about: Mapping[str, Any] | None = None,
    ) -> None:
        """Clear away what a dead attempt left.

        Args: root, of the checkpoints, made when missing; key and run, see validation/manifest.py; at, called in the phases of a save, also
        from the thread behind; emit, told "sealed" or "unsaved" on rank 0; timeout_s, of the saves' own collectives; damaged, folders that
        were refused when this attempt resumed; about, further facts for state.json.
        """
        self._root, self._world, self._key, self._run = root, world, key, run
        self._faults, self._emit, self._timeout_s, self._damaged, self._about = at, emit, timeout_s, damaged, about or {}
        self._host = HostCopy(world)
        self._told: tuple[Piece, ...] | None = None  # the pieces whose plan rank 0 knows
        self._plans: list[SavePlan] = [SavePlan([])] * world.world_size  # on rank 0
        self._metadata: Metadata | None = None  # on rank 0, of these plans
        self._group: dist.ProcessGroup | None = None
        self._thread: threading.Thread | None = None
        self._saves: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()  # for the thread; None: that was all
        self._idle = threading.Event()
        self._idle.set()
        self._broken: BaseException | None = None  # what ended the thread: a lost peer, or a planned fault
        self._struck: BaseException | None = None  # the planned fault
        self.sealed_step: int | None = None  # the newest step that this saver sealed, on every rank
        if world.rank == 0:
            root.mkdir(parents=True, exist_ok=True)
            clear_leftovers(root)

    def prepare(self, state: State) -> None:
        """Make what the first save needs, so that it stops training no longer than others. Collective. To be called when training goes."""
        if self._group is None and self._world.world_size > 1:
            self._group = dist.new_group(backend="gloo", timeout=timedelta(seconds=self._timeout_s))
        self._host.take(state.tensors)

    def save(self, state: State, *, rows: Callable[[], None] = lambda: None, refused: str = "") -> None:
        """Copy the state and let it be written behind. Waits for an earlier save that is still under way. Collective.

        Args: rows, called in the thread, waits until the disk has what this rank has to show for the steps before the state, or raises
        OSError; refused, why this rank cannot vouch for what lies before the state; the checkpoint is then given up by all ranks.
        Raises: what ended the thread of the earlier save, when the ranks lost each other in it.
        """
        began = time.perf_counter()
        self.settle()
        if self._broken is not None:
            raise self._broken
        self._at("staging", state.step)
        if self._world.world_size > 1 and self._group is None:
            self.prepare(state)
        pieces = self._host.take(state.tensors)
        facts = self._facts(state) if self._world.rank == 0 else b""
        save = _Save(step=state.step, pieces=pieces, facts=facts, rows=rows, began=began, refused=refused)
        if self._thread is None:  # a daemon: a rank whose training failed does not wait for peers that are gone
            self._thread = threading.Thread(target=self._work, daemon=True, name="saver")
            self._thread.start()
        self._idle.clear()
        self._saves.put(save)  # returns with the interpreter's lock still held, which starting a thread does not

    def close(self) -> None:
        """Wait for the last save; a lost peer is training's own to notice. Collective. Raises a planned fault that struck in the thread."""
        self.settle()
        if self._thread is not None:
            self._saves.put(None)
            self._thread.join()
            self._thread = None
        if self._struck is not None:
            raise self._struck

    def settle(self) -> None:
        """Wait until the save under way, if any, is over on this rank: sealed, given up, or its peers lost."""
        self._idle.wait()

    def _work(self) -> None:
        while (save := self._saves.get()) is not None:
            recording = current()
            try:
                with nullcontext() if recording is None else recording.aside(save.step, "checkpoint"):
                    self._run_behind(save)
            finally:
                self._idle.set()

    def _at(self, phase: str, step: int) -> None:
        """Where planned faults strike, named by the update before the save; one that raises is kept apart from a disk that does."""
        try:
            self._faults(phase, step - 1)
        except OSError:  # a planned full disk: like one that refuses
            raise
        except BaseException as error:
            self._struck = error
            raise

    def _facts(self, state: State) -> bytes:
        versions = {"torch": torch.__version__, "python": platform.python_version(), "format": FORMAT}
        facts = {"step": state.step, "position": state.position, "seed": state.seed, "plain": state.plain}
        return canonical_json({**facts, "world_size": self._world.world_size, "versions": versions, **self._about})

    def _run_behind(self, save: _Save) -> None:
        """This rank's part of one save, to its end."""
        try:
            reports = self._gather(self._write(save))
            reason = self._seal(save, reports) if self._world.rank == 0 else ""
            if self._world.rank > 0:
                self._at("seal", save.step)
            if self._agree(sealed=not reason):
                self.sealed_step = save.step
        except BaseException as error:
            self._broken = error
            if self._world.rank == 0 and self._struck is None:
                self._emit("unsaved", step=save.step, reason=f"the ranks lost each other while it was written ({error})")

    def _write(self, save: _Save) -> _Report:
        """Write this rank's files. A disk that refuses is a report, not the end of training."""
        if save.refused:
            return _Report(error=f"rank {self._world.rank}: {save.refused}")
        try:
            save.rows()
        except OSError as error:
            return _Report(error=f"rank {self._world.rank}: its rows cannot be written ({error})")
        folder = partial_folder(self._root, save.step)
        try:
            folder.mkdir(exist_ok=True)
            plan = save_plan(save.pieces)
            results, files = write_shards(folder, save.pieces, plan, self._world, begun=lambda: self._at("write", save.step))
            if self._world.rank == 0:
                files[PLAIN] = write_file(folder / PLAIN, save.facts)
        except Exception as error:
            if self._struck is not None:  # torch.save may have hidden it behind an error of its own
                raise self._struck from None
            return _Report(error=f"rank {self._world.rank}: {_in_words(error)}")
        known, self._told = save.pieces is self._told, save.pieces
        return _Report(plan=None if known else plan, results=results, files=files)

    def _gather(self, report: _Report) -> list[_Report]:
        """Every rank's report, on rank 0. Collective: also ranks that wrote nothing, or could not."""
        if self._group is None:
            return [report]
        reports: list[Any] = [None] * self._world.world_size
        dist.gather_object(report, reports if self._world.rank == 0 else None, dst=0, group=self._group)
        return reports

    def _agree(self, *, sealed: bool) -> bool:
        """Rank 0's word, on every rank: whether the checkpoint stands. Collective."""
        word = torch.tensor([int(sealed)])
        if self._group is not None:
            dist.broadcast(word, src=0, group=self._group)
        return bool(word.item())

    def _seal(self, save: _Save, reports: Sequence[_Report]) -> str:
        """On rank 0: sign for the folder, or clear it away; why it could not be sealed, or ""."""
        partial = partial_folder(self._root, save.step)
        try:
            for place, report in enumerate(reports):
                if report.plan is not None:
                    self._plans[place], self._metadata = report.plan, None
            reason = "; ".join(report.error for report in reports if report.error)
            size = 0 if reason else self._sign(save, partial, reports)
        except Exception as error:
            if self._struck is not None:
                raise
            reason = _in_words(error)
        if reason:
            shutil.rmtree(partial, ignore_errors=True)
            self._emit("unsaved", step=save.step, reason=reason)
        else:
            self._emit("sealed", step=save.step, bytes=size, seconds=time.perf_counter() - save.began)
        return reason

    def _sign(self, save: _Save, partial: Path, reports: Sequence[_Report]) -> int:
        """Metadata, manifest, seal, claim; then older checkpoints may go. Returns the size of the checkpoint's files."""
        if self._metadata is None:
            self._metadata = plan_metadata(self._plans)
        files = {name: seal for report in reports for name, seal in report.files.items()}
        files[METADATA] = write_metadata(partial, self._metadata, [report.results for report in reports], self._world)
        sync_folder(partial)
        self._at("seal", save.step)
        manifest = Manifest(step=save.step, run=self._run, files=files)
        sealed = seal_folder(partial, manifest, self._key)
        self._damaged -= {sealed.name}  # a good one stands in its place
        claim_newest(self._root, manifest, self._key)
        for folder in retired(sealed_folders(self._root), sealed, self._damaged):
            shutil.rmtree(folder, ignore_errors=True)
        return sum(seal.bytes for seal in files.values())


def _in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".replace("\n", " ")[:500]
