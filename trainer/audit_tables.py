"""The tables of an audited run, merged from the lines that its ranks left (trainer/audit.py). Torch-free.

Rows of steps that were lost with an attempt do not count, as in the ledger; whole states keep all attempts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from trainer.parts import Part
from validation.records import COLLECTIVE_COLUMNS, CONSUMED_COLUMNS, DIGEST_COLUMNS, STATE_COLUMNS, STREAM_COLUMNS, UPDATE_COLUMNS

WORKERS_FILE = "worker_streams"  # what loader workers leave beside the rank's own lines
Row = Mapping[str, Any]


class Table(NamedTuple):
    """How a table is read out of the parts."""

    columns: tuple[str, ...]
    rows: Callable[[Part, int], Iterator[Row]]  # of one part; a step counts below the limit
    order: tuple[str, ...]  # what rows are sorted by; equal ones stay as the ranks left them


def merged(name: str, parts: Sequence[Part], limits: Mapping[int, int]) -> pd.DataFrame:
    """One of AUDIT_TABLES, with its columns and types also when there are no rows.

    Args: limits, attempt -> the step where its rows stop counting (trainer.merge.lineage).
    """
    columns, rows, order = AUDIT_TABLES[name]
    found = [
        {"attempt": part.attempt, "world_size": part.start["world_size"], "rank": part.rank, **row}
        for part in parts for row in rows(part, limits[part.attempt])
    ]  # fmt: skip
    table = pd.DataFrame(found, columns=list(columns))
    if name == "consumed":
        table = table.explode(["sample_id", "content"])
    return typed(table).sort_values(list(order), kind="stable", ignore_index=True)


def typed(table: pd.DataFrame) -> pd.DataFrame:
    """The columns' types, also of a table without rows."""
    return table.astype({name: _TYPES.get(name, "str") for name in table.columns})


def _steps(name: str) -> Callable[[Part, int], Iterator[Row]]:
    """Lines of the steps that count."""

    def rows(part: Part, limit: int) -> Iterator[Row]:
        return (row for row in part.lines(name) if row["step"] < limit)

    return rows


def _digests(part: Part, limit: int) -> Iterator[Row]:
    return ({"stage": "reduced"} | dict(row) for row in _steps("digests")(part, limit))  # lines of older runs have no stage


def _consumed(part: Part, limit: int) -> Iterator[Row]:
    """A row a micro-batch, with lists of its samples."""
    for line in _steps("consumed")(part, limit):
        yield {**line, "sample_id": line["sample_ids"].split(), "content": line["contents"].split()}


def _streams(part: Part, limit: int) -> Iterator[Row]:
    """Draws of loader workers carry the step at which the worker was started, so they count in an attempt of which nothing was lost."""
    yield from _steps("streams")(part, limit)
    if limit >= 2**62:
        yield from part.lines(WORKERS_FILE)


def _collectives(part: Part, limit: int) -> Iterator[Row]:
    """Counted up to an attempt's end, so those of the last one."""
    return iter(part.lines("collectives") if limit >= 2**62 else ())


def _states(part: Part, limit: int) -> Iterator[Row]:  # noqa: ARG001 - states of all attempts count
    for line in part.lines("states"):
        for name, sha256 in line["names"].items():
            yield {**line, "name": name, "sha256": sha256}


AUDIT_TABLES: Mapping[str, Table] = {
    "digests": Table(DIGEST_COLUMNS, _digests, ("step", "rank")),
    "consumed": Table(CONSUMED_COLUMNS, _consumed, ("step", "rank", "micro")),
    "streams": Table(STREAM_COLUMNS, _streams, STREAM_COLUMNS),
    "collectives": Table(COLLECTIVE_COLUMNS, _collectives, COLLECTIVE_COLUMNS),
    "updates": Table(UPDATE_COLUMNS, _steps("updates"), ("step", "rank")),
    "states": Table(STATE_COLUMNS, _states, ("attempt", "rank")),
}
_TYPES = {
    **dict.fromkeys(("world_size", "attempt", "rank", "step", "micro", "sample_id", "calls", "elements"), "int64"),
    **dict.fromkeys(("norm", "limit", "moved", "weight", "loss"), "float64"), "poisoned": "bool",
}  # fmt: skip
