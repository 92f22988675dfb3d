"""Great Expectations behind one function that returns plain records; nothing else in the project imports it.

The library passes vacuously where there is nothing to look at (an empty suite, an empty frame, a column of nulls), so every result is
read with suspicion: a success without a value that was looked at is a failure. A missing column arrives as `exception_info` and is
a failure too.
"""

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.contract import PLANTS, DataContract
from validation.contract_plants import plant_into
from validation.contract_suite import SAMPLE_ID, Ask, as_utc, kind_asks, kind_of, kind_rows, name_asks, value_asks
from validation.records import ContractRecords, Expectation

COPY_CORRELATION = 0.999  # a column this close to the label is the label under another name


def run_expectations(frame_name: str, frame: pd.DataFrame, spec: DataContract) -> tuple[Expectation, ...]:
    """Hold a frame against its contract: one suite on its rows, two small ones on its columns' names and kinds.

    Args: frame_name is the split ("train" | "judge"); frame has a `sample_id` column beside the contract's.
    Returns: one record an expectation. A frame without rows, a missing column and a column of nulls violate what speaks about them.
    """
    rows = _prepared(frame.loc[:, ~frame.columns.duplicated()], spec)
    names = pd.DataFrame({"column": [str(column) for column in frame.columns]})
    about_columns = [*_validated(names, name_asks(spec)), *_validated(kind_rows(rows, spec), kind_asks(spec))]
    results = [
        *_validated(rows, value_asks(frame_name, spec)),
        *(replace(item, column="") for item in about_columns),
        *_copies_of_label(rows, spec),
    ]
    return tuple(replace(item, frame=frame_name) for item in results)


def build_contract_records(frames: Mapping[str, pd.DataFrame], spec: DataContract) -> ContractRecords:
    """Evaluate both splits, and each planted frame by the same suite.

    Args: frames by split ("train", "judge"), each the recipe's `SplitData.frame` with its `sample_ids` as column `sample_id`.
    """
    found = [item for split, frame in frames.items() for item in run_expectations(split, frame, spec)]
    return ContractRecords(
        expectations=(*found, *_shared_ids(frames)),
        planted=tuple(_planted(frames, spec)),
        planted_defect="; ".join(plant.words for plant in PLANTS),
        columns={
            split: tuple(str(column) for column in frame.columns if column not in (spec.label, SAMPLE_ID))
            for split, frame in frames.items()
        },
        forbidden=spec.forbidden,
        rows={split: len(frame) for split, frame in frames.items()},
        span={split: _span(frame, spec.event_time) for split, frame in frames.items()},
    )


def _validated(frame: pd.DataFrame, asks: Iterable[Ask]) -> list[Expectation]:
    """Put all asks to the library as one suite on one frame. The library is imported here: cold it takes 3 to 20 s."""
    import great_expectations as gx

    logging.getLogger("great_expectations").setLevel(logging.WARNING)  # it announces every temporary folder
    planned = list(asks)
    context = gx.get_context(mode="ephemeral")
    context.enable_analytics(False)
    context.variables.progress_bars = {"globally": False}  # type: ignore[assignment]  # the documented form
    asset = context.data_sources.add_pandas("frames").add_dataframe_asset("frame")
    batch = asset.add_batch_definition_whole_dataframe("whole").get_batch({"dataframe": frame})
    suite = gx.ExpectationSuite(name="contract", expectations=[_gx(ask, index) for index, ask in enumerate(planned)])
    # results come back in another order (those with an exception first), so each carries its ask's number
    answers: dict[int, Any] = {item["expectation_config"]["meta"]["ask"]: item for item in batch.validate(suite).results}
    return [_read(ask, answers[index], frame) for index, ask in enumerate(planned)]


def _gx(ask: Ask, index: int) -> Any:
    import great_expectations.expectations as gxe

    name = "Expect" + "".join(word.capitalize() for word in ask.kind.split("_"))
    column = {"column": ask.column} if ask.column else {}
    return getattr(gxe, name)(**column, **ask.limits, meta={"ask": index})


def _read(ask: Ask, answer: Any, frame: pd.DataFrame) -> Expectation:
    """Reduce a result to plain values; a success in which nothing was looked at becomes a failure."""
    seen: dict[str, Any] = dict(answer.result)
    looked_at = _looked_at(seen)
    if ask.column and ask.column not in frame:
        observed = "is absent"
    elif not seen:
        observed = f"could not be evaluated ({_exception(answer.exception_info)})"
    else:
        observed = _observed(seen, ask.aspect) if looked_at else "has no value to look at"
    success = bool(answer.success) and looked_at
    return Expectation(
        frame="", expectation=ask.kind, column=ask.column, success=success, observed=observed, expected=ask.expected, aspect=ask.aspect
    )


