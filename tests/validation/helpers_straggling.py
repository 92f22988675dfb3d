"""Timelines of jobs that are simulated step by step: each rank's phases, the collective at the last arrival, and what makes ranks late."""

import numpy as np
import pandas as pd

from validation.records import TIMELINE_COLUMNS

PHASES_MS = {"data": 4.0, "forward": 30.0, "backward": 60.0, "optimizer": 5.0}
TRANSFER_MS = 8.0


def gauss(rng, shape):
    """5 % of every phase."""
    return rng.normal(1, 0.05, shape).clip(0.5)


def lognormal(rng, shape):
    """Skewed, sigma 0.15."""
    return rng.lognormal(0, 0.15, shape)


def pareto(rng, shape):
    """Heavy tails: infinite variance of what is beyond the least time."""
    return 1 + 0.03 * rng.pareto(1.8, shape)


def busy(rng, shape):
    """A machine with other work: now and then a phase waits for a core, half a step on average."""
    return rng.lognormal(0, 0.1, shape) + (rng.random(shape) < 0.03) * rng.exponential(1.0, shape)


def slices(rng, shape):
    """Phases wait for whole time slices of a scheduler, 0 to 3 of them."""
    return rng.normal(1, 0.02, shape).clip(0.8) + 0.15 * rng.binomial(3, 0.15, shape)


def dragging(rng, shape):
    """Jitter that lasts: each rank's next step is like its last one (0.7)."""
    noise = rng.normal(0, 0.04, shape)
    for step in range(1, shape[0]):
        noise[step] += 0.7 * noise[step - 1]
    return (1 + noise).clip(0.5)


JITTERS = (gauss, lognormal, pareto, busy, slices, dragging)


def job(*, ranks=4, steps=20, seed=0, jitter=gauss, late=None, factor=None, samples=None, hidden=False, first=0, scale=1.0) -> pd.DataFrame:
    """TIMELINE_COLUMNS of one job.

    late: phase -> (steps, ranks) ms more in it ("between" before the step, "transfer" of the rank itself); factor: (steps, ranks), of all
    phases; hidden: the backward walls hold the waiting, as where the reduction overlaps; scale: of all times.
    """
    rng = np.random.default_rng(seed)
    shape, late = (steps, ranks), late or {}
    own = {name: ms * scale * jitter(rng, shape) * (1 if factor is None else factor) + late.get(name, 0) for name, ms in PHASES_MS.items()}
    zero = np.zeros(shape)
    checkpoint, between, slow_transfer = (np.broadcast_to(late.get(name, zero), shape) for name in ("checkpoint", "between", "transfer"))
    transfer = TRANSFER_MS * scale * jitter(rng, (steps, 1)) + slow_transfer
    ready, columns = np.zeros(ranks), {name: np.empty(shape) for name in TIMELINE_COLUMNS}
    for step in range(steps):
        start = ready + between[step]
        arrival = start + own["data"][step] + own["forward"][step] + own["backward"][step]
        wait = arrival.max() - arrival
        ready = arrival.max() + transfer[step] + own["optimizer"][step] + checkpoint[step]
        columns["start_ns"][step], columns["wait_ms"][step], columns["step_ms"][step] = start * 1e6, wait, ready - start
    columns["step"][:], columns["rank"][:] = first + np.arange(steps)[:, None], np.arange(ranks)
    columns["transfer_ms"][:], columns["checkpoint_ms"][:] = transfer, checkpoint
    columns["samples"][:] = 32 if samples is None else samples
    for name, ms in own.items():
        columns[f"{name}_ms"][:] = ms
    if hidden:
        columns["backward_ms"] += columns["wait_ms"]
    table = pd.DataFrame({name: values.reshape(-1) for name, values in columns.items()})
    return table.astype({"rank": np.int64, "step": np.int64, "start_ns": np.int64, "samples": np.int64})


def on(ranks, steps, rank, ms, at=None):
    """ms more on one rank at these steps (all of them), shape (steps, ranks)."""
    made = np.zeros((steps, ranks))
    made[slice(None) if at is None else at, rank] = ms
    return made
