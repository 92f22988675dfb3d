"""Which of a folder's dumps belong to one run: other world sizes, ranks that occur twice, and times far apart.

Clocks of machines may be hours apart, and a file may be left over from another run. Both show as the same operations begun at other times.
They are told apart by how far, and by how evenly: ranks of one run wait for one another at every collective, so one shift of a clock
explains all their common operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from infra.dump_names import Found
from infra.dump_pool import Parsed
from validation.flight import DEFAULT_GROUP, Dump

FAR_NS = 5_000_000_000  # ranks that begin the same operations further apart have other clocks, or are of other runs
CLOCK_S = 1_800.0  # machines' clocks that are wrong are wrong by an hour and more (a time zone, never set); less is rather another run
LOOSE_NS, LOOSE_SHARE = 50_000_000, 0.002  # by how much operations of one run may scatter around the shift of a clock, and of their span
COMPARED = 256  # newest common operations that are looked at


@dataclass(frozen=True, slots=True)
class Member:
    """A file and the dump in it."""

    found: Found
    parsed: Parsed

    @property
    def dump(self) -> Dump:
        """Its dump; only members that have one are compared."""
        assert self.parsed.dump is not None
        return self.parsed.dump


def one_run(members: Sequence[Member]) -> tuple[list[Member], list[str]]:
    """The largest set of dumps that can be of one run, in the given order, and what was left out or noted, in words."""
    members, size_problems = _one_size(members)
    members, time_problems = _one_time(members)
    members, twice = _each_once(members)
    return members, [*size_problems, *time_problems, *twice]


def moment_ns(dump: Dump) -> int:
    """When a dump was taken, or when its newest operation was issued; 0 = neither is known."""
    return dump.taken_ns or int(dump.created_ns.max(initial=0))


def _one_size(members: Sequence[Member]) -> tuple[list[Member], list[str]]:
    """Leave out files of runs with another number of ranks."""
    ranks_by_size: dict[int, set[int]] = {}
    for member in members:
        if member.parsed.world_size:
            ranks_by_size.setdefault(member.parsed.world_size, set()).add(member.dump.rank)
    if not ranks_by_size:
        return list(members), []
    size = max(ranks_by_size, key=lambda known: (len(ranks_by_size[known]), known))
    others = [m for m in members if (m.parsed.world_size or size) != size or m.dump.rank >= size]
    if not others:
        return list(members), []
    sizes = sorted({m.parsed.world_size for m in others if m.parsed.world_size} - {size})
    of_sizes = f"{' and '.join(map(str, sizes))} rank{'s' if sizes != [1] else ''}" if sizes else "more ranks"
    problem = (
        f"files of several runs are mixed: {_named(others)} belong to a run of {of_sizes}, the others to one of {size}; those of "
        f"{size} ranks were used"
    )
    return [m for m in members if m not in others], [problem]


def _one_time(members: Sequence[Member]) -> tuple[list[Member], list[str]]:
    """Leave out what is of another time and another run; note clocks that are far apart."""
    timed = [(member, starts) for member in members if (starts := _starts(member.dump)) is not None]
    if len(timed) < 2:
        return list(members), []
    reference = max((starts for _, starts in timed), key=lambda starts: len(starts.seq))
    shifts = [(member, starts, shift) for member, starts in timed if (shift := _shift(reference, starts)) is not None]
    main = _largest_cluster(shifts)
    known = {member.dump.rank for member, _ in main}
    is_most = 2 * len(known) > len({member.dump.rank for member, _ in timed})
    inside = {id(member) for member, _ in main}
    left_out: dict[int, Member] = {}
    apart: list[tuple[Member, Shift]] = []
    for member, starts in timed:
        shift = None if id(member) in inside else _shift(main[0][1], starts)
        if shift is None or abs(shift.seconds) * 1e9 < FAR_NS:
            continue
        is_clock = shift.is_rigid and (abs(shift.seconds) >= CLOCK_S or not is_most)
        if member.dump.rank in known or not is_clock:
            left_out[id(member)] = member
        else:
            apart.append((moved(member, -round(shift.seconds * 1e9)), shift))
    clocks = {str(member.found.path): member for member, _ in apart}
    return [clocks.get(str(m.found.path), m) for m in members if id(m) not in left_out], _time_problems(list(left_out.values()), apart)


@dataclass(frozen=True, slots=True, eq=False)
class Starts:
    """When one rank began the collectives of its widest group."""

    group: str
    seq: npt.NDArray[np.int64]  # (K,) ascending, each once
    created_ns: npt.NDArray[np.int64]  # (K,)


def _starts(dump: Dump) -> Starts | None:
    """None for a dump without times."""
    if not dump.created_ns.any():
        return None
    counts = np.bincount(dump.group, minlength=len(dump.groups))
    whole = [number for number, group in enumerate(dump.groups) if group.name == DEFAULT_GROUP and counts[number]]
    number = whole[0] if whole else int(counts.argmax())
    own = (dump.group == number) & (dump.created_ns > 0)
    seq, places = np.unique(dump.seq[own], return_index=True)
    return Starts(dump.groups[number].name, seq, dump.created_ns[own][places])


@dataclass(frozen=True, slots=True)
class Shift:
    """How far one rank's clock is ahead of another's by the operations that both have."""

    seconds: float
    is_rigid: bool  # one shift explains them all, as for two clocks of one run


def _shift(reference: Starts, other: Starts) -> Shift | None:
    """None where nothing can be said: no operation in common, and none that contradicts."""
    if reference.group != other.group or not len(reference.seq) or not len(other.seq):
        return None
    _, ours, theirs = np.intersect1d(reference.seq, other.seq, assume_unique=True, return_indices=True)
    if not len(ours):
        return _contradiction(reference, other)
    begun = reference.created_ns[ours[-COMPARED:]]
    ahead = other.created_ns[theirs[-COMPARED:]] - begun
    shift = float(np.median(ahead))
    spread = float(np.median(np.abs(ahead - shift)))
    return Shift(shift / 1e9, spread <= LOOSE_NS + LOOSE_SHARE * float(np.ptp(begun)))


def _contradiction(reference: Starts, other: Starts) -> Shift | None:
    """Later operations at an earlier time: of another run."""
    is_later = other.seq[0] > reference.seq[-1]
    apart_ns = int(other.created_ns[-1] - reference.created_ns[0]) if is_later else int(other.created_ns[0] - reference.created_ns[-1])
    return Shift(apart_ns / 1e9, is_rigid=False) if (apart_ns < -FAR_NS if is_later else apart_ns > FAR_NS) else None


def _largest_cluster(shifts: Sequence[tuple[Member, Starts, Shift]]) -> list[tuple[Member, Starts]]:
    """Those whose clocks agree; of clusters with as many ranks the newest."""
    clusters: list[list[tuple[Member, Starts, Shift]]] = []
    last_s = 0.0
    for item in sorted(shifts, key=lambda item: (item[2].seconds, str(item[0].found.path))):
        if not clusters or (item[2].seconds - last_s) * 1e9 > FAR_NS:
            clusters.append([])
        clusters[-1].append(item)
        last_s = item[2].seconds
    largest = max(clusters, key=lambda cluster: (len({member.dump.rank for member, _, _ in cluster}), cluster[0][2].seconds))
    return [(member, starts) for member, starts, _ in largest]


def _time_problems(left_out: Sequence[Member], apart: Sequence[tuple[Member, Shift]]) -> list[str]:
    problems = []
    if left_out:
        problems.append(
            f"files of several runs are mixed: the operations of {_named(left_out)} are from another time than the same ones of the other "
            "ranks; the largest set that belongs together was used"
        )
    if apart:
        by_rank = {member.dump.rank: _duration(shift.seconds) for member, shift in apart}
        clocks = ", ".join(f"rank {rank} by {text}" for rank, text in [*by_rank.items()][:8])
        more = f" and {len(by_rank) - 8} more" if len(by_rank) > 8 else ""
        problems.append(
            f"clocks are far apart ({clocks}{more}): nothing can be concluded from how late one of these ranks was against another; their "
            "times were moved so that the operations they have in common begin together"
        )
    return problems


def moved(member: Member, by_ns: int) -> Member:
    """The same with all its times moved."""
    dump = member.dump
    marker = dump.marker and dump.marker._replace(since_ns=_moved(dump.marker.since_ns, by_ns), beat_ns=_moved(dump.marker.beat_ns, by_ns))
    times = np.where(dump.created_ns > 0, dump.created_ns + by_ns, 0)
    dump = replace(dump, taken_ns=_moved(dump.taken_ns, by_ns), created_ns=times, marker=marker)
    return Member(member.found, replace(member.parsed, dump=dump))


def _moved(time_ns: int, by_ns: int) -> int:
    return time_ns + by_ns if time_ns else 0


def _each_once(members: Sequence[Member]) -> tuple[list[Member], list[str]]:
    """Leave out a rank's second file for one snapshot: the same one again, or one that contradicts the first."""
    kept: list[Member] = []
    problems = []
    seen: dict[tuple[int, bool, int], Member] = {}
    for member in sorted(
        members, key=lambda m: (*_slot(m), m.parsed.is_cut, -moment_ns(m.dump), len(m.found.path.name), str(m.found.path))
    ):
        slot = _slot(member)
        first = seen.get(slot)
        if first is None:
            seen[slot] = member
            kept.append(member)
        elif _goes_on(member.dump, first.dump):
            kept.append(member)  # an older snapshot under a name that says no number
        else:
            what = "holds the same as" if _same(first.dump, member.dump) else "contradicts"
            problems.append(f"rank {slot[0]} is there twice: {member.found.path.name} {what} {first.found.path.name} and was left out")
    order = {id(member): place for place, member in enumerate(members)}
    return sorted(kept, key=lambda member: order[id(member)]), problems


def _slot(member: Member) -> tuple[int, bool, int]:
    return member.dump.rank, member.found.is_late, member.found.number


def _same(one: Dump, other: Dump) -> bool:
    return bool(np.array_equal(one.created_ns, other.created_ns) and np.array_equal(one.finished, other.finished))


def _goes_on(older: Dump, newer: Dump) -> bool:
    """Is the newer dump the same rank's, some operations later?"""
    if _same(older, newer):
        return 0 < older.taken_ns < newer.taken_ns
    return bool(len(older.seq)) and bool(np.isin(older.created_ns[-1:], newer.created_ns).all())


def _named(members: Sequence[Member]) -> str:
    names = [member.found.path.name for member in members]
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def _duration(seconds: float) -> str:
    size = abs(seconds)
    text = f"{size / 3600:.1f} h" if size >= 3600 else f"{size / 60:.1f} min" if size >= 60 else f"{size:.1f} s"
    return f"{'-' if seconds < 0 else '+'}{text}"