def _looked_at(seen: Mapping[str, Any]) -> bool:
    """Say whether the result rests on at least one value."""
    if "element_count" not in seen:
        observed = seen.get("observed_value")
        return observed is not None and not pd.isna(observed)
    nulls = seen.get("missing_count", seen["unexpected_count"])  # of the null expectation, the unexpected are the nulls
    return int(seen["element_count"]) > int(nulls)


def _observed(seen: Mapping[str, Any], aspect: str) -> str:
    if "element_count" not in seen:
        return f"is {seen['observed_value']}"
    if aspect == "nulls":
        return f"is {seen['unexpected_count'] / seen['element_count']:.4g} null"
    examples = ", ".join(dict.fromkeys(str(value) for value in seen["partial_unexpected_list"]))
    return f"has {seen['unexpected_count']} against it: {examples[:60]}" if examples else "as asked"


def _exception(info: Mapping[str, Any]) -> str:
    """First line of the library's exception; it comes plain or keyed by metric."""
    plain = info if "exception_message" in info else next(iter(info.values()), {})
    lines = str(plain.get("exception_message") or "no message").splitlines()
    return lines[0][:120]


def _prepared(frame: pd.DataFrame, spec: DataContract) -> pd.DataFrame:
    """Keep the contract's columns; event times become UTC without a zone, code numbers of a closed category become text."""
    wanted = dict.fromkeys((SAMPLE_ID, *spec.columns, spec.label, spec.event_time))
    kept = frame[[column for column in wanted if column in frame]].copy()
    if spec.event_time in kept:
        kept[spec.event_time] = as_utc(kept[spec.event_time])
    for column, rule in spec.columns.items():
        if rule.allowed and column in kept and kind_of(kept[column]) == "number":
            kept[column] = kept[column].astype(str).where(kept[column].notna())
    return kept.astype({column: np.float64 for column in kept if kept[column].dtype == np.float32})  # limits may be beyond float32


def _copies_of_label(rows: pd.DataFrame, spec: DataContract) -> list[Expectation]:
    """Look for the label under another name: a number column that moves exactly with it."""
    if spec.label not in rows or kind_of(rows[spec.label]) != "number":
        return []
    label = rows[spec.label].to_numpy(np.float64, na_value=np.nan)
    numbers = [column for column in spec.columns if column in rows and kind_of(rows[column]) == "number"]
    return [_copy_result(column, _correlation(rows[column].to_numpy(np.float64, na_value=np.nan), label)) for column in numbers]


def _copy_result(column: str, correlation: float) -> Expectation:
    return Expectation(
        frame="", expectation="column_values_to_not_copy_the_label", column=column, success=abs(correlation) < COPY_CORRELATION,
        observed=f"correlates {correlation:.4f} with the label", expected=f"below {COPY_CORRELATION}", aspect="cutoff",
    )  # fmt: skip


def _correlation(left: npt.NDArray[np.float64], right: npt.NDArray[np.float64]) -> float:
    """Pearson's r over rows where both are finite; 0 when there is none or one of the two is constant."""
    both = np.isfinite(left) & np.isfinite(right)
    if not both.any():
        return 0.0
    x, y = left[both] - left[both].mean(), right[both] - right[both].mean()
    spread = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return float(x @ y) / spread if spread > 0 else 0.0


def _shared_ids(frames: Mapping[str, pd.DataFrame]) -> list[Expectation]:
    if not all(split in frames and SAMPLE_ID in frames[split] for split in ("train", "judge")):
        return []
    shared = np.intersect1d(frames["train"][SAMPLE_ID].to_numpy(), frames["judge"][SAMPLE_ID].to_numpy())
    return [
        Expectation(
            frame="judge", expectation="sample_ids_to_not_be_in_train", column=SAMPLE_ID, success=shared.size == 0,
            observed=f"shares {shared.size} ids with train", expected="none of train's ids", aspect="sample ids",
        )
    ]  # fmt: skip


def _span(frame: pd.DataFrame, event_time: str) -> tuple[str, str]:
    """First and last event, ISO in UTC; empty texts when there is none."""
    times = as_utc(frame[event_time]).dropna() if event_time in frame else pd.Series(dtype="datetime64[ns]")
    return (times.min().isoformat(), times.max().isoformat()) if len(times) else ("", "")


def _planted(frames: Mapping[str, pd.DataFrame], spec: DataContract) -> Iterable[Expectation]:
    """Evaluate each planted frame; only the demanded number of rows is lowered, since plants are made of samples."""
    relaxed = replace(spec, min_rows=dict.fromkeys(spec.min_rows, 1))
    for plant in PLANTS:
        planted = plant_into(plant, frames, spec)
        if planted is not None:
            yield from (replace(item, frame=plant.frame) for item in run_expectations(plant.split, planted, relaxed))
