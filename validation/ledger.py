"""The sample ledger compared: where consumption first parts from what it had to be, and which samples were repeated or lost.

Ledgers are tables with records.LEDGER_COLUMNS, rows in any order. Positions count samples over the whole run and are unique, so that
(step, position) is the order in which the global batch was formed, whichever lane and rank took a sample.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pandas as pd

from validation.completeness import absent_columns, listed
from validation.errors import EvidenceError
from validation.records import LEDGER_COLUMNS, Frame

Rows = npt.NDArray[np.int64]
_ORDER = ["step", "position", "lane", "sample_id"]  # columns of Rows
_POSITION, _SAMPLE = 1, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class LedgerDifference:
    """How a ledger differs from what was expected of it."""

    rows: int  # samples consumed
    expected_rows: int
    wrong: int  # positions that differ; surplus and lacking rows count too
    first: str  # the first divergent position in words; "" when the ledgers are equal
    repeated: tuple[int, ...]  # sample ids consumed more often than expected, ascending
    missing: tuple[int, ...]  # sample ids consumed less often than expected, ascending

    def __str__(self) -> str:
        if not self.wrong:
            return f"{self.rows} samples, each once and in order"
        return f"first at {self.first}; repeated samples: {listed(self.repeated)}; missing samples: {listed(self.missing)}"


def compare_order(ledger: Frame, expected: Sequence[int]) -> LedgerDifference:
    """Compare a ledger with the sample ids that positions 0..N-1 had to hold.

    Args: ledger, LEDGER_COLUMNS in any row order; expected, N sample ids in position order.
    Raises: EvidenceError when a column is absent or is not of whole numbers.
    """
    found = ledger_rows(ledger)
    wanted = np.zeros((len(expected), len(_ORDER)), dtype=np.int64)
    wanted[:, _POSITION] = np.arange(len(expected))
    wanted[:, _SAMPLE] = np.asarray(expected, dtype=np.int64)
    return _difference(found, wanted, columns=[_POSITION, _SAMPLE])


def compare_ledgers(ledger: Frame, twin: Frame) -> LedgerDifference:
    """Compare a ledger with another run's, on step, position, lane and sample id.

    Args: both LEDGER_COLUMNS, any row order; `twin` is what is expected.
    Raises: EvidenceError when a column is absent or is not of whole numbers.
    """
    return _difference(ledger_rows(ledger), ledger_rows(twin), columns=list(range(len(_ORDER))))


def ledger_rows(ledger: Frame) -> Rows:
    """Give the ledger as int64 of shape (N, 4): step, position, lane, sample id, sorted by them in this order.

    Raises: EvidenceError when a column is absent or is not of whole numbers (a NaN turns a column into floats).
    """
    absent = absent_columns(ledger, LEDGER_COLUMNS)
    broken = [name for name in LEDGER_COLUMNS if name not in absent and len(ledger) and not pd.api.types.is_integer_dtype(ledger[name])]
    if absent or broken:
        raise EvidenceError(
            f"the ledger lacks the columns {listed(absent)} and holds no whole numbers in {listed(broken)}. Which samples were consumed "
            "cannot be told. Run the probe again, with a trainer that writes step, lane, position and sample_id as int64."
        )
    rows = ledger[_ORDER].to_numpy(dtype=np.int64, copy=True)
    return rows[np.lexsort(rows.T[::-1])]


def _difference(found: Rows, wanted: Rows, *, columns: list[int]) -> LedgerDifference:
    common = min(len(found), len(wanted))
    differs = (found[:common][:, columns] != wanted[:common][:, columns]).any(axis=1)
    wrong = int(differs.sum()) + abs(len(found) - len(wanted))
    at = int(differs.argmax()) if differs.any() else common
    repeated, missing = _surplus(found[:, _SAMPLE], wanted[:, _SAMPLE])
    return LedgerDifference(
        rows=len(found), expected_rows=len(wanted), wrong=wrong, first=_described(found, wanted, at) if wrong else "",
        repeated=repeated, missing=missing,
    )  # fmt: skip


def _described(found: Rows, wanted: Rows, at: int) -> str:
    if at >= len(found):
        return f"position {wanted[at, _POSITION]}: the ledger ends, sample {wanted[at, _SAMPLE]} was expected"
    step, position, lane, sample = (int(value) for value in found[at])
    if at >= len(wanted):
        return f"position {position} (step {step}, lane {lane}): sample {sample}, nothing more was expected"
    expected = f"sample {wanted[at, _SAMPLE]} at position {wanted[at, _POSITION]}"
    return f"position {position} (step {step}, lane {lane}): sample {sample}, expected {expected}"


def _surplus(found: npt.NDArray[np.int64], wanted: npt.NDArray[np.int64]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Sample ids that occur more often, and less often, in `found` than in `wanted`."""
    ids, index = np.unique(np.concatenate([found, wanted]), return_inverse=True)
    surplus = np.bincount(index[: len(found)], minlength=len(ids)) - np.bincount(index[len(found) :], minlength=len(ids))
    return tuple(ids[surplus > 0].tolist()), tuple(ids[surplus < 0].tolist())
