"""What a job would have taken without its stragglers: replay the dependencies with ideal durations.

S = T / T_ideal, where T replays the recorded durations and T_ideal replays the same dependencies with every operation at its type's ideal
duration. S_t and S_w: all ideal but one type's or one worker's durations; M_W and M_S: the share of the slowdown that goes away when the
slowest workers or the last stage are ideal. Definitions: Lin et al., "Understanding Stragglers in Large Model Training Using What-if
Analysis", OSDI 2025; docs/stragglers.md says where its words leave a choice.
"""

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from validation.records import TIMELINE_COLUMNS
from validation.what_if_graph import Dependencies
from validation.what_if_replay import Mask, Replay, own_times
from validation.what_if_timeline import timeline_replay
from validation.what_if_trace import TRACE_COLUMNS, Times, Trace, read_trace

SLOWEST_PERCENT = 3  # of the workers, rounded up, are ideal in M_W (the paper's choice)
ROUNDING = 1e-6  # of a step: less than this is no slowdown that could be shared out
MERGED = {
    "forward-send": "forward-pp-comm", "forward-recv": "forward-pp-comm",
    "backward-send": "backward-pp-comm", "backward-recv": "backward-pp-comm",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Decomposition:
    """Slowdowns when only one group of operations keeps its real durations; largest first."""

    overall: Mapping[str, float]
    by_step: Mapping[int, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Figures of a replay; dimensionless, 1.0 = as fast as without stragglers, unless said otherwise."""

    slowdown: float  # S
    by_step: Mapping[int, float]  # S of each step
    by_type: Decomposition  # S_t
    by_worker: Mapping[int, float]  # S_w by global rank, largest first
    by_dp_rank: Decomposition
    by_stage: Decomposition
    slowest_workers: tuple[int, ...]  # global ranks that M_W takes
    slowest_workers_share: float  # M_W; NaN where there is no slowdown to share
    last_stage_share: float  # M_S; NaN with one stage, and as above
    recorded_s: Mapping[int, float]  # each step as it was recorded, seconds
    replayed_s: Mapping[int, float]  # with its real durations
    ideal_s: Mapping[int, float]
    replay_error: float  # mean recorded step over mean replayed step, minus 1: time that no dependency explains
    notes: tuple[str, ...] = field(default=())

    def document(self) -> dict[str, Any]:
        """The figures as JSON types, under the names of the paper."""
        return {
            "S": self.slowdown,
            "S_t": dict(self.by_type.overall),
            "S_w": {str(rank): value for rank, value in self.by_worker.items()},
            "M_W": _number(self.slowest_workers_share),
            "M_S": _number(self.last_stage_share),
            "S_dp_rank": dict(self.by_dp_rank.overall),
            "S_stage": dict(self.by_stage.overall),
            "S_step": _by_step(self.by_step),
            "S_t_step": _nested(self.by_type),
            "S_dp_rank_step": _nested(self.by_dp_rank),
            "S_stage_step": _nested(self.by_stage),
            "slowest_workers": list(self.slowest_workers),
            "step_s": {"recorded": _by_step(self.recorded_s), "replayed": _by_step(self.replayed_s), "ideal": _by_step(self.ideal_s)},
            "replay_error": self.replay_error,
            "notes": list(self.notes),
        }


def what_if(trace: pd.DataFrame, sizes: Mapping[str, Any] | None = None) -> WhatIf:
    """Replay a job without its stragglers.

    Args: trace, a row an operation (validation.what_if_trace.TRACE_COLUMNS, times in seconds), or a timeline of ours (TIMELINE_COLUMNS),
        which is one stage whose operations are the phases; sizes as in the trace's meta file ("dp_size", "pp_size", ...), only checked.
    Raises: DataError when the table cannot be replayed: columns missing, no complete step, an order of starts that cannot be.
    """
    is_timeline = set(TIMELINE_COLUMNS) <= set(trace.columns) and not set(TRACE_COLUMNS) <= set(trace.columns)
    if is_timeline:
        return _figures(timeline_replay(trace))
    read = read_trace(trace, sizes or {})
    units = Dependencies(read).units
    return _figures(Replay(read, units, own_times(read, units)))


def _figures(replay: Replay) -> WhatIf:
    trace = replay.trace
    real, ideal = replay.real_s(), replay.ideal_s()
    typed = _decomposed(replay, ideal, [MERGED.get(place.optype, place.optype) for place in trace.places], _of_places)
    ranked = _decomposed(replay, ideal, trace.dp_ranks, _of_rank)
    staged = _decomposed(replay, ideal, [place.stage for place in trace.places], _of_places)
    slowest = _slowest(trace, ranked, staged)
    of_slowest = np.any([_worker_mask(trace, rank) for rank in slowest], axis=0)
    last = np.array([place.stage == trace.stages - 1 for place in trace.places])[:, np.newaxis, np.newaxis]
    return WhatIf(
        slowdown=_ratio(real.mean(), ideal.mean()),
        by_step={step: _ratio(one, other) for step, one, other in zip(trace.steps, real, ideal, strict=True)},
        by_type=typed, by_dp_rank=ranked, by_stage=staged, by_worker=_by_worker(replay, ideal), slowest_workers=slowest,
        slowest_workers_share=_share(replay, real, ideal, of_slowest),
        last_stage_share=_share(replay, real, ideal, last) if trace.stages > 1 else math.nan,
        recorded_s=_timed(trace, trace.recorded), replayed_s=_timed(trace, real), ideal_s=_timed(trace, ideal),
        replay_error=_ratio(trace.recorded.mean(), real.mean()) - 1, notes=trace.notes,
    )  # fmt: skip


def _decomposed(
    replay: Replay, ideal: Times, labels: Sequence[Hashable], mask_of: Callable[[Sequence[Hashable], Hashable], Mask]
) -> Decomposition:
    """Slowdowns of the groups that labels name."""
    names = list(dict.fromkeys(labels))
    found = replay.restored([mask_of(labels, name) for name in names])
    overall = {str(name): _ratio(steps.mean(), ideal.mean()) for name, steps in zip(names, found, strict=True)}
    by_step = {
        step: _largest_first({str(name): _ratio(found[row, place], ideal[place]) for row, name in enumerate(names)})
        for place, step in enumerate(replay.trace.steps)
    }
    return Decomposition(overall=_largest_first(overall), by_step=by_step)


def _of_places(labels: Sequence[Hashable], name: Hashable) -> Mask:
    return np.array([label == name for label in labels])[:, np.newaxis, np.newaxis]


def _of_rank(labels: Sequence[Hashable], name: Hashable) -> Mask:
    return np.array([label == name for label in labels])[np.newaxis, :, np.newaxis]


def _worker_mask(trace: Trace, rank: int) -> Mask:
    """Operations of the worker with this global rank."""
    mask = np.zeros(trace.start.shape[:2], dtype=bool)
    for (dp_rank, stage), worker in trace.workers.items():
        if worker == rank:
            mask[[place.stage == stage for place in trace.places], trace.dp_ranks.index(dp_rank)] = True
    return mask[..., np.newaxis]


def _by_worker(replay: Replay, ideal: Times) -> dict[int, float]:
    ranks = sorted(set(replay.trace.workers.values()))
    found = replay.restored([_worker_mask(replay.trace, rank) for rank in ranks])
    slowdowns = {rank: _ratio(steps.mean(), ideal.mean()) for rank, steps in zip(ranks, found, strict=True)}
    return dict(sorted(slowdowns.items(), key=lambda item: (-item[1], item[0])))


def _slowest(trace: Trace, ranked: Decomposition, staged: Decomposition) -> tuple[int, ...]:
    """The slowest workers, each judged by the smaller slowdown of its rank and its stage, as the published M_W does."""
    scores = {rank: min(ranked.overall[str(dp)], staged.overall[str(stage)]) for (dp, stage), rank in trace.workers.items()}
    count = -(-len(scores) * SLOWEST_PERCENT // 100)
    return tuple(sorted(scores, key=lambda rank: (-scores[rank], rank))[:count])


def _share(replay: Replay, real: Times, ideal: Times, mask: Mask) -> float:
    """Share of the slowdown that goes away when the masked operations are ideal."""
    if not real.mean() - ideal.mean() > ROUNDING * ideal.mean():
        return math.nan
    return _ratio(real.mean() - replay.mended(mask).mean(), real.mean() - ideal.mean())


def _ratio(one: float, other: float) -> float:
    return float(one / other) if other else math.nan


def _largest_first(values: Mapping[str, float]) -> dict[str, float]:
    return dict(sorted(values.items(), key=lambda item: -item[1]))


def _timed(trace: Trace, seconds: Times) -> dict[int, float]:
    return dict(zip(trace.steps, map(float, seconds), strict=True))


def _by_step(values: Mapping[int, float]) -> dict[str, float]:
    return {str(step): value for step, value in values.items()}


def _nested(found: Decomposition) -> dict[str, dict[str, float]]:
    return {str(step): dict(values) for step, values in found.by_step.items()}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value
