"""Late steps that are explained by what was recorded or by when they come: pauses, checkpoints, compilation."""

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.errors import DataError
from validation.finding import CAUSES
from validation.straggling_cause import Reason
from validation.straggling_lateness import Lateness
from validation.straggling_patterns import RECURRING_GAIN_SHARE, Late, lost_share
from validation.straggling_table import AFTER, BEFORE, Matrix, Steps

PAUSE_COLUMNS = ("rank", "step", "cause", "ms")  # one row a recorded pause; cause is one of validation.finding.CAUSES
COMPILING_STEPS = 5  # at the beginning of a timeline
COMPILING_SHARE = 10.0  # healthy steps that a single late step at the beginning has to take: less is an ordinary warm-up
ALONE_SHARE = 0.5  # of the lateness that a pause, or a checkpoint that others do not make, has to explain
ONE_PHASE_SHARE = 0.75  # of single late steps that fall into one phase when it is that phase's; pauses fall into any


def paused_cells(table: Steps, pauses: pd.DataFrame | None) -> dict[str, npt.NDArray[np.bool_]]:
    """cause -> (S, W): a pause was recorded there that explains lateness. Raises DataError for missing columns and unknown causes."""
    if pauses is None or pauses.empty:
        return {}
    if missing := [name for name in PAUSE_COLUMNS if name not in pauses.columns]:
        raise DataError(
            f"the table of pauses has no column {', '.join(missing)}. Pauses are left unexplained. Give {', '.join(PAUSE_COLUMNS)}."
        )
    if unknown := sorted(set(pauses["cause"]) - set(CAUSES)):
        raise DataError(f"pauses with cause {', '.join(map(str, unknown))} are not known. Use one of {', '.join(CAUSES)}.")
    cells: dict[str, npt.NDArray[np.bool_]] = {}
    for cause, rows in pauses.groupby("cause", sort=True):
        ms = np.zeros(table.wait.shape)
        at = np.searchsorted(table.steps, rows["step"].to_numpy()).clip(0, len(table.steps) - 1)
        who = np.searchsorted(table.ranks, rows["rank"].to_numpy()).clip(0, len(table.ranks) - 1)
        fits = (table.steps[at] == rows["step"].to_numpy()) & (table.ranks[who] == rows["rank"].to_numpy())
        np.add.at(ms, (at[fits], who[fits]), rows["ms"].to_numpy(dtype=np.float64)[fits])
        late_next = np.zeros_like(ms)
        late_next[1:] = ms[:-1]  # a pause after the collective makes late for the next one
        cells[str(cause)] = np.maximum(ms, late_next) > 0
    return cells


def collected_cells(late: Lateness, timeline: pd.DataFrame) -> dict[str, npt.NDArray[np.bool_]]:
    """cause "gc" -> (S, W): garbage was collected there, or in the step before, for as long as explains the lateness; {} = not recorded.

    Every job collects a little garbage in most steps: what is short explains nothing.
    """
    if "gc_ms" not in timeline.columns:
        return {}
    table, rows = late.table, timeline[timeline["gc_ms"] > 0]
    ms = np.zeros(table.wait.shape)
    step, rank = rows["step"].to_numpy(dtype=np.int64), rows["rank"].to_numpy(dtype=np.int64)
    at = np.searchsorted(table.steps, step).clip(0, len(table.steps) - 1)
    who = np.searchsorted(table.ranks, rank).clip(0, len(table.ranks) - 1)
    fits = (table.steps[at] == step) & (table.ranks[who] == rank)
    ms[at[fits], who[fits]] = rows["gc_ms"].to_numpy(dtype=np.float64)[fits]
    before = np.zeros_like(ms)
    before[1:] = ms[:-1]
    return {"gc": (np.maximum(ms, before) >= ALONE_SHARE * late.excess) & (late.excess > 0)}


