"""Ledgers for tests, row by row."""

import numpy as np

from trainer.parts import Ledger, LedgerRows


def ledger_of(rows: object) -> Ledger:
    """A ledger of (n, 4) rows: step, lane, position, sample id; a span each."""
    table = np.array(rows, dtype=np.int64).reshape(-1, 4)
    return Ledger(np.concatenate((table[:, :3], np.ones_like(table[:, :1])), axis=1), table[:, 3])


def rows_of(ledger: LedgerRows) -> list[tuple[int, ...]]:
    """All rows that are read back."""
    return ledger.read(0, len(ledger)).tolist()
