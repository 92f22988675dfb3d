"""Evidence that has to be there before anything is judged: what is absent makes a gate inconclusive, never passing."""

from collections.abc import Iterable, Sequence

import pandas as pd

from validation.verdict import Check

SHOWN = 4  # names listed before "and N more"


def absent_columns(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[str, ...]:
    """Name the columns a table lacks, in the order of `columns`; empty when it has all of them."""
    return tuple(column for column in columns if column not in frame.columns)


def complete(missing: Sequence[str], *, source: str, action: str) -> Check:
    """One check for all required evidence: passed when nothing is missing, else undecided and naming what is missing."""
    if not missing:
        return Check(name="required evidence", observed="complete", threshold="complete", unit="", passed=True, source=source)
    return Check(
        name="required evidence", observed=None, threshold="complete", unit="", passed=None, source=source,
        where=listed(missing, separator="; "), action=action,
    )  # fmt: skip


def listed(items: Iterable[object], *, separator: str = ", ", limit: int = SHOWN) -> str:
    """Join the first few items and count the rest: "3, 4, 5, 6 and 2 more"; "none" when there are none."""
    words = [str(item) for item in items]
    more = f" and {len(words) - limit} more" if len(words) > limit else ""
    return separator.join(words[:limit]) + more or "none"
