"""A plain elastic trainer, as torch's documentation writes it: DDP, DistributedSampler, torch.save on rank 0. Started by torchrun.

    torchrun ... torchrun_trainer.py FOLDER STEPS CHECKPOINT_EVERY KILL_STEP [KILL_STEP ...]

The n-th start kills its rank 1 in the n-th KILL_STEP, after the backward pass. Files left in FOLDER for the clock, monotonic ns as text:
killed-<start> right before the kill, updated-<start>-<rank> right after a start's first update.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

# torchrun starts this file: `support` lies one folder up
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from support.network import SEED, loss_sum, make_data, make_model, make_optimizer
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

BATCH, ROWS, FEATURES, HIDDEN = 4096, 8192, 64, (256, 128)  # as support.recipes.wide


def main() -> None:
    """Train from the newest checkpoint to the end, or to this start's kill."""
    folder, steps, checkpoint_every = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    start = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    kill_step = [*map(int, sys.argv[4:]), -1, -1][start]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(SEED)
    model = DistributedDataParallel(make_model(FEATURES, HIDDEN))
    optimizer = make_optimizer(model)
    step = first = load(folder, model, optimizer)
    batches = DataLoader(
        dataset := TensorDataset(*make_data(ROWS, FEATURES, SEED)), BATCH // world_size, sampler=DistributedSampler(dataset)
    )
    while step < steps:
        for inputs, labels in batches:
            optimizer.zero_grad()
            torch.autograd.backward(loss_sum(model, inputs, labels) / BATCH * world_size)
            if rank == 1 and step == kill_step:
                (folder / f"killed-{start}").write_text(str(time.monotonic_ns()))
                os.kill(os.getpid(), signal.SIGKILL)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            step += 1
            if step == first + 1:
                (folder / f"updated-{start}-{rank}").write_text(str(time.monotonic_ns()))
            if rank == 0 and step % checkpoint_every == 0:
                save(folder, model, optimizer, step)
            if step == steps:
                break
    dist.barrier()
    dist.destroy_process_group()


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put the checkpoint back, if there is one; returns the updates it holds."""
    path = folder / "checkpoint.pt"
    if not path.exists():
        return 0
    state: dict[str, Any] = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def save(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Write beside the old checkpoint, then take its place."""
    partial = folder / "checkpoint.partial"
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.rename(folder / "checkpoint.pt")


if __name__ == "__main__":
    main()
