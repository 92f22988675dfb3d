"""Stragglers: which ranks keep the others waiting, in which phase, why, and what that costs.

Judged by arrival: a rank that is slow arrives last at the step's collective, and waits least; walls of phases may look alike on all ranks,
because the others wait inside them. docs/stragglers.md has the tests, their error rates, and what they cannot see.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.finding import Finding
from validation.straggling_cause import reason
from validation.straggling_lateness import Lateness
from validation.straggling_patterns import Places, episodes, late_cells, recurring
from validation.straggling_shared import Rotation, rotation, slow_stretch, uneven
from validation.straggling_special import PAUSE_COLUMNS, collected_cells, paused_cells, special_cause, structural
from validation.straggling_table import Matrix, read_steps
from validation.straggling_words import Explained, late_finding, rotation_finding, stretch_finding, uneven_finding

__all__ = ["PAUSE_COLUMNS", "find_stragglers", "idle"]

MOSTLY = 0.5  # of a rotation's pauses that were recorded with a cause when it is theirs


def idle(timeline: pd.DataFrame) -> pd.DataFrame:
    """Tell how long each rank waited for the last one, step by step.

    Args: timeline with TIMELINE_COLUMNS.
    Returns: a row a step (its index), a column a rank with ms of waiting at the first collective, then `slow_rank`, the one that waited
        least, and `slowdown`, the step over what it had taken without that rank's lateness (dimensionless).
    Raises: DataError when the timeline cannot be read.
    """
    table = read_steps(timeline)
    frame = pd.DataFrame(table.wait.astype(np.float64), index=pd.Index(table.steps, name="step"), columns=table.ranks.tolist())
    frame["slow_rank"] = table.ranks[np.argmin(table.wait, axis=1)]
    second = np.partition(table.wait, 1, axis=1)[:, 1] if len(table.ranks) > 1 else np.zeros(len(table.steps))
    frame["slowdown"] = table.step_ms / np.maximum(table.step_ms - second, 1e-6)
    return frame


def find_stragglers(
    timeline: pd.DataFrame, *, pauses: pd.DataFrame | None = None, hosts: Mapping[int, str] | None = None
) -> tuple[Finding, ...]:
    """Find the ranks that make a job slow, and slowness that is no rank's.

    Args: timeline with TIMELINE_COLUMNS, a row a rank and step; pauses, what was recorded of pauses (PAUSE_COLUMNS: rank, step, cause, ms);
        hosts, rank -> label of its machine.
    Returns: findings with verdict "straggler", the one that cost the job most time first; () = healthy. Kind "late_rank" names ranks unless
        they take turns (garbage collection that goes round, samples dealt out unevenly: then no rank is to be drained, and `evidence` says
        who was late when); kind "uniform_slowness" names none, and `step` is the first of the slow steps.
    Raises: DataError when the timeline cannot be read.
    """
    table = read_steps(timeline)
    if len(table.ranks) < 2:
        return ()
    late = Lateness.of(table)
    paused = paused_cells(table, pauses)
    steady = episodes(late)
    excess, least = late_cells(late, steady)
    single = recurring(late, excess, least)
    single += structural(late, excess, least, paused, known=[one.place for one in (*steady, *single)])
    pausing = {**collected_cells(late, timeline), **paused} if steady or single else {}
    explained = [(one, special_cause(late, one, reason(late, one), pausing)) for one in (*steady, *single)]
    culprits = {int(table.ranks[one.place]) for one, _ in explained}
    found = [(_lost_ms(late, group), late_finding(late, group, hosts or {}, culprits)) for group in _grouped(explained)]
    for one in single:
        excess[one.steps, one.place] = 0
    found += _shared(late, excess, least, paused, alike=not steady)
    return tuple(finding for _, finding in sorted(found, key=lambda pair: -pair[0]))


def _lost_ms(late: Lateness, group: Sequence[Explained]) -> float:
    """Time that these ranks cost the job in their late steps, all together."""
    steps = np.unique(np.concatenate([one.steps for one, _ in group]))
    return late.gain_without([one.place for one, _ in group], steps)


def _grouped(explained: Sequence[Explained]) -> list[list[Explained]]:
    """Ranks that are late for the same reason in the same steps, together."""
    groups: list[list[Explained]] = []
    for one, why in explained:
        for group in groups:
            other, its = group[0]
            if (its.phase, its.cause) == (why.phase, why.cause) and _overlap(one.steps, other.steps):
                group.append((one, why))
                break
        else:
            groups.append([(one, why)])
    return groups


def _overlap(one: Places, other: Places) -> bool:
    """More than half of the shorter one's steps are in both."""
    return 2 * len(np.intersect1d(one, other)) > min(len(one), len(other))


def _shared(
    late: Lateness, excess: Matrix, least: float, paused: Mapping[str, npt.NDArray[np.bool_]], *, alike: bool
) -> list[tuple[float, Finding]]:
    """What is no single rank's, each with the ms that it cost: pauses that go round, uneven samples (where ranks are `alike` otherwise),
    steps that were slow for all."""
    found = []
    table = late.table
    cells = np.logical_or.reduce(list(paused.values())) if paused else None
    if (turns := rotation(late, excess, least, cells)) is not None:
        mine = late.last[turns.rows] == turns.columns
        lost = float(late.gain[np.unique(turns.rows[mine])].sum())
        found.append((lost, rotation_finding(late, turns, _recorded(turns, paused) or "gc")))
    if alike and (steps := uneven(late)) is not None:
        found.append((float(table.wait.mean(axis=1).sum()), uneven_finding(late, steps)))
    if (stretch := slow_stretch(late)) is not None:
        found.append((float(table.step_ms[stretch.steps].sum()) * (1 - 1 / stretch.ratio), stretch_finding(late, stretch)))
    return found


def _recorded(found: Rotation, paused: Mapping[str, npt.NDArray[np.bool_]]) -> str:
    """Cause of most of these pauses, as it was recorded; "" = it was not."""
    shares = {cause: float(cells[found.rows, found.columns].mean()) for cause, cells in paused.items()}
    best = max(shares, key=lambda cause: shares[cause], default="")
    return best if best and shares[best] >= MOSTLY else ""
