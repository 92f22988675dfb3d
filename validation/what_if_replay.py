"""Replaying the steps of a trace with other durations: when would each step have ended?

P = places, R = data-parallel ranks, T = steps, K = scenarios replayed at once. All times in seconds.
"""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

from validation.what_if_graph import Unit
from validation.what_if_trace import COMMUNICATION_TYPES, Times, Trace

MASK_BYTES = 1 << 26  # of durations held at a time
EARLY_S = 1e-2  # clocks of two machines: a transfer over this long before its last member began took no time (the published value)

Mask = npt.NDArray[np.bool_]  # broadcastable to (P, R, T): operations that a scenario treats unlike the others


def own_times(trace: Trace, units: Sequence[Unit]) -> Times:
    """What each operation took, shape (P, R, T): communication from the moment when its last member had started, so without waiting."""
    own = trace.end - trace.start
    for unit in units:
        if unit.communicates:
            members = list(unit.members)
            begun = trace.start[members].max(axis=(0, 1) if unit.over_ranks else 0)
            own[members] = trace.end[members] - begun
    own[own <= -EARLY_S] = 0.0
    return own


class Replay:
    """One trace and its dependencies: units in an order in which each comes after all that it needs."""

    def __init__(self, trace: Trace, units: Sequence[Unit], real: Times) -> None:
        self.trace = trace
        self._units = units
        self.real = real  # (P, R, T)
        self.ideal = self._ideal_times()  # (P, 1, 1)

    def _ideal_times(self) -> Times:
        """One time for all operations of a type: the mean of a computation, the median of a communication."""
        ideal = np.empty((len(self.trace.places), 1, 1))
        for optype in {place.optype for place in self.trace.places}:
            chosen = [index for index, place in enumerate(self.trace.places) if place.optype == optype]
            ideal[chosen] = np.median(self.real[chosen]) if optype in COMMUNICATION_TYPES else self.real[chosen].mean()
        return ideal

    def step_s(self, durations: Times) -> Times:
        """When each step ends, shape (K, T). Args: durations of shape (P, K, R, T), or (P, K, R or 1, T or 1)."""
        ends: list[Times | None] = [None] * len(self.trace.places)
        done = np.zeros((1, 1, 1))
        for unit in self._units:
            begun = _latest(ends, (index for needs in unit.needs for index in needs))
            if unit.over_ranks:
                begun = begun.max(axis=1, keepdims=True)
            for member in unit.members:
                end = begun + durations[member]
                ends[member] = end
                done = np.maximum(done, end)
        shape = (durations.shape[1], len(self.trace.steps))
        return np.ascontiguousarray(np.broadcast_to(done.max(axis=1), shape))

    def restored(self, masks: Sequence[Mask]) -> Times:
        """Steps when only the masked operations keep their real times, shape (K, T) of K masks."""
        return self._scenarios(masks, self.real, self.ideal)

    def mended(self, mask: Mask) -> Times:
        """Steps when the masked operations take their ideal times and all others their real ones, shape (T,)."""
        return np.asarray(self._scenarios([mask], self.ideal, self.real)[0])

    def real_s(self) -> Times:
        """Steps with all real times, shape (T,): gaps that no dependency explains are left out."""
        return np.asarray(self.step_s(self.real[:, np.newaxis])[0])

    def ideal_s(self) -> Times:
        """Steps with all ideal times, shape (T,)."""
        return np.asarray(self.step_s(self.ideal[:, np.newaxis])[0])

    def _scenarios(self, masks: Sequence[Mask], inside: Times, outside: Times) -> Times:
        found = [self.step_s(np.stack([np.where(mask, inside, outside) for mask in some], axis=1)) for some in self._chunks(masks)]
        return np.concatenate(found)

    def _chunks(self, masks: Sequence[Mask]) -> Iterator[Sequence[Mask]]:
        size = max(1, MASK_BYTES // max(1, self.real.nbytes))
        for first in range(0, len(masks), size):
            yield masks[first : first + size]


def _latest(ends: Sequence[Times | None], needs: Iterable[int]) -> Times:
    """The last of these ends; the step's start where nothing is needed."""
    latest: Times = np.zeros((1, 1, 1))
    for index in needs:
        end = ends[index]
        assert end is not None  # units are in order
        latest = np.maximum(latest, end)
    return latest
