"""Is the mean of a sequence below its limit? A test that may be looked at after every value, for ever, at no cost in false alarms.

Somebody bets, day by day, that the values x_t are worse than the limit -m, with a purse that starts at 1 and that grows by the factor

    1 + bet * g_t,    g_t = (-m - min(x_t, m)) / 2m,    0 <= bet < 1 fixed before x_t is seen.

Since g_t >= -1 the purse cannot be lost whole. If each day's capped value has, given all before it, a mean of at least -m, no such bet is
favourable: the purse is a nonnegative supermartingale, and by Ville's inequality it ever reaches 1 / alpha with probability at most alpha,
whatever the distribution, however often and on whatever occasion one looks (Ville 1939; Waudby-Smith and Ramdas, "Estimating means of
bounded random variables by betting", JRSS-B 86, 2024, whose one-sided capital process this is).

Which bets. The purse is split: over the BETS (diversified Kelly betting, section 5 there) and over the day on which betting begins, one
half on the first day and 1 / 2s(s+1) on day s, so that a version that was good for weeks and then breaks is not sheltered by the bets that
its good weeks lost (the e-detectors of Shin, Ramdas and Rinaldo, 2023, with weights that add up to 1, which keeps the promise for ever). A
mean of supermartingales is one; nothing is tuned on the data.

The unit of a bet is a block: a day, or as many days as it takes to have enough rows. Rows of one day share its weather; nothing is
assumed of them, since only their mean is used and no larger sample size is claimed. Two things are assumed. Across blocks: the mean GIVEN
THE PAST is what must not be below the limit, so spells of bad days that announce one another count against a version; the margin is what
shelters a version that is as good as its fallback. And a day's gain counts at most m, as much as the loss that is tolerated: one splendid
day does not buy many bad ones. Without a cap the bets would have to fear one day's worst possible gain, and a month could never prove
anything. benchmarks/monitor_replays.py measures what these assumptions are worth when they do not quite hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]

BETS = (0.5, 0.9)  # shares of the purse
DEEPEST = -20.0  # margins; no confidence sequence is followed further down
RESOLUTION = 0.05  # margins, of the confidence sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Rows that make one bet."""

    day: str  # on which it was complete
    rows: int
    mean: float  # of the rows' paired differences, recipe's unit


def blocks(days: Sequence[str], rows: Sequence[int], totals: Sequence[float], min_n: int) -> tuple[Block, ...]:
    """Put days (ascending) together until they have `min_n` rows; what is left at the end waits.

    Args: rows and totals, how many differences each day has and what they add up to.
    """
    found: list[Block] = []
    waiting_rows, waiting_total = 0, 0.0
    for day, count, total in zip(days, rows, totals, strict=True):
        waiting_rows, waiting_total = waiting_rows + count, waiting_total + total
        if waiting_rows >= min_n:
            found.append(Block(day=day, rows=waiting_rows, mean=waiting_total / waiting_rows))
            waiting_rows, waiting_total = 0, 0.0
    return tuple(found)


def log_purse(values: Floats, *, margin: float, limit: float | Floats | None = None) -> Floats:
    """Natural logarithm of the purse (..., T) after each of `values` (..., T) against the claim that their capped mean is >= limit.

    Args: margin > 0, in the values' unit, is the cap of a day's gain; limit, below the margin, is -margin unless given, and may be an array
    that broadcasts against (..., T). A NaN among the values makes everything from there on NaN: it proves nothing and passes nothing.
    """
    bound = np.asarray(-margin if limit is None else limit, np.float64)
    gains = (bound - np.minimum(values, margin)) / (margin - bound)
    running = np.full((len(BETS), *gains.shape[:-1]), -np.inf)  # log of what stands on each bet, over all beginnings so far
    logs = np.empty(gains.shape)
    for day in range(gains.shape[-1]):
        share = 1 / (2 * (day + 1) * (day + 2)) + (0.5 if day == 0 else 0.0)
        factors = np.stack([np.log1p(bet * gains[..., day]) for bet in BETS])
        with np.errstate(invalid="ignore"):  # NaN stays NaN
            running = np.logaddexp(running, np.log(share)) + factors
            standing = np.logaddexp.reduce(running, axis=0) - np.log(len(BETS))
            logs[..., day] = np.logaddexp(standing, -np.log(2 * (day + 2)))  # the part that has not begun to bet is kept
    return logs


def confidence_sequence(values: Floats, *, margin: float, alpha: float) -> tuple[Floats, Floats]:
    """Ends (T,), (T,) of an interval for the mean that holds on all days at once with probability 1 - alpha, each end at alpha / 2.

    The upper end bounds the mean of days capped at +margin from above: it is the smallest limit that the test of `log_purse` has not ruled
    out, so it falls below -margin on the day on which the purse reaches 2 / alpha. The lower end bounds the mean of days capped at -margin.
    """
    return -_upper(-values, margin=margin, alpha=alpha / 2), _upper(values, margin=margin, alpha=alpha / 2)


def _upper(values: Floats, *, margin: float, alpha: float) -> Floats:
    """Upper ends (T,): the purse against a limit grows with the limit, so those that are not ruled out are an interval."""
    limits: Floats = np.arange(round(DEEPEST / RESOLUTION), round(1 / RESOLUTION), dtype=np.float64) * (margin * RESOLUTION)
    purses = log_purse(np.broadcast_to(values, (len(limits), len(values))), margin=margin, limit=limits[:, None])
    ruled_out = np.maximum.accumulate(purses >= -np.log(alpha), axis=1)
    first = np.where(ruled_out.any(axis=0), ruled_out.argmax(axis=0), len(limits))
    return np.asarray(np.where(first < len(limits), limits[np.minimum(first, len(limits) - 1)], np.inf))
