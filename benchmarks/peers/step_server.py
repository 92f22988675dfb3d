"""Times the loops of this folder, each run in ranks forked from this one warm interpreter; started by step_throughput.py.

    python step_server.py SIDE [SIDE ...]        SIDE: plain | unwrapped | with_accelerate | with_fabric

Reads one JSON request a line from stdin, {side, recipe, world_size, warmup, steps, save_every}, and answers with one line on stdout:
{"seconds": from the start of step `warmup` to the start of step `warmup + steps` by rank 0's clock} or {"error": ...}. "ready" is the
first line.
"""

import importlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # `support` lies one folder up

os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch._dynamo
import torch.distributed as dist

from trainer.recipe import load_recipe

FORK = multiprocessing.get_context("fork")
DEADLINE_S = 170.0


def batches(recipe: Any, rank: int, world_size: int) -> Iterator[Any]:
    """This rank's batches without end: a new permutation of all rows each epoch, as torch's DistributedSampler draws it."""
    data, share = recipe.data("train"), recipe.training.global_batch_size // world_size
    epoch = 0
    while True:
        rows = torch.randperm(len(data), generator=torch.Generator().manual_seed(recipe.training.seed + epoch)).numpy()
        for start in range(0, len(rows) - share * world_size + 1, share * world_size):
            yield data.batch(rows[start + rank * share : start + (rank + 1) * share])
        epoch += 1


def train(request: dict[str, Any], rank: int, folder: str) -> float:
    """Seconds of the timed steps on this rank."""
    world_size, warmup, steps = request["world_size"], request["warmup"], request["steps"]
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size, "GROUP_RANK": 0}
    torchrun = {"TORCHELASTIC_RUN_ID": "steps", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 29500}  # nobody listens: the group stands
    os.environ.update({name: str(value) for name, value in (names | torchrun).items()})
    if world_size > 1 or request["side"] == "plain":  # DDP wants a process group on one rank, too
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    recipe: Any = load_recipe(request["recipe"])
    torch.manual_seed(recipe.training.seed)
    samples = len(recipe.data("train")) * recipe.training.epochs
    update, save = importlib.import_module(request["side"]).make_loop(recipe, world_size, -(-samples // recipe.training.global_batch_size))
    torch.set_num_threads(1)  # libraries set it as they like
    started = 0.0
    for step, batch in enumerate(batches(recipe, rank, world_size)):
        if step == warmup:
            started = time.monotonic()
        if step == warmup + steps:
            break
        update(batch)
        if save is not None and step == 0:  # what a library does at its first checkpoint alone is not timed
            save(Path(folder) / "first")
        if save is not None and (step + 1) % request["save_every"] == 0:
            save(Path(folder) / f"checkpoint-{step + 1}")
    seconds = time.monotonic() - started
    if world_size > 1:
        dist.barrier()
    return seconds


def rank_main(request: dict[str, Any], rank: int, folder: str, outbox: Any) -> None:
    """One rank's process."""
    try:
        outbox.send({"seconds": train(request, rank, folder)})
    except Exception:
        outbox.send({"error": traceback.format_exc(limit=-3)})
    outbox.close()
    os._exit(0)  # what a library does at exit is not timed and not wanted


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """Run all ranks; rank 0's time, or the first error."""
    with tempfile.TemporaryDirectory() as folder:
        pipes = [FORK.Pipe(duplex=False) for _ in range(request["world_size"])]
        ranks = [FORK.Process(target=rank_main, args=(request, n, folder, pipe[1])) for n, pipe in enumerate(pipes)]
        for process in ranks:
            process.start()
        for _, outbox in pipes:
            outbox.close()
        try:
            return collected([inbox for inbox, _ in pipes])
        finally:
            for process in ranks:
                process.kill()
                process.join()


def collected(inboxes: list[Any]) -> dict[str, Any]:
    """Rank 0's word once every rank has spoken, or the first error."""
    said: dict[Any, dict[str, Any]] = {}
    until = time.monotonic() + DEADLINE_S
    while len(said) < len(inboxes):
        ready = wait([inbox for inbox in inboxes if inbox not in said], timeout=max(0.0, until - time.monotonic()))
        if not ready:
            return {"error": f"no end after {DEADLINE_S:g} s"}
        for inbox in ready:
            try:
                said[inbox] = inbox.recv()
            except EOFError:
                said[inbox] = {"error": "a rank died without a word"}
            if "error" in said[inbox]:
                return said[inbox]
    return said[inboxes[0]]


def main() -> None:
    """Import everything once, then serve."""
    torch.set_num_threads(1)  # before any operation: a forked rank must not inherit a thread pool
    for side in sys.argv[1:]:
        importlib.import_module(side)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
