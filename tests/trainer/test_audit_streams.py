"""Draws of random numbers are seen: who drew, from which generator, in which state it was found. Equal states are equal numbers."""

import json
import random
import timeit
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_audit import Bench, bench
from helpers_loop import run_ranks, tiny_job
from loader_recipes import Augmented, JitterData
from tiny_recipe import TRAIN, TinyData, weighted_loss
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from trainer.audit_streams import Draw, watch_backward, watched
from trainer.dataset import MapSplit, seed_streams
from trainer.loader import Loader, Request
from trainer.recipe import Batch
from trainer.streams import stream_seed
from trainer.world import World

DRAWS: dict[str, Callable[[], object]] = {
    "torch": lambda: torch.rand(3), "numpy": lambda: np.random.rand(3), "python": random.random,
}  # fmt: skip


def drawn(work: Callable[[], object]) -> list[Draw]:
    found: list[Draw] = []
    with watched(found):
        work()
    return found


@pytest.mark.parametrize("generator", DRAWS)
def test_only_what_moved_is_noted(generator: str) -> None:
    """One draw is one row of its generator; looking on moves nothing."""
    assert [draw.generator for draw in drawn(DRAWS[generator])] == [generator]
    assert drawn(lambda: None) == []


@pytest.mark.parametrize("generator", DRAWS)
@pytest.mark.parametrize("draws", [1, 5000])
def test_the_state_is_the_one_it_was_found_in(generator: str, draws: int) -> None:
    """Equal states before are equal rows, however much is drawn; a later state is another row."""

    def some(count: int) -> str:
        [draw] = drawn(lambda: [DRAWS[generator]() for _ in range(count)])
        return draw.state

    seed_streams(1)
    first, second = some(draws), some(1)
    seed_streams(1)
    assert some(1) == first
    assert second != first


@pytest.mark.parametrize("generator", DRAWS)
def test_seeding_inside_is_told_apart(generator: str) -> None:
    """Who seeds before he draws did not draw from what he found: the same seed gives the same row from wherever it started."""

    def seeded(start: int, key: int) -> list[Draw]:
        seed_streams(start)
        return [draw for draw in drawn(lambda: (seed_streams(key), DRAWS[generator]())) if draw.generator == generator]

    assert seeded(1, 5) == seeded(2, 5)
    assert seeded(1, 5) != seeded(1, 6)
    seed_streams(1)
    assert seeded(1, 5) != drawn(DRAWS[generator])


def rows_of(run: Bench) -> list[tuple[int, str, str]]:
    return [(row["step"], row["drawer"], row["generator"]) for row in run.rows("streams")]


def test_dropout_of_the_model_is_seen(tmp_path: Path) -> None:
    """One row a loss, by the state from which its masks came; a model that draws nothing leaves none."""
    run = bench(tmp_path)
    run.step(0, [1, 2], [3])
    run.model.eval()
    run.step(1, [1, 2])

    assert rows_of(run) == [(0, "model", "torch")] * 2
    assert len({row["state"] for row in run.rows("streams")}) == 2


