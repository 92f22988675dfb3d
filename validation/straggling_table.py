"""A step timeline as dense arrays, S steps x W ranks, and what each rank did by itself in them. All times in ms.

A backward pass that overlaps with its reduction may be recorded with the waiting inside it (all ranks alike); where the phases of a step
add up to more than the step, the overlap is taken out of backward again.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.errors import DataError
from validation.records import TIMELINE_COLUMNS

Matrix = npt.NDArray[np.float32]  # (S, W)
BEFORE = ("between", "data", "forward", "backward")  # own work before the step's first collective; between: since the step before ended
AFTER = ("transfer", "optimizer", "checkpoint")  # what makes a rank late for the next one
NOT_A_TIMELINE = "Give the timeline.parquet that a run leaves in its folder."
ROWS_AT_ONCE = 256  # steps: the temporaries stay small
SAMPLED = 1000  # steps that tell whether waiting is recorded inside backward
OVERLAP_SHARE = 0.5  # of the waiting that has to be inside other phases before it is taken out: rounding is not


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Steps:
    """Steps that all ranks have, in order."""

    ranks: npt.NDArray[np.int64]  # (W,)
    steps: npt.NDArray[np.int64]  # (S,)
    own: Mapping[str, Matrix]  # BEFORE and AFTER -> own time, waiting taken out
    wait: Matrix  # own arrival to last arrival
    step: Matrix  # wall clock of the step
    samples: Matrix
    notes: tuple[str, ...] = ()  # what was left out or mended

    @property
    def step_ms(self) -> npt.NDArray[np.float64]:
        """The job's time of each step, shape (S,): the median rank's, for all leave a collective together."""
        return np.asarray(np.median(self.step, axis=1), dtype=np.float64)


def read_steps(timeline: pd.DataFrame) -> Steps:
    """Arrange a timeline.

    Args: timeline with TIMELINE_COLUMNS, a row a rank and step, in any order; where a (rank, step) stands twice, the last row counts.
    Raises: DataError when columns are missing, nothing is a finite number, or no step has all ranks.
    """
    missing = [name for name in TIMELINE_COLUMNS if name not in timeline.columns]
    if missing:
        raise DataError(
            f"the timeline has no column {', '.join(missing)} (found: {', '.join(map(str, timeline.columns))}). {NOT_A_TIMELINE}"
        )
    if timeline.empty:
        raise DataError(f"the timeline has no rows. Nothing can be said of its ranks. {NOT_A_TIMELINE}")
    notes: list[str] = []
    rank, step = _whole(timeline["rank"], "rank"), _whole(timeline["step"], "step")
    order, ranks, steps = _rectangle(rank, step, notes)
    shape = (len(steps), len(ranks))

    def matrix(name: str) -> Matrix:
        column = timeline[name]
        if column.dtype.kind not in "fiu":
            column = pd.to_numeric(column, errors="coerce").astype(np.float64)
        values = column.to_numpy().astype(np.float32, copy=False)
        return (values if order is None else values[order]).reshape(shape)

    wall, wait, samples = matrix("step_ms"), matrix("wait_ms").copy(), matrix("samples")  # a copy: it may be mended
    own = {name: matrix(f"{name}_ms") for name in (*BEFORE[1:], *AFTER)}
    own["between"] = _between(timeline["start_ns"], order, wall, steps)
    sums = [values.sum(axis=1, dtype=np.float64) for values in (wall, wait, *own.values())]  # finite if all are
    kept = np.asarray(np.isfinite(sums).all(axis=0))
    if not kept.any():
        raise DataError(
            f"no step of the timeline has finite times on all {len(ranks)} ranks. Nothing can be said of them. {NOT_A_TIMELINE}"
        )
    if not kept.all():
        notes.append(f"{int((~kept).sum())} of {len(kept)} steps hold times that are no finite numbers: left out")
        wall, wait, samples, steps = wall[kept], wait[kept], samples[kept], steps[kept]
        own = {name: values[kept] for name, values in own.items()}
    _mend(own, wait, wall, notes)
    return Steps(ranks=ranks, steps=steps, own=own, wait=wait, step=wall, samples=np.nan_to_num(samples), notes=tuple(notes))


def _whole(column: pd.Series, name: str) -> npt.NDArray[np.int64]:
    try:
        return column.to_numpy(dtype=np.int64)
    except (TypeError, ValueError):
        raise DataError(f"column {name} of the timeline holds values that are no whole numbers. {NOT_A_TIMELINE}") from None


def _rectangle(
    rank: npt.NDArray[np.int64], step: npt.NDArray[np.int64], notes: list[str]
) -> tuple[npt.NDArray[np.int64] | None, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Rows sorted by (step, rank) that make a full rectangle (None: they do as they are), its ranks and steps."""
    width = int(np.argmax(step != step[0])) or len(step)  # rows of the first step, if they are sorted
    if len(rank) % width == 0:
        table, ranks = step.reshape(-1, width), rank[:width]
        is_sorted = bool((np.diff(ranks) > 0).all() and (np.diff(table[:, 0]) > 0).all())
        if is_sorted and bool((table == table[:, :1]).all() and (rank.reshape(table.shape) == ranks).all()):
            return None, ranks.copy(), table[:, 0].copy()
    order = np.lexsort((rank, step))  # stable
    last = np.append((np.diff(step[order]) != 0) | (np.diff(rank[order]) != 0), True)
    order = order[last]
    steps, starts, counts = np.unique(step[order], return_index=True, return_counts=True)
    sets = [rank[order[start : start + count]].tobytes() for start, count in zip(starts, counts, strict=True)]
    usual = pd.Series(sets).mode().iloc[0]  # of two as usual, the first in order of bytes
    kept = np.array([found == usual for found in sets])
    ranks = np.frombuffer(usual, dtype=np.int64)
    if not kept.all():
        notes.append(f"{int((~kept).sum())} of {len(kept)} steps do not have the {len(ranks)} ranks that most have: left out")
    return order[np.repeat(kept, counts)], ranks, steps[kept]


