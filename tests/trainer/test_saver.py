"""Saving behind training's back: what is sealed is what was there when it was asked for, at any world size, and a failing disk is told."""

import hashlib
import os
import resource
import shutil
import signal
import tempfile
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers_checkpoint import ALONE, empty, load, names, save, saver, state_after, wide_state
from helpers_loop import run_ranks, tiny_job
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor import empty as empty_dtensor

from trainer.checkpoint import CLAIM
from trainer.sealing import BUFFER_BYTES, SealingStream
from trainer.staging import MIN_SHARE_BYTES, HostCopy
from trainer.state import State, state_digest
from trainer.world import World
from validation.manifest import FileSeal


def state_of(tensors: dict[str, Tensor], step: int = 1) -> State:
    return State(step=step, position=0, seed=7, tensors=tensors, plain={})


def test_what_is_sealed_is_the_state_of_the_call(tmp_path: Path) -> None:
    """Training goes on while the files are written, and nothing of what it does then is in them."""
    begun, go_on, weight = threading.Event(), threading.Event(), torch.zeros(1000)

    def hold(phase: str, _: int) -> None:
        if phase == "write":
            begun.set()
            assert go_on.wait(60)

    made = saver(tmp_path, at=hold)
    made.save(state_of({"weight/x": weight}))
    weight.fill_(1.0)
    assert begun.wait(60)
    assert names(tmp_path) == ["step-00000001.partial"]
    go_on.set()
    made.close()

    found = load(tmp_path).state
    assert found is not None
    assert found.tensors["weight/x"].eq(0).all()


def test_next_save_waits_for_the_one_under_way(tmp_path: Path) -> None:
    """Saves never overlap: phases come in order, named by the update before the save; each is told once it stands."""
    said: list[Any] = []

    def at(phase: str, update: int) -> None:
        time.sleep(0.02)
        said.append((phase, update))

    save(tmp_path, state_after(1), state_after(2), at=at, emit=lambda name, **fields: said.append((name, fields["step"])))

    each = [("staging", 0), ("write", 0), ("seal", 0), ("sealed", 1)]
    assert said == each + [(name, number + 1) for name, number in each]


def test_sealed_event_tells_size_and_time(tmp_path: Path) -> None:
    """Bytes are those of the folder's files but the manifest."""
    [(name, fields)] = save(tmp_path, state_after(1))

    sizes = [path.stat().st_size for path in (tmp_path / "step-00000001").iterdir() if path.name != "MANIFEST.json"]
    assert (name, fields["bytes"]) == ("sealed", sum(sizes))
    assert 0 < fields["seconds"] < 20


@given(sizes=st.lists(st.sampled_from([0, 1, 64, BUFFER_BYTES - 1, BUFFER_BYTES, BUFFER_BYTES + 7]), max_size=9))
def test_what_is_written_in_pieces_is_sealed_in_order(sizes: list[int]) -> None:
    """Small pieces wait for one another; the file, its size and its sha256 are those of all of them, a phase is told once they leave."""
    told: list[int] = []
    with tempfile.TemporaryFile() as raw:
        stream = SealingStream(raw, lambda: told.append(1))
        body = b"".join(bytes([place]) * size for place, size in enumerate(sizes))
        for place, size in enumerate(sizes):
            assert stream.write(bytes([place]) * size) == size
        stream.sync()
        raw.seek(0)

        assert raw.read() == body
        assert stream.tell() == len(body)
        assert stream.seal() == FileSeal(bytes=len(body), sha256=hashlib.sha256(body).hexdigest())
        assert bool(told) == bool(body)


def test_newest_two_are_kept(tmp_path: Path) -> None:
    """Older ones go when a newer one stands."""
    save(tmp_path, *map(state_after, (1, 2, 3, 4)))

    assert names(tmp_path) == [CLAIM, "step-00000003", "step-00000004"]


