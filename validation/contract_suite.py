"""The data contract as a list of questions: what is asked of a frame, in plain values, with the words for the record.

Minimum and maximum stand for map expectations where both say the same: on 250,000 rows a comparison of times takes 1 s as a map
and 3 ms as an aggregate.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from validation.contract import Column, DataContract

SAMPLE_ID = "sample_id"
FLOAT_MAX = float(np.finfo(np.float64).max)
NULL_ROUNDING = 1e-12  # 1 - max_null_share is not exact in binary; a share at the limit has to pass
KINDS = {"number": ("number",), "time": ("time",), "category": ("category", "number")}  # a code number may be a category


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One expectation to be put to Great Expectations."""

    aspect: str
    kind: str  # the library's name without "expect_"
    expected: str  # in words
    column: str = ""  # "" for the table
    limits: Mapping[str, Any] = field(default_factory=dict)


def value_asks(split: str, spec: DataContract) -> Iterable[Ask]:
    """What the rows have to look like: volume and identity first, then nulls, ranges, categories, period and freshness."""
    yield from _table_asks(split, spec)
    yield from _column_asks(spec)
    if split in spec.period:
        yield from _time_asks(spec.event_time, *spec.period[split], spec.max_gap_days)


def name_asks(spec: DataContract) -> Iterable[Ask]:
    """Ask a table with one row a column name (in `column`): no name twice, none from after the cutoff."""
    yield Ask(aspect="columns", kind="column_values_to_be_unique", column="column", expected="each column name once")
    yield Ask(
        aspect="cutoff", kind="column_values_to_not_be_in_set", column="column", limits={"value_set": list(spec.forbidden)},
        expected="no column known only after the cutoff",
    )  # fmt: skip


def kind_asks(spec: DataContract) -> Iterable[Ask]:
    """Ask a table with one row a contract column, "name: kind" as `kind_rows` makes them: all as declared.

    One question about all columns: the library takes 7 ms a question, whatever the size of the frame.
    """
    declared = [f"{column}: {kind}" for column, rule in spec.columns.items() for kind in KINDS.get(rule.kind, ())]
    yield Ask(
        aspect="columns", kind="column_values_to_be_in_set", column="column", limits={"value_set": declared},
        expected="every column there and of its kind",
    )  # fmt: skip


def kind_rows(frame: pd.DataFrame, spec: DataContract) -> pd.DataFrame:
    """Name each contract column's kind in `frame`; an absent one is "name: absent"."""
    return pd.DataFrame({"column": [f"{column}: {kind_of(frame[column]) if column in frame else 'absent'}" for column in spec.columns]})


def kind_of(column: pd.Series) -> str:
    """Name a column's kind: "number" (also bool), "time" or "category"."""
    if pd.api.types.is_numeric_dtype(column):
        return "number"
    return "time" if pd.api.types.is_datetime64_any_dtype(column) else "category"


def as_utc(moments: pd.Series) -> pd.Series:
    """Parse to UTC without a zone; what cannot be read becomes null, and the null expectation refuses it."""
    return pd.to_datetime(moments, utc=True, errors="coerce", format="ISO8601").dt.tz_localize(None)


def _table_asks(split: str, spec: DataContract) -> Iterable[Ask]:
    if split in spec.min_rows:
        rows = max(1, spec.min_rows[split])
        yield Ask(aspect="rows", kind="table_row_count_to_be_between", limits={"min_value": rows}, expected=f"at least {rows} rows")
    yield Ask(aspect="sample ids", kind="column_values_to_be_unique", column=SAMPLE_ID, expected="each id once")
    yield Ask(aspect="sample ids", kind="column_values_to_not_be_null", column=SAMPLE_ID, expected="an id for every sample")


def _column_asks(spec: DataContract) -> Iterable[Ask]:
    """The label and the event time may never be null; every other column as its rule says."""
    rules = {**spec.columns, spec.label: Column(kind=""), spec.event_time: Column(kind="time")}
    for column, rule in rules.items():
        limits = {"mostly": max(0.0, 1.0 - rule.max_null_share - NULL_ROUNDING)}
        words = f"at most {rule.max_null_share:.4g} null"
        yield Ask(aspect="nulls", kind="column_values_to_not_be_null", column=column, limits=limits, expected=words)
    for column, rule in spec.columns.items():
        if rule.kind == "number":
            yield from _range_asks(column, rule)
        if rule.allowed:
            words = f"one of {len(rule.allowed)} values"
            values = {"value_set": list(rule.allowed)}
            yield Ask(aspect="categories", kind="column_values_to_be_in_set", column=column, limits=values, expected=words)


def _range_asks(column: str, rule: Column) -> Iterable[Ask]:
    """Finite and in range: an infinity lies outside the largest float, a null is counted by the null expectation."""
    low = -FLOAT_MAX if rule.minimum is None else rule.minimum
    high = FLOAT_MAX if rule.maximum is None else rule.maximum
    least = "a finite minimum" if rule.minimum is None else f"a minimum >= {low:g}"
    most = "a finite maximum" if rule.maximum is None else f"a maximum <= {high:g}"
    yield Ask(
        aspect="values", kind="column_min_to_be_between", column=column, limits={"min_value": low, "max_value": FLOAT_MAX}, expected=least
    )
    yield Ask(
        aspect="values", kind="column_max_to_be_between", column=column, limits={"min_value": -FLOAT_MAX, "max_value": high}, expected=most
    )


def _time_asks(column: str, first_text: str, last_text: str, max_gap_days: float) -> Iterable[Ask]:
    first, last = as_utc(pd.Series([first_text, last_text]))
    oldest = last - pd.Timedelta(days=max_gap_days)
    starts, ends = {"min_value": first}, {"max_value": last, "strict_max": True}
    yield Ask(aspect="period", kind="column_min_to_be_between", column=column, limits=starts, expected=f"none before {first}")
    yield Ask(aspect="period", kind="column_max_to_be_between", column=column, limits=ends, expected=f"all before {last}")
    fresh = {"min_value": oldest}
    yield Ask(aspect="freshness", kind="column_max_to_be_between", column=column, limits=fresh, expected=f"a last event since {oldest}")
