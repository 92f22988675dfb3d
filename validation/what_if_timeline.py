"""A timeline of ours as a trace that can be replayed: one stage, the phases of a step are its operations.

A rank computes data, forward and backward, meets the others in the collective, then updates and saves. Waiting is no operation: it comes
back from the replay. "between" is the time that a rank lost between two steps, beyond the rank that lost the least.
"""

import numpy as np
import pandas as pd

from validation.straggling_table import AFTER, BEFORE, read_steps
from validation.what_if_graph import Unit
from validation.what_if_replay import Replay
from validation.what_if_trace import TRANSFER, Place, Trace

PHASES = (*BEFORE, *AFTER)


def timeline_replay(timeline: pd.DataFrame) -> Replay:
    """Make a timeline ready for replay: P = len(PHASES) places, W data-parallel ranks, S steps.

    Args: timeline with TIMELINE_COLUMNS.
    Raises: DataError when it cannot be read, see validation.straggling_table.read_steps.
    """
    table = read_steps(timeline)
    real = np.stack([table.own[phase].T.astype(np.float64) for phase in PHASES]) / 1e3
    ranks = tuple(int(rank) for rank in table.ranks)
    notes = list(table.notes)
    if len(ranks) == 1:
        notes.append("one rank only: its steps can be compared with each other, not with another rank")
    places = tuple(Place(stage=0, optype=phase, number=0, chunk=0, model_chunk=0) for phase in PHASES)
    zeros = np.zeros(real.shape)
    trace = Trace(
        places=places, steps=tuple(int(step) for step in table.steps), workers={(rank, 0): rank for rank in ranks}, dp_ranks=ranks,
        stages=1, start=zeros, end=zeros, recorded=table.step_ms / 1e3, notes=tuple(notes),
    )  # fmt: skip
    units = [
        Unit(members=(index,), needs=((index - 1,) if index else (),), over_ranks=phase == TRANSFER, communicates=phase == TRANSFER)
        for index, phase in enumerate(PHASES)
    ]
    return Replay(trace, units, real)
