"""One rank's recorded operations as tracks, one a group: what it issued while the trouble was on, and what it still waits in.

N = rows: the operations of the newest snapshot, then those that only a dump after the end knows. Such late rows tell what was issued; that
they are finished says nothing. Rows that follow a long silence were issued after the wait that is judged.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from validation.flight import P2P, Dump, RankEvidence
from validation.hang_texts import is_echo

SILENCE_NS = 1_000_000_000  # a wait this long is no pause between two operations

Rows = npt.NDArray[np.int64]


class Head(NamedTuple):
    """An operation that a rank is inside."""

    group: int  # into the dump's groups
    seq: int
    row: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankRows:
    """All rows of a rank, and which of them matter."""

    rank: int
    dump: Dump  # with the late rows at its end
    known: int  # rows of the snapshot
    cut: int  # rows issued before a long silence that the snapshot saw
    heads: tuple[Head, ...]  # collectives it is inside, the first of each group
    peers: tuple[int, ...] = ()  # rows of point-to-point operations it is inside
    before: frozenset[tuple[int, int]] | None = None  # (group, seq) of collectives pending in the snapshot before; None: there is one only
    moved: bool = False  # issued something between the snapshots


def rows_of(one: RankEvidence) -> RankRows | None:
    """Join what the newest snapshot and the dump after the end know of a rank; None without any dump."""
    late = one.late_dumps[-1] if one.late_dumps else None
    if not one.dumps:
        if late is None:
            return None
        known, dump = 0, replace(late, finished=np.ones(len(late.seq), dtype=bool))
    else:
        known = len(one.dumps[-1].seq)
        dump = one.dumps[-1] if late is None else joined(one.dumps[-1], late)
    point = point_to_point(dump)
    cut = _cut(dump, known)
    before, moved = _earlier(one.dumps, dump)
    return RankRows(
        rank=one.rank, dump=dump, known=known, cut=cut, heads=_heads(dump, known, cut, point, is_echo(one.result)),
        peers=tuple(np.flatnonzero(point & ~dump.finished).tolist()), before=before, moved=moved,
    )  # fmt: skip


def point_to_point(dump: Dump) -> npt.NDArray[np.bool_]:
    """(N,) whether a row is a point-to-point operation."""
    table = np.array([signature.op in P2P for signature in dump.signatures], dtype=bool)
    return table[dump.signature] if len(table) else np.zeros(len(dump.seq), dtype=bool)


def _cut(dump: Dump, known: int) -> int:
    """Rows up to the first long silence that lies at or after the snapshot's end."""
    total = len(dump.seq)
    if total == known or not known:
        return total
    created = dump.created_ns[max(known - 1, 0) :]
    silent = np.flatnonzero(np.diff(created) > SILENCE_NS)
    return total if not len(silent) else max(known - 1, 0) + int(silent[0]) + 1


def _heads(dump: Dump, known: int, cut: int, point: npt.NDArray[np.bool_], is_failed: bool) -> tuple[Head, ...]:
    """First pending collective of each group; a rank that issued more right after the snapshot is in what it failed in, the last one."""
    total = len(dump.seq)
    if not known:
        return ()
    pending = np.flatnonzero(~dump.finished[:known] & ~point[:known])
    if cut > known:  # it issued more right after the snapshot
        collective = np.flatnonzero(~point[:cut])
        pending = collective[-1:] if is_failed and cut == total else collective[:0]
    heads: dict[int, Head] = {}
    for row in pending.tolist():
        group = int(dump.group[row])
        if group not in heads or dump.seq[row] < heads[group].seq:
            heads[group] = Head(group, int(dump.seq[row]), row)
    return tuple(heads.values())


def _earlier(dumps: Sequence[Dump], newest: Dump) -> tuple[frozenset[tuple[int, int]] | None, bool]:
    """What was pending in the snapshot before the newest, in the newest one's numbers of groups; and whether anything was issued since."""
    if len(dumps) < 2:
        return None, False
    first = dumps[-2]
    numbers = {group.name: number for number, group in enumerate(newest.groups)}
    rows = np.flatnonzero(~first.finished & ~point_to_point(first))
    pending = frozenset((numbers.get(first.groups[int(first.group[row])].name, -1), int(first.seq[row])) for row in rows.tolist())
    return pending, _stamp(first) != _stamp(dumps[-1])


def _stamp(dump: Dump) -> tuple[int, int, int]:
    """What changes when a rank issues or finishes something."""
    return (int(dump.created_ns[-1]) if len(dump.created_ns) else 0, len(dump.seq), int(np.count_nonzero(dump.finished)))


