"""What is the same in every replay of flights' December; torch-free, and JSON in the cache folder."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter

from validation.drift import Bins

Counts = Mapping[str, Mapping[str, tuple[tuple[int, ...], int]]]  # column -> day -> (rows a bin, rows without a value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Month:
    """The month's records but for its rows, which stand in Parquet files beside it."""

    columns: tuple[Bins, ...]
    scores: Bins
    utility_scale: float  # standard deviation of the baseline's utility on the judge split
    utility_unit: str
    slices: Mapping[str, tuple[str, ...]]  # slice column -> its values on the judge split
    inputs: Mapping[str, Counts]  # "clean" and each regression -> counts of what the candidate was fed
    score_counts: Mapping[str, Counts]


_MONTH = TypeAdapter(Month)


def write_month(month: Month, path: Path) -> None:
    """Write it whole: its presence says that the rows beside it are whole, too."""
    part = path.with_suffix(".part")
    part.write_bytes(_MONTH.dump_json(month))
    part.replace(path)


def read_month(path: Path) -> Month:
    """Read it back. Raises ValueError when it is none."""
    return _MONTH.validate_json(path.read_bytes())
