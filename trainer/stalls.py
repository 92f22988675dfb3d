"""When a rank group stands still for longer than its own past explains: a threshold learned from the job's updates. No clock, no files."""

import math
from collections import deque
from collections.abc import Collection, Hashable, Mapping

# Below this no stall is looked into. Eight ranks of a toy step on two cores that four other groups share make an update in 0.5 s, a disk
# that syncs holds one up for 1 to 2 s; a person who waits for a verdict notices 5 s and not 3.
FLOOR_S = 5.0
# The same for what is known to be long and to tell nothing while it lasts: imports, first batch and compilation before an attempt's first
# update, an evaluation on one rank, a checkpoint on a slow disk. A minute is their usual order of magnitude.
SLOW_FLOOR_S = 60.0
FACTOR = (
    5.0  # times what is usual: the slowest of a healthy job's steps take two to three times its median, neighbours on the machine double it
)
QUANTILE = 0.98  # of the times between updates that are kept: the few worst, a machine that paused, do not make the watch blind
KEPT = 256  # times between updates
# An attempt's first updates compile and fill caches, and too few of them are known to say what is usual: four times the floor.
EARLY_UPDATES, EARLY_FACTOR = 4, 4.0
# What a leader did not see does not count: one that is woken late was short of processor time, and so were its ranks.
LOOKED_S = 0.5
TIMEOUT_SHARE = 0.6  # of the collectives' time-out: evidence is taken, twice, before the time-out wipes it out
SLOW_PHASES = frozenset({"setup", "checkpoint", "evaluate"})  # of any rank's marker
SILENT_PHASES = frozenset({"done", ""})  # of all ranks: what follows the last update, and programs that say nothing


class StallWatch:
    """Measures how long an attempt has made no progress, and how long is too long."""

    def __init__(self, *, floor_s: float, stall_s: float, now_ns: int) -> None:
        """Args: floor_s, see FLOOR_S, infinite = never; stall_s, the collectives' time-out; now_ns, monotonic."""
        self._floor_s, self._latest_s = floor_s, TIMEOUT_SHARE * stall_s
        self._usual: deque[float] = deque(maxlen=KEPT)  # s between two looks that saw progress
        self._slow: deque[float] = deque(maxlen=KEPT)  # the same when there was a slow phase in between
        self._looked_ns = self.moved_ns = now_ns  # the last look; the last progress
        self._made, self._said = 0, 0  # updates of this attempt; words of its ranks
        self._is_slow = True  # whether a slow phase was seen since the last progress
        self._marks: dict[int, Hashable] = {}
        self.quiet_s = 0.0  # since the last progress, as far as somebody looked

    def look(self, now_ns: int, *, made: int, said: int) -> None:
        """Take in how far the attempt is: updates that it made, and words (events) of its ranks, which are progress as well."""
        self.quiet_s += min((now_ns - self._looked_ns) / 1e9, LOOKED_S)
        self._looked_ns = now_ns
        if made > self._made and self._made >= EARLY_UPDATES:
            (self._slow if self._is_slow else self._usual).append(self.quiet_s)
        if (made, said) != (self._made, self._said):
            self._made, self._said = made, said
            self._go_on(now_ns)
            self._is_slow, self._marks = False, {}

    def look_inside(self, now_ns: int, marks: Mapping[int, Hashable], phases: Collection[str]) -> None:
        """Take in where each rank's program is, asked for once it is quiet; it is progress when every rank moved since the last time.

        Args: marks, by rank; phases, of the ranks' markers.
        """
        self._is_slow = bool(SLOW_PHASES.intersection(phases)) or SILENT_PHASES.issuperset(phases)
        before, self._marks = self._marks, dict(marks)
        if before and before.keys() == marks.keys() and all(before[rank] != mark for rank, mark in marks.items()):
            self._go_on(now_ns)

    @property
    def is_quiet(self) -> bool:
        """Whether it is time to look inside the ranks."""
        return self.quiet_s >= min(self._floor_s, self._latest_s)

    @property
    def threshold_s(self) -> float:
        """How long without progress is too long, in the phase that the ranks were last seen in."""
        if math.isinf(self._floor_s):
            return math.inf
        if self._is_slow or self._made == 0:
            usual_s = max(SLOW_FLOOR_S, FACTOR * max(self._slow, default=0.0))
        elif self._made < EARLY_UPDATES:
            usual_s = EARLY_FACTOR * self._floor_s
        else:
            usual_s = FACTOR * quantile(self._usual)
        return min(max(self._floor_s, usual_s), self._latest_s)

    @property
    def is_stalled(self) -> bool:
        """Whether it has been quiet for too long."""
        return self.quiet_s >= self.threshold_s

    def _go_on(self, now_ns: int) -> None:
        self.quiet_s, self.moved_ns = 0.0, now_ns


def quantile(values: Collection[float]) -> float:
    """The QUANTILE of some values, one of them; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, math.ceil(QUANTILE * len(ordered)))] if ordered else 0.0
