"""The global gradient norm: torch's value, with bits that do not know the shards."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from helpers_loop import run_ranks, tiny_job
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from trainer.norms import as_one, clip_, global_norm, row_norms
from trainer.world import World

SHAPES = ((5,), (1,), (7, 3), (16, 8), (3, 2, 5), (1, 9))


def gradients() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=draw) * 10 ** (place - 3) for place, shape in enumerate(SHAPES)]


@given(rows=st.integers(1, 40), columns=st.integers(1, 200), parts=st.integers(1, 8), seed=st.integers(0, 99))
def test_a_row_does_not_know_its_neighbours(rows: int, columns: int, parts: int, seed: int) -> None:
    """Cut into any shards, every row keeps the bits of its norm."""
    whole = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    shards = [row_norms(part.clone()) for part in whole.chunk(parts)]

    assert torch.equal(torch.cat(shards), row_norms(whole))


def test_gradients_in_one_memory_are_one_vector() -> None:
    """Views that lie one behind the other are handed on as one that writes through; its norm and theirs are equal within rounding."""
    buffer = torch.cat([value.reshape(-1) for value in gradients()] + [torch.zeros(9)])
    views = [part.view(shape) for part, shape in zip(buffer.split([math.prod(shape) for shape in SHAPES] + [9])[:-1], SHAPES, strict=True)]
    before = global_norm(views, by_rows=False)
    (whole,) = as_one(views)
    whole.mul_(2.0)

    assert torch.equal(whole, torch.cat([view.reshape(-1) for view in views]))
    assert global_norm([whole], by_rows=False) == pytest.approx(2.0 * before, rel=1e-6)


@pytest.mark.parametrize(
    "pick",
    [
        lambda a: [a[:2], a[3:5]],
        lambda a: [a[3:5], a[:3]],
        lambda a: [a[:8].view(2, 4).T, a[8:9]],
        lambda a: [a[:2], torch.zeros(2)],
        lambda a: [a[:2].double(), a[2:3]],
    ],
    ids=["gap", "order", "strides", "elsewhere", "types"],
)
def test_other_gradients_stay_as_they_are(pick: Callable[[torch.Tensor], list[torch.Tensor]]) -> None:
    """What is no unbroken piece of one memory is not taken for one."""
    given = pick(torch.arange(12.0))

    assert all(one is other for one, other in zip(as_one(given), given, strict=True))


def test_neighbours_by_chance_are_not_one() -> None:
    """Two memories that touch, as a caching allocator may give them, are two."""
    bytes_there = bytearray(32)
    left, right = (torch.frombuffer(bytes_there, dtype=torch.float32, count=4, offset=offset) for offset in (0, 16))

    assert left.data_ptr() + 16 == right.data_ptr()
    assert len(as_one([left, right])) == 2


def test_norm_is_torchs() -> None:
    """Within rounding it is what clip_grad_norm_ measures, and clipping does what it does."""
    ours, theirs = gradients(), [torch.nn.Parameter(value) for value in gradients()]
    for parameter, value in zip(theirs, gradients(), strict=True):
        parameter.grad = value
    norm = global_norm(ours)
    clip_(ours, norm, 0.7)

    assert math.isclose(norm, float(torch.nn.utils.clip_grad_norm_(theirs, 0.7)), rel_tol=1e-6)
    assert all(torch.allclose(value, parameter.grad, rtol=1e-5) for value, parameter in zip(ours, theirs, strict=True))


def test_small_gradients_are_not_scaled() -> None:
    """Below the limit not a bit changes."""
    kept = gradients()
    clip_(kept, global_norm(kept), 1e9)

    assert all(torch.equal(value, before) for value, before in zip(kept, gradients(), strict=True))


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_norm_shows_what_is_not_finite(broken: float) -> None:
    """One element that is not a finite number makes the norm not finite."""
    values = gradients()
    values[2][1, 1] = broken

    assert not math.isfinite(global_norm(values))


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_shards_have_the_norm_of_the_whole(world_size: int, tmp_path: Path) -> None:
    """Every rank finds the bits of the unsharded norm, with more ranks than rows as well, and clips its shard as the whole is clipped."""
    seen = run_ranks(tiny_job(tmp_path, world_size=world_size), sharded_norm)
    whole = gradients()
    norm = global_norm(whole)
    clip_(whole, norm, 0.7)

    assert all(value == norm for value, _ in seen)
    assert all(found == [value.numpy().tobytes() for value in whole] for _, found in seen)


def sharded_norm(world: World) -> tuple[float, list[bytes]]:
    mesh = init_device_mesh("cpu", (world.world_size,))
    shards = [distribute_tensor(value, mesh, [Shard(0)]) for value in gradients()]
    norm = global_norm(shards)
    clip_(shards, norm, 0.7)
    return norm, [shard.full_tensor().numpy().tobytes() for shard in shards]
