"""A snapshot from outside: of ranks that wait, hold their interpreter, are stopped, are dead; in time, laid over torch's own records."""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers_loop import FORK
from torch import nn

from trainer.evidence import Taken, Watched, finish, take
from trainer.recorded_merge import _is_same, document
from trainer.recorded_reading import RingReader
from trainer.recording import Recording
from trainer.ring import RingWriter, ring_path, signature_text
from validation.flight import Signature

WAITING, HELD, STOPPED, DEAD, FAILED = range(5)


def live(folder: Path, rank: int) -> None:
    """Three steps together, the last one with DDP; then each rank comes to its own end."""
    Recording.start(folder, rank, 5, attempt=7)
    store = dist.FileStore(str(folder / "store"), 5)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=5, timeout=timedelta(seconds=20))
    recording = Recording.start(folder, rank, 5)  # takes over, with a server of its own
    for step in range(3):
        recording.step(step)
        dist.all_reduce(torch.ones(4 + step))
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    model(torch.ones(2, 4)).sum().backward()
    dist.barrier()
    recording.step(3, "forward")
    (folder / f"ready-{rank}").touch()
    if rank == HELD:
        recording.phase("data")
        re.match(r"(a+)+$", "a" * 60 + "b")  # for ever, in C
    if rank == STOPPED:
        os.kill(os.getpid(), signal.SIGSTOP)
    if rank == DEAD:
        time.sleep(0.5)  # its part of the barrier has left
        os.kill(os.getpid(), signal.SIGKILL)
    if rank == FAILED:
        try:
            raise ValueError("loss is nan")
        finally:
            time.sleep(60)
    dist.all_reduce(torch.ones(8))


@contextmanager
def five_ranks(folder: Path) -> Iterator[list[Watched]]:
    """The ranks, each where it stays."""
    ranks = [FORK.Process(target=live, args=(folder, rank)) for rank in range(5)]
    for rank in ranks:
        rank.start()
    try:
        until = time.monotonic() + 60
        while len(list(folder.glob("ready-*"))) < 5 or ranks[DEAD].is_alive():
            assert time.monotonic() < until
            time.sleep(0.02)
        time.sleep(0.8)  # a heartbeat has been missed, or an exception seen at one
        yield [Watched(number, rank.pid or 0, ring_path(folder, 0, number)) for number, rank in enumerate(ranks)]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join(20)


def test_five_ranks(tmp_path: Path) -> None:
    """Two snapshots of five ranks, dead and stopped ones included, take a moment, and each rank tells its own story."""
    with five_ranks(tmp_path) as ranks:
        began = time.monotonic()
        first = take(ranks, tmp_path / "001", number=1)
        take(ranks, tmp_path / "001", number=2)
        took_s = time.monotonic() - began
    finish(tmp_path / "001", exit_codes={DEAD: -9}, results={FAILED: "ValueError: loss is nan"})

    assert took_s < 2.0  # 0.07 on a quiet machine
    assert first.states[STOPPED] == "T"
    assert first.states[DEAD] in "XZ"
    assert first.recorded == (0, 1, 2, 3, 4)
    assert first.answered == first.stacks == (WAITING, HELD, FAILED)
    _check_stories(tmp_path / "001")
    assert json.loads((tmp_path / "001" / "states.json").read_text()).keys() == {"1", "2"}
    assert json.loads((tmp_path / "001" / "exitcodes.json").read_text()) == {"3": -9}
    assert (tmp_path / "001" / "rank4.result.txt").read_text() == "ValueError: loss is nan"


