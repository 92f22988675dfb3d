"""Reading rings: of a rank that runs, hangs or is dead, while it writes or after. Torch-free.

Nothing torn is ever taken for a record, and none raises. Only a file that is no ring at all does.
"""

import json
import mmap
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from trainer import recorded_layout as at
from trainer.recorded_layout import Layout
from validation.errors import EvidenceError
from validation.flight import DEFAULT_GROUP, Dump, Group, Marker, Signature

TRIES = 20  # of reading a marker that is being written


class Owner(NamedTuple):
    """Whose ring it is."""

    rank: int
    world_size: int
    pid: int
    started: int  # clock ticks after boot; 0 = not known
    stack_signal: int  # 0 = none
    address: str  # of the server that tells torch's own records; "" = none


class Recorded(NamedTuple):
    """One operation as the rank wrote it down."""

    serial: int
    group: Group
    made: int  # of two groups with one name the larger one is the later one
    backend: str  # of the group, "" = not known
    signature: Signature
    place: str
    seq: int
    created_ns: int
    left_ns: int  # 0 = inside, or on its way
    is_p2p: bool
    is_failed: bool  # it ended with an exception
    is_future: bool  # its end is waited for where nothing can be seen
    step: int
    micro: int
    phase: str
    thread: int

    def is_over(self, marker: Marker) -> bool:
        """Known to be over. What was handed on as a future is so once the rank has come to a later step."""
        return not self.is_failed and (self.left_ns > 0 or (self.is_future and 0 <= self.step < marker.step))


class Between(NamedTuple):
    """Something that came between, longer than a few ms."""

    kind: str  # "gc"; "silent": nothing of the process could run (the interpreter held, the process stopped, or the CPU taken away)
    began_ns: int
    lasted_ns: int
    step: int
    phase: str


