"""A trace of a hybrid-parallel job as dense arrays: which operations a step has, and when each began and ended.

P = places (operations of one step of one data-parallel rank), R = data-parallel ranks, T = steps. All times in seconds. Steps are done
again and again with the same operations, so a step that has others than most is left out, and that is said.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.errors import DataError

TRACE_COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc", "mb_id", "gmc")
NUMBERS = tuple(name for name in TRACE_COLUMNS if name != "optype")

FORWARD, BACKWARD = "forward-compute", "backward-compute"
COMPUTE_TYPES = (FORWARD, BACKWARD, "gc", "optimizer")
PIPELINE_TYPES = ("forward-send", "forward-recv", "backward-send", "backward-recv")
GATHER, SCATTER, SEPARATE = "params-all-gather", "grads-reduce-scatter", "separate-grads-all-reduce"
LAYERNORM, EMBEDDING, CLIP = "layernorm-grads-all-reduce", "embedding-grads-all-reduce", "optimizer-clip-main-grad"
TRANSFER = "transfer"  # of a timeline of ours, whose other operations are named as its phases
COMMUNICATION_TYPES = (*PIPELINE_TYPES, GATHER, SCATTER, SEPARATE, LAYERNORM, EMBEDDING, CLIP, TRANSFER)
TYPES = (*COMPUTE_TYPES, *COMMUNICATION_TYPES[:-1])
NOT_A_TRACE = "Replay needs the table of operations as it was recorded: export the trace again."

Times = npt.NDArray[np.float64]


class Place(NamedTuple):
    """An operation that every step has on every data-parallel rank."""

    stage: int
    optype: str
    number: int  # among those of its type on this stage, in order of their starts
    chunk: int  # of the model, within the stage; -1 = none
    model_chunk: int  # of the model, over all stages; -1 = none


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Trace:
    """Complete steps of a job."""

    places: tuple[Place, ...]  # (P,)
    steps: tuple[int, ...]  # (T,)
    workers: Mapping[tuple[int, int], int]  # (dp rank, stage) -> global rank
    dp_ranks: tuple[int, ...]  # (R,)
    stages: int
    start: Times  # (P, R, T)
    end: Times  # (P, R, T)
    recorded: Times  # (T,) from the first start to the last end
    notes: tuple[str, ...] = ()  # what was left out


def read_trace(table: pd.DataFrame, sizes: Mapping[str, Any]) -> Trace:
    """Arrange a table of operations.

    Args: table with TRACE_COLUMNS, a row an operation; sizes as in the trace's meta file, only to check that both belong together.
    Raises: DataError when a column is missing, nothing can be read as numbers, or no step is complete.
    """
    missing = [name for name in TRACE_COLUMNS if name not in table.columns]
    if missing:
        raise DataError(f"the trace has no column {', '.join(missing)} (found: {', '.join(map(str, table.columns))}). {NOT_A_TRACE}")
    notes: list[str] = []
    rows = _known(_finite(table, notes), notes)
    rows = _collapsed(rows, notes)
    rows, ranks, stages = _complete(rows, notes)
    first = rows[(rows["step"] == rows["step"].iloc[0]) & (rows["dp_rank"] == ranks[0])]
    steps = tuple(int(step) for step in rows["step"].unique())
    shape = (len(steps), len(ranks), len(first))
    start = rows["start_ts"].to_numpy(dtype=np.float64).reshape(shape)
    end = start + rows["duration"].to_numpy(dtype=np.float64).reshape(shape)
    workers = {(int(dp), int(stage)): int(rank) for dp, stage, rank in _workers(rows)}
    notes += _size_notes(sizes, len(ranks), stages)
    if len(workers) == 1:
        notes.append("one worker only: its steps can be compared with each other, not with another worker")
    return Trace(
        places=tuple(_places(first)), steps=steps, workers=workers, dp_ranks=ranks, stages=stages,
        start=np.ascontiguousarray(start.transpose(2, 1, 0)), end=np.ascontiguousarray(end.transpose(2, 1, 0)),
        recorded=end.max(axis=(1, 2)) - start.min(axis=(1, 2)), notes=tuple(notes),
    )  # fmt: skip


def _finite(table: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Numbers as numbers; steps with a row that holds none, or a negative duration, are left out."""
    if table.empty:
        raise DataError(f"the trace has no rows. There is nothing to replay. {NOT_A_TRACE}")
    rows = table[list(TRACE_COLUMNS)].copy()
    for name in NUMBERS:
        rows[name] = pd.to_numeric(rows[name], errors="coerce").astype(np.float64)
    needed = rows[["dp_rank", "stage", "step", "seq_id", "start_ts", "duration"]].to_numpy()
    bad = ~np.isfinite(needed).all(axis=1) | (rows["duration"].to_numpy() < 0) | rows["optype"].isna().to_numpy()
    if bad.all():
        raise DataError(f"no row of the trace has finite times and numbers. There is nothing to replay. {NOT_A_TRACE}")
    if bad.any():
        steps = rows.loc[bad, "step"].dropna().unique()
        rows = rows[~bad & ~rows["step"].isin(steps)]
        notes.append(f"{int(bad.sum())} rows hold no finite number or a negative duration: {_listed(steps)} left out")
    whole = [name for name in NUMBERS if name not in ("start_ts", "duration")]
    rows[whole] = rows[whole].fillna(-1).astype(np.int64)
    rows["optype"] = rows["optype"].astype(str)
    return rows


