"""A ring holds the newest of what its rank did, through kills, torn records and full areas; only a file that is no ring is refused."""

import faulthandler
import os
import random
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.recorded_layout import GROUPS_BYTES, OPERATION, OPERATION_TYPE, PHASE_SLOTS, TEXT_BYTES, Layout
from trainer.recorded_reading import Between, RingReader
from trainer.ring import RingWriter, read_ring, runs_of, signature_text
from validation.errors import EvidenceError
from validation.flight import Group, Marker, Signature

TEXT_OF_GROUP = '{"name":"0","ranks":[[0,4,1]],"description":"default_pg","made":9,"backend":"gloo"}'
SUM = Signature("all_reduce", ((4, 2),), ("Float",), ((4, 2),), ("Float",), "sum")


def writer(path: Path, *, entries: int = 16, strings: int = 1 << 15) -> RingWriter:
    return RingWriter(path, rank=1, world_size=4, layout=Layout(entries=entries, steps=8, events=8, strings=strings))


def issue(ring: RingWriter, seq: int, signature: Signature = SUM, *, over: bool = True, made: int = 1) -> int:
    """One operation of the group of all ranks, begun at `seq` ns."""
    text = ring.group("0", range(4), "default_pg", made, "gloo") if seq == 1 else TEXT_OF_GROUP.replace("9", str(made))
    group = ring.texts.number(text)
    numbers = (group, ring.texts.number(signature_text(signature)), ring.texts.number(f"train.py:{seq} step"))
    serial = ring.operation(seq, seq, *numbers, seq // 10, 0, ring.phase_of("backward"), 0, 7)
    if over:
        ring.left(serial, seq + 1)
    return serial


def test_what_was_written_is_read(tmp_path: Path) -> None:
    """Operations, marker, groups and notes come back as evidence."""
    ring = writer(tmp_path / "a.ring")
    issue(ring, 1)
    issue(ring, 2, over=False)
    ring.group("7", (1, 3), "pair", 2)
    ring.mark(5, 2, ring.phase_of("backward"), 99)
    ring.beat(123, 45)
    ring.note("data exhausted")

    dump = read_ring(tmp_path / "a.ring")

    assert (dump.rank, dump.wrapped, dump.signatures) == (1, False, (SUM,))
    assert dump.groups == (Group("0", (0, 1, 2, 3), "default_pg"), Group("7", (1, 3), "pair"))
    assert [dump.places[place] for place in dump.place] == ["train.py:1 step", "train.py:2 step"]
    assert (dump.seq.tolist(), dump.created_ns.tolist(), dump.finished.tolist()) == ([1, 2], [1, 2], [True, False])
    assert dump.marker == Marker(5, "backward", 2, 99, 123, "data exhausted")


def test_full_ring_keeps_the_newest(tmp_path: Path) -> None:
    """Of 40 operations in 16 slots the last 16 are left, it is known that older ones are gone, and a late end does not touch them."""
    ring = writer(tmp_path / "a.ring")
    serials = [issue(ring, seq, over=False) for seq in range(1, 41)]
    ring.left(serials[0], 77)
    ring.flag(serials[0], 2)

    dump = read_ring(tmp_path / "a.ring")

    assert dump.wrapped
    assert dump.seq.tolist() == list(range(25, 41))
    assert not dump.finished.any()


@pytest.mark.parametrize("at", [0, OPERATION.size - 8], ids=["first number", "last number"])
def test_torn_record_is_left_out(at: int, tmp_path: Path) -> None:
    """A record whose two numbers differ was being written when the process died: the ones before it stand."""
    path = tmp_path / "a.ring"
    ring = writer(path)
    for seq in (1, 2, 3):
        issue(ring, seq)
    body = bytearray(path.read_bytes())
    body[ring.layout.operations_at + 2 * OPERATION.size + at] ^= 0xFF
    path.write_bytes(body)

    assert read_ring(path).seq.tolist() == [1, 2]


def test_damage_never_raises(tmp_path: Path) -> None:
    """Whatever bytes are changed or missing behind the first ones, reading gives what is whole."""
    path = tmp_path / "a.ring"
    ring = writer(path, strings=1 << 12)
    for seq in range(1, 30):
        issue(ring, seq)
    whole = path.read_bytes()
    draw = random.Random(0)
    for _ in range(60):
        body = bytearray(whole)
        for _ in range(200):
            body[draw.randrange(64, len(body))] = draw.randrange(256)
        path.write_bytes(body[: draw.randrange(64, len(body))])
        with RingReader(path) as reader:
            dump = reader.dump()
            assert len(dump.seq) <= 16
            assert len(reader.steps()) <= 8
            assert len(reader.events()) <= 8


@pytest.mark.parametrize("body", [b"", b"PAR1 something else", b"\0" * 9000], ids=["empty", "foreign", "not begun"])
def test_foreign_file_is_refused(body: bytes, tmp_path: Path) -> None:
    """A file that is no ring is said to be none, with what to give instead."""
    (tmp_path / "a.ring").write_bytes(body)

    with pytest.raises(EvidenceError, match=r"not a ring .* Give the file under flight/"):
        read_ring(tmp_path / "a.ring")


def test_other_format_is_refused(tmp_path: Path) -> None:
    """A ring of a later version is not misread."""
    path = tmp_path / "a.ring"
    writer(path)
    body = bytearray(path.read_bytes())
    body[8] = 2
    path.write_bytes(body)

    with pytest.raises(EvidenceError, match="format 2"):
        read_ring(path)


def test_texts_make_room(tmp_path: Path) -> None:
    """A thousand sizes in room for a few hundred: the newest operations keep theirs, numbers are renewed in time."""
    ring = writer(tmp_path / "a.ring", entries=64)
    for seq in range(1, 1001):
        issue(ring, seq, Signature("all_gather", ((seq,),), ("Long",)))

    dump = read_ring(tmp_path / "a.ring")

    assert ring.texts.generation > 4
    assert dump.seq.tolist() == list(range(937, 1001))
    assert [dump.signatures[number].sizes for number in dump.signature] == [((seq,),) for seq in dump.seq.tolist()]


def test_overwritten_text_takes_its_operation_along(tmp_path: Path) -> None:
    """An operation whose sizes were overwritten is gone, not wrong."""
    ring = writer(tmp_path / "a.ring", strings=1 << 12)
    issue(ring, 1)
    for number in range(200):
        ring.texts.number(f"text {number} {'-' * 50}")
    issue(ring, 2)

    dump = read_ring(tmp_path / "a.ring")

    assert (dump.seq.tolist(), dump.wrapped) == ([2], True)


def test_huge_signature_loses_its_sizes_only() -> None:
    """Sizes that no place could hold are left out; equal ones in a row cost one."""
    many = Signature("all_gather", tuple((n,) for n in range(5000)), ("Float",) * 5000, reduce_op="max")

    assert len(signature_text(many)) < TEXT_BYTES
    assert signature_text(SUM._replace(sizes=((3, 3),) * 9)).startswith('["all_reduce",[[[3,3],9]]')


def test_group_made_again_replaces_the_first(tmp_path: Path) -> None:
    """After the group of all ranks was dissolved and made again, numbers begin again: only the new one's operations count."""
    ring = writer(tmp_path / "a.ring")
    for seq in (1, 2, 3):
        issue(ring, seq)
    issue(ring, 1, made=2)

    dump = read_ring(tmp_path / "a.ring")

    assert (dump.seq.tolist(), dump.wrapped) == ([1], False)


def test_areas_that_are_full_lose_nothing_else(tmp_path: Path) -> None:
    """More groups, phases and words than there is room for: the first ones stand, the rest does no harm."""
    ring = writer(tmp_path / "a.ring")
    for number in range(1500):
        ring.group(str(number), range(number), "x" * 20, number)
    numbers = [ring.phase_of(f"phase {number}") for number in range(100)]
    ring.mark(0, 0, numbers[-1], 1)
    ring.note("é" * 10_000)

    with RingReader(tmp_path / "a.ring") as reader:
        assert 400 < len(reader.groups()) < GROUPS_BYTES // 50
        assert reader.groups()["5"].ranks == (0, 1, 2, 3, 4)
        assert max(numbers) == PHASE_SLOTS - 1
        assert reader.marker().phase == "other"
        assert reader.marker().note.startswith("ééé")


@given(st.sets(st.integers(0, 300)))
@settings(max_examples=50, deadline=None)
def test_runs_spell_out_the_ranks(ranks: set[int]) -> None:
    """Runs hold each rank once, and a whole or strided world is one run."""
    assert sorted(rank for first, stop, stride in runs_of(tuple(ranks)) for rank in range(first, stop, stride)) == sorted(ranks)
    assert len(runs_of(range(1024))) == len(runs_of(range(3, 1024, 8))) == 1


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGABRT], ids=lambda signum: signum.name)
def test_killed_process_leaves_its_ring(signum: signal.Signals, tmp_path: Path) -> None:
    """What was written before the signal is there, whatever the signal."""
    path = tmp_path / "a.ring"
    pid = os.fork()
    if pid == 0:
        ring = writer(path)
        for seq in range(1, 21):
            issue(ring, seq, over=seq < 20)
        ring.mark(2, -1, ring.phase_of("backward"), 5)
        faulthandler.disable()  # pytest's would print the stack
        os.kill(os.getpid(), signum)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signum

    dump = read_ring(path)

    assert dump.seq.tolist() == list(range(5, 21))
    assert dump.finished.tolist() == [True] * 15 + [False]
    assert dump.marker is not None
    assert dump.marker.step == 2


