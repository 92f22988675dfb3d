"""Rings of one job -> its step timeline, the table that stragglers are found in. Torch-free.

A step's operations are waited in as a whole: what a rank spent inside of them beyond the rank that spent least there is waiting for others.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pandas as pd

from trainer import recorded_layout as at
from trainer.recorded_reading import RingReader
from validation.records import TIMELINE_COLUMNS

MS_NS = 1e6
OWN = ("data", "forward", "backward", "optimizer", "checkpoint")  # phases with a column of their own
AS_COMPUTE = ("other", "evaluate")  # time of a step that has none counts as forward


def recorded_timeline(rings: Iterable[Path]) -> pd.DataFrame:
    """The steps that the rings still hold, TIMELINE_COLUMNS and `gc_ms`, sorted by (step, rank).

    Steps that a rank has not ended are not in it. Samples are not recorded: 0. Own times have the time inside of operations taken out.
    Args: rings of one job, in any order.
    Raises: EvidenceError when a file is not a ring; FileNotFoundError when there is none.
    """
    table = pd.concat([_of(path) for path in rings], ignore_index=True)
    least = table.groupby("step")["inside_ms"].transform("min")
    table["wait_ms"], table["transfer_ms"] = table["inside_ms"] - least, least
    table = table.drop_duplicates(["step", "rank"], keep="last").sort_values(["step", "rank"], kind="stable", ignore_index=True)
    return table[[*TIMELINE_COLUMNS, "gc_ms"]]


def _of(path: Path) -> pd.DataFrame:
    with RingReader(path) as reader:
        rows, rank = reader.steps(), reader.owner().rank
    inside, phases = rows["inside_ns"] / MS_NS, rows["phase_ns"] / MS_NS  # (N, 8), N = steps
    own = np.maximum(phases - inside, 0.0)
    places = {name: place for place, name in enumerate(at.PHASES)}
    columns = {f"{name}_ms": own[:, places[name]] for name in OWN}
    columns["forward_ms"] = columns["forward_ms"] + sum(own[:, places[name]] for name in AS_COMPUTE)
    return pd.DataFrame({
        "rank": np.full(len(rows), rank), "step": rows["step"], "start_ns": rows["start_ns"], "samples": np.zeros(len(rows), np.int64),
        "step_ms": (rows["end_ns"] - rows["start_ns"]) / MS_NS, "inside_ms": inside.sum(axis=1), "gc_ms": rows["gc_ns"] / MS_NS, **columns,
    })  # fmt: skip
