"""A rank's ring file: what it does, written as it happens, and readable by any process at any time, also after it died. Torch-free.

A bounded file mapped into memory. What was written is there when the process is killed, whatever the signal, as long as the machine
stands. The oldest records make room for new ones. See trainer/recorded_layout.py for the bytes and trainer/recorded_reading.py for readers.
"""

import itertools
import json
import mmap
import os
import threading
from collections.abc import Sequence
from pathlib import Path

from trainer import recorded_layout as at
from trainer.recorded_layout import Layout
from trainer.recorded_reading import RingReader, read_ring
from validation.flight import Signature

__all__ = ["RingReader", "RingWriter", "read_ring", "ring_path", "signature_text"]


def ring_path(folder: Path, attempt: int, rank: int) -> Path:
    """Where a rank of a run's attempt leaves its ring."""
    return folder / "flight" / f"attempt-{attempt}-rank-{rank}.ring"


class RingWriter:
    """Writes one rank's ring. Safe from several threads of one process; nothing here waits, and no call fails once it is open."""

    def __init__(
        self, path: Path | None, *, rank: int, world_size: int, entries: int = 2048, layout: Layout | None = None
    ) -> None:  # fmt: skip
        """Make the file anew, with all its bytes on the disk, so that writing never meets a full one.

        Args: path, None for memory that nobody else can read; entries, operations that are kept (and what else is kept, see `layout`).
        Raises: OSError where there is no room, or no folder.
        """
        self.layout = layout or Layout(entries=entries)
        self.path = path
        self._map = _open(path, self.layout.size)
        self._words = memoryview(self._map).cast("q")  # one number at a time: twice as fast as packing it
        self._serials = itertools.count(1)
        self._step_serials, self._event_serials, self._marks = itertools.count(1), itertools.count(1), itertools.count(1)
        self.texts = Texts(self._map, self.layout)
        self._phases: dict[str, int] = {}
        self._groups_used = 0
        self._lock = threading.Lock()
        self.phase_of("")
        facts = (at.MAGIC, 1, rank, world_size, os.getpid(), _started(), *_slots(self.layout), at.GROUPS_BYTES)
        at.FACTS.pack_into(self._map, 0, *facts)

    def operation(
        self, created_ns: int, seq: int, group: int, signature: int, place: int, step: int, micro: int, phase: int, flags: int, thread: int
    ) -> int:
        """Record that an operation begins. Args: group, signature and place as `texts` numbered them, phase as `phase_of` did.

        Returns: its serial number, for `left`.
        """
        serial = next(self._serials)
        place_of = self._place_of(serial)
        at.OPERATION.pack_into(
            self._map, place_of, serial, created_ns, 0, seq, group, signature, place, step, micro, phase, flags, thread, serial
        )
        return serial

    def left(self, serial: int, now_ns: int) -> None:
        """Record that an operation is over; nothing happens when its record is gone."""
        place = self._place_of(serial) >> 3
        if self._words[place] == serial:
            self._words[place + (at.LEFT_AT >> 3)] = now_ns

    def flag(self, serial: int, flags: int) -> None:
        """Add flags to an operation's record."""
        place = self._place_of(serial)
        if at.COUNT.unpack_from(self._map, place)[0] == serial:
            found = at.FLAGS.unpack_from(self._map, place + at.FLAGS_AT)[0]
            at.FLAGS.pack_into(self._map, place + at.FLAGS_AT, found | flags)

    def _place_of(self, serial: int) -> int:
        return self.layout.operations_at + (serial - 1) % self.layout.entries * at.OPERATION.size

    def mark(self, step: int, micro: int, phase: int, since_ns: int) -> None:
        """Say where the program stands."""
        serial = next(self._marks)
        at.MARKER.pack_into(self._map, at.MARKER_AT, serial, step, micro, phase, 0, 0, since_ns, serial)

    def beat(self, wall_ns: int, monotonic_ns: int) -> None:
        """Say that the interpreter is not held, and lay the two clocks side by side."""
        at.BEAT.pack_into(self._map, at.BEAT_AT, wall_ns, monotonic_ns)

    def step(
        self, step: int, start_ns: int, arrival_ns: int, end_ns: int, phase_ns: Sequence[int], inside_ns: Sequence[int], gc_ns: int
    ) -> None:  # fmt: skip
        """Record a step that is over; times by PHASES, and how much of each was spent inside of operations."""
        serial = next(self._step_serials)
        place = self.layout.steps_at + (serial - 1) % self.layout.steps * at.STEP.size
        at.STEP.pack_into(self._map, place, serial, step, start_ns, arrival_ns, end_ns, *phase_ns, *inside_ns, gc_ns, serial)

    def event(self, kind: str, began_ns: int, lasted_ns: int, step: int, phase: int) -> None:
        """Record something that came between. Args: kind, one of EVENT_KINDS."""
        serial = next(self._event_serials)
        place = self.layout.events_at + (serial - 1) % self.layout.events * at.EVENT.size
        at.EVENT.pack_into(self._map, place, serial, began_ns, lasted_ns, step, phase, at.EVENT_KINDS.index(kind), serial)

    def note(self, text: str) -> None:
        """Keep what the program says of itself; cut to what there is room for."""
        _put(self._map, at.NOTE_AT, at.NOTE_BYTES, text)

    def address(self, text: str) -> None:
        """Say where torch's own records can be asked for."""
        _put(self._map, at.ADDRESS_AT, at.ADDRESS_BYTES, text)

    def stack_signal(self, signal: int) -> None:
        """Say which signal has this process write its stacks."""
        at.SIGNAL.pack_into(self._map, at.SIGNAL_AT, signal)

    def phase_of(self, name: str) -> int:
        """The number of a phase; all beyond PHASE_SLOTS share the last one's."""
        number = self._phases.get(name)
        if number is None:
            with self._lock:
                number = self._phases.setdefault(name, min(len(self._phases), at.PHASE_SLOTS - 1))
                is_shared = number == at.PHASE_SLOTS - 1
                _put(self._map, at.PHASES_AT + number * at.PHASE_BYTES, at.PHASE_BYTES, "other" if is_shared else name)
        return number

    def group(self, name: str, ranks: Sequence[int], description: str, made: int, backend: str = "") -> str:
        """Record a group's members for good, as far as there is room. Returns: the text that its operations name.

        Args: made, larger for a group that was made later; of two with one name the later one counts.
        """
        facts = {"name": name, "ranks": runs_of(ranks), "description": description, "made": made, "backend": backend}
        text = json.dumps(facts, separators=(",", ":"))
        body = text.encode() + b"\n"
        with self._lock:
            if self._groups_used + len(body) <= at.GROUPS_BYTES:
                start = at.GROUPS_AT + self._groups_used
                self._map[start : start + len(body)] = body
                self._groups_used += len(body)
                at.COUNT.pack_into(self._map, at.GROUPS_USED_AT, self._groups_used)
        return text

    def close(self) -> None:
        """Let go of the file; it stays."""
        self._words.release()
        self._map.close()


