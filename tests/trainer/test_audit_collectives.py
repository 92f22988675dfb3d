"""The types of a training's collectives are named; the audit's own gathering and what lies between steps are not counted."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_audit import Bench, bench
from helpers_loop import run_ranks, tiny_job
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from trainer import audit_collectives
from trainer.audit_collectives import Collectives
from trainer.state import tensor_sha256
from trainer.world import World

STEPS = 5


def reduced_small(run: Bench) -> None:
    """Gradients travel as float16, the weight as float64."""
    for parameter in run.model.parameters():
        assert parameter.grad is not None
        small = parameter.grad.half()
        dist.all_reduce(small)
        parameter.grad.copy_(small)
    dist.all_reduce(torch.ones((), dtype=torch.float64))


def counted(world: World, folder: Path) -> list[dict[str, Any]]:
    run = bench(folder / str(world.rank), world)
    run.between = reduced_small
    for step in range(STEPS):
        dist.barrier()  # an evaluation, a save
        run.step(step, [1, 2, 3])
    run.audit.close()
    return run.rows("collectives")


@pytest.mark.parametrize("entries", [audit_collectives.ENTRIES, 10], ids=["once", "often"])
def test_types_are_named(entries: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One row an operation and type with calls and elements, however often the recorder had to be read."""
    monkeypatch.setattr(audit_collectives, "ENTRIES", entries)
    elements = sum(p.numel() for p in bench(tmp_path / "here").model.parameters())
    expected = [
        {"operation": "all_reduce", "dtype": "float16", "calls": 6 * STEPS, "elements": elements * STEPS},
        {"operation": "all_reduce", "dtype": "float64", "calls": STEPS, "elements": STEPS},
    ]

    assert run_ranks(tiny_job(tmp_path / "run", world_size=2), lambda world: counted(world, tmp_path)) == [expected, expected]


def test_one_process_has_none(tmp_path: Path) -> None:
    """Without a process group, or a recorder, the table is empty."""
    run = bench(tmp_path)
    run.step(0, [1, 2])
    run.audit.close()

    assert run.rows("collectives") == []


def test_no_recorder_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch without the private name leaves an empty table."""
    monkeypatch.setattr(audit_collectives, "_dump", lambda: None)

    def rows(world: World) -> list[Any]:
        collectives = Collectives()
        collectives.start()
        dist.barrier()
        collectives.stop()
        collectives.read()
        return collectives.rows()

    assert run_ranks(tiny_job(tmp_path, world_size=2), rows) == [[], []]


def sharded(world: World, folder: Path, *, is_sharded: bool) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], float]:
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 1))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    if is_sharded:
        fully_shard(model, mesh=init_device_mesh("cpu", (world.world_size,)))
    run = bench(folder / f"{is_sharded}-{world.rank}", world, model=model, keep_gradients=1)
    run.step(0, [1, 2, 3])
    run.audit.close()
    digests = [(row["stage"], row["tensor"], row["sha256"]) for row in run.rows("digests")]
    return digests, run.rows("collectives"), run.rows("updates")[0]["moved"]


def test_shards_are_digested_whole(tmp_path: Path) -> None:
    """With FSDP2 every rank leaves the digests and norms of the whole tensors; the audit's gathering is not among the collectives."""
    whole, other = (
        run_ranks(tiny_job(tmp_path / str(kind), world_size=2), lambda world, kind=kind: sharded(world, tmp_path, is_sharded=kind))
        for kind in (True, False)
    )

    assert whole[0][0] == whole[1][0]
    assert [row[:2] for row in whole[0][0]] == [row[:2] for row in other[0][0]]
    assert dict(zip([row[:2] for row in whole[0][0]], whole[0][0], strict=True))["weight", "0.bias"][2] != tensor_sha256(torch.zeros(5))
    assert whole[0][2] == pytest.approx(other[0][2], rel=1e-5)
    assert [(row["operation"], row["dtype"], row["calls"]) for row in whole[0][1]] == [
        ("all_gather", "float32", 1), ("all_reduce", "float32", 1),
    ]  # fmt: skip