def test_draws_of_the_loss_outside_of_the_model_are_seen(tmp_path: Path) -> None:
    """Noise that the loss itself draws counts, too, whatever it draws from."""

    def noisy(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        noise = torch.rand(6) + np.random.rand()
        return weighted_loss(model, batch._replace(inputs=nn.functional.dropout(batch.inputs) + noise))

    run = bench(tmp_path, loss=noisy)
    run.model.eval()
    run.step(0, [1, 2])

    assert rows_of(run) == [(0, "model", "torch"), (0, "model", "numpy")]


def test_a_fetch_that_draws_is_seen(tmp_path: Path) -> None:
    """Data that draws as it pleases leaves rows; fetches before the first step, which only check, do not."""
    run = bench(tmp_path, data=JitterData(TRAIN, 1))
    run.model.eval()
    run.data.batch(np.arange(3))
    run.step(0, [1, 2])

    assert rows_of(run) == [(0, "data", name) for name in ("torch", "numpy", "python")]


def test_a_keyed_fetch_leaves_no_row(tmp_path: Path) -> None:
    """MapSplit puts the generators back where they were: whose streams belong to the sample cannot be used twice."""
    points = TinyData(TRAIN, 1)
    run = bench(tmp_path, data=MapSplit(Augmented(points), points.frame))
    run.model.eval()
    run.audit.begin(0)
    run.data.keyed_batch(np.arange(3), np.arange(3, dtype=np.uint64))  # type: ignore[attr-defined]  # MapSplit has it
    run.data.batch(np.arange(3))

    assert not run.rows("streams")


def worker_rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "worker_streams.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.parametrize("data", [JitterData(TRAIN, 1), "keyed"], ids=["drawn", "keyed"])
def test_our_loader_workers_are_seen(data: Any, tmp_path: Path) -> None:
    """What the trainer's own workers draw stands in their file; they start every fetch from its own stream, so no state comes twice."""
    points = TinyData(TRAIN, 1)
    run = bench(tmp_path, data=MapSplit(Augmented(points), points.frame) if data == "keyed" else data)
    run.audit.begin(3)
    requests = [Request(np.arange(2), np.array([key, key], dtype=np.uint64)) for key in range(6)]
    loader = Loader(run.data, requests, 2)
    for _ in requests:
        loader.take()
    loader.close()
    found = worker_rows(tmp_path)

    assert not run.rows("streams")
    assert len(found) == (0 if data == "keyed" else 18)
    assert len({(row["generator"], row["state"]) for row in found}) == len(found)
    assert {(row["step"], row["drawer"]) for row in found} <= {(3, "data")}


class Noisy:
    """A map-style dataset of the team's own, that draws from numpy."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> float:
        return float(np.random.rand())


def copied(_: int) -> None:
    """Every worker goes on with the generator that it got when it was forked."""
    np.random.seed(0)


@pytest.mark.parametrize(("init", "is_copied"), [(copied, True), (None, False)], ids=["copied", "seeded"])
def test_numpy_copied_into_a_teams_workers_is_seen(init: Any, is_copied: bool, tmp_path: Path) -> None:
    """Workers of a DataLoader that a team made itself leave the states that they drew from: equal ones when numpy was copied."""
    run = bench(tmp_path)
    run.audit.begin(0)
    loader = DataLoader(Noisy(), batch_size=4, num_workers=2, worker_init_fn=init, multiprocessing_context="fork")  # type: ignore[arg-type,var-annotated]
    list(loader)
    counts = Counter(row["state"] for row in worker_rows(tmp_path) if row["generator"] == "numpy")

    assert sum(counts.values()) == 4
    assert set(counts.values()) == ({2} if is_copied else {1})


def test_a_teams_loader_without_workers_is_seen_once(tmp_path: Path) -> None:
    """A fetch inside a fetch is one draw: the dataset of a loader may ask the split."""
    run = bench(tmp_path, data=JitterData(TRAIN, 1))
    run.audit.begin(0)

    class Asking(Noisy):
        def __getitem__(self, index: int) -> float:
            return float(run.data.batch(np.array([index])).inputs.sum())

    list(DataLoader(Asking(), batch_size=8))  # type: ignore[arg-type,var-annotated]

    assert rows_of(run) == [(0, "data", name) for name in ("torch", "numpy", "python")] * 2


@pytest.mark.parametrize("is_equal", [True, False], ids=["same seed", "own seed"])
def test_ranks_that_draw_the_same_masks_are_seen(is_equal: bool, tmp_path: Path) -> None:
    """Two ranks with one dropout seed are in equal states, two with their own are not."""

    def states(world: World) -> list[str]:
        run = bench(tmp_path / str(world.rank), world)
        for step in range(2):
            seed_streams(stream_seed(3, step, 0 if is_equal else world.rank))
            run.step(step, [1, 2, 3])
        return [row["state"] for row in run.rows("streams")]

    first, second = run_ranks(tiny_job(tmp_path / "ranks", world_size=2), states)

    assert len(set(first)) == 2
    assert (first == second) == is_equal
    assert bool(set(first) & set(second)) == is_equal


def test_watching_is_cheap() -> None:
    """Looking at the generators around a loss that draws nothing takes well below a millisecond."""
    assert min(timeit.repeat(lambda: drawn(lambda: None), number=10, repeat=5)) / 10 < 1e-3


def test_the_newest_audit_reads_along_with_loaders(tmp_path: Path) -> None:
    """Two audits in one process do not both note a fetch."""
    first, second = bench(tmp_path / "a"), bench(tmp_path / "b")
    second.audit.begin(0)
    first.audit.begin(0)
    list(DataLoader(Noisy(), batch_size=16))  # type: ignore[arg-type,var-annotated]

    assert (len(first.rows("streams")), len(second.rows("streams"))) == (0, 1)


@pytest.mark.parametrize("is_preserved", [True, False])
def test_masks_that_a_backward_pass_draws_anew_are_seen(is_preserved: bool) -> None:
    """Activation checkpointing puts the generator back, or draws other masks than the loss had."""
    block, told = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), []
    hidden = checkpoint(block, torch.ones(3, 4), use_reentrant=False, preserve_rng_state=is_preserved)
    loss_sum = hidden.sum()
    watch_backward(loss_sum, told.append)
    (loss_sum / 2).backward()

    assert [draw.generator for draw in told] == ([] if is_preserved else ["torch"])