class RingReader:
    """One ring, to be asked again and again.

    Raises: EvidenceError when the file is not a ring; FileNotFoundError when there is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with path.open("rb") as file:
            size = file.seek(0, 2)
            self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None
        head = self._bytes(0, at.FACTS.size)
        if head[: len(at.MAGIC)] != at.MAGIC:
            raise EvidenceError(
                f"{path} is not a ring that a rank of Sea Trial recorded ({size} bytes, begins with {head[:8]!r}). Nothing was read of it. "
                "Give the file under flight/ of a run's folder, or wait until its rank has made it."
            )
        facts = at.FACTS.unpack(head)
        if facts[1] != 1:
            raise EvidenceError(
                f"{path} is a ring of format {facts[1]}, and this version reads format 1. Read it with the version that wrote it."
            )
        self._layout = Layout(entries=facts[6], steps=facts[7], events=facts[8], strings=facts[9])
        self._facts = facts

    def owner(self) -> Owner:
        """Whose it is."""
        _, _, rank, world_size, pid, started, *_ = self._facts
        signal = at.SIGNAL.unpack(self._bytes(at.SIGNAL_AT, at.SIGNAL.size))[0]
        return Owner(rank, world_size, pid, started, signal, self._text_in(at.ADDRESS_AT, at.ADDRESS_BYTES))

    def marker(self) -> Marker:
        """Where the rank's program stands: cheap, for those who look often."""
        for _ in range(TRIES):
            first, step, micro, phase, _, _, since_ns, last = at.MARKER.unpack(self._bytes(at.MARKER_AT, at.MARKER.size))
            if first == last:
                break
        if first == 0:
            step = micro = -1
        beat_ns = at.BEAT.unpack(self._bytes(at.BEAT_AT, at.BEAT.size))[0]
        note = self._text_in(at.NOTE_AT, at.NOTE_BYTES)
        return Marker(step, self._phase(phase), micro, since_ns, beat_ns, note)

    def clocks(self) -> tuple[int, int]:
        """The wall clock and the monotonic one, ns, read side by side at the last heartbeat; (0, 0) before the first."""
        wall_ns, monotonic_ns = at.BEAT.unpack(self._bytes(at.BEAT_AT, at.BEAT.size))
        return wall_ns, monotonic_ns

    def issued(self) -> int:
        """How many operations the rank has begun, also those that are gone: cheap, for those who look often."""
        heads = self._table(self._layout.operations_at, self._layout.entries, at.OPERATION_TYPE)["head"]
        return int(heads.max(initial=0))

    def operations(self) -> list[Recorded]:
        """What is left of the rank's operations, in the order in which they began; of a group that was made twice the later one's."""
        return _newest(self._kept())

    def _kept(self) -> list[Recorded]:
        rows = self._whole(self._layout.operations_at, self._layout.entries, at.OPERATION_TYPE)
        texts, phases = _Texts(self), [self._phase(number) for number in range(at.PHASE_SLOTS)]
        found = []
        for head, created, left, seq, group, signature, place, step, micro, phase, flags, thread, _ in rows.tolist():
            known_group, known_signature = _group(texts[group]), _signature(texts[signature])
            if known_group is None or known_signature is None:
                continue  # its texts were overwritten: it is as gone as an overwritten record
            name = phases[phase] if phase < at.PHASE_SLOTS else ""
            found.append(
                Recorded(
                    head, *known_group, known_signature, texts[place], seq, created, left, bool(flags & at.P2P_FLAG),
                    bool(flags & at.FAILED_FLAG), bool(flags & at.FUTURE_FLAG), step, micro, name, thread,
                )
            )  # fmt: skip
        return found

    def groups(self) -> dict[str, Group]:
        """Every group that the rank knows of, also those that it is not in; that of all ranks by its size where it was not recorded."""
        used = min(at.COUNT.unpack(self._bytes(at.GROUPS_USED_AT, at.COUNT.size))[0], at.GROUPS_BYTES)
        lines = self._bytes(at.GROUPS_AT, used).decode(errors="replace").splitlines()
        groups = {DEFAULT_GROUP: Group(DEFAULT_GROUP, tuple(range(self._facts[3])), "default_pg")}
        return groups | {known[0].name: known[0] for line in lines if (known := _group(line)) is not None}

    def steps(self) -> npt.NDArray[np.void]:
        """STEP_TYPE rows of the steps that are over, oldest first, as far as they are left."""
        return self._whole(self._layout.steps_at, self._layout.steps, at.STEP_TYPE)

    def events(self) -> list[Between]:
        """What came between, oldest first, as far as it is left."""
        rows = self._whole(self._layout.events_at, self._layout.events, at.EVENT_TYPE)
        kinds = dict(enumerate(at.EVENT_KINDS))
        return [
            Between(kinds.get(kind, ""), began, lasted, step, self._phase(phase))
            for _, began, lasted, step, phase, kind, _ in rows.tolist()
        ]  # fmt: skip

    def dump(self, *, taken_ns: int = 0) -> Dump:
        """All of it as evidence."""
        kept, marker = self._kept(), self.marker()
        entries = _newest(kept)
        groups = self.groups() | {entry.group.name: entry.group for entry in entries}
        names, signatures, places = (
            _numbers(groups),
            _numbers(entry.signature for entry in entries),
            _numbers(entry.place for entry in entries),
        )
        return Dump(
            rank=self._facts[2],
            taken_ns=taken_ns,
            wrapped=bool(kept) and kept[0].serial > 1,
            groups=tuple(groups.values()),
            signatures=tuple(signatures),
            places=tuple(places),
            group=np.array([names[entry.group.name] for entry in entries], np.int32),
            seq=np.array([entry.seq for entry in entries], np.int64),
            signature=np.array([signatures[entry.signature] for entry in entries], np.int32),
            created_ns=np.array([entry.created_ns for entry in entries], np.int64),
            finished=np.array([entry.is_over(marker) for entry in entries], np.bool_),
            step=np.array([entry.step for entry in entries], np.int32),
            micro=np.array([entry.micro for entry in entries], np.int32),
            place=np.array([places[entry.place] for entry in entries], np.int32),
            marker=marker,
        )

    def text(self, number: int) -> str | None:
        """A text by its number; None when it was overwritten."""
        start = self._layout.strings_at + number % self._layout.strings
        written, length = at.TEXT.unpack(self._bytes(start, at.TEXT.size))
        if written != number or length > at.TEXT_BYTES:
            return None
        body = self._bytes(start + at.TEXT.size, length)
        still = at.TEXT.unpack(self._bytes(start, at.TEXT.size))[0]
        return body.decode(errors="replace") if still == number else None

    def close(self) -> None:
        """Let go of the file."""
        if self._map is not None:
            self._map.close()

    def __enter__(self) -> "RingReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _whole(self, start: int, slots: int, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
        """Records that are whole, by serial number. A record is written first to last, so it is read last to first."""
        tails = self._table(start, slots, kind)["tail"]
        rows = self._table(start, slots, kind)
        heads = self._table(start, slots, kind)["head"]
        places = np.arange(len(rows), dtype=np.uint64)
        is_whole = (heads == tails) & (rows["head"] == heads) & (heads > 0) & ((heads - np.uint64(1)) % np.uint64(slots) == places)
        whole: npt.NDArray[np.void] = rows[is_whole]
        return whole[np.argsort(whole["head"], kind="stable")]

    def _table(self, start: int, slots: int, kind: np.dtype[np.void]) -> npt.NDArray[np.void]:
        return np.frombuffer(self._bytes(start, slots * kind.itemsize), kind)

    def _phase(self, number: int) -> str:
        return self._text_in(at.PHASES_AT + number * at.PHASE_BYTES, at.PHASE_BYTES) if number < at.PHASE_SLOTS else ""

    def _text_in(self, start: int, room: int) -> str:
        body = self._bytes(start, room)
        return body[4 : 4 + min(int.from_bytes(body[:4], "little"), room - 4)].decode(errors="replace")

    def _bytes(self, start: int, size: int) -> bytes:
        """A copy; zeros for what a file that was cut short does not hold."""
        return (b"" if self._map is None else self._map[start : start + size]).ljust(size, b"\0")


