"""The evidence as one scene: every group's ranks side by side, with numbers for equal operations and equal call sites."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from validation.flight import DEFAULT_GROUP, Evidence, Group, RankEvidence
from validation.hang_signatures import Agreement, agreement
from validation.hang_stacks import Standing, standings
from validation.hang_tracks import Head, RankRows, Track, point_to_point, rows_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lane:
    """One process group: its ranks' tracks, side by side."""

    name: str
    members: tuple[int, ...]
    is_known: bool  # the member list was recorded; otherwise it is who has operations there
    tracks: Mapping[int, Track]

    def reached(self, rank: int, seq: int) -> bool:
        """Whether a rank had issued this number before the silence that is judged."""
        track = self.tracks.get(rank)
        return track is not None and track.reached >= seq

    def holds(self, rank: int, seq: int) -> bool:
        """Whether a rank issued this number at any time, as far as is known; true where the ring lost it."""
        track = self.tracks.get(rank)
        return track is not None and track.last >= seq


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scene:
    """What the judges look at."""

    evidence: Evidence
    ranks: tuple[int, ...]  # all of the job
    rows: Mapping[int, RankRows]
    lanes: tuple[Lane, ...]
    by_name: Mapping[str, tuple[Lane, ...]]
    keys: tuple[Agreement, ...]
    clashes: Mapping[str, tuple[tuple[int, ...], ...]]  # name of a group -> member lists that contradict each other
    standing: Mapping[int, tuple[Standing, ...]]  # of main threads, oldest first

    def of(self, rank: int) -> RankEvidence:
        """All that is known of a rank, nothing for one that left nothing."""
        return self.evidence.ranks.get(rank) or RankEvidence(rank=rank)

    def lane(self, rank: int, head: Head) -> Lane | None:
        """The group that a head lies in."""
        name = self.rows[rank].dump.groups[head.group].name
        return next((lane for lane in self.by_name.get(name, ()) if rank in lane.tracks), None)

    def stands(self, rank: int) -> Standing | None:
        """What a rank's main thread did when its stack was taken last."""
        found = self.standing.get(rank, ())
        return found[-1] if found else None

    def where(self, rank: int, lane: Lane | None = None, seq: int = -1) -> str:
        """The call site: as recorded with the operation, else the program's own line in the stack."""
        track = lane.tracks.get(rank) if lane is not None else None
        recorded = track.where(seq) if track is not None else ""
        stands = self.stands(rank)
        return recorded or (stands.where if stands is not None else "")

    @property
    def default(self) -> Lane | None:
        """The group of all ranks."""
        return next((lane for lane in self.lanes if lane.name == DEFAULT_GROUP), None)


def _by_name(lanes: Iterable[Lane]) -> dict[str, tuple[Lane, ...]]:
    found: dict[str, tuple[Lane, ...]] = {}
    for lane in lanes:
        found[lane.name] = (*found.get(lane.name, ()), lane)
    return found


def scene_of(evidence: Evidence) -> Scene:
    """Arrange the evidence; independent of the order in which ranks, groups and signatures come."""
    rows = {rank: found for rank in sorted(evidence.ranks) if (found := rows_of(evidence.ranks[rank])) is not None}
    ranks = tuple(sorted({*range(evidence.world_size), *evidence.ranks}))
    members, clashes = _members(rows.values(), ranks)
    keys = _Keys()
    tracks: dict[tuple[str, tuple[int, ...]], dict[int, Track]] = {}
    for rank, found in rows.items():
        for name, track in _tracks(found, keys):
            lists = members.get(name, ())
            own = next((one for one in lists if rank in one), lists[0] if len(lists) == 1 else ())
            tracks.setdefault((name, own), {})[rank] = track
    for name, lists in members.items():  # groups of which the ring holds nothing
        if name == DEFAULT_GROUP:
            tracks.setdefault((name, lists[0]), {})
    lanes = tuple(
        Lane(name=name, members=own or tuple(sorted(found)), is_known=bool(own), tracks=found)
        for (name, own), found in sorted(tracks.items(), key=lambda item: item[0])
    )
    return Scene(
        evidence=evidence, ranks=ranks, rows=rows, lanes=lanes, by_name=_by_name(lanes), keys=tuple(keys.known), clashes=clashes,
        standing={rank: stands for rank in sorted(evidence.ranks) if (stands := standings(evidence.ranks[rank]))},
    )  # fmt: skip


class _Keys:
    """Numbers of agreements, the same for all ranks."""

    def __init__(self) -> None:
        self.known: dict[Agreement, int] = {}
        self._tables: dict[tuple[object, ...], npt.NDArray[np.int32]] = {}

    def table(self, signatures: tuple[object, ...]) -> npt.NDArray[np.int32]:
        """Agreement of each of a dump's signatures."""
        if signatures not in self._tables:
            numbers = [self.known.setdefault(agreement(one), len(self.known)) for one in signatures]  # type: ignore[arg-type]
            self._tables[signatures] = np.array(numbers, dtype=np.int32)
        return self._tables[signatures]


def _tracks(found: RankRows, keys: _Keys) -> Iterable[tuple[str, Track]]:
    """One rank's rows by group, collectives alone."""
    dump = found.dump
    if not len(dump.seq):
        return
    key = keys.table(dump.signatures)[dump.signature]
    collective = ~point_to_point(dump)
    everything = bool(collective.all())
    for number in np.unique(dump.group).tolist():
        is_all = everything and bool((dump.group == number).all())
        rows = np.flatnonzero((dump.group == number) & collective)
        if not len(rows):
            continue
        selected = slice(None) if is_all else rows
        seq = dump.seq[selected]
        if len(seq) > 1 and bool((np.diff(seq) <= 0).any()):  # not as issued: sorted, the first of equal numbers kept
            _, first = np.unique(seq, return_index=True)
            selected, seq = rows[first], dump.seq[rows[first]]
            rows = selected
        before = seq[rows < found.cut]
        yield dump.groups[number].name, Track(
            source=found, rows=selected, seq=seq, key=key[selected], reached=int(before[-1]) if len(before) else -1,
            _created=dump.created_ns[selected],
        )  # fmt: skip


def _members(
    rows: Iterable[RankRows], ranks: tuple[int, ...]
) -> tuple[dict[str, tuple[tuple[int, ...], ...]], dict[str, tuple[tuple[int, ...], ...]]]:
    """Member lists by name as the ranks recorded them, and the names with lists that contradict each other."""
    lists: dict[str, set[tuple[int, ...]]] = {}
    for found in rows:
        for group in found.dump.groups:
            members = tuple(sorted(group.ranks))
            if members and not _is_default(group):
                lists.setdefault(group.name, set()).add(members)
    known = {name: tuple(sorted(found)) for name, found in lists.items()}
    clashes = {name: found for name, found in known.items() if len(found) > 1}
    return {DEFAULT_GROUP: (ranks,), **known}, clashes


def _is_default(group: Group) -> bool:
    return group.name == DEFAULT_GROUP