def _check_stories(folder: Path) -> None:
    """What the files of the second snapshot say of each rank."""
    dumps = [json.loads((folder / f"rank{rank}.hang2.json").read_text()) for rank in range(5)]
    markers = [dump["sea_trial"]["marker"] for dump in dumps]
    age_s = [(dump["sea_trial"]["taken_ns"] - marker["beat_ns"]) / 1e9 for dump, marker in zip(dumps, markers, strict=True)]
    names = [[(entry["profiling_name"], entry["collective_seq_id"], entry["retired"]) for entry in dump["entries"]] for dump in dumps]
    stacks = {rank: (folder / f"rank{rank}.stack2.txt").read_text() for rank in (WAITING, HELD, FAILED)}

    # DDP's bucket and what it does when it is made were begun by C++: only torch's recorder has them
    ops = ["all_reduce"] * 3 + ["all_gather", "broadcast", "broadcast", "all_reduce", "barrier"]
    common = [(f"gloo:{op}", seq, True) for seq, op in enumerate(ops, 1)]
    assert names[WAITING] == [*common, ("gloo:all_reduce", 9, False)]
    assert names[HELD] == names[FAILED] == common
    assert names[STOPPED] == names[DEAD] == [*common[:3], common[7]]
    assert dumps[WAITING]["entries"][-1]["where"].endswith("live")
    assert dumps[WAITING]["entries"][-1]["step"] == 3
    assert [entry["step"] for entry in dumps[WAITING]["entries"]] == [0, 1, 2, 2, 2, 2, 2, 2, 3]
    assert [marker["phase"] for marker in markers] == ["forward", "data", "forward", "forward", "forward"]
    assert age_s[WAITING] < 0.6 < min(age_s[HELD], age_s[STOPPED], age_s[DEAD])
    assert markers[FAILED]["note"].startswith("exception: ValueError: loss is nan (test_snapshots.py:")
    assert "in all_reduce\n" in stacks[WAITING]
    assert "in match\n" in stacks[HELD]
    assert all("Thread 0x" in stack and stack.rstrip().splitlines()[-1].startswith("  File") for stack in stacks.values())
    assert dumps[DEAD]["pg_config"]["0"]["ranks"] == "[0, 1, 2, 3, 4]"