def read_ring(path: Path) -> Dump:
    """A rank's operations, groups and marker, at this moment. Raises EvidenceError when the file is not a ring."""
    with RingReader(path) as reader:
        return reader.dump()


class _Texts(dict[int, str]):
    """Texts by number, each read once; "" for those that are gone."""

    def __init__(self, reader: RingReader) -> None:
        super().__init__()
        self._reader = reader

    def __missing__(self, number: int) -> str:
        self[number] = self._reader.text(number) or ""
        return self[number]


def _newest(entries: list[Recorded]) -> list[Recorded]:
    newest = {entry.group.name: entry.made for entry in sorted(entries, key=lambda entry: entry.made)}
    return [entry for entry in entries if entry.made == newest[entry.group.name]]


@lru_cache(maxsize=4096)
def _group(text: str) -> tuple[Group, int, str] | None:
    """A group, when it was made, and its backend; None for what cannot be read."""
    try:
        found = json.loads(text)
        ranks = tuple(rank for first, stop, stride in found["ranks"] for rank in range(first, stop, stride))
        return Group(found["name"], ranks, found["description"]), int(found["made"]), str(found["backend"])
    except (ValueError, KeyError, TypeError):
        return None


@lru_cache(maxsize=1 << 14)
def _signature(text: str) -> Signature | None:
    """A signature as `signature_text` wrote it; None for what cannot be read."""
    try:
        op, sizes, dtypes, output_sizes, output_dtypes, reduce_op, root, peer, tag = json.loads(text)
        return Signature(op, _spread(sizes), tuple(dtypes), _spread(output_sizes), tuple(output_dtypes), reduce_op, root, peer, tag)
    except (ValueError, TypeError):
        return None


def _spread(runs: list[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape, count in runs for _ in range(count))


def _numbers(values: Iterable[Any]) -> dict[Any, int]:
    """Each value once, numbered in the order of their coming."""
    return {value: number for number, value in enumerate(dict.fromkeys(values))}
