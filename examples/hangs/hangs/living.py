"""One rank of a program, in a forked process: recording, process group, prelude, body, and a wait for the end."""

import importlib
import os
import sys
import time
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from hangs.catalogue import Case
from hangs.plain import keep_late
from hangs.reading import EVIDENCE, PLAIN, result_of, ring_of
from hangs.scene import Scene
from trainer.recording import Recording

SETTLE_S = 0.25  # before a program's own operations: whoever looks from outside now and then has looked by then


def live(case: Case, rank: int, root: Path, *, entries: int, end: int) -> None:
    """Live a rank's life; its result stands beside the evidence. Args: entries, of the ring; end, a pipe that closes when all is over."""
    recording = Recording.start(ring_of(root, rank), rank, case.world_size, entries=entries)
    store = dist.FileStore(str(root / "rendezvous"), case.world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=case.world_size, timeout=timedelta(seconds=case.timeout_s))
    _prelude()
    time.sleep(SETTLE_S)
    module, _, function = case.body.partition(":")
    world = Scene(rank=rank, world_size=case.world_size, recording=recording, timeout_s=case.timeout_s)
    try:
        getattr(importlib.import_module(f"hangs.{module}"), function)(rank, case.world_size, world)
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        traceback.print_exc()
        keep_late(root / (EVIDENCE if case.look == "afterwards" else PLAIN), ring_of(root, rank), rank)
        result_of(root, rank).write_text(f"{type(error).__name__}: {error}")
        os._exit(1)
    recording.phase("done")
    result_of(root, rank).write_text("ok")
    os.read(end, 1)


def _prelude() -> None:
    """What every program does first: operations 1 to 4 of the group of all ranks."""
    for size in (4, 5, 6):
        dist.all_reduce(torch.ones(size))
    dist.barrier()
