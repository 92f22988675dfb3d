"""What a rank does is recorded once, by whatever way it asks for it, with what torch's own recorder lacks; nothing of it stays behind."""

import gc
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_loop import run_ranks, tiny_job
from torch.distributed import all_reduce as imported_before
from torch.distributed.distributed_c10d import ProcessGroup, Work

from trainer.recorded_reading import Recorded, RingReader
from trainer.recording import SWITCH, Recording, current, recording_of
from trainer.ring import ring_path
from trainer.world import World
from validation.flight import Group, Marker

gather_by_older_name = dist.all_gather_into_tensor


def recorded(folder: Path, world: World, function: Callable[[Recording], Any]) -> tuple[list[Recorded], Marker, dict[str, Group], Any]:
    """What one rank records while it runs a function, and what that returns."""
    with Recording.start(folder, world.rank, world.world_size) as recording:
        found = function(recording)
    with RingReader(ring_path(folder, 0, world.rank)) as reader:
        return reader.operations(), reader.marker(), reader.groups(), found


def on_ranks(folder: Path, function: Callable[[Recording], Any], world_size: int = 2) -> list[Any]:
    """The same on every rank of a gloo group."""
    return run_ranks(tiny_job(folder, world_size=world_size), lambda world: recorded(folder, world, function))


def said(entry: Recorded) -> tuple[object, ...]:
    """Operator, root, peer and tag of an operation."""
    _, _, _, _, _, *rest = entry.signature
    return (entry.signature.op, *rest)


def everything(recording: Recording) -> list[tuple[str, int]]:
    """Each operation once, by several names. Returns: what torch's own recorder says of them."""
    rank, one, two = dist.get_rank(), torch.ones(1), torch.ones(2)
    recording.step(4)
    recording.micro(1, "backward")
    imported_before(torch.ones(4, 2), op=dist.ReduceOp.MAX)
    dist.barrier()
    dist.monitored_barrier()
    if rank:
        dist.recv(one, 0, tag=7)
        dist.send(two, 0)
    else:
        dist.send(one, 1, tag=7)
        dist.recv(two)
    for work in dist.batch_isend_irecv([dist.P2POp(dist.isend, one, 1 - rank), dist.P2POp(dist.irecv, two[:1], 1 - rank)]):
        work.wait()
    dist.all_gather_object([None, None], {"rank": rank})
    dist.all_to_all_single(two, torch.ones(2))
    dist.reduce_scatter_tensor(one, two)
    gather_by_older_name(two, one)
    dist.all_gather([torch.ones(1), torch.ones(1)], one)
    dist.scatter(one, [torch.ones(1), torch.ones(1)] if rank == 0 else None, src=0)
    dist.gather(one, [torch.ones(1), torch.ones(1)] if rank == 1 else None, dst=1)
    dist.reduce(one.double(), dst=1)
    dist.broadcast(torch.ones(3, dtype=torch.bool), src=1)
    dist.all_reduce(one, async_op=True).wait()
    entries = json.loads(torch._C._distributed_c10d._dump_fr_trace_json(True, False))["entries"]
    return [(entry["profiling_name"], entry["collective_seq_id"]) for entry in entries]


def test_every_operation_is_recorded_once(tmp_path: Path) -> None:
    """By imported and older names, inside of object collectives, to and from a peer: with operator, root, peer, tag, place and labels."""
    (zero, marker, _, torchs), (one, *_) = on_ranks(tmp_path, everything)

    assert [said(entry) for entry in one] == [
        ("all_reduce", "max", -1, -1, 0), ("barrier", "", -1, -1, 0), ("monitored_barrier", "", -1, -1, 0), ("recv", "", -1, 0, 7),
        ("send", "", -1, 0, 0), ("send", "", -1, 0, 0), ("recv", "", -1, 0, 0),
        ("all_gather", "", -1, -1, 0), ("all_gather", "", -1, -1, 0),
        ("all_to_all", "", -1, -1, 0), ("reduce_scatter", "sum", -1, -1, 0), ("all_gather", "", -1, -1, 0), ("all_gather", "", -1, -1, 0),
        ("scatter", "", 0, -1, 0), ("gather", "", 1, -1, 0), ("reduce", "sum", 1, -1, 0), ("broadcast", "", 1, -1, 0),
        ("all_reduce", "sum", -1, -1, 0),
    ]  # fmt: skip
    assert [entry.signature.op for entry in zero if entry.is_p2p] == ["send", "recv", "send", "recv"]
    assert {(entry.step, entry.micro, entry.phase, entry.place.partition(":")[0]) for entry in zero} == {
        (4, 1, "backward", "test_recording.py")
    }
    assert all(entry.left_ns >= entry.created_ns > 0 for entry in zero)
    assert (zero[0].signature.sizes, zero[0].signature.dtypes) == (((4, 2),), ("Float",))
    assert (one[15].signature.dtypes, one[16].signature.dtypes) == (("Double",), ("Bool",))
    assert (marker.step, marker.phase) == (4, "done")
    mine = [entry.seq for entry in zero if not entry.is_p2p and entry.signature.op != "monitored_barrier"]
    assert mine == [seq for _, seq in torchs][-len(mine) :]  # so that the two can be laid over each other


