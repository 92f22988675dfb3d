"""Traces of operations -> frames, with their meta file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from validation.errors import DataError

META_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TraceFile:
    """One job's trace."""

    name: str  # "AR" of trace-AR.parquet
    table: pd.DataFrame  # a row an operation
    sizes: dict[str, Any]  # of its meta file: dp_size, pp_size, tp_size, ...; empty without one
    problems: tuple[str, ...] = ()


def read_traces(paths: Sequence[Path]) -> tuple[list[TraceFile], list[str]]:
    """Read every trace that can be read, by name, and what is to be said of the others."""
    traces, problems = [], []
    for path in sorted(paths):
        try:
            traces.append(read_trace_file(path))
        except DataError as error:
            problems.append(str(error))
    return traces, [*problems, *(problem for trace in traces for problem in trace.problems)]


def read_trace_file(path: Path) -> TraceFile:
    """Read `trace-NAME.parquet` with the `meta-NAME.yaml` beside it. Raises DataError when it is no table."""
    name = path.stem.removeprefix("trace").lstrip("-_.") or path.stem
    sizes, problem = _sizes(path.with_name(f"meta-{name}.yaml"))
    return TraceFile(name=name, table=_table(path), sizes=sizes, problems=(problem,) if problem else ())


def _table(path: Path) -> pd.DataFrame:
    try:
        return pd.read_parquet(path)
    except Exception as error:  # pyarrow raises errors of its own for rubbish
        raise DataError(
            f"{path.name} cannot be read as a Parquet table ({type(error).__name__}) and was left out. Copy it again."
        ) from None


def _sizes(path: Path) -> tuple[dict[str, Any], str]:
    if not path.exists():
        return {}, ""
    try:
        with path.open("rb") as file:
            value = yaml.safe_load(file.read(META_BYTES))
    except (OSError, yaml.YAMLError) as error:
        return {}, f"{path.name} cannot be read ({type(error).__name__}); sizes were taken from the trace"
    return (value, "") if isinstance(value, dict) else ({}, f"{path.name} names no sizes; they were taken from the trace")
