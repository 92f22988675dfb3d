"""The exact reduction against a plain tree in one process, bit for bit; the fast one against plain sums."""

import contextlib
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from helpers_loop import run_ranks, tiny_job
from torch import nn

from trainer import fast, reduce, rows
from trainer.fast import FastReduction
from trainer.faults import FaultPlan
from trainer.feed import MicroBatch
from trainer.lanes import rank_lanes
from trainer.moving import MovingBuffers
from trainer.recipe import Batch
from trainer.reduce import ExactReduction
from trainer.telemetry import StepClock
from trainer.world import World
from validation.errors import RankError

SIZES = (1, 2, 3, 7, 16, 61, 1000)  # gradient elements of the two parameters together; most do not divide by W
CASES = tuple((lanes, size, dtype) for lanes in (1, 2, 4, 8, 16) for size in SIZES for dtype in ("float32", "float64"))
Case = tuple[int, int, str]
Array = npt.NDArray[Any]


@pytest.mark.parametrize("at_once_bytes", [0, 1 << 30], ids=["by chunks", "at once"])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8, 11, 13, 16])
def test_exact_equals_a_plain_tree(world_size: int, at_once_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every rank of every split ends with the bits of the tree that one process adds; loss and weight come along unharmed."""
    monkeypatch.setattr(reduce, "AT_ONCE_BYTES", at_once_bytes)  # before the ranks are forked
    cases = [case for case in CASES if case[0] >= world_size]
    seen = run_ranks(tiny_job(tmp_path, world_size=world_size), partial(exact_sums, cases))

    for number, case in enumerate(cases):
        expected = plain_sums(case)
        assert all(rank[number] == expected for rank in seen), case


@pytest.mark.parametrize("at_once_bytes", [0, 1 << 30], ids=["by chunks", "at once"])
def test_ranks_out_of_step_are_refused(at_once_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of different steps are never added: every rank hears of it, whichever way they travelled."""
    monkeypatch.setattr(reduce, "AT_ONCE_BYTES", at_once_bytes)
    seen = run_ranks(tiny_job(tmp_path, world_size=3), one_rank_ahead)

    assert all("the ranks' steps are [4, 5, 4] (by rank): a rank left out a collective" in said for said in seen)


@pytest.mark.parametrize("one_bucket_bytes", [0, 1 << 20], ids=["bucket by bucket", "in one buffer"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_fast_equals_plain_sums_within_rounding(
    world_size: int, one_bucket_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's all-reduce leaves the sum over ranks, not their mean, and the global loss and weight, whichever way it goes."""
    monkeypatch.setattr(fast, "ONE_BUCKET_BYTES", one_bucket_bytes)  # before the ranks are forked
    cases: list[Case] = [(8, 61, "float32"), (8, 7, "float64")]
    seen = run_ranks(tiny_job(tmp_path, world_size=world_size), partial(fast_sums, cases))

    for number, case in enumerate(cases):
        total, losses, weights = lane_gradients(case).sum(axis=0), *lane_scalars(case)
        for gradient, loss, weight in (rank[number] for rank in seen):
            np.testing.assert_allclose(gradient, total, rtol=1e-4, atol=1e-4)
            np.testing.assert_allclose((loss, weight), (losses.sum(), weights.sum()), rtol=1e-6)


@pytest.mark.parametrize("blind", ["one", "all"])
def test_ranks_that_cannot_share_memory_use_sockets(blind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sees another process's memory, or none, is enough: all of them take the way that works for all, to the same bits."""
    opened = rows._opened

    def blinded(path: str, length: int, token: int) -> Any:
        with contextlib.suppress(FileExistsError):
            (tmp_path / "first").touch(exist_ok=False)
            return opened(path, length, token + 1)
        return opened(path, length, token) if blind == "one" else opened("/nowhere", length, token)

    monkeypatch.setattr(rows, "_opened", blinded)  # before the ranks are forked
    monkeypatch.setattr(rows.SharedRows, "exchange", None)  # nobody may call it
    case = (8, 61, "float32")
    exact = run_ranks(tiny_job(tmp_path / "exact", world_size=3), partial(exact_sums, [case]))
    (tmp_path / "first").unlink()
    quick = run_ranks(tiny_job(tmp_path / "fast", world_size=2), partial(fast_sums, [case]))

    assert all(rank[0] == plain_sums(case) for rank in exact)
    for ((gradient, _, _),) in quick:
        np.testing.assert_allclose(gradient, lane_gradients(case).sum(axis=0), rtol=1e-4, atol=1e-4)


def test_rows_of_one_exchange_stand_until_the_next(tmp_path: Path) -> None:
    """Ranks that are fast write the next rows while slow ones still read: over and over, each reads what was meant for that step."""
    assert run_ranks(tiny_job(tmp_path, world_size=3), exchange_in_a_hurry) == [[True] * 40] * 3


def exchange_in_a_hurry(world: World) -> list[bool]:
    shared = rows.share_rows(world, 1000, torch.float32)
    assert shared is not None
    found = []
    for step in range(40):
        shared.own[shared.turn].fill_(100.0 * step + world.rank)
        seen = shared.exchange(step)
        time.sleep(0.003 * ((step + world.rank) % 3 == 0))
        found.append(all(bool((seen[rank] == 100.0 * step + rank).all()) for rank in range(3)))
    return found


def test_fast_counts_steps_of_small_models(tmp_path: Path) -> None:
    """Steps and weights are not rounded to the model's bfloat16 on their way, which holds whole numbers to 256 only."""
    assert run_ranks(tiny_job(tmp_path, world_size=2), fast_in_bfloat16) == [514.0, 514.0]


def fast_in_bfloat16(world: World) -> float:
    model = two_parameters((8, 7, "bfloat16"))
    reduction = FastReduction(model, world, *quiet(world, model), has_unused=False, coupled=False)
    micro = micro_batch(reduction.groups(rank_lanes(world.rank, 2, 8))[0][0])
    reduction.backward(257, micro, reduction.module(torch.ones(7)), torch.tensor(257.0), 1.0)
    return reduction.finish(257).weight


def lane_gradients(case: Case) -> Array:
    """(V, size) gradients over twelve orders of magnitude, so that every order of adding rounds differently."""
    lanes, size, dtype = case
    draw = np.random.default_rng(lanes * 1000 + size)
    return (draw.normal(size=(lanes, size)) * 10.0 ** draw.integers(-6, 6, size=(lanes, size))).astype(dtype)


def lane_scalars(case: Case) -> tuple[Array, Array]:
    """(V,) loss sums and weights with all their bits in use."""
    draw = np.random.default_rng(case[1])
    return draw.normal(size=case[0]), draw.uniform(1, 2, size=case[0])


def plain_sums(case: Case) -> tuple[bytes, float, float]:
    """Add neighbouring lanes, then neighbouring pairs, and so on."""
    values: Sequence[Array] = list(lane_gradients(case))
    while len(values) > 1:
        values = [left + right for left, right in zip(values[::2], values[1::2], strict=True)]
    losses, weights = lane_scalars(case)
    return values[0].tobytes(), sum(losses.tolist()), sum(weights.tolist())


def exact_sums(cases: Sequence[Case], world: World) -> list[tuple[bytes, float, float]]:
    """Each case's reduced gradient and totals on one rank; two rounds, so that buffers are used again."""
    found = []
    for step, case in enumerate(cases):
        model = two_parameters(case)
        reduction = ExactReduction(model, world, case[0], *quiet(world, model))
        for _ in range(2):
            for lane in rank_lanes(world.rank, world.world_size, case[0]):
                loss, weight = losses_of(model, case, range(lane, lane + 1))
                reduction.backward(step, micro_batch(lane), loss, weight, 1.0)
            totals = reduction.finish(step)
        found.append((flat_gradient(model).tobytes(), totals.loss_sum, totals.weight))
    return found


def one_rank_ahead(world: World) -> str:
    """What the reduction says when rank 1 has skipped a step."""
    case, step = (8, 61, "float32"), 4 + (world.rank == 1)
    model = two_parameters(case)
    reduction = ExactReduction(model, world, case[0], *quiet(world, model))
    for lane in rank_lanes(world.rank, world.world_size, case[0]):
        reduction.backward(step, micro_batch(lane), *losses_of(model, case, range(lane, lane + 1)), 1.0)
    with pytest.raises(RankError) as caught:
        reduction.finish(step)
    return str(caught.value)


def micro_batch(lane: int) -> MicroBatch:
    """A whole lane; what is in it does not matter to the reduction."""
    return MicroBatch(lane=lane, part=0, is_last=True, batch=Batch(*[torch.zeros(1)] * 3), counts=1.0)


def fast_sums(cases: Sequence[Case], world: World) -> list[tuple[Array, float, float]]:
    """As `exact_sums`, through DDP."""
    found = []
    for step, case in enumerate(cases):
        model = two_parameters(case)
        reduction = FastReduction(model, world, *quiet(world, model), has_unused=False, coupled=False)
        for _ in range(2):
            lanes = rank_lanes(world.rank, world.world_size, case[0])
            micro = micro_batch(reduction.groups(lanes)[0][0])
            with reduction.forward(micro):
                loss, weight = losses_of(reduction.module, case, lanes)
            reduction.backward(step, micro, loss, weight, 1.0)
            totals = reduction.finish(step)
        found.append((flat_gradient(model), totals.loss_sum, totals.weight))
    return found


class Planted(nn.Module):
    """forward(g) -> sum of g * parameters, whose gradient is g itself."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(size - size // 3, dtype=dtype))
        self.second = nn.Parameter(torch.zeros(max(size // 3, 0), dtype=dtype))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (torch.cat((self.first, self.second)) * gradient).sum()


def two_parameters(case: Case) -> Planted:
    return Planted(case[1], getattr(torch, case[2]))


def losses_of(model: nn.Module, case: Case, lanes: range) -> tuple[torch.Tensor, torch.Tensor]:
    """(sum, weight) of some lanes, with the planted gradients behind the sum and the planted loss as its value."""
    chosen = slice(lanes.start, lanes.stop)
    losses, weights = (torch.tensor(values[chosen].sum()) for values in lane_scalars(case))
    value = model(torch.from_numpy(lane_gradients(case)[chosen].sum(axis=0)))
    return value.double() + losses, weights


def flat_gradient(model: nn.Module) -> Array:
    gradient: Array = np.concatenate([p.grad.numpy().ravel() for p in model.parameters() if p.grad is not None])
    return gradient


def quiet(world: World, model: Planted) -> tuple[StepClock, FaultPlan, MovingBuffers]:
    clock = StepClock(torch.device("cpu"))
    clock.start(0, 0)
    return clock, FaultPlan((), world, lambda *_, **__: None), MovingBuffers(model, (), model.first)