class Texts:
    """Texts in a ring of their own. What was written stays for three quarters of the area: numbers are renewed every quarter.

    A number is good for as long as `generation` does not change; after that, ask again.
    """

    def __init__(self, area: mmap.mmap, layout: Layout) -> None:
        self._map, self._start, self._size = area, layout.strings_at, layout.strings
        self._head = 0
        self._known: dict[str, int] = {}
        self._lock = threading.Lock()
        self.generation = 0

    def number(self, text: str) -> int:
        """The number of a text."""
        found = self._known.get(text)
        return self._write(text) if found is None else found

    def _write(self, text: str) -> int:
        body = text.encode(errors="replace")[: min(at.TEXT_BYTES, self._size // 16)]
        needed = -(-(at.TEXT.size + len(body)) // 8) * 8
        with self._lock:
            if self._head % self._size + needed > self._size:  # none goes around the corner
                self._head = -(-self._head // self._size) * self._size
            number = self._head
            start = self._start + number % self._size
            at.TEXT.pack_into(self._map, start, number, len(body))
            self._map[start + at.TEXT.size : start + at.TEXT.size + len(body)] = body
            self._head += needed
            at.COUNT.pack_into(self._map, at.STRINGS_HEAD_AT, self._head)
            if self._head * 4 // self._size != self.generation:
                self.generation = self._head * 4 // self._size
                self._known.clear()
            self._known[text] = number
        return number


def signature_text(signature: Signature) -> str:
    """A signature as a ring keeps it. Sizes stand as [shape, how often in a row]; of those too many to keep none is kept."""
    op, sizes, dtypes, output_sizes, output_dtypes, *rest = signature
    text = json.dumps([op, _counted(sizes), dtypes, _counted(output_sizes), output_dtypes, *rest], separators=(",", ":"))
    return text if len(text) < at.TEXT_BYTES // 2 else json.dumps([op, [], [], [], [], *rest], separators=(",", ":"))


def _counted(sizes: Sequence[tuple[int, ...]]) -> list[tuple[tuple[int, ...], int]]:
    return [(shape, len(list(same))) for shape, same in itertools.groupby(sizes)]


def runs_of(ranks: Sequence[int]) -> list[list[int]]:
    """Ranks as [first, stop, stride] runs: groups of thousands are short to write down."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][1] - 1 + runs[-1][2]:
            runs[-1][1] = rank + 1
        elif runs and runs[-1][1] == runs[-1][0] + 1:  # of one rank yet: any stride will do
            runs[-1][1:] = [rank + 1, rank - runs[-1][0]]
        else:
            runs.append([rank, rank + 1, 1])
    return runs


def _open(path: Path | None, size: int) -> mmap.mmap:
    if path is None:
        return mmap.mmap(-1, size)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)  # one that a reader has mapped stays whole for it
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.posix_fallocate(fd, 0, size)  # a sparse file would kill the process that meets a full disk
        return mmap.mmap(fd, size)
    finally:
        os.close(fd)


def _put(area: mmap.mmap, start: int, room: int, text: str) -> None:
    """A text in a fixed place: its length last, so that a reader never takes old bytes for new ones."""
    body = text.encode(errors="replace")[: room - 4]
    area[start : start + 4] = b"\0\0\0\0"
    area[start + 4 : start + 4 + len(body)] = body
    area[start : start + 4] = len(body).to_bytes(4, "little")


def _slots(layout: Layout) -> tuple[int, int, int, int]:
    return layout.entries, layout.steps, layout.events, layout.strings


def _started() -> int:
    """When this process started, in clock ticks after boot: tells it from a later one with its number."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