def structural(
    late: Lateness, excess: Matrix, least: float, paused: Mapping[str, npt.NDArray[np.bool_]], *, known: Collection[int]
) -> list[Late]:
    """Late steps of one rank that need no statistics: a checkpoint that only it makes, a long first compilation, recorded pauses."""
    table, found = late.table, []
    rows, columns = np.nonzero(excess > least)
    for place in sorted(set(np.unique(columns).tolist()) - set(known)):
        at = rows[columns == place]
        saving = at[_saves_alone(table, at, place, late)]
        compiling = at[at < COMPILING_STEPS]
        if len(saving) and lost_share(late, [place], saving) >= RECURRING_GAIN_SHARE:
            found.append(Late(place=place, steps=saving, is_episode=False))
        elif len(compiling) and _compiles(late, place, compiling):
            found.append(Late(place=place, steps=compiling, is_episode=False))
        elif paused and _is_only_one(columns, place):
            in_pause = at[np.logical_or.reduce([cells[at, place] for cells in paused.values()])]
            if len(in_pause) and lost_share(late, [place], in_pause) >= RECURRING_GAIN_SHARE:
                found.append(Late(place=place, steps=in_pause, is_episode=False))
    return found


def _is_only_one(columns: npt.NDArray[np.int64], place: int) -> bool:
    return float((columns == place).mean()) > ONE_PHASE_SHARE


def _saves_alone(table: Steps, at: npt.NDArray[np.int64], place: int, late: Lateness) -> npt.NDArray[np.bool_]:
    """Which of these steps are late by a checkpoint, in them or at the end of the one before, that the others did not make."""
    saved = table.own["checkpoint"]
    alone = saved[:, place] - np.median(np.delete(saved, place, axis=1), axis=1)
    longest = np.maximum(alone, np.concatenate(([0], alone[:-1])))
    return np.asarray(longest[at] >= ALONE_SHARE * late.excess[at, place])


def _compiles(late: Lateness, place: int, at: npt.NDArray[np.int64]) -> bool:
    """A rank that takes many steps' time over its first ones, in forward or backward."""
    busy = late.table.own["forward"] + late.table.own["backward"]
    more = float((busy[at, place] - np.median(np.delete(busy[at], place, axis=1), axis=1)).sum())
    lateness = float(late.excess[at, place].sum())
    return more >= ALONE_SHARE * lateness and lateness >= COMPILING_SHARE * float(np.median(late.healthy_ms))


def special_cause(late: Lateness, one: Late, why: Reason, paused: Mapping[str, npt.NDArray[np.bool_]]) -> Reason:
    """The reason, unless a recorded pause, the beginning of the job, or single pauses in whatever phase say otherwise."""
    for cause, cells in paused.items():
        if float(cells[one.steps, one.place].mean()) >= ALONE_SHARE:
            return replace(why, cause=cause, evidence=f"{why.evidence}; {cause} was recorded in these steps")
    if one.steps[-1] < COMPILING_STEPS and why.cause == "compute":
        return replace(why, cause="compile", evidence=f"{why.evidence}; only in the first steps")
    if not one.is_episode and why.cause in ("compute", "host_cpu") and len(one.steps) >= 3 and (why.phase == "" or _phases_vary(late, one)):
        return replace(why, cause="gc", phase="", evidence=f"{why.evidence}; single pauses, in no phase in particular")
    return why


def _phases_vary(late: Lateness, one: Late) -> bool:
    """True when no phase holds most of the late steps."""
    names = (*BEFORE, *AFTER)
    losses = np.stack([_more(late, one, phase) for phase in names])
    most = np.bincount(losses.argmax(axis=0), minlength=len(names)).max()
    return bool(most < ONE_PHASE_SHARE * len(one.steps))


def _more(late: Lateness, one: Late, phase: str) -> npt.NDArray[np.float64]:
    """ms more than the others' median in a phase, of each late step; of what ends a step, there or in the step before."""
    own = late.table.own[phase]
    more = own[:, one.place] - np.median(np.delete(own, one.place, axis=1), axis=1)
    here = np.asarray(more[one.steps], dtype=np.float64)
    return here if phase in BEFORE else np.maximum(here, more[np.maximum(one.steps - 1, 0)])
