"""How late each rank arrives at each step's first collective, against the others. S steps x W ranks, times in ms."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from validation.straggling_table import Matrix, Steps

ROWS_AT_ONCE = 1 << 20  # of one rank and step, sorted at a time: the temporaries stay small


@dataclass(frozen=True, eq=False)
class Lateness:
    """Arrivals of a timeline, reckoned once."""

    table: Steps
    excess: Matrix  # (S, W) behind the median of the others (the later one of two in the middle); negative = earlier
    score: Matrix  # (S, W) centred rank of arrival, (W - 1) / 2 = last; without stragglers its mean is 0
    last: npt.NDArray[np.int64]  # (S,) place of the last rank
    gain: npt.NDArray[np.float64]  # (S,) how much sooner the step had ended without its last rank

    @classmethod
    def of(cls, table: Steps) -> "Lateness":
        """Needs two ranks or more."""
        steps, ranks = table.wait.shape
        excess, score = np.empty_like(table.wait), np.empty_like(table.wait)
        last, gain = np.empty(steps, dtype=np.int64), np.empty(steps)
        rows = max(1, ROWS_AT_ONCE // ranks)
        for start in range(0, steps, rows):
            part = slice(start, start + rows)
            excess[part], score[part], last[part], gain[part] = _arrivals(table.wait[part])
        return cls(table, excess, score, last, gain)

    @cached_property
    def healthy_ms(self) -> npt.NDArray[np.float64]:
        """(S,) what the step had taken without its last rank's lateness."""
        return np.maximum(self.table.step_ms - self.gain, 1e-6)

    def gain_without(self, places: list[int], steps: npt.NDArray[np.int64]) -> float:
        """ms that these steps had ended sooner, all together, had these ranks not been later than the others."""
        others = np.delete(self.table.wait[steps], places, axis=1)
        return float(others.min(axis=1).sum()) if others.shape[1] else 0.0

    def slowdown(self, places: list[int], steps: npt.NDArray[np.int64]) -> float:
        """Mean of these steps over their mean without these ranks' lateness."""
        total = float(self.table.step_ms[steps].sum())
        return total / max(total - self.gain_without(places, steps), 1e-6)


def _arrivals(wait: Matrix) -> tuple[Matrix, Matrix, npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """excess, score, last, gain of some steps."""
    ranks = wait.shape[1]
    order = np.argsort(wait, axis=1, kind="stable")
    ordered = np.take_along_axis(wait, order, axis=1)
    place = np.empty(wait.shape, dtype=np.float32)
    np.put_along_axis(place, order, np.broadcast_to(np.arange(ranks, dtype=np.float32), wait.shape), axis=1)
    middle = (ranks - 2) // 2  # of the ranks - 1 others; of two in the middle the later one: with three ranks, one early one blames nobody
    median = np.where(place > middle, ordered[:, middle, None], ordered[:, middle + 1, None])
    return median - wait, (ranks - 1) / 2 - place, order[:, 0], (ordered[:, 1] - ordered[:, 0]).astype(np.float64)
