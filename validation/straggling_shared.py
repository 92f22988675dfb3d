"""Slowness that is no single rank's: pauses that go round, work that is unevenly dealt out, and steps that are slow for everybody."""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import scipy  # its parts are loaded when they are first asked for

from validation.straggling_lateness import Lateness
from validation.straggling_patterns import ALARMS, Places, regular
from validation.straggling_table import AFTER, BEFORE, Matrix

PAUSES = 4  # late steps, on two ranks or more, that make a rotation
ROTATION_SHARE = 0.05  # of the time that it has to cost
ALIKE_SPREAD = 0.35  # interquartile range of their lengths over the median: pauses of one kind are alike, heavy tails are not
BETWEEN_SHARE = 0.2  # of the pauses: so few may be between a quarter and a half of their usual length, where tails have more
FOLLOWS = 0.8  # correlation of lateness with samples
UNEVEN_SHARE = 0.08  # of the time that is lost by uneven samples
SLOW_STEPS = 10  # on end, that make a slow stretch
SLOW_RATIO = 1.2  # of the stretch's steps over the others
APART_SIGMAS = 3.5  # of the other steps' own spread (robust) that it has to be above them; slow steps themselves may be unsteady
SMOOTHED = 5  # steps, by their median
EVERYBODY = 0.75  # of the ranks that have to be slower


class Rotation(NamedTuple):
    """Pauses that hit one rank after the other."""

    rows: Places  # steps of the table
    columns: Places  # places of ranks
    length_ms: float  # usual
    period: int  # steps between pauses of one rank, or of all; 0 = not regular


class Stretch(NamedTuple):
    """Steps that were slow on all ranks."""

    steps: Places
    ratio: float  # of its time, waiting left out, over the other steps'
    phase: str  # that grew most
    ranks_slower: int


def rotation(late: Lateness, excess: Matrix, least: float, paused: npt.NDArray[np.bool_] | None = None) -> Rotation | None:
    """Find pauses of like length that come regularly, on rank after rank.

    Args: excess and least as validation.straggling_patterns.late_cells gives them; paused, (S, W): cells with a recorded pause, which need
        not be regular.
    """
    rows, columns = np.nonzero(excess > least)
    if len(rows) < PAUSES:
        return None
    usual = float(np.quantile(excess[rows, columns], 0.75))
    rows, columns = np.nonzero(excess > max(least, usual / 2))
    lengths = excess[rows, columns]
    middle = int(((excess > usual / 4) & (excess <= usual / 2)).sum())
    if len(rows) < PAUSES or len(np.unique(columns)) < 2 or middle > BETWEEN_SHARE * len(rows):
        return None
    if np.subtract(*np.quantile(lengths, (0.75, 0.25))) > ALIKE_SPREAD * float(np.median(lengths)):
        return None
    cost = float(late.gain[rows[late.last[rows] == columns]].sum())
    if cost < ROTATION_SHARE * float(late.table.step_ms.sum()):
        return None
    period, chance = _rhythm(rows, columns)
    is_known = paused is not None and float(paused[rows, columns].mean()) >= 0.5
    return Rotation(rows, columns, float(np.median(lengths)), period) if is_known or chance <= ALARMS else None


def _rhythm(rows: Places, columns: Places) -> tuple[int, float]:
    """Period and chance of it: of each rank's own pauses where they recur, or of all together."""
    own = [regular(rows[columns == place]) for place in np.unique(columns)]
    recurring = [found for found in own if found[1] < 1]
    together = regular(np.unique(rows))
    alone = (recurring[0][0], float(np.prod([chance for _, chance in recurring]))) if recurring else (0, 1.0)
    period, chance = min((alone, together), key=lambda found: found[1])
    return period, min(1.0, 2 * chance)


def uneven(late: Lateness) -> Places | None:
    """Steps whose last rank changes and has most samples; None unless samples explain the lateness and it costs enough."""
    samples = late.table.samples
    mean = samples.mean(axis=1, keepdims=True)
    if not (mean > 0).all() or float(samples.std(axis=1).mean()) < 0.02 * float(mean.mean()):
        return None
    more = (samples / mean - 1).ravel()
    follows = float(np.corrcoef(more, late.excess.ravel())[0, 1]) if more.std() and late.excess.std() else 0.0
    waiting = late.table.wait.mean(axis=1)
    if not follows >= FOLLOWS or float(waiting.sum()) < UNEVEN_SHARE * float(late.table.step_ms.sum()):
        return None
    return np.flatnonzero(waiting >= UNEVEN_SHARE / 2 * late.table.step_ms)


def slow_stretch(late: Lateness) -> Stretch | None:
    """Find steps on end in which all ranks were slower than in the others, waiting left out."""
    own = late.table.step - late.table.wait
    job = np.median(own, axis=1)
    if len(job) < 2 * SLOW_STEPS:
        return None
    smooth = scipy.ndimage.median_filter(job, size=SMOOTHED, mode="nearest")
    low = float(np.quantile(smooth, 0.25))
    inside = smooth > low * (1 + (SLOW_RATIO - 1) / 2)
    starts, stops = _runs(inside)
    if not len(starts):
        return None
    longest = int(np.argmax(stops - starts))
    steps = _sharpened(job, int(starts[longest]), int(stops[longest]), low)
    if not SLOW_STEPS <= len(steps) <= len(job) - SLOW_STEPS:
        return None
    rest = np.delete(np.arange(len(job)), steps)
    ratio = float(np.median(job[steps]) / np.median(job[rest]))
    apart = _is_apart(job[steps], job[rest])
    by_rank = np.median(own[steps], axis=0) / np.median(own[rest], axis=0)
    slower = int((by_rank >= 1 + (ratio - 1) / 2).sum())
    if ratio < SLOW_RATIO or not apart or slower < EVERYBODY * len(by_rank):
        return None
    grown = {name: float(np.median(late.table.own[name][steps]) - np.median(late.table.own[name][rest])) for name in (*BEFORE[1:], *AFTER)}
    phase = max(grown, key=lambda name: grown[name])
    return Stretch(steps, float(late.table.step_ms[steps].mean() / late.table.step_ms[rest].mean()), phase, slower)


def _is_apart(slow: npt.NDArray[np.floating], rest: npt.NDArray[np.floating]) -> bool:
    """Whether nearly all slow steps take longer than nearly all others, and by more than the others differ from each other."""
    usual = float(np.median(rest))
    spread = 1.4826 * float(np.median(np.abs(rest - usual)))
    is_above = bool(np.quantile(slow, 0.1) > np.quantile(rest, 0.9))
    return is_above and float(np.median(slow)) - usual >= APART_SIGMAS * spread


def _runs(inside: npt.NDArray[np.bool_]) -> tuple[Places, Places]:
    """Starts and ends of runs of True."""
    edges = np.diff(np.concatenate(([0], inside.astype(np.int8), [0])))
    return np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)


def _sharpened(job: npt.NDArray[np.floating], start: int, stop: int, low: float) -> Places:
    """The stretch by its unsmoothed steps: those around it that are nearer to its level than to the other one."""
    middle = (low + float(np.median(job[start:stop]))) / 2
    while start < stop and job[start] < middle:
        start += 1
    while stop > start and job[stop - 1] < middle:
        stop -= 1
    while start > 0 and job[start - 1] >= middle:
        start -= 1
    while stop < len(job) and job[stop] >= middle:
        stop += 1
    return np.arange(start, stop)