def _known(rows: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """Rows of TYPES."""
    others = sorted(set(rows["optype"].unique()) - set(TYPES))
    rows = rows[rows["optype"].isin(TYPES)]
    if rows.empty:
        raise DataError(f"the trace has no operation of a known type (found: {', '.join(others)}). Known are: {', '.join(TYPES)}.")
    if others:
        notes.append(f"operations of unknown type {', '.join(others)} are left out: their time is in no figure")
    return rows


def _collapsed(rows: pd.DataFrame, notes: list[str]) -> pd.DataFrame:
    """One row an operation: tensor-parallel ranks do an operation together, from the first start to the last end. Sorted."""
    key = ["step", "dp_rank", "stage", "optype", "seq_id"]
    if rows.duplicated(key).any():
        several = rows.groupby(["dp_rank", "stage"])["rank"].nunique().max()
        if several == 1:
            raise DataError(f"the trace holds operations twice (same {', '.join(key)} and rank). Is it two files in one? {NOT_A_TRACE}")
        notes.append(f"{several} ranks a stage do each operation together: taken from the first start to the last end")
        ends = (rows["start_ts"] + rows["duration"]).groupby([rows[name] for name in key]).transform("max")
        starts = rows.groupby(key)["start_ts"].transform("min")
        rows = rows.assign(start_ts=starts, duration=ends - starts).sort_values([*key, "rank"]).drop_duplicates(key)
    return rows.sort_values(key, kind="stable").reset_index(drop=True)


def _complete(rows: pd.DataFrame, notes: list[str]) -> tuple[pd.DataFrame, tuple[int, ...], int]:
    """Steps in which every data-parallel rank has the operations that most have; rows sorted by (step, dp_rank, stage, type, number)."""
    code = rows["stage"].astype(str) + " " + rows["optype"] + " " + rows["seq_id"].astype(str)
    hashed = pd.util.hash_pandas_object(code, index=False).to_numpy()
    cells = pd.DataFrame({"step": rows["step"], "dp_rank": rows["dp_rank"], "hash": hashed, "count": 1})
    signs = cells.groupby(["step", "dp_rank"], sort=True).agg(hash=("hash", "sum"), count=("count", "sum")).reset_index()
    ranks = tuple(int(rank) for rank in sorted(signs["dp_rank"].unique()))
    usual = signs.groupby(["hash", "count"], sort=True).size().idxmax()
    signs["usual"] = (signs["hash"] == usual[0]) & (signs["count"] == usual[1])  # type: ignore[index]
    fit = signs.groupby("step")["usual"].sum() == len(ranks)
    kept = fit.index[fit]
    if not len(kept):
        raise DataError(
            f"no step of the trace has the same operations on all {len(ranks)} data-parallel ranks. A replay would compare unlike things. "
            "Record whole steps of every rank."
        )
    if len(kept) < len(fit):
        notes.append(f"{_listed(fit.index[~fit])} left out: not all ranks have the operations that most steps have")
    rows = rows[rows["step"].isin(kept)]
    return rows, ranks, int(rows["stage"].max()) + 1


def _workers(rows: pd.DataFrame) -> list[list[int]]:
    found: list[list[int]] = rows.groupby(["dp_rank", "stage"])["rank"].min().reset_index().to_numpy().tolist()
    return found


def _places(first: pd.DataFrame) -> list[Place]:
    columns = (first[name].tolist() for name in ("stage", "optype", "seq_id", "mc", "gmc"))
    return [Place(*values) for values in zip(*columns, strict=True)]


def _size_notes(sizes: Mapping[str, Any], ranks: int, stages: int) -> list[str]:
    found = {"dp_size": ranks, "pp_size": stages}
    return [
        f"the sizes say {name} {sizes[name]}, the trace has {count}: the trace counts"
        for name, count in found.items()
        if name in sizes and sizes[name] != count
    ]


def _listed(steps: Any) -> str:
    numbers = [str(int(step)) for step in list(steps)[:5]]
    return f"steps {', '.join(numbers)}{' ...' if len(steps) > 5 else ''}"