def _between(start: pd.Series, order: npt.NDArray[np.int64] | None, wall: Matrix, steps: npt.NDArray[np.int64]) -> Matrix:
    """Time from the end of the step before to the start of this one, by each rank's own clock, beyond the rank that took the least."""
    if start.dtype.kind not in "iu":
        start = pd.to_numeric(start, errors="coerce").fillna(0)
    stamps = start.to_numpy().astype(np.int64, copy=False)
    starts = (stamps if order is None else stamps[order]).reshape(wall.shape)
    between = np.zeros(wall.shape, dtype=np.float32)
    follows = np.diff(steps) == 1
    for first in range(1, len(steps), ROWS_AT_ONCE):
        rows, before = slice(first, first + ROWS_AT_ONCE), slice(first - 1, min(first + ROWS_AT_ONCE, len(steps)) - 1)
        gap = ((starts[rows] - starts[before]) / 1e6).astype(np.float32) - wall[before]
        np.maximum(gap, 0, out=gap)
        between[rows] = np.where(follows[before, None], gap - gap.min(axis=1, keepdims=True), 0)
    return between


def _mend(own: dict[str, Matrix], wait: Matrix, wall: Matrix, notes: list[str]) -> None:
    """Take waiting out of backward where it was recorded inside, and find it where it was not recorded at all. In place."""
    if (wait < 0).any():
        notes.append("some ranks arrive after the last arrival: clocks differ; read as no waiting")
        np.maximum(wait, 0, out=wait)
    if wait.shape[1] > 1 and not wait.any():
        before = own["data"] + own["forward"] + own["backward"]
        if np.ptp(before, axis=1).any():
            notes.append("no waiting was recorded: arrivals are reckoned from the phases")
            wait += before.max(axis=1, keepdims=True) - before
        return
    every = max(1, len(wait) // SAMPLED)
    if float(_hidden(own, wait, wall, slice(None, None, every)).sum()) > OVERLAP_SHARE * float(wait[::every].sum()) > 0:
        own["backward"] = own["backward"].copy()
        for first in range(0, len(wait), ROWS_AT_ONCE):
            rows = slice(first, first + ROWS_AT_ONCE)
            own["backward"][rows] -= np.minimum(_hidden(own, wait, wall, rows), own["backward"][rows])
        notes.append("backward was recorded with the waiting inside it: taken out")


def _hidden(own: Mapping[str, Matrix], wait: Matrix, wall: Matrix, rows: slice) -> Matrix:
    """Waiting of some steps that is inside their other phases: what the phases add up to beyond the step."""
    parts = [own[name][rows] for name in ("data", "forward", "backward", *AFTER)]
    return np.asarray(np.clip(np.add.reduce(parts) + wait[rows] - wall[rows], 0, wait[rows]), dtype=np.float32)
