"""Where a rank really left the common order, which shows later: by steps, micro-batches and call sites, else by what repeats."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from validation.hang_scene import Lane
from validation.hang_tracks import Track

LONGEST_SHIFT = 64  # operations that a rank may have left out or added and still be followed


class Divergence(NamedTuple):
    """Where the wrong rank left the common order."""

    seq: int
    shift: int  # operations that it left out (positive) or added (negative); 0 = cannot be told
    is_sure: bool  # by markers or call sites, not by the shapes alone


def divergence(lane: Lane, culprit: int, peer: int, visible: int) -> Divergence:
    """Compare the wrong rank with one of the majority, up to the number `visible` under which they differ or one has nothing.

    Tokens (step, micro-batch, call site, agreement) differ first where the rank left the order. To be believed, what follows has to be the
    other's order shifted by as many operations as were left out or added: ranks may lawfully call from other places.
    """
    one, other = lane.tracks[culprit], lane.tracks[peer]
    mine, theirs, low = _tokens(one, other, visible)
    if mine is None or theirs is None:
        return Divergence(visible, by_period(lane, culprit, peer, visible), False)
    width = min(len(mine), len(theirs))
    differs = np.flatnonzero((mine[:width] != theirs[:width]).any(axis=1))
    start = int(differs[0]) if len(differs) else width
    shift = _shift(mine[start:], theirs[start:]) or _shift_further(one, other, visible, start)
    if shift == 0 and low + start < visible:
        return Divergence(visible, 0, False)
    is_level = one.value("step", visible) == other.value("step", visible)  # who is a step ahead is known to have left out the rest of one
    if shift == 0 and is_level and (foretold := by_period(lane, culprit, peer, visible)):
        return Divergence(visible, foretold, False)
    return Divergence(low + start, shift, True)


def _shift_further(one: Track, other: Track, visible: int, start: int) -> int:
    """The shift, from what both issued after `visible` without waiting for it, as asynchronous operations are; 0 = cannot be told."""
    if max(one.reached, other.reached) <= visible:
        return 0
    mine, theirs, low = _tokens(one, other, visible + LONGEST_SHIFT)
    if mine is None or theirs is None:
        return 0
    ends = (int(np.searchsorted(track.seq, max(track.reached, visible), side="right")) - int(np.searchsorted(track.seq, low))
            for track in (one, other))  # fmt: skip
    return _shift(mine[start : next(ends)], theirs[start : next(ends)])


def _tokens(one: Track, other: Track, visible: int) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64] | None, int]:
    """Rows of (key, place, step, micro) of both tracks from their first common number; None where neither steps nor places are there."""
    low = max(int(one.seq[0]), int(other.seq[0]))
    columns: list[tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = []
    texts: dict[str, int] = {}
    mine, theirs = _window(one, low, visible), _window(other, low, visible)
    for name in ("place", "step", "micro"):
        first, second = one.column(name), other.column(name)
        if first is None or second is None:
            continue
        pair = (first[mine].astype(np.int64), second[theirs].astype(np.int64))
        if name == "place":
            pair = (_as_texts(pair[0], one, texts), _as_texts(pair[1], other, texts))
        columns.append(pair)
    if not columns or not any((pair[0] >= 0).any() and (pair[1] >= 0).any() for pair in columns):
        return None, None, low
    columns.append((one.key[mine].astype(np.int64), other.key[theirs].astype(np.int64)))
    return np.stack([pair[0] for pair in columns], axis=1), np.stack([pair[1] for pair in columns], axis=1), low


def _window(track: Track, low: int, high: int) -> slice:
    return slice(int(np.searchsorted(track.seq, low)), int(np.searchsorted(track.seq, high, side="right")))


def _as_texts(numbers: npt.NDArray[np.int64], track: Track, texts: dict[str, int]) -> npt.NDArray[np.int64]:
    """Numbers of places that mean the same on both ranks."""
    places = track.source.dump.places
    table = np.array([texts.setdefault(place, len(texts)) for place in places] or [-1], dtype=np.int64)
    return np.where(numbers >= 0, table[np.clip(numbers, 0, len(table) - 1)], -1)


def _shift(mine: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64]) -> int:
    """How many operations `mine` left out (positive) or added (negative) at its start, so that the rest runs along with `theirs`."""
    for size in range(1, LONGEST_SHIFT + 1):
        for one, other, sign in ((mine, theirs[size:], 1), (mine[size:], theirs, -1)):
            width = min(len(one), len(other))
            if width and bool((one[:width] == other[:width]).all()):
                return sign * size
    return 0


def by_period(lane: Lane, culprit: int, peer: int, visible: int) -> int:
    """Operations that the rank left out, foretold by what followed the peer's operation when it came before; 0 = cannot be told.

    Steps repeat. Where the peer is at operation x of the pattern and the rank at the one that always came k later, the rank left out k;
    where steps are recorded, one that came in another step than the rank's is none of them.
    """
    theirs, place = lane.tracks[peer], lane.tracks[peer].position(visible)
    mine = lane.tracks[culprit].position(visible)
    if place < 1 or mine < 0:
        return 0
    keys, wanted = theirs.key[: place + 1], int(lane.tracks[culprit].key[mine])
    steps, step = theirs.column("step"), lane.tracks[culprit].value("step", visible)
    is_stepped = steps is not None and min(int(steps[place]), step) >= 0
    earlier = [
        int(number) for number in np.flatnonzero(keys[:-1] == keys[-1])[::-1]
        if number > 0 and (keys[number - 1] == keys[-2] or (is_stepped and _begins(steps, number) and _begins(steps, place)))
    ]  # fmt: skip
    for number in earlier[:4]:
        for ahead in np.flatnonzero(keys[number + 1 : place] == wanted).tolist():
            later = number + 1 + ahead
            if not is_stepped or steps is None or steps[later] - steps[number] == step - steps[place]:
                return int(ahead) + 1
    return 0


def _begins(steps: npt.NDArray[np.int32] | None, place: int) -> bool:
    """Whether the operation in this place is the first of its step."""
    return steps is not None and place > 0 and bool(steps[place] >= 0 and steps[place] != steps[place - 1])


def repeats_before(track: Track, seq: int) -> bool:
    """Whether the operation under this number is the same as the one before it."""
    place = track.position(seq)
    return place > 0 and bool(track.key[place] == track.key[place - 1])


def came_before(track: Track, seq: int) -> bool:
    """Whether the same operation came earlier on this rank."""
    place = track.position(seq)
    return place > 0 and bool((track.key[:place] == track.key[place]).any())
