"""What had really happened before a moment: counts and sums over past events of a group, without looking ahead.

Times are whole minutes. An event at minute t is known to a question asked at `now` only if t < now. Values are whole numbers and
are added as int64, so that an answer does not depend, not even in its last bit, on anything that happened later.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]

_SPAN = 2**22  # minutes, eight years: the length of one group's stretch of the common time line


@dataclass(frozen=True, slots=True)
class EventLog:
    """Events of many groups, sorted by group and minute. Q questions are asked, each about a group (0-based, -1 = no group)."""

    keys: Ints  # (N,) group * _SPAN + minute, ascending
    sums: Ints  # (N + 1, K) running sums of K values
    rows: Ints  # (N,) row that each event came from

    def window(self, group: Ints, now: Ints, minutes: int) -> tuple[Ints, Ints]:
        """Count (Q,) and sums (Q, K) of the group's events in [now - minutes, now)."""
        first = np.searchsorted(self.keys, _key(group, np.maximum(now - minutes, 0)))
        last = np.searchsorted(self.keys, _key(group, now))
        return last - first, self.sums[last] - self.sums[first]

    def latest(self, group: Ints, now: Ints) -> Ints:
        """Row (Q,) of the group's last event before `now`; -1 if there is none."""
        if not len(self.keys):
            return np.full(len(now), -1)
        at = np.searchsorted(self.keys, _key(group, now)) - 1
        found = (at >= 0) & (self.keys[at] // _SPAN == group)
        return np.where(found, self.rows[at], -1)


def event_log(group: Ints, minute: Ints, values: Ints) -> EventLog:
    """Log of the events that happened; those of group -1 and those beyond the time line (never) are left out.

    Args: group (R,), minute (R,) with minutes before 0 counted as 0, values (R, K).
    """
    rows = np.flatnonzero((group >= 0) & (minute < _SPAN))
    keys = _key(group[rows], np.maximum(minute[rows], 0))
    order = np.argsort(keys, kind="stable")
    rows = rows[order]
    sums = np.concatenate([np.zeros((1, values.shape[1]), np.int64), np.cumsum(values[rows], axis=0)])
    return EventLog(keys[order], sums, rows)


def waiting(group: Ints, due: Ints, done: Ints, *, patience: int) -> tuple[Ints, Floats]:
    """For each row, at its due minute: how many others of its group are past due and not done, and for how long on average.

    Args: due (R,) and done (R,) >= due, minutes. After `patience` minutes one is given up (a cancelled flight does not wait for ever).
    Returns: count (R,), mean minutes overdue (R,), 0 where nobody waits.
    """
    entered, entered_due = event_log(group, due, due[:, None]).window(group, due, _SPAN)
    gone, gone_due = event_log(group, np.minimum(done, due + patience), due[:, None]).window(group, due, _SPAN)
    count = entered - gone
    overdue = count * due - (entered_due - gone_due)[:, 0]
    return count, overdue / np.maximum(count, 1)


def _key(group: Ints, minute: Ints) -> Ints:
    return group * _SPAN + minute