def some_groups(recording: Recording) -> None:
    """Two groups, of which this rank is in one, and a third that nobody uses."""
    pair = [dist.new_group([0, 2]), dist.new_group([1])]
    dist.new_group([0, 1, 2], group_desc="all of them")
    if dist.get_rank() != 1:
        dist.broadcast(torch.ones(1), src=2, group=pair[0])


def test_members_of_groups_are_known_everywhere(tmp_path: Path) -> None:
    """Every rank knows every group's members, also of those that it is not in; roots are global ranks."""
    found = on_ranks(tmp_path, some_groups, world_size=3)

    for operations, _, groups, _ in found:
        assert [group.ranks for group in groups.values()] == [(0, 1, 2), (0, 2), (1,), (0, 1, 2)]
        assert [(entry.group.ranks, entry.signature.root) for entry in operations] in ([], [((0, 2), 2)])
    assert groups["3"].description == "all of them"


def test_ends_are_known_as_far_as_can_be(tmp_path: Path) -> None:
    """Waited for, asked about, handed on to a later step: over. Failed: not, however it left."""
    (operations, marker, *_), _ = on_ranks(tmp_path, failing)

    assert [(entry.signature.op, entry.is_over(marker), entry.is_failed) for entry in operations] == [
        ("all_reduce", True, False), ("all_reduce", True, False), ("monitored_barrier", False, True),
    ]  # fmt: skip
    assert operations[2].left_ns > 0


def failing(recording: Recording) -> None:
    """A future, a question, and on rank 0 a barrier that nobody joins."""
    recording.step(0)
    dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    asked = dist.all_reduce(torch.ones(1), async_op=True)
    while not asked.is_completed():
        time.sleep(0.001)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError):
            dist.monitored_barrier(timeout=timedelta(seconds=0.05))
    recording.step(1)


def again(recording: Recording) -> None:
    """The group of all ranks, dissolved and made again."""
    for seq in range(3):
        dist.all_reduce(torch.ones(seq + 1))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    folder = os.environ["SECOND"]
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.FileStore(folder, world_size), rank=rank, world_size=world_size)
    dist.barrier()


