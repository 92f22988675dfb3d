"""Who agrees with whom at one place of a group's order, and where the first disagreement lies."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from validation.finding import FindingKind
from validation.flight import DEFAULT_GROUP
from validation.hang_scene import Lane, Scene
from validation.hang_signatures import Agreement, difference, may_differ_in_size


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """Ranks of one group that issued different operations under one number."""

    lane: Lane
    seq: int
    kind: FindingKind  # how the minority differs from the majority; of a tie, the gravest
    sides: tuple[tuple[Agreement, tuple[int, ...]], ...]  # largest first, then by rank
    unknown: tuple[int, ...]  # members whose operation under this number is not recorded

    @property
    def is_tie(self) -> bool:
        return len(self.sides[0][1]) == len(self.sides[1][1])

    @property
    def majority(self) -> tuple[int, ...]:
        return () if self.is_tie else self.sides[0][1]

    @property
    def culprits(self) -> tuple[int, ...]:
        """The minority; of a tie in a job of two ranks both, of another tie nobody."""
        if not self.is_tie:
            return tuple(sorted(rank for _, ranks in self.sides[1:] for rank in ranks))
        both = tuple(sorted(rank for _, ranks in self.sides for rank in ranks))
        return both if len(both) == 2 and len(self.lane.members) == 2 and self.lane.name == DEFAULT_GROUP else ()

    def answer(self, rank: int) -> Agreement:
        """What a rank issued here."""
        return next(key for key, ranks in self.sides if rank in ranks)


def sides_at(scene: Scene, lane: Lane, seq: int, ranks: Iterable[int] | None = None) -> tuple[tuple[Agreement, tuple[int, ...]], ...]:
    """The answers under one number, those that agree as far as is known together; largest side first, then by lowest rank."""
    by_key: dict[int, list[int]] = {}
    for rank in sorted(lane.tracks if ranks is None else ranks):
        track = lane.tracks.get(rank)
        place = track.position(seq) if track is not None else -1
        if track is not None and place >= 0:
            by_key.setdefault(int(track.key[place]), []).append(rank)
    merged: list[tuple[Agreement, list[int]]] = []
    for number, found in sorted(by_key.items(), key=lambda item: (-len(item[1]), item[1])):
        key = scene.keys[number]
        same = next((side for side in merged if difference(side[0], key) is None), None)
        if same is None:
            merged.append((key, list(found)))
        else:
            same[1].extend(found)
    ordered = sorted(merged, key=lambda side: (-len(side[1]), min(side[1])))
    return tuple((key, tuple(sorted(found))) for key, found in ordered)


def differing(lane: Lane) -> Sequence[int]:
    """Numbers under which not all tracks hold the same agreement, ascending; by one pass over the columns."""
    tracks = [track for track in lane.tracks.values() if len(track.seq)]
    if len(tracks) < 2:
        return ()
    low_seq, high_seq = min(int(track.seq[0]) for track in tracks), max(track.last for track in tracks)
    total = sum(len(track.seq) for track in tracks)
    numbers = None
    if high_seq - low_seq > 8 * total + 1_000_000:  # numbers far apart: count the ones that are there
        numbers = np.unique(np.concatenate([track.seq for track in tracks]))
    width = len(numbers) if numbers is not None else high_seq - low_seq + 1
    low, high = np.full(width, np.iinfo(np.int32).max, dtype=np.int32), np.full(width, -1, dtype=np.int32)
    for track in tracks:
        places = track.seq - low_seq if numbers is None else np.searchsorted(numbers, track.seq)
        low[places] = np.minimum(low[places], track.key)
        high[places] = np.maximum(high[places], track.key)
    found = np.flatnonzero((high >= 0) & (low < high))
    return (found + low_seq if numbers is None else numbers[found]).tolist()


def conflicts(scene: Scene, lane: Lane, up_to: int | None = None) -> Iterable[Conflict]:
    """Disagreements of a group in their order, to the number `up_to`."""
    for seq in differing(lane):
        if up_to is not None and seq > up_to:
            return
        sides = sides_at(scene, lane, seq)
        if len(sides) < 2 or _is_lawful(lane, seq, sides):
            continue
        answered = {rank for _, ranks in sides for rank in ranks}
        yield Conflict(
            lane=lane, seq=seq, kind=_kind(sides), sides=sides, unknown=tuple(rank for rank in lane.members if rank not in answered)
        )


def _kind(sides: Sequence[tuple[Agreement, tuple[int, ...]]]) -> FindingKind:
    """The gravest difference between the first side and the others."""
    order: tuple[FindingKind, ...] = ("op_type_mismatch", "shape_mismatch", "dtype_mismatch", "root_mismatch", "silent_mismatch")
    found = {difference(sides[0][0], key) for key, _ in sides[1:]}
    return next(kind for kind in order if kind in found)


def _is_lawful(lane: Lane, seq: int, sides: Sequence[tuple[Agreement, tuple[int, ...]]]) -> bool:
    """Sizes of its own on each rank, in an operation that every rank is through: the backend allows it."""
    ops = {key.op for key, _ in sides}
    if len(ops) > 1 or not may_differ_in_size(next(iter(ops))) or _kind(sides) != "shape_mismatch":
        return False
    return all(track.is_finished(seq) or track.reached > seq for track in lane.tracks.values() if track.position(seq) >= 0)