def joined(snapshot: Dump, late: Dump) -> Dump:
    """The snapshot with the rows at its end that only the later dump knows."""
    last: dict[tuple[str, bool], int] = {}
    for dump in (snapshot,):
        point = point_to_point(dump)
        for number, group in enumerate(dump.groups):
            for is_point in (False, True):
                seqs = dump.seq[(dump.group == number) & (point == is_point)]
                if len(seqs):
                    last[group.name, is_point] = int(seqs.max())
    point = point_to_point(late)
    limits = np.array([[last.get((group.name, kind), -1) for kind in (False, True)] for group in late.groups], dtype=np.int64).reshape(
        -1, 2
    )
    new = np.flatnonzero(late.seq > limits[late.group, point.astype(np.int64)]) if len(late.seq) else np.empty(0, dtype=np.int64)
    return snapshot if not len(new) else _appended(snapshot, late, new)


def _appended(snapshot: Dump, late: Dump, new: Rows) -> Dump:
    """Columns of both, with one table of groups, signatures and places."""
    names = [group.name for group in snapshot.groups]
    extra = [group for group in late.groups if group.name not in names]
    names += [group.name for group in extra]
    numbers = np.array([names.index(group.name) for group in late.groups], dtype=np.int32)
    step, micro = (_column(getattr(snapshot, name), getattr(late, name), new, len(snapshot.seq)) for name in ("step", "micro"))
    places, place = snapshot.places, snapshot.place
    if snapshot.place is not None and late.place is not None:
        places = (*snapshot.places, *late.places)
        place = np.concatenate([snapshot.place, late.place[new] + len(snapshot.places)]).astype(np.int32)
    elif snapshot.place is not None:
        places, place = (*snapshot.places, ""), _column(snapshot.place, None, new, len(snapshot.seq), len(snapshot.places))
    return replace(
        snapshot, groups=(*snapshot.groups, *extra), signatures=(*snapshot.signatures, *late.signatures), places=places, place=place,
        group=np.concatenate([snapshot.group, numbers[late.group[new]]]), seq=np.concatenate([snapshot.seq, late.seq[new]]),
        signature=np.concatenate([snapshot.signature, late.signature[new] + len(snapshot.signatures)]).astype(np.int32),
        created_ns=np.concatenate([snapshot.created_ns, late.created_ns[new]]), step=step, micro=micro,
        finished=np.concatenate([snapshot.finished, np.ones(len(new), dtype=bool)]), marker=snapshot.marker or late.marker,
    )  # fmt: skip


def _column(
    one: npt.NDArray[np.int32] | None, other: npt.NDArray[np.int32] | None, new: Rows, rows: int, missing: int = -1
) -> npt.NDArray[np.int32] | None:
    """A column of both dumps; what one of them lacks is `missing`."""
    if one is None and other is None:
        return None
    first = np.full(rows, missing, dtype=np.int32) if one is None else one
    return np.concatenate([first, np.full(len(new), missing, dtype=np.int32) if other is None else other[new]]).astype(np.int32)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Track:
    """A rank's collectives in one group, ascending by number, columns of n."""

    source: RankRows
    rows: Rows | slice  # into the rank's rows
    seq: npt.NDArray[np.int64]
    key: npt.NDArray[np.int32]  # into the agreements of the scene
    reached: int  # the highest number issued before a long silence; -1 = none
    _created: npt.NDArray[np.int64] = field(repr=False)

    @property
    def last(self) -> int:
        """The highest number known, issued when ever."""
        return int(self.seq[-1]) if len(self.seq) else -1

    @property
    def times_ns(self) -> npt.NDArray[np.int64]:
        """When each was issued, beside `seq`; 0 = not recorded."""
        return self._created

    def position(self, seq: int) -> int:
        """Where a number stands, -1 = not recorded here."""
        place = int(np.searchsorted(self.seq, seq))
        return place if place < len(self.seq) and self.seq[place] == seq else -1

    def created_ns(self, seq: int) -> int:
        """When it was issued; 0 = not recorded."""
        place = self.position(seq)
        return int(self._created[place]) if place >= 0 else 0

    def column(self, name: str) -> npt.NDArray[np.int32] | None:
        """Steps, micro-batches or places of the rows, where recorded."""
        values = getattr(self.source.dump, name)
        return None if values is None else values[self.rows]

    def value(self, name: str, seq: int) -> int:
        """One entry of such a column; -1 = not recorded."""
        values, place = getattr(self.source.dump, name), self.position(seq)
        if values is None or place < 0:
            return -1
        row = place if isinstance(self.rows, slice) else int(self.rows[place])
        return int(values[row])

    def where(self, seq: int) -> str:
        """Call site of a number; "" = not recorded."""
        number, places = self.value("place", seq), self.source.dump.places
        return places[number] if 0 <= number < len(places) else ""

    def is_finished(self, seq: int) -> bool:
        """Known to be over in the snapshot."""
        place = self.position(seq)
        if place < 0:
            return False
        row = place if isinstance(self.rows, slice) else int(self.rows[place])
        return row < self.source.known and bool(self.source.dump.finished[row])
