"""What a replay without stragglers says of a job's trace, as a finding."""

import math
from typing import Any

from infra.traces import TraceFile
from validation.finding import Finding
from validation.what_if import WhatIf, what_if

SLOW = 1.1  # a job whose steps take a tenth longer than without its stragglers is slowed by them (the paper's threshold)
MOST = 0.5  # of the slowdown: who explains as much is named


def trace_finding(trace: TraceFile) -> Finding:
    """Replay one trace: who is to blame, and the figures under `what_if`. Raises DataError when it cannot be replayed."""
    found = what_if(trace.table, trace.sizes)
    said: dict[str, Any] = {"slowdown": found.slowdown, "evidence": _lines(found), "what_if": found.document()}
    if not found.slowdown >= SLOW:
        text = f"Stragglers cost this job little: its step takes {found.slowdown:.3f} times the ideal one."
        return Finding(verdict="healthy", kind="healthy", explanation=text, action="Nothing to do.", **said)
    text = f"Stragglers make this job's step {found.slowdown:.2f} times as long as it need be"
    workers, stage = _known(found.slowest_workers_share), _known(found.last_stage_share)
    if workers >= max(MOST, stage):
        return Finding(
            verdict="straggler", kind="late_rank", ranks=tuple(sorted(found.slowest_workers)), cause=_cause(found),
            explanation=f"{text}; with the slowest workers as fast as the others {workers:.0%} of that goes away.",
            action="Take the machines of these ranks out and test their devices.", **said,
        )  # fmt: skip
    if stage >= MOST:
        return Finding(
            verdict="straggler", kind="late_rank", ranks=_last_stage(trace), cause="imbalance",
            explanation=f"{text}; the last pipeline stage has more to do than the others.",
            action="Move layers from the last stage, which computes the loss as well, to the others.", **said,
        )  # fmt: skip
    return Finding(
        verdict="straggler", kind="uniform_slowness", confidence="medium",
        explanation=f"{text}, but neither a few workers nor the last stage explain it; {_worst(found)} costs most.",
        action="Look at what the ranks share, and at how unequal the lengths of their samples are.", **said,
    )  # fmt: skip


def _lines(found: WhatIf) -> tuple[str, ...]:
    types = ", ".join(f"{name} {value:.3f}" for name, value in found.by_type.overall.items())
    return (
        f"S = {found.slowdown:.3f}: time of a step over its time without stragglers",
        f"M_W = {found.slowest_workers_share:.3f}: share of the slowdown that goes away when the slowest workers are ideal",
        f"M_S = {found.last_stage_share:.3f}: the same for the last pipeline stage",
        f"S_t, with only one type of operation as slow as it was: {types}",
        *found.notes,
    )


def _known(share: float) -> float:
    return 0.0 if math.isnan(share) else share


def _worst(found: WhatIf) -> str:
    return max(found.by_type.overall, key=lambda name: found.by_type.overall[name], default="")


def _cause(found: WhatIf) -> str:
    worst = _worst(found)
    return "network" if "comm" in worst or "sync" in worst else "compute"


def _last_stage(trace: TraceFile) -> tuple[int, ...]:
    """Global ranks of the last pipeline stage, as far as the trace names them."""
    table = trace.table
    if not {"stage", "rank"} <= set(table.columns):
        return ()
    return tuple(sorted({int(rank) for rank in table.loc[table["stage"] == table["stage"].max(), "rank"]}))
