"""Where lateness is one rank's and no chance: episodes of a rank that is late step after step, and late steps that recur.

Every test asks how likely the pattern is when each rank is as likely to be last as any other, and all of them together may name a rank of a
healthy job in ALARMS of the jobs. The rank of arrival is used and not the time, so that heavy tails do no harm; the time only decides
whether it matters. docs/stragglers.md derives the constants and shows the rates that were measured.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy  # its parts are loaded when they are first asked for

from validation.straggling_lateness import Lateness
from validation.straggling_table import Matrix

WINDOW = 20  # steps in which a slowdown of 20 % has to be found
BLOCK = WINDOW // 2  # steps: windows start and stop at its multiples
ALARMS = 1e-3  # chance of naming a rank of a job whose ranks are all alike, for each kind of test
EPISODE_SHARE = 0.10  # of a healthy step that a rank's median lateness has to be: half of the 20 % that have to be found
RECURRING_GAIN_SHARE = 0.08  # of the time, for steps that are late now and then
RECURRING_ALARMS = 5e-3  # chance that late steps fall on one rank so; that they have to cost RECURRING_GAIN_SHARE makes it far less
LATE_SIGMAS = 4.0  # a step is late beyond so many robust standard deviations of all ranks' lateness ...
LATE_SHARE = 0.15  # ... and by this share of a healthy step
LEVELS, LEVEL_FACTOR = 4, 1.5  # of lateness at which late steps are counted
REGULAR = 0.05  # chance up to which gaps are said to be equal
RUN = 3  # late steps on end that make a burst
RECURRENT = 3  # late steps that make a pattern
CELLS_FOR_NOISE = 1 << 20  # that jitter is measured from

Places = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Late:
    """A rank and the steps in which it is late, as places in the table."""

    place: int
    steps: Places  # of the table, ascending
    is_episode: bool  # late step after step; otherwise the late steps are single ones
    period: int = 0  # steps between them, 0 = not regular


def episodes(late: Lateness) -> list[Late]:
    """Ranks that are late step after step, for WINDOW steps or longer (or the whole of a shorter timeline)."""
    steps, ranks = late.excess.shape
    windows = list(_windows(steps))
    scores, sums, healthy = _running(late.score), _running(late.excess), _running(late.healthy_ms[:, np.newaxis])
    threshold = -scipy.special.ndtri(ALARMS / (ranks * len(windows)))
    found: dict[int, list[tuple[int, int]]] = {}
    for start, stop in windows:
        deviation = math.sqrt((stop - start) * (ranks**2 - 1) / 12)
        first, last = start // BLOCK, -(-stop // BLOCK)
        suspect = (scores[last] - scores[first]) >= threshold * deviation
        share = EPISODE_SHARE * float((healthy[last] - healthy[first])[0])
        for place in np.flatnonzero(suspect & (sums[last] - sums[first] >= share)):
            median = float(np.median(late.excess[start:stop, place]))
            if median >= EPISODE_SHARE * float(np.median(late.healthy_ms[start:stop])):
                found.setdefault(int(place), []).append((start, stop))
    made = [Late(place=place, steps=_edges(late, place, spans), is_episode=True) for place, spans in sorted(found.items())]
    return [one for one in made if len(one.steps)] if 2 * len(made) <= ranks else []  # more than half are not late: the others are early


def _windows(steps: int) -> Iterator[tuple[int, int]]:
    """WINDOW steps, then twice as many and so on, each overlapping half of the one before, and the whole."""
    length = WINDOW
    while length < steps:
        for start in range(0, steps - length + 1, length // 2):
            yield start, start + length
        length *= 2
    yield 0, steps


def _running(values: npt.NDArray[np.floating]) -> npt.NDArray[np.float64]:
    """Sums of the rows before every BLOCK-th one, and of all: shape (blocks + 1, W)."""
    sums = np.zeros((-(-len(values) // BLOCK) + 1, values.shape[1]))
    np.add.reduceat(values, np.arange(0, len(values), BLOCK), axis=0, dtype=np.float64, out=sums[1:])
    return np.cumsum(sums, axis=0)


def _edges(late: Lateness, place: int, spans: list[tuple[int, int]]) -> Places:
    """The steps in which the rank is late: the stretch with the largest sum of lateness above half its level."""
    start, stop = min(first for first, _ in spans), max(last for _, last in spans)
    level = float(np.median(late.excess[start:stop, place]))
    start, stop = max(0, start - WINDOW), min(len(late.excess), stop + WINDOW)
    above = np.clip(late.excess[start:stop, place].astype(np.float64) / level, -1, 2) - 0.5
    sums = np.concatenate(([0.0], np.cumsum(above)))
    lowest = np.minimum.accumulate(sums)
    last = int(np.argmax(sums - lowest))
    first = int(np.argmin(sums[: last + 1]))
    return np.arange(start + first, start + last)


def late_cells(late: Lateness, known: Sequence[Late]) -> tuple[Matrix, float]:
    """Lateness beyond that of known episodes, (S, W), a copy, and the least that is beyond jitter, ms.

    Jitter is measured twice, around the median and from one step to the next, and the smaller one counts: late steps widen the first if
    they are many, the second if they are scattered.
    """
    excess = late.excess.copy()
    for one in known:
        excess[one.steps, one.place] = 0
    every = max(1, excess.size // CELLS_FOR_NOISE)
    sample, steps = excess[::every], np.diff(excess, axis=0)[::every]
    sigmas = [1.4826 * float(np.median(np.abs(sample - np.median(sample))))]
    if len(steps):
        sigmas.append(1.4826 * float(np.median(np.abs(steps))) / math.sqrt(2))
    return excess, max(LATE_SIGMAS * min(sigmas), LATE_SHARE * float(np.median(late.healthy_ms)))


def recurring(late: Lateness, excess: Matrix, least: float) -> list[Late]:
    """Ranks whose late steps are too many, too regular or too close together to be chance.

    Args: as late_cells gives them. Late is what is beyond `least`, then what is beyond half as much again and so on: heavy tails may drown
    a rank's late steps at one level and not at the next.
    """
    rows, columns = np.nonzero(excess > least)
    values = excess[rows, columns]
    levels = [values > least * LEVEL_FACTOR**level for level in range(LEVELS)]
    alarms = RECURRING_ALARMS / max(1, len({int(chosen.sum()) for chosen in levels} - {0}))  # the same cells are the same test
    found: dict[int, Late] = {}
    for chosen in levels:
        for one in _recurring(late, rows[chosen], columns[chosen], alarms):
            found.setdefault(one.place, one)
    return list(found.values()) if 2 * len(found) <= excess.shape[1] else []


def _recurring(late: Lateness, rows: Places, columns: Places, alarms: float) -> list[Late]:
    """Among late cells (rows of the table, places of ranks), those of ranks that have too many."""
    steps, ranks = late.excess.shape
    counts, found = np.bincount(columns, minlength=ranks), []
    for place in np.flatnonzero(counts >= RECURRENT):
        at = rows[columns == place]
        period, chance = regular(at)
        chance *= min(1.0, ranks * float(scipy.special.bdtrc(counts[place] - 1, len(rows), 1 / ranks)))
        burst = _burst(at, len(rows), steps * ranks, alarms)
        if chance > alarms:
            at = burst
        if len(at) and lost_share(late, [int(place)], at) >= RECURRING_GAIN_SHARE:
            found.append(Late(place=int(place), steps=at, is_episode=len(burst) > len(at) / 2, period=period))
    return found


def regular(at: Places) -> tuple[int, float]:
    """Period of late steps (0 = none), and the chance that gaps are as equal as these, given the first one.

    Gaps of rare events are geometric: each length near the mean one has probability exp(-1) / mean. Exactly equal gaps and gaps alike to
    one step are two tests.
    """
    gaps = np.diff(at)
    if len(gaps) < 2 or np.median(gaps) < 2:
        return 0, 1.0
    period = int(np.median(gaps))
    chances = [
        float(scipy.special.bdtrc(np.sum(np.abs(gaps - period) <= slack) - 2, len(gaps) - 1, min(1.0, lengths * math.exp(-1) / period)))
        for slack, lengths in ((0, 1), (1, 3))
    ]
    chance = min(1.0, 2 * min(chances))
    return (period if chance <= REGULAR else 0), chance


def _burst(at: Places, total: int, cells: int, alarms: float) -> Places:
    """The late steps that stand RUN or more on end, if that is no chance at the rate of all other late steps."""
    runs = np.split(at, np.flatnonzero(np.diff(at) > 1) + 1)
    kept = [run for run in runs if len(run) >= RUN and _chance_of_run(len(run), total, cells) <= alarms]
    return np.concatenate(kept) if kept else np.array([], dtype=np.int64)


def _chance_of_run(length: int, total: int, cells: int) -> float:
    rate = max(total - length + 1, 1) / cells
    return float(min(1.0, cells * rate**length))


def lost_share(late: Lateness, places: list[int], at: Places) -> float:
    """Share of the time, from the first to the last of these steps and WINDOW at least, that these ranks cost in them."""
    return late.gain_without(places, at) / float(late.table.step_ms[span(at, len(late.excess))].sum())


def span(at: Places, steps: int) -> Places:
    """All steps from the first to the last of these, and as many around them as make WINDOW."""
    first, last = int(at[0]), int(at[-1]) + 1
    missing = max(0, min(WINDOW, steps) - (last - first))
    start = min(max(0, first - missing // 2), steps - (last - first) - missing)
    return np.arange(max(0, start), max(0, start) + (last - first) + missing)