def test_group_made_again_starts_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Operations of a group that was dissolved are not those of its namesake."""
    monkeypatch.setenv("SECOND", str(tmp_path / "second"))

    for operations, *_ in on_ranks(tmp_path, again):
        assert [(entry.signature.op, entry.seq) for entry in operations] == [("barrier", 1)]


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, value: torch.Tensor) -> torch.Tensor:
        return value.clone()

    @staticmethod
    def backward(*_: Any) -> Any:
        raise MemoryError("no room")


def noted(folder: Path, function: Callable[[Recording], Any]) -> str:
    """The note of a process that records alone."""
    return recorded(folder, World(rank=0, world_size=1), function)[1].note


def test_exception_that_was_caught_is_told_for_a_while(tmp_path: Path) -> None:
    """One that left a backward pass is noted, though the program goes on; after two more steps it is forgotten."""
    notes = []

    def skip(recording: Recording) -> None:
        recording.note("data exhausted")
        for step in range(4):
            recording.step(step)
            if step == 0:
                with pytest.raises(MemoryError):
                    Broken.apply(torch.ones(1, requires_grad=True)).sum().backward()
            notes.append(RingReader(ring_path(tmp_path, 0, 0)).marker().note)

    noted(tmp_path, skip)

    assert all(note.startswith("data exhausted; exception: MemoryError: no room (test_recording.py:") for note in notes[:3])
    assert notes[3] == "data exhausted"


def test_exception_on_its_way_is_told_at_a_heartbeat(tmp_path: Path) -> None:
    """A clean-up that takes long holds an exception that nobody has seen yet."""

    def clean_up(_: Recording) -> str:
        try:
            try:
                raise ValueError("loss is nan")
            finally:
                time.sleep(0.5)
        except ValueError:
            return RingReader(ring_path(tmp_path, 0, 0)).marker().note

    assert "ValueError: loss is nan (test_recording.py" in recorded(tmp_path, World(rank=0, world_size=1), clean_up)[3]


def test_what_ends_the_program_is_told(tmp_path: Path) -> None:
    """An exception that leaves the recording is noted, and the phase stays the one in which it was raised."""

    def fail(recording: Recording) -> None:
        recording.step(2, "forward")
        raise KeyError("label")

    with pytest.raises(KeyError):
        recorded(tmp_path, World(rank=0, world_size=1), fail)

    marker = RingReader(ring_path(tmp_path, 0, 0)).marker()
    assert (marker.step, marker.phase) == (2, "forward")
    assert marker.note.startswith("exception: KeyError: 'label' (test_recording.py:")


def test_steps_add_up(tmp_path: Path) -> None:
    """A step's phases fill its time; collections are counted, long ones written down."""

    def steps(recording: Recording) -> None:
        recording.step(0)
        time.sleep(0.02)
        recording.phase("forward")
        recording._collected("start", {})
        time.sleep(0.01)
        recording._collected("stop", {})
        recording.phase("optimizer")
        recording.step(1)
        gc.collect()

    recorded(tmp_path, World(rank=0, world_size=1), steps)
    with RingReader(ring_path(tmp_path, 0, 0)) as reader:
        row, events = reader.steps()[0], reader.events()

    assert row["phase_ns"].sum() == row["end_ns"] - row["start_ns"]
    assert row["phase_ns"][0] >= 20_000_000
    assert (events[0].kind, events[0].phase, events[0].step) == ("gc", "forward", 0)
    assert row["gc_ns"] >= events[0].lasted_ns >= 10_000_000


def test_thread_behind_has_labels_of_its_own(tmp_path: Path) -> None:
    """A thread that works behind training is not taken for the step in front of it."""

    def behind(recording: Recording) -> None:
        recording.step(9)

        def work() -> None:
            with recording.aside(4, "checkpoint"):
                assert recording.entered(1)[0] == 4

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert recording.entered(1)[0] == 9

    recorded(tmp_path, World(rank=0, world_size=1), behind)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    """After the end torch, the hooks and the collector are as they were."""
    before = (dict(ProcessGroup.__dict__), Work.__dict__["wait"], sys.excepthook, torch.autograd.backward, list(gc.callbacks))

    recorded(tmp_path, World(rank=0, world_size=1), lambda _: None)

    after = (dict(ProcessGroup.__dict__), Work.__dict__["wait"], sys.excepthook, torch.autograd.backward, list(gc.callbacks))
    assert before == after
    assert current() is None


def test_forked_child_writes_nothing(tmp_path: Path) -> None:
    """A loader's worker shares the ring's memory, and is not the rank."""

    def fork(recording: Recording) -> bool:
        recording.step(1)
        pid = os.fork()
        if pid == 0:
            os._exit(0 if current() is None and sys.excepthook is sys.__excepthook__ else 1)
        return os.waitpid(pid, 0)[1] == 0

    assert recorded(tmp_path, World(rank=0, world_size=1), fork)[3]


def test_without_room_it_goes_on_in_memory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that cannot be made costs the record, not the run."""
    (tmp_path / "flight").write_text("in the way")

    with Recording.start(tmp_path, 0, 1) as recording:
        recording.step(0)

    assert "cannot be made" in capsys.readouterr().err


def test_switch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What recording costs can be measured without it."""
    monkeypatch.setenv(SWITCH, "off")

    with recording_of(tmp_path, 0, 1, attempt=0):
        assert current() is None
    assert not (tmp_path / "flight").exists()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_nccl_is_recorded_like_gloo(tmp_path: Path) -> None:
    """One rank on one GPU: the same fields, and torch's own numbers of started and completed stay in the document."""
    from trainer.recorded_merge import document

    with Recording.start(tmp_path, 0, 1):
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        dist.all_reduce(torch.ones(4, device="cuda"))
        torch.cuda.synchronize()
        torchs = json.loads(torch._C._distributed_c10d._dump_nccl_trace_json(True, False))
        found = document(RingReader(ring_path(tmp_path, 0, 0)), torchs, taken_ns=1)
        dist.destroy_process_group()

    (entry,) = found["entries"]
    assert (entry["profiling_name"], entry["reduce_op"], entry["collective_seq_id"]) == ("nccl:all_reduce", "sum", 1)
    assert entry["time_discovered_started_ns"]