def test_refused_ones_go_once_training_is_past_them(tmp_path: Path) -> None:
    """A damaged checkpoint does not count as one of the two, and never pushes out a good one."""
    save(tmp_path, *map(state_after, (1, 2, 3)))
    (tmp_path / "step-00000003" / "state.json").write_text("{}")
    found = load(tmp_path)
    assert (found.state and found.state.step, found.damaged) == (2, {"step-00000003"})

    made = saver(tmp_path, damaged=found.damaged)
    for step, left in ((2, [2, 3]), (3, [2, 3]), (4, [3, 4])):
        made.save(state_after(step))
        made.settle()
        assert names(tmp_path) == [CLAIM, *(f"step-{number:08d}" for number in left)]
    assert load(tmp_path).refused == ()


def test_leftovers_of_a_dead_attempt_are_cleared(tmp_path: Path) -> None:
    """What was never sealed, or was on its way out, is removed before the first save."""
    for name in ("step-00000001.partial", "step-00000002.replaced"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x").write_text("x")

    save(tmp_path, state_after(1))
    assert names(tmp_path) == [CLAIM, "step-00000001"]


@pytest.mark.parametrize("phase", ["staging", "write", "seal"])
def test_planned_error_comes_out_of_the_saver(phase: str, tmp_path: Path) -> None:
    """A fault that raises is not taken for a failing disk: the rank ends with its words."""

    def at(now: str, _: int) -> None:
        if now == phase:
            raise RuntimeError("as planned")

    with pytest.raises(RuntimeError, match="as planned"):
        save(tmp_path, state_after(1), at=at)
    assert load(tmp_path).state is None


def test_store_that_cannot_be_written_stops_saves_only(tmp_path: Path) -> None:
    """A file stands where the folder has to be: it is told, and the next save works when it is gone."""
    said: list[Any] = []
    made = saver(tmp_path, emit=lambda name, **fields: said.append((name, fields)))
    (tmp_path / "step-00000001.partial").write_text("")
    made.save(state_after(1))
    made.settle()
    (tmp_path / "step-00000001.partial").unlink()
    made.save(state_after(2))
    made.close()

    assert [name for name, _ in said] == ["unsaved", "sealed"]
    assert "FileExistsError" in said[0][1]["reason"]


def test_nothing_is_sealed_before_its_rows_are_on_disk(tmp_path: Path) -> None:
    """Rows are waited for before a byte of the state is written; a disk that refuses them stops this save only."""
    said: list[Any] = []
    standing: list[list[str]] = []

    def refuse() -> None:
        standing.append(names(tmp_path))
        raise OSError(28, "No space left on device")

    made = saver(tmp_path, emit=lambda name, **fields: said.append((name, fields.get("reason", ""))))
    made.save(state_after(1), rows=refuse)
    made.settle()
    made.save(state_after(2), rows=lambda: standing.append(names(tmp_path)))
    made.close()

    assert standing == [[], []]
    assert said == [("unsaved", "rank 0: its rows cannot be written ([Errno 28] No space left on device)"), ("sealed", "")]


@pytest.mark.parametrize("full_rank", [0, 1])
def test_full_disk_of_one_rank_fails_the_save_on_all(full_rank: int, tmp_path: Path) -> None:
    """A write that the kernel refuses leaves the last checkpoint in charge, no half one, and the next save tries again."""
    root = tmp_path / "root"

    def work(world: World) -> list[Any]:
        said: list[Any] = []
        made = saver(root, world, emit=lambda name, **fields: said.append((name, fields.get("reason", ""))))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        for step, limit in ((1, resource.RLIM_INFINITY), (2, 100_000), (3, resource.RLIM_INFINITY)):
            if world.rank == full_rank:
                resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
            made.save(wide_state(step))
            made.settle()
            standing = [name for name in names(root) if name <= f"step-{step:08d}.partial"]  # the other rank may be in the next save
            said.append((made.sealed_step, standing))
        made.close()
        return said

    first, second = run_ranks(tiny_job(tmp_path / "job", world_size=2), work)
    assert [first[0], first[2], first[4]] == [("sealed", ""), ("unsaved", first[2][1]), ("sealed", "")]
    assert f"rank {full_rank}: " in first[2][1]
    assert first[3] == (1, [CLAIM, "step-00000001"])
    assert [step for step, _ in second] == [1, 1, 3]
    assert state_digest(load(root).state) == state_digest(wide_state(3))  # type: ignore[arg-type]


def test_disk_that_gives_back_other_bytes_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint that does not read back as it was written is not sealed, and the older one stays."""
    save(tmp_path, state_after(1))
    monkeypatch.setattr(os, "posix_fadvise", lambda fd, *_: os.pwrite(os.open(f"/proc/self/fd/{fd}", os.O_WRONLY), b"\xff", 700))

    [(name, fields)] = save(tmp_path, state_after(2))
    assert name == "unsaved"
    assert "__0_0.distcp reads back with sha256" in fields["reason"]
    assert names(tmp_path) == [CLAIM, "step-00000001"]


@pytest.mark.parametrize("phase", ["staging", "write", "seal"])
def test_dead_peer_does_not_hold_a_rank(phase: str, tmp_path: Path) -> None:
    """A peer killed in a save: the others' wait ends at once, `close` is quiet, the next save tells torch's own error."""

    def work(world: World) -> None:
        def at(now: str, _: int) -> None:
            if (now, world.rank) == (phase, 1):
                os.kill(os.getpid(), signal.SIGKILL)

        made = saver(tmp_path / "root", world, at=at, timeout_s=3.0 if phase == "staging" else 60.0)
        start, told = time.monotonic(), ""
        try:
            made.save(wide_state(1))
            made.close()
            made.save(wide_state(2))
            made.close()
            made.save(wide_state(3))
        except Exception as error:
            told = f"{error}"
        (tmp_path / "told").write_text(f"{time.monotonic() - start < 30} {told}")
        os._exit(0)  # the group cannot be left in good order

    with pytest.raises(EOFError):
        run_ranks(tiny_job(tmp_path / "job", world_size=2), work)
    assert (tmp_path / "told").read_text().startswith("True ")
    if phase != "staging":
        assert "gloo" in (tmp_path / "told").read_text()


VALUES = {
    "weight/even": torch.arange(8 * 3, dtype=torch.float32).reshape(8, 3),
    "weight/uneven": torch.arange(7 * 5, dtype=torch.bfloat16).reshape(7, 5) / 3,
    "weight/few": torch.arange(3, dtype=torch.float64) / 7,
    "optimizer/even/step": torch.tensor(11.0),
    "buffer/count": torch.tensor(5, dtype=torch.int64),
    "buffer/none": torch.empty(0, 4),
    "buffer/turned": torch.arange(12.0).reshape(3, 4).t(),
    "buffer/part": torch.arange(20)[3:7],
}


def tensors_digest(tensors: dict[str, Tensor]) -> str:
    return state_digest(state_of(tensors))


def sharded(value: Tensor, world: World) -> Tensor:
    """By rows over all ranks, as FSDP2 does; what has none is the same on every rank."""
    mesh = init_device_mesh("cpu", (world.world_size,))
    return distribute_tensor(value, mesh, [Shard(0) if value.ndim and value.numel() else Replicate()])


def like_sharded(world: World) -> Any:
    mesh = init_device_mesh("cpu", (world.world_size,))

    def make(name: str, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        if name.startswith("buffer/"):
            return empty(name, shape, dtype)
        return empty_dtensor(*shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0) if shape else Replicate()])

    return make


def test_any_world_size_reads_any_other(tmp_path: Path) -> None:
    """One plain rank -> 2 and 4 sharded ones -> 3 plain ones -> 4 sharded -> one: the same bytes all the way."""
    root = tmp_path / "root"
    save(root, state_of(VALUES))
    digest = tensors_digest(VALUES)
    legs = [(2, True), (4, True), (3, False), (4, True), (1, False)]
    for step, (world_size, is_sharded) in enumerate(legs, start=2):

        def leg(world: World, step: int = step, is_sharded: bool = is_sharded) -> tuple[str, str]:
            found = load(root, world=world, like=like_sharded(world) if is_sharded else empty).state
            assert found is not None
            tensors = dict(found.tensors)
            if is_sharded:
                assert all(name.startswith("buffer/") or tensors[name].placements for name in tensors)
            save(root, state_of(tensors, step=step), world=world)
            again = load(root, world=world).state
            assert again is not None
            return tensors_digest(tensors), tensors_digest(dict(again.tensors))

        assert run_ranks(tiny_job(tmp_path / f"leg-{step}", world_size=world_size), leg) == [(digest, digest)] * world_size


def test_freshly_sharded_state_is_saved_whole(tmp_path: Path) -> None:
    """Shards made by torch, not by a load: 4 ranks of 7 rows and of 3 (one rank has none)."""
    digest = state_digest(state_of(VALUES))
    run_ranks(
        tiny_job(tmp_path, world_size=4),
        lambda world: save(tmp_path / "root", state_of({name: sharded(value, world) for name, value in VALUES.items()}), world=world),
    )

    assert state_digest(load(tmp_path / "root").state) == digest  # type: ignore[arg-type]


def test_torch_itself_can_read_it(tmp_path: Path) -> None:
    """A sealed folder is an ordinary DCP checkpoint."""
    save(tmp_path, wide_state(1))
    target = {name: torch.empty_like(value) for name, value in wide_state(1).tensors.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that it loads in one process
        dcp.load(target, checkpoint_id=tmp_path / "step-00000001")

    assert all(target[name].equal(value) for name, value in wide_state(1).tensors.items())


def test_changed_layout_is_planned_anew(tmp_path: Path) -> None:
    """The optimizer's first update adds tensors, a restart may change shapes: the next save has them as they are then."""
    first, second = {"weight/x": torch.ones(3)}, {"weight/x": torch.ones(4), "optimizer/x/step": torch.tensor(1.0)}
    save(tmp_path, state_of(first, 1), state_of(second, 2), state_of(second, 3))

    found = load(tmp_path).state
    assert found is not None
    assert state_digest(found) == state_digest(state_of(second, 3))


def test_buffers_are_made_once() -> None:
    """A second copy of the same layout lands in the same memory."""
    copy = HostCopy(ALONE)
    places = [[piece.host.data_ptr() for piece in copy.take(VALUES)] for _ in range(2)]

    assert places[0] == places[1]


@given(st.lists(st.integers(0, 1_200_000), min_size=1, max_size=12), st.integers(1, 8))
def test_ranks_share_what_they_all_have(sizes: list[int], world_size: int) -> None:
    """Every tensor is saved by exactly one rank, and no rank has more than the largest tensor above another writer's load."""
    tensors = {f"weight/{i}": torch.empty(size, dtype=torch.uint8) for i, size in enumerate(sizes)}
    shares = [HostCopy(World(rank=rank, world_size=world_size)).take(tensors) for rank in range(world_size)]

    assert sorted(piece.name for share in shares for piece in share) == sorted(tensors)
    loads = [sum(piece.host.nbytes for piece in share) for share in shares]
    assert max(loads) <= sum(sizes) / max(1, min(world_size, sum(sizes) // MIN_SHARE_BYTES)) + max(sizes)


def test_small_states_are_one_file(tmp_path: Path) -> None:
    """Below a share's worth of bytes, more files cost more than they spread; rank 0, which signs, has the last turn to write."""
    run_ranks(tiny_job(tmp_path, world_size=3), lambda world: save(tmp_path / "root", state_after(1), world=world))

    assert names(tmp_path / "root" / "step-00000001") == [".metadata", "MANIFEST.json", "__2_0.distcp", "state.json"]
    shutil.rmtree(tmp_path / "root")
