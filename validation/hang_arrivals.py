"""Nobody waits for long, but the same rank comes last again and again: stragglers from the creation times of operations alone.

M = operations that all members of a group recorded, R = its ranks. Times are nanoseconds.
"""

from functools import reduce

import numpy as np
import numpy.typing as npt

from validation.finding import Finding
from validation.hang_scene import Lane, Scene
from validation.hang_words import found, listed, named, operation

Times = npt.NDArray[np.int64]

FEWEST_RANKS, FEWEST_OPERATIONS, FEWEST_HOLDS = 3, 20, 5
HELD_NS = 5_000_000  # less is jitter
ALONE = 0.6  # of the last rank's lateness behind the first lies behind the last but one: the others did not come one by one, as stages do
OF_ONE = 0.8  # of all time held belongs to one rank
OF_SPAN = 0.08  # of the time recorded is lost that way
ALIKE, MOSTLY = 0.4, 0.7  # so many delays are within so much of their median: what chance delays differs more
BURST_NS = 100_000_000  # pauses that go round are long


def judge_arrivals(scene: Scene) -> Finding | None:
    """Name the rank that all others keep waiting for, or say that pauses of equal length go round; None when neither shows.

    Only where all ranks recorded the same operations, on one host's clock. A rank whose clock is ahead comes late every time: what is
    common to all its operations is taken off.
    """
    if len({one.host for one in scene.evidence.ranks.values()}) > 1:
        return None
    for lane in sorted(scene.lanes, key=lambda lane: (-len(lane.members), lane.name)):
        ranks, seqs, created = _common(lane)
        if len(ranks) >= FEWEST_RANKS and len(seqs) >= FEWEST_OPERATIONS:
            finding = _judge(scene, lane, ranks, seqs, created)
            if finding is not None:
                return finding
    return None


def _common(lane: Lane) -> tuple[tuple[int, ...], Times, Times]:
    """Ranks, numbers (M,) that all of them recorded, and creation times (R, M); empty when a member left nothing."""
    ranks = tuple(sorted(lane.tracks))
    if ranks != tuple(sorted(lane.members)) or not ranks:
        return (), np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int64)
    seqs = reduce(np.intersect1d, (lane.tracks[rank].seq for rank in ranks)).astype(np.int64)
    table = np.array([lane.tracks[rank].times_ns[np.searchsorted(lane.tracks[rank].seq, seqs)] for rank in ranks], dtype=np.int64)
    is_timed = (table > 0).all(axis=0)
    return ranks, seqs[is_timed], table[:, is_timed]


def _held(created: Times) -> tuple[Times, Times]:
    """Of each operation who came last, as a row, and how long after the last but one; 0 = not worth telling. (M,) each."""
    early = np.sort(created, axis=0)[:2]
    others = np.where(created == early[0], early[1], early[0])  # the first of the other ranks
    ahead = np.maximum((created - others).min(axis=1), 0)
    moved = created - ahead[:, None]
    order = np.sort(moved, axis=0)
    gap = order[-1] - order[-2]
    is_held = (gap >= HELD_NS) & (gap >= ALONE * (order[-1] - order[0]))
    return moved.argmax(axis=0), np.where(is_held, gap, 0)


def _judge(scene: Scene, lane: Lane, ranks: tuple[int, ...], seqs: Times, created: Times) -> Finding | None:
    last, gap = _held(created)
    by_rank = np.bincount(last, weights=gap, minlength=len(ranks))
    total, span = float(by_rank.sum()), int(created.max() - created.min())
    if total < OF_SPAN * span or not total:
        return None
    row = int(by_rank.argmax())
    mine = np.flatnonzero((last == row) & (gap > 0))
    first, middle_s = int(seqs[mine[0]]), float(np.median(gap[mine])) / 1e9
    if by_rank[row] >= OF_ONE * total and len(mine) >= FEWEST_HOLDS and _are_alike(gap[mine]):
        rank = ranks[row]
        key = scene.keys[int(lane.tracks[rank].key[lane.tracks[rank].position(first)])]
        return found(
            scene, "late_rank", ranks=(rank,), verdict="straggler", lateness_s=middle_s, confidence="medium",
            collective=operation(scene, lane, first, rank, key),
            explanation=f"Rank {rank} keeps the others waiting: it came {1e3 * middle_s:.0f} ms after all of them to {len(mine)} of "
            f"{len(seqs)} operations of {named(lane)}, first to seq {first}. All go on; the job is slow, not hung.",
            lines=(f"{named(lane)}: {by_rank[row] / total:.0%} of the {total / 1e9:.2f} s in which ranks waited for one is rank {rank}'s",),
        )  # fmt: skip
    return _going_round(scene, lane, ranks, seqs, last, gap)


def _are_alike(delays: Times) -> bool:
    """Whether most are near their median."""
    middle = float(np.median(delays))
    return float(np.mean(np.abs(delays - middle) <= ALIKE * middle)) >= MOSTLY


def _going_round(scene: Scene, lane: Lane, ranks: tuple[int, ...], seqs: Times, last: Times, gap: Times) -> Finding | None:
    """Long pauses of equal length that meet one rank after another, as collections of garbage do: no rank is to blame."""
    bursts = np.flatnonzero(gap >= BURST_NS)
    met = sorted({ranks[row] for row in last[bursts].tolist()})
    if len(bursts) < FEWEST_HOLDS or 2 * len(met) <= len(ranks):
        return None
    if not _are_alike(gap[bursts]):
        return None
    middle = float(np.median(gap[bursts]))
    first, rank = int(seqs[bursts[0]]), ranks[int(last[bursts[0]])]
    key = scene.keys[int(lane.tracks[rank].key[lane.tracks[rank].position(first)])]
    return found(
        scene, "late_rank", verdict="straggler", cause="gc", lateness_s=middle / 1e9, confidence="medium",
        collective=operation(scene, lane, first, rank, key),
        explanation=f"Pauses of about {middle / 1e6:.0f} ms go round: {len(bursts)} operations of {named(lane)} waited for one rank, in "
        f"turn for {listed(met)}. That is how collections of garbage look; no rank is to blame.",
        lines=(f"{named(lane)}: pauses at seq " + ", ".join(str(int(seqs[at])) for at in bursts[:8]),),
    )  # fmt: skip
