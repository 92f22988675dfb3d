"""Ledgers: where two orders of consumption part, and which samples were repeated or lost."""

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.errors import EvidenceError
from validation.ledger import compare_ledgers, compare_order, ledger_rows

ORDER = (7, 3, 9, 1, 5, 8)


def ledger(samples: tuple[int, ...] = ORDER, *, batch: int = 3) -> pd.DataFrame:
    """Samples in position order, `batch` a step, one lane each."""
    positions = range(len(samples))
    return pd.DataFrame(
        {"step": [p // batch for p in positions], "lane": [p % batch for p in positions], "position": positions, "sample_id": samples}
    ).astype("int64")


def test_equal_order() -> None:
    """A ledger that follows the permutation differs nowhere."""
    found = compare_order(ledger(), ORDER)

    assert (found.wrong, found.first, found.repeated, found.missing) == (0, "", (), ())
    assert str(found) == "6 samples, each once and in order"


@pytest.mark.parametrize(
    ("samples", "wrong", "first", "repeated", "missing"),
    [
        pytest.param((7, 3, 1, 9, 5, 8), 2, "position 2 (step 0, lane 2): sample 1, expected sample 9 at position 2", (), (), id="swapped"),
        pytest.param((7, 3, 9, 9, 5, 8), 1, "position 3 (step 1, lane 0): sample 9", (9,), (1,), id="repeated"),
        pytest.param((7, 3, 9, 1, 5), 1, "position 5: the ledger ends, sample 8 was expected", (), (8,), id="short"),
        pytest.param((*ORDER, 7), 1, "position 6 (step 2, lane 0): sample 7, nothing more was expected", (7,), (), id="long"),
        pytest.param((), 6, "position 0: the ledger ends, sample 7 was expected", (), tuple(sorted(ORDER)), id="empty"),
    ],
)
def test_first_divergence(samples: tuple[int, ...], wrong: int, first: str, repeated: tuple[int, ...], missing: tuple[int, ...]) -> None:
    """The first divergent position is named, with the samples that were repeated and lost."""
    found = compare_order(ledger(samples), ORDER)

    assert (wrong, repeated, missing) == (found.wrong, found.repeated, found.missing)
    assert found.first.startswith(first)


def test_right_samples_at_wrong_positions() -> None:
    """A batch taken one step late is seen although every sample comes once and in order."""
    late = ledger().assign(position=lambda frame: frame["position"] + 3)

    assert compare_order(late, ORDER).wrong == 6


def test_lane_counts_only_between_runs() -> None:
    """A sample in another lane is a difference from the twin, not from the permutation."""
    moved = ledger().assign(lane=0)

    assert compare_order(moved, ORDER).wrong == 0
    assert compare_ledgers(moved, ledger()).wrong == 4


def test_large_ids_keep_every_digit() -> None:
    """Ids beyond 2**53, which floats cannot tell apart, are compared exactly."""
    big = 2**60

    assert compare_order(ledger((big, big + 1)), (big, big + 2)).wrong == 1


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param(ledger().drop(columns="lane"), id="column-absent"),
        pytest.param(ledger().assign(sample_id=[1.0, 2.0, float("nan"), 4.0, 5.0, 6.0]), id="nan"),
        pytest.param(ledger().assign(sample_id=list("abcdef")), id="text"),
    ],
)
def test_unreadable_ledger(broken: pd.DataFrame) -> None:
    """A ledger without whole numbers in every column cannot be compared, and the message says how to mend it."""
    with pytest.raises(EvidenceError, match="as int64"):
        ledger_rows(broken)


@given(st.permutations(range(len(ORDER))))
def test_row_order_does_not_matter(rows: list[int]) -> None:
    """A shuffled table gives the same difference."""
    found = ledger((7, 3, 9, 9, 5, 8))

    assert compare_order(found, ORDER) == compare_order(found.iloc[rows].reset_index(drop=True), ORDER)


@given(st.lists(st.integers(0, 5), max_size=12), st.lists(st.integers(0, 5), max_size=12))
def test_surplus_balances(found: list[int], wanted: list[int]) -> None:
    """Equal exactly when the orders are; repeated and missing are disjoint."""
    difference = compare_order(ledger(tuple(found)), wanted)

    assert (difference.wrong == 0) == (found == wanted)
    assert not set(difference.repeated) & set(difference.missing)
