"""data_contract: are the inputs what the recipe says, with nothing from after the cutoff?

Great Expectations judged the frames (validation/expectations.py); here its results become one check per aspect and frame, so
that a contract of thirty columns reads as a dozen lines that name the columns at fault. Claim, control and blind spots:
docs/gates/data_contract.md.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd

from validation.records import ContractRecords, Expectation
from validation.verdict import Check, Control, GateVerdict, Plot, Series, Table, check, conclude, controlled, inconclusive

GATE = "data_contract"
SPLITS = ("train", "judge")
SOURCE = "the recipe's data contract"
SHOWN = 3  # failed expectations quoted in a check; the table holds the rest


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """What a column of the contract frame has to look like."""

    kind: str  # "number" | "category" | "time"
    max_null_share: float = 0.0  # 0..1
    minimum: float | None = None
    maximum: float | None = None
    allowed: tuple[str, ...] = ()  # closed set for a category; empty = open


@dataclass(frozen=True, slots=True, kw_only=True)
class DataContract:
    """What the inputs are, and what did not exist yet when the decision is made (the production cutoff)."""

    columns: Mapping[str, Column]  # every column of the frame that feeds the model
    label: str  # the frame's outcome column
    event_time: str  # the frame's time column, used for the train/judge split and freshness
    known_after_cutoff: tuple[str, ...]  # may stand neither in `columns` nor in the frame, the label excepted
    min_rows: Mapping[str, int]  # split -> rows
    period: Mapping[str, tuple[str, str]]  # split -> [first, last) event time, ISO, UTC without an offset; train ends before judge starts
    max_gap_days: float  # the last event of a split may be this much older than its period's end

    @property
    def forbidden(self) -> tuple[str, ...]:
        """Columns known only after the cutoff; the label is one by nature and is kept from the model elsewhere."""
        return tuple(column for column in self.known_after_cutoff if column != self.label)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plant:
    """A defect, the split whose contract the planted frame is held against, and the aspect whose check has to fail."""

    name: str
    split: str
    words: str
    aspect: str

    @property
    def frame(self) -> str:
        """How the planted frame is called in the records."""
        return f"{self.split}+{self.name}"


PLANTS = (
    Plant(name="late-column", split="judge", words="a column known only after the cutoff added to judge rows", aspect="cutoff"),
    Plant(name="nulls", split="judge", words="nulls injected into a column of judge rows", aspect="nulls"),
    Plant(name="judge-rows", split="train", words="judge rows moved into the training period", aspect="period"),
)


# aspect -> what to do when it is violated; the order is that of the checks: volume and identity before anything a map
# expectation could pass vacuously on too few rows.
ASPECTS: Mapping[str, str] = {
    "rows": "load the missing rows or correct min_rows in the recipe's contract",
    "sample ids": "give each sample one stable id, and keep a sample in one split only",
    "columns": "mend the loader: the contract names columns or kinds that the frame does not have",
    "cutoff": "remove the column: it does not exist yet when the decision is made",
    "nulls": "find out why values are missing upstream, or change max_null_share with a reason",
    "values": "find the rows outside the range (a unit, a sentinel, an infinity) and mend them upstream",
    "categories": "map the new category, or add it to the contract and train again",
    "period": "correct the split: rows outside the period leak between training and judging",
    "freshness": "load newer data: the newest event is too old for the declared period",
}
OPTIONAL = ("values", "categories")  # a contract may have no number and no closed category


def judge_contract(records: ContractRecords) -> GateVerdict:
    """Judge both frames under the contract, and each planted frame by the same rules.

    Any violated expectation fails; an aspect nobody looked at, a frame that is absent or a missed plant is inconclusive.
    """
    if not records.expectations:
        return inconclusive(GATE, reason="no expectation was evaluated: the evidence is empty", action="run the contract probe again")
    frames = tuple(dict.fromkeys((*SPLITS, *records.rows)))
    checks = [*_frames_checks(records.expectations, frames), *_name_checks(records), _order_check(records.span)]
    verdict = conclude(
        GATE, checks,
        passed_reason=f"{len(records.expectations)} expectations hold on {_rows_text(records.rows)}",
        tables=(_frames_table(records), _failed_table(records.expectations)),
        plots=(_aspect_plot(records.expectations, frames),),
        notes=_notes(records),
    )  # fmt: skip
    return _with_control(verdict, records)


def _with_control(verdict: GateVerdict, records: ContractRecords) -> GateVerdict:
    """Attach the control: every plant has to be caught at its own aspect; the first one missed makes the gate blind."""
    wanted = [plant for plant in PLANTS if plant.aspect != "cutoff" or records.forbidden]
    judged = [controlled(verdict, plant.words, plant.aspect, _judge_plant(records.planted, plant)) for plant in wanted]
    controls = [item.control for item in judged if item.control is not None]
    for item, control in zip(judged, controls, strict=True):
        if not control.caught:
            return item
    words = {name: "; ".join(getattr(control, name) for control in controls) for name in ("planted", "expected", "detail")}
    return replace(verdict, control=Control(**words, caught=True))


def _judge_plant(planted: Sequence[Expectation], plant: Plant) -> GateVerdict:
    seen = [item for item in planted if item.frame == plant.frame]
    return conclude(GATE, _frames_checks(seen, (plant.frame,)), passed_reason="the planted frame passed")


def _frames_checks(expectations: Sequence[Expectation], frames: Sequence[str]) -> list[Check]:
    checks = []
    for frame in frames:
        for aspect in ASPECTS:
            mine = [item for item in expectations if (item.frame, item.aspect) == (frame, aspect)]
            if mine or aspect not in OPTIONAL:
                checks.append(_aspect_check(frame, aspect, mine))
    return checks


def _aspect_check(frame: str, aspect: str, mine: Sequence[Expectation]) -> Check:
    """Fold one aspect of one frame into a check that quotes the columns at fault; none evaluated = not measured."""
    failed = [item for item in mine if not item.success]
    quoted = "; ".join(f"{item.column or 'table'} {item.observed}, asked {item.expected}" for item in failed[:SHOWN])
    more = f"; {len(failed) - SHOWN} more" if len(failed) > SHOWN else ""
    return check(
        aspect, float(len(failed)) if mine else None, "<=", 0.0, unit="violated", source=SOURCE,
        where=f"{frame}: {quoted}{more}" if failed else frame,
        action=ASPECTS[aspect] if mine else f"evaluate '{aspect}' on {frame}: load the split and give the contract its limits",
    )  # fmt: skip


def _name_checks(records: ContractRecords) -> list[Check]:
    """Compare the columns by name, independently of Great Expectations."""
    checks = []
    for frame, columns in records.columns.items():
        late = sorted(set(columns) & set(records.forbidden))
        checks.append(
            check("late columns by name", float(len(late)), "<=", 0.0, unit="columns", source=SOURCE,
                  where=f"{frame}: {', '.join(late)}" if late else frame, action=ASPECTS["cutoff"])
        )  # fmt: skip
    return checks


def _order_check(span: Mapping[str, tuple[str, str]]) -> Check:
    """Demand that the last training event lies before the first judged one."""
    last, first = span.get("train", ("", ""))[1], span.get("judge", ("", ""))[0]
    known = bool(last) and bool(first)
    return Check(
        name="last training event before first judged event", observed=last if known else None, threshold=first or "the first judged event",
        unit="", passed=bool(pd.Timestamp(last) < pd.Timestamp(first)) if known else None, comparison="<", source=SOURCE,
        action=ASPECTS["period"],
    )  # fmt: skip


def _rows_text(rows: Mapping[str, int]) -> str:
    return " and ".join(f"{count:,} {frame} rows" for frame, count in rows.items())


def _frames_table(records: ContractRecords) -> Table:
    rows = []
    for frame, count in records.rows.items():
        mine = [item for item in records.expectations if item.frame == frame]
        first, last = records.span.get(frame, ("", ""))
        rows.append((frame, count, first, last, len(records.columns.get(frame, ())), len(mine), sum(not item.success for item in mine)))
    columns = ("frame", "rows", "first event", "last event", "columns", "expectations", "violated")
    return Table(title="Frames under the contract", columns=columns, rows=tuple(rows))


def _aspect_plot(expectations: Sequence[Expectation], frames: Sequence[str]) -> Plot:
    """How many expectations of each aspect hold and how many are violated, over all frames."""
    counts = [
        [sum(item.success is held and item.aspect == aspect for item in expectations) for aspect in ASPECTS] for held in (True, False)
    ]
    named = zip(("hold", "violated"), counts, strict=True)
    series = tuple(Series(name=name, x=tuple(ASPECTS), y=tuple(map(float, values))) for name, values in named)
    title = f"Expectations on {' and '.join(frames)}"
    return Plot(title=title, kind="bar", x_label="aspect of the contract", y_label="expectations", series=series, stacked=True)


def _failed_table(expectations: Sequence[Expectation]) -> Table:
    rows = tuple(
        (item.frame, item.aspect, item.column or "table", item.expectation, item.observed, item.expected)
        for item in expectations
        if not item.success
    )
    return Table(title="Violated expectations", columns=("frame", "aspect", "column", "expectation", "seen", "asked"), rows=rows)


def _notes(records: ContractRecords) -> tuple[str, ...]:
    notes = [
        "Leaks are found by name, by period, by shared sample ids and by a copy of the label; a late value under an innocent name is not."
    ]
    if not records.forbidden:
        notes.append("The contract names no column known only after the cutoff, so no late column could be planted.")
    return tuple(notes)