def test_reading_while_it_is_written(tmp_path: Path) -> None:
    """No record that is half of one and half of another is ever taken, however fast they are written."""
    path = tmp_path / "a.ring"
    ring = writer(path, entries=4)
    pid = os.fork()
    if pid == 0:
        for seq in range(1, 10_000_000):
            serial = ring.operation(seq, seq, seq, seq, seq, seq % 1000, seq % 1000, 0, 0, 7)
            ring.left(serial, seq)
    reader, seen = RingReader(path), 0
    try:
        until = time.monotonic() + 0.3
        while time.monotonic() < until:
            rows = reader._whole(ring.layout.operations_at, 4, OPERATION_TYPE)
            for name in ("created_ns", "seq", "group", "signature", "place"):
                assert (rows[name] == rows["head"]).all(), name
            assert (rows["step"] == rows["head"] % 1000).all()
            seen += len(rows)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert seen > 100


def test_copy_that_overtakes_the_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy may hold both numbers of a new record around the old middle: that is read again, after its last number was seen."""
    path = tmp_path / "a.ring"
    ring = writer(path, entries=1)
    issue(ring, 1)
    start, reader = ring.layout.operations_at, RingReader(path)
    old = reader._bytes(start, OPERATION.size)
    issue(ring, 2)
    new = reader._bytes(start, OPERATION.size)
    copies = iter([new[:8] + old[8:-8] + new[-8:], new, new])
    monkeypatch.setattr(reader, "_bytes", lambda *_: next(copies))

    assert reader._whole(start, 1, OPERATION_TYPE)[["head", "seq"]].tolist() == [(2, 2)]


def test_steps_and_events_come_back(tmp_path: Path) -> None:
    """Rows of steps and what came between, oldest first, as many as there are slots."""
    ring = writer(tmp_path / "a.ring")
    for step in range(12):
        ring.step(step, step * 10, step * 10 + 4, step * 10 + 9, range(8), [0] * 8, 3)
        ring.event("gc", step, 6_000_000, step, ring.phase_of("backward"))

    with RingReader(tmp_path / "a.ring") as reader:
        assert reader.steps()["step"].tolist() == list(range(4, 12))
        assert reader.steps()["phase_ns"][0].tolist() == list(range(8))
        assert reader.events()[0] == Between("gc", 4, 6_000_000, 4, "backward")
