"""A recipe of examples/mutants trained in a plain script with its own hooks, as TrainCheck is shown it: torchrun mutant_training.py

Environment: MUTANT (import path), MUTANT_STEPS (updates).
"""

import importlib
import os
import time

import numpy as np
import torch
import torch.distributed as dist

from trainer.hooks import Hooks, Step
from trainer.world import World


def main() -> None:
    """Train, and say how long the updates took."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    world = World(rank=dist.get_rank(), world_size=dist.get_world_size())
    module_name, _, name = os.environ["MUTANT"].partition(":")
    recipe = getattr(importlib.import_module(module_name), name)
    hooks = getattr(recipe, "hooks", None) or Hooks()
    torch.manual_seed(recipe.training.seed)
    model = recipe.model()
    module = hooks.wrap(model, world)
    optimizer = recipe.optimizer(model)
    steps = int(os.environ["MUTANT_STEPS"])
    schedule = recipe.schedule(optimizer, steps)
    data = recipe.data("train")
    began = time.monotonic()
    for number in range(steps):
        chosen = np.random.default_rng([1, number]).permutation(len(data))[: recipe.training.global_batch_size]
        parts = np.array_split(chosen[world.rank :: world.world_size], 2)
        hooks.streams(recipe.training.seed, number, world)
        step = Step(
            number=number, world=world, module=module, model=model, optimizer=optimizer, schedule=schedule,
            micro_batches=[data.batch(rows) for rows in parts], clip_norm=0.5, loss=recipe.loss,
        )  # fmt: skip
        hooks.step(step)
    print(f"seconds {time.monotonic() - began:.3f}", flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
