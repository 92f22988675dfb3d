"""When releases are asked for: recorded, or generated from a seed. Pure; the clock of a pattern starts on a Monday at 00:00."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from validation.errors import ConfigError

HOUR_S, DAY_S, WEEK_S = 3600.0, 86400.0, 604800.0
OFFICE_DAYS, OFFICE_START_H, OFFICE_HOURS = 5, 9, 8  # Monday to Friday, 9:00 to 17:00
NIGHTLY_H = 2  # the schedule of every model fires at 02:00
RERUN_SHARE = 0.2  # assumption: a fifth of the nightly releases have one gate held again by hand

Pattern = Literal["steady", "office", "nightly", "recorded"]
PATTERNS: tuple[Pattern, ...] = ("steady", "office", "nightly")  # what can be generated


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """One release, or the re-run of one gate, is asked for."""

    at_s: float  # since the pattern's start
    model: int  # releases of one model wait for each other
    is_rerun: bool = False  # one gate, by hand: goes before what the schedule asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """How much is asked for."""

    pattern: Pattern
    per_week: float  # releases; re-runs come on top
    weeks: int
    models: int = 1
    recorded_s: tuple[float, ...] = ()  # of pattern "recorded": times of past releases, any origin


def arrivals(demand: Demand, rng: np.random.Generator) -> tuple[Arrival, ...]:
    """Draw what is asked for, in order of time; the same demand and generator state give the same arrivals.

    Raises: ConfigError for an unknown pattern, a rate that is no positive number, or fewer than two recorded times.
    """
    if not (np.isfinite(demand.per_week) and demand.per_week > 0) or demand.weeks < 1 or demand.models < 1:
        raise ConfigError(
            f"{demand.per_week} releases a week over {demand.weeks} weeks and {demand.models} models cannot be simulated. "
            "Give positive numbers, e.g. --per-week 1,5,20."
        )
    if demand.pattern not in get_args(Pattern):
        raise ConfigError(f"there is no arrival pattern '{demand.pattern}'. Choose one of: {', '.join(get_args(Pattern))}.")
    draw: dict[str, Callable[[], Sequence[Arrival]]] = {
        "steady": lambda: _of_models(rng.uniform(0, demand.weeks * WEEK_S, _count(demand, rng)), demand, rng),
        "office": lambda: _of_models(_office(_count(demand, rng), demand.weeks, rng), demand, rng),
        "nightly": lambda: _nightly(demand, rng),
        "recorded": lambda: _of_models(_recorded(demand), demand, rng),
    }
    return tuple(sorted(draw[demand.pattern](), key=lambda arrival: arrival.at_s))


def _count(demand: Demand, rng: np.random.Generator) -> int:
    """A Poisson process: a Poisson number of points, placed independently (conditional uniformity)."""
    return int(rng.poisson(demand.per_week * demand.weeks))


def _of_models(times: np.ndarray, demand: Demand, rng: np.random.Generator) -> list[Arrival]:
    models = rng.integers(demand.models, size=len(times))
    return [Arrival(at_s=float(at), model=int(model)) for at, model in zip(times, models, strict=True)]


def _office(count: int, weeks: int, rng: np.random.Generator) -> np.ndarray:
    """Times spread evenly over office hours."""
    hours = rng.uniform(0, weeks * OFFICE_DAYS * OFFICE_HOURS, count)
    day, hour = np.divmod(hours, OFFICE_HOURS)
    week, weekday = np.divmod(day, OFFICE_DAYS)
    times: np.ndarray = week * WEEK_S + weekday * DAY_S + (OFFICE_START_H + hour) * HOUR_S
    return times


def _nightly(demand: Demand, rng: np.random.Generator) -> list[Arrival]:
    """A night's releases all at once, spread over the week's nights as evenly as whole numbers go; re-runs in the office hours after."""
    due = np.floor(np.arange(demand.weeks * 7 + 1) * demand.per_week / 7)
    nights = np.repeat(np.arange(demand.weeks * 7), np.diff(due).astype(int))
    releases = [Arrival(at_s=night * DAY_S + NIGHTLY_H * HOUR_S, model=at % demand.models) for at, night in enumerate(nights.tolist())]
    again = rng.uniform(size=len(releases)) < RERUN_SHARE
    starts = rng.uniform(OFFICE_START_H - NIGHTLY_H, OFFICE_START_H - NIGHTLY_H + OFFICE_HOURS, len(releases)) * HOUR_S
    reruns = [
        Arrival(at_s=release.at_s + after, model=release.model, is_rerun=True)
        for release, held, after in zip(releases, again.tolist(), starts.tolist(), strict=True)
        if held
    ]
    return [*releases, *reruns]


def _recorded(demand: Demand) -> np.ndarray:
    """The recorded gaps, again and again, shrunk or stretched until the rate is the one asked for."""
    known = np.sort(np.asarray(demand.recorded_s, dtype=float))
    if len(known) < 2 or not known[-1] > known[0]:
        raise ConfigError(f"{len(known)} recorded release times say nothing about a pattern. Take a generated one: {', '.join(PATTERNS)}.")
    gaps = np.diff(known)
    gaps *= WEEK_S / demand.per_week / gaps.mean()
    count = int(demand.per_week * demand.weeks)
    times: np.ndarray = np.cumsum(np.resize(gaps, count))
    return times[times < demand.weeks * WEEK_S]
