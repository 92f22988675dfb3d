"""The order in which a rank goes through its groups, beside that of the others: who of two that wait for each other left it.

A program visits its groups in one order on every rank, so one rank's operations are a beginning of another's, whatever the groups' names.
"""

from collections.abc import Iterable
from typing import NamedTuple

from validation.flight import DEFAULT_GROUP
from validation.hang_scene import Scene

LOOKED_AT = 64  # operations of a rank's end
COMPARED = 32  # other ranks


class Token(NamedTuple):
    """One operation, without the group's name, which is another one on other ranks."""

    key: int  # agreement
    is_default: bool  # of the group of all ranks
    where: str
    step: int


def program(scene: Scene, rank: int, since: int) -> tuple[Token, ...]:
    """The rank's collectives in the order of issue, from the number `since` of the group of all ranks on."""
    found: list[tuple[int, int, Token]] = []  # row, number in the group of all ranks, what
    for lane in scene.lanes:
        track = lane.tracks.get(rank)
        if track is None:
            continue
        is_default = lane.name == DEFAULT_GROUP
        places = range(len(track.seq)) if isinstance(track.rows, slice) else track.rows.tolist()
        for place, row in list(enumerate(places))[-LOOKED_AT:]:
            seq = int(track.seq[place])
            token = Token(int(track.key[place]), is_default, track.where(seq), track.value("step", seq))
            found.append((row, seq if is_default else -1, token))
    found.sort()
    start = next((number for number, (_, seq, _) in enumerate(found) if seq == since >= 0), -1)
    return tuple(token for _, _, token in found[start + 1 :])


def deserters(scene: Scene, suspects: Iterable[int]) -> tuple[int, ...]:
    """Those of the suspects whose order of groups contradicts that of most other ranks; () when that tells nobody from the others."""
    suspects = tuple(sorted(suspects))
    lane = scene.default
    ranks = [rank for rank in scene.rows if lane is None or rank in lane.tracks]
    sample = sorted({*suspects, *ranks[:COMPARED]})
    if lane is None or len(sample) < 3 or any(rank not in lane.tracks for rank in suspects):
        return ()
    since = _common(scene, sample)
    programs = {rank: program(scene, rank, since) for rank in sample}
    against = {rank: sum(not _agree(programs[rank], programs[other]) for other in sample if other != rank) for rank in suspects}
    wrong = tuple(rank for rank in suspects if 2 * against[rank] > len(sample) - 1)
    return wrong if len(wrong) < len(suspects) else ()


def _common(scene: Scene, ranks: Iterable[int]) -> int:
    """A number of the group of all ranks that all of these still hold, some way back; -1 = from the start."""
    lane = scene.default
    assert lane is not None
    tracks = [lane.tracks[rank] for rank in ranks]
    low, high = max(int(track.seq[0]) for track in tracks), min(track.last for track in tracks)
    return max(low, high - 4) if high >= low else -1


def _agree(one: tuple[Token, ...], other: tuple[Token, ...]) -> bool:
    """One is a beginning of the other."""
    width = min(len(one), len(other))
    return one[:width] == other[:width]
