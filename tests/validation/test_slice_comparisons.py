"""Where each comparison falls: outcomes are built to have a given mean and standard error exactly, 400 samples a cluster each.

With 399 degrees of freedom and three comparisons the plain bound is 1.65 and the family's 2.13 standard errors; the reference's utility
has a standard deviation of one, so the margin is 0.1.
"""

import numpy as np
import pandas as pd
import pytest
from helpers_gates import SLICE_POLICY, slice_records

from validation.slice_comparisons import FAILED, PASSED, UNCERTAIN, UNDECIDABLE, Comparisons, compare
from validation.slices import judge_slices

N = 400


def noise(error: float) -> np.ndarray:
    """Alternating values with mean zero whose mean has exactly this standard error."""
    return np.where(np.arange(N) % 2, 1.0, -1.0) * error * np.sqrt(N - 1)


def built(*, gain: float = 0.0, gain_error: float = 0.0, gap: float = 0.0, gap_error: float = 0.0) -> pd.DataFrame:
    """Candidate and baseline on one slice: utility gained over the baseline and confidence above the hit rate, as asked."""
    base = np.where(np.arange(N) // 2 % 2, 1.0, -1.0)
    frame = pd.DataFrame({"sample_id": range(N), "cluster": range(N), "side": "all", "utility_baseline": base})
    shared = {f"{measure}_{who}": 0.5 for measure in ("loss", "confidence", "hit") for who in ("candidate", "baseline")}
    frame = frame.assign(**shared, utility_candidate=base + gain + noise(gain_error))
    return frame.assign(confidence_candidate=0.5 + gap + noise(gap_error))


def compared(frame: pd.DataFrame, contenders: tuple[str, ...] = ("candidate", "baseline")) -> Comparisons:
    """All comparisons on `frame` under the default policy."""
    records = slice_records(frame, slices=("side",), contenders=contenders)
    return compare(records, SLICE_POLICY, frame)


@pytest.mark.parametrize(
    ("gain", "error", "status"),
    [
        pytest.param(-0.04, 0.03, PASSED, id="low-end-above-the-margin"),
        pytest.param(-0.06, 0.03, UNCERTAIN, id="low-end-below"),
        pytest.param(-0.15, 0.03, UNCERTAIN, id="mean-below-high-end-above"),
        pytest.param(-0.17, 0.03, FAILED, id="high-end-below"),
        pytest.param(0.05, 0.08, PASSED, id="wide-but-good"),
        pytest.param(0.0, 0.08, UNDECIDABLE, id="wide"),
        pytest.param(-0.2, 0.08, UNDECIDABLE, id="wide-and-lower"),
        pytest.param(-0.25, 0.08, UNCERTAIN, id="wide-but-worse-without-the-correction"),
        pytest.param(-0.3, 0.08, FAILED, id="wide-and-worse"),
        pytest.param(-0.0999999, 0.0, PASSED, id="just-above-the-margin"),
        pytest.param(-0.1000001, 0.0, FAILED, id="just-below-the-margin"),
    ],
)
def test_utility_falls_where_its_two_ends_say(gain: float, error: float, status: str) -> None:
    """Passing looks at the plain lower end, failing at the family's upper end, deciding at the width."""
    assert [item.status for item in compared(built(gain=gain, gain_error=error)).utility] == [status]


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["too-sure", "too-unsure"])
@pytest.mark.parametrize(
    ("gap", "error", "status"),
    [
        pytest.param(0.09, 0.03, PASSED, id="upper-end-below-the-limit"),
        pytest.param(0.12, 0.03, UNCERTAIN, id="upper-end-above"),
        pytest.param(0.2, 0.03, UNCERTAIN, id="mean-above-lower-end-below"),
        pytest.param(0.23, 0.03, FAILED, id="lower-end-above"),
        pytest.param(0.1, 0.08, UNDECIDABLE, id="wide"),
    ],
)
def test_the_calibration_gap_falls_where_its_two_ends_say(gap: float, error: float, status: str, sign: float) -> None:
    """Too sure and too unsure are judged alike."""
    assert [item.status for item in compared(built(gap=sign * gap, gap_error=error)).calibration] == [status]


@pytest.mark.parametrize(
    ("gain", "status"),
    [(0.063, PASSED), (0.055, UNCERTAIN), (-0.06, UNCERTAIN), (-0.08, FAILED)],
    ids=["above-1.97-errors", "between-1.65-and-1.97", "below", "surely-below"],
)
def test_superiority_is_tested_at_half_of_the_error(gain: float, status: str) -> None:
    """Two measures share the 5%, so each needs 1.97 standard errors, not 1.65."""
    found = compared(built(gain=gain, gain_error=0.03)).superiority

    assert [(item.column, item.status) for item in found] == [("utility", status), ("log loss", FAILED)]


def test_an_infinite_log_loss_leaves_superiority_to_utility() -> None:
    """A baseline that was sure and wrong has no mean log loss to beat."""
    frame = built(gain=0.3, gain_error=0.03)
    frame.loc[3, "loss_baseline"] = np.inf

    assert [item.column for item in compared(frame).superiority] == ["utility"]


def test_the_family_counts_every_comparison() -> None:
    """One slice and the whole set against each reference, and one calibration: three with one reference, five with two."""
    frame = built().assign(utility_rule=0.0, loss_rule=0.5, confidence_rule=0.5, hit_rule=0.5)

    assert compared(frame).family == 3
    assert compared(frame, ("candidate", "baseline", "rule")).family == 5


def test_a_slice_that_one_reference_cannot_decide_is_not_called_judged() -> None:
    """It passes against the baseline and is undecidable against the rule: no utility check, and no coverage."""
    frame = built(gain=0.3, gain_error=0.01)
    frame = frame.assign(utility_rule=frame["utility_candidate"] + noise(0.5) + 0.25, loss_rule=0.6, confidence_rule=0.5, hit_rule=0.5)
    verdict = judge_slices(slice_records(frame, slices=("side",), contenders=("candidate", "baseline", "rule")), SLICE_POLICY)

    found = {item.name: item.passed for item in verdict.checks}
    assert not any(name.startswith("utility of") for name in found)
    assert found["coverage of side"] is None