@contextmanager
def _server(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """Somebody who listens where a rank's server would. Yields: the address."""
    name = f"seatrial-test-{os.getpid()}-{time.monotonic_ns()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + name)
        listener.listen()

        def serve() -> None:
            link, _ = listener.accept()
            with link:
                answer(link)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"@{name}"
        thread.join(5)


def _nothing(link: socket.socket) -> None:
    time.sleep(0.6)


def _half(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{")


def _nonsense(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\nabc")


def _refusal(link: socket.socket) -> None:
    link.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


@pytest.mark.parametrize("answer", [_nothing, _half, _nonsense, _refusal], ids=lambda answer: answer.__name__[1:])
def test_server_that_does_not_tell(answer: Callable[[socket.socket], None], tmp_path: Path) -> None:
    """Silence costs 0.3 s; half an answer or nonsense is no answer: the ring stands alone."""
    ring = _ring_of_two(tmp_path / "a.ring")
    with _server(answer) as address:
        ring.address(address)
        began = time.monotonic()
        taken = take([Watched(0, os.getpid(), tmp_path / "a.ring")], tmp_path / "001", number=1)
        took_s = time.monotonic() - began

    assert taken.answered == ()
    assert took_s < 0.5
    dump = json.loads((tmp_path / "001" / "rank0.hang.json").read_text())
    assert [entry["profiling_name"] for entry in dump["entries"]] == ["gloo:all_reduce", "gloo:send"]
    assert dump["sea_trial"]["has_torchs"] is False


def _ring_of_two(path: Path) -> RingWriter:
    """An all_reduce that is over and a send that is not, of rank 0 of 2, in this process."""
    ring = RingWriter(path, rank=0, world_size=2)
    group = ring.texts.number(ring.group("0", (0, 1), "default_pg", 1, "gloo"))
    for seq, signature, flags in (
        (1, Signature("all_reduce", ((4,),), ("Float",), reduce_op="sum"), 0),
        (1, Signature("send", peer=1, tag=3), 1),
    ):
        numbers = (group, ring.texts.number(signature_text(signature)), ring.texts.number("train.py:5 step"))
        serial = ring.operation(1_000_000_000 * (1 + flags), seq, *numbers, 0, -1, 0, flags, 1)
        if not flags:
            ring.left(serial, 1_100_000_000)
    return ring


def entry(op: str, seq: int, created_ns: int, *, retired: bool = True) -> dict[str, Any]:
    """One of torch's own."""
    return {
        "record_id": seq - 1, "process_group": ["0", "default_pg"], "profiling_name": f"gloo:{op}", "collective_seq_id": seq,
        "is_p2p": False, "time_created_ns": created_ns, "retired": retired, "input_sizes": [[4]], "input_dtypes": ["Float"],
        "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "scheduled", "time_discovered_completed_ns": 0,
    }  # fmt: skip


def test_number_that_is_off_is_found_by_time(tmp_path: Path) -> None:
    """Recording that began late counts from one: the stamps tell which of torch's operations it was, and its number counts."""
    _ring_of_two(tmp_path / "a.ring")
    torchs = {"entries": [entry("broadcast", 1, 900_000_000), entry("all_reduce", 2, 1_000_050_000)], "version": "2.10"}

    found = document(RingReader(tmp_path / "a.ring"), torchs, taken_ns=7)

    assert [(one["profiling_name"], one["collective_seq_id"], one["reduce_op"], one["peer"]) for one in found["entries"]] == [
        ("gloo:broadcast", 1, "", -1), ("gloo:all_reduce", 2, "sum", -1), ("gloo:send", 0, "", 1),
    ]  # fmt: skip
    assert [one["record_id"] for one in found["entries"]] == [0, 1, 2]


@pytest.mark.parametrize(
    ("op", "theirs", "is_same"),
    [
        ("all_gather", "nccl:_all_gather_base", True), ("barrier", "nccl:all_reduce_barrier", True), ("send", "nccl:send 0->1", True),
        ("reduce_scatter", "gloo:all_reduce", True), ("reduce_scatter", "nccl:_reduce_scatter_base", True),
        ("reduce", "gloo:all_reduce", False), ("broadcast", "gloo:all_reduce", False),
    ],
)  # fmt: skip
def test_names_of_backends(op: str, theirs: str, *, is_same: bool) -> None:
    """A backend's own name for an operation is known; another operation at the same number is not taken for it."""
    assert _is_same(op, theirs) is is_same


def test_operations_of_helper_groups_are_not_told_twice(tmp_path: Path) -> None:
    """Under DETAIL torch checks and makes each operation in groups without a name: the ring's word for it is enough."""
    _ring_of_two(tmp_path / "a.ring")
    helper = [one | {"process_group": ["", ""]} for one in (entry("all_gather", 3, 1_000_010_000), entry("all_reduce", 1, 1_000_020_000))]

    found = document(RingReader(tmp_path / "a.ring"), {"entries": helper}, taken_ns=7)

    assert [(one["process_group"][0], one["profiling_name"]) for one in found["entries"]] == [("0", "gloo:all_reduce"), ("0", "gloo:send")]


def test_process_that_took_the_number_is_not_the_rank(tmp_path: Path) -> None:
    """A pid that belongs to somebody else by now is gone: nobody is sent a signal."""
    path = tmp_path / "a.ring"
    _ring_of_two(path)
    body = bytearray(path.read_bytes())
    body[36] ^= 0xFF  # when it started
    path.write_bytes(body)

    assert take([Watched(0, os.getpid(), path)], tmp_path / "001", number=1).states == {0: "X"}


def test_rank_without_a_ring(tmp_path: Path) -> None:
    """Nothing recorded yet: its state is all there is."""
    taken = take([Watched(0, os.getpid(), tmp_path / "none.ring")], tmp_path / "001", number=1)

    assert taken == Taken(taken.taken_ns, taken.states, (), (), ())
    assert taken.states[0] in "RS"
    assert sorted(path.name for path in (tmp_path / "001").iterdir()) == ["states.json"]
