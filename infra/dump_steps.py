"""The steps that our own recorder wrote into dumps -> a timeline of the job."""

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from validation.records import TIMELINE_COLUMNS

OWN = ("data", "forward", "backward", "optimizer", "checkpoint")  # phases with a column of their own; time of another counts as forward
MS_NS = 1e6

StepRow = dict[str, float]


def step_rows(own: Mapping[str, Any]) -> tuple[StepRow, ...]:
    """Finished steps of a dump's "sea_trial", oldest first; one that is not whole is passed over."""
    steps = own.get("steps")
    rows = [_row(step) for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    return tuple(row for row in rows if row is not None)


def _row(step: Mapping[str, Any]) -> StepRow | None:
    try:
        start, end = int(step["start_ns"]), int(step["end_ns"])
        phases = {str(name): float(ms) for name, ms in dict(step.get("phase_ms") or {}).items()}
        inside = {str(name): float(ms) for name, ms in dict(step.get("inside_ms") or {}).items()}
        row = {"step": int(step["step"]), "start_ns": start, "step_ms": (end - start) / MS_NS, "gc_ms": float(step.get("gc_ms") or 0.0)}
    except (KeyError, TypeError, ValueError):
        return None
    row |= {f"{name}_ms": 0.0 for name in OWN} | {"inside_ms": sum(inside.values()), "samples": 0.0}
    for name, ms in phases.items():
        row[f"{name if name in OWN else 'forward'}_ms"] += max(0.0, ms - inside.get(name, 0.0))
    return row


def timeline_of(steps: Mapping[int, Sequence[StepRow]]) -> pd.DataFrame | None:
    """TIMELINE_COLUMNS and gc_ms, sorted by (step, rank); None without a step. Args: steps, by rank.

    What a rank spent inside of a step's operations beyond the rank that spent least there is waiting. Samples are not recorded: 0.
    """
    table = pd.DataFrame([{"rank": rank, **row} for rank, rows in steps.items() for row in rows])
    if table.empty:
        return None
    least = table.groupby("step")["inside_ms"].transform("min")
    table["wait_ms"], table["transfer_ms"] = table["inside_ms"] - least, least
    table = table.astype(dict.fromkeys(("rank", "step", "start_ns", "samples"), "int64"))
    table = table.drop_duplicates(["step", "rank"], keep="last").sort_values(["step", "rank"], kind="stable", ignore_index=True)
    return table[[*TIMELINE_COLUMNS, "gc_ms"]]
