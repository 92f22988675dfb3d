"""gradient_equivalence: every outcome, at its edges, and its control caught and missed."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.canonical import canonical_json
from validation.equivalence import judge_equivalence
from validation.policy import parse_policy
from validation.records import LEDGER_COLUMNS, EquivalenceRecords
from validation.verdict import GateVerdict, Outcome

POLICY = parse_policy().gradient_equivalence
TENSORS = ("body.bias", "body.weight", "head.weight")
SIZES = (1, 2, 4)
SAMPLES = 6 * 4  # steps x global batch
NOISE = 2e-7


def digests() -> pd.DataFrame:
    """Equal gradients on every rank of every world size, six steps."""
    return pd.DataFrame(
        [
            (w, rank, step, name, f"{step}{name}".encode().hex())
            for w in SIZES
            for rank in range(w)
            for step in range(6)
            for name in TENSORS
        ],
        columns=["world_size", "rank", "step", "tensor", "sha256"],
    )


def ledger(samples: Any = range(100, 100 + SAMPLES)) -> pd.DataFrame:
    """Four samples a step in four lanes."""
    rows = [(p // 4, p % 4, p, sample) for p, sample in enumerate(samples)]
    return pd.DataFrame(rows, columns=list(LEDGER_COLUMNS)).astype("int64")


def errors(in_noise: float = 1.0, legs: tuple[str, ...] = ("logic", "training", "fast")) -> pd.DataFrame:
    """Every tensor of every leg `in_noise` times its noise from the reference, at two steps of the largest world size."""
    rows = [(leg, 4, step, name, in_noise * NOISE, NOISE) for leg in legs for step in range(2) for name in TENSORS]
    return pd.DataFrame(rows, columns=["leg", "world_size", "step", "tensor", "rel_err", "noise"])


def records(**changes: Any) -> EquivalenceRecords:
    """A clean run; name what a test is about."""
    clean = EquivalenceRecords(
        world_sizes=SIZES, digests=digests(), states={w: ("state",) * w for w in SIZES}, ledgers={w: ledger() for w in SIZES},
        expected_order=tuple(range(100, 100 + SAMPLES)), samples=SAMPLES, errors=errors(), legs=("logic", "training", "fast"),
        dropout_excluded=True, planted_defect="the gradient divided by the world size twice",
        planted_errors=errors(0.75 / NOISE, legs=("training",)), worker_seconds=1.0,
    )  # fmt: skip
    return replace(clean, **changes)


def changed(frame: pd.DataFrame, column: str, value: Any, **where: Any) -> pd.DataFrame:
    """A copy with `column` set to `value` in the rows that match."""
    copy = frame.copy()
    rows = np.logical_and.reduce([frame[name] == wanted for name, wanted in where.items()])
    copy.loc[rows, column] = value
    return copy


def failed(verdict: GateVerdict) -> list[str]:
    """Names of failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


def test_clean_run_passes() -> None:
    """Same bits everywhere and errors within the noise pass, with the control caught."""
    verdict = judge_equivalence(records(), POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason
    assert verdict.control is not None
    assert verdict.control.caught
    assert "0.75" in verdict.control.detail
    assert "divided by the world size 4 once more" not in verdict.action


def test_first_divergence_is_named() -> None:
    """One other digest on one rank is named by step, tensor, world size and rank."""
    found = changed(digests(), "sha256", "other", world_size=4, rank=2, step=3, tensor="head.weight")
    verdict = judge_equivalence(records(digests=found), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert "first at step 3, tensor head.weight, W=4, rank 2" in verdict.reason
    assert "ranks of one world size disagree" in verdict.action
    assert "1 of 3 tensors (head.weight)" in verdict.action


def test_other_bits_of_a_world_size() -> None:
    """A world size whose ranks agree among themselves but not with W=1 fails as one whose sum depends on the ranks."""
    found = changed(digests(), "sha256", "other", world_size=4, step=2)
    verdict = judge_equivalence(records(digests=found), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert "first at step 2, tensor body.bias, W=4, rank 0" in verdict.reason
    assert "the sum depends on how many ranks there are; every tensor differ" in verdict.action


def test_majority_is_the_reference_without_one_worker() -> None:
    """Without W=1 the odd one out is named, not the majority."""
    found = changed(digests().query("world_size > 1"), "sha256", "a-first-by-name", world_size=2, rank=0, step=0, tensor="body.bias")
    verdict = judge_equivalence(records(digests=found, world_sizes=(2, 4)), POLICY)

    assert "first at step 0, tensor body.bias, W=2, rank 0" in verdict.reason
    assert [item.observed for item in verdict.checks if item.name == "gradient digests that differ"] == [1.0]


def test_final_states_differ() -> None:
    """A rank whose final state differs fails although all gradients agree."""
    verdict = judge_equivalence(records(states={1: ("state",), 2: ("state",) * 2, 4: ("state", "state", "drifted", "state")}), POLICY)

    assert failed(verdict) == ["final states that differ"]
    assert "first at W=4, rank 2" in verdict.reason


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        pytest.param([*range(100, 123), 100], "repeated samples: 100; missing samples: 123", id="repeated"),
        pytest.param([*range(100, 122), 123, 122], "position 22 (step 5, lane 2): sample 123", id="swapped"),
        pytest.param([*range(100, 124), 100], "nothing more was expected", id="surplus"),
    ],
)
def test_ledger_fails(samples: list[int], words: str) -> None:
    """A sample repeated, swapped or added at one world size fails there by position."""
    verdict = judge_equivalence(records(ledgers={1: ledger(), 2: ledger(), 4: ledger(samples)}), POLICY)

    assert failed(verdict) == ["wrong ledger positions at W=4"]
    assert words in verdict.reason


@pytest.mark.parametrize(
    ("in_noise", "outcome"),
    [
        pytest.param(8.0, Outcome.PASS, id="at-the-limit"),
        pytest.param(np.nextafter(8.0, 0.0), Outcome.PASS, id="one-ulp-below"),
        pytest.param(np.nextafter(8.0, 9.0), Outcome.FAIL, id="one-ulp-above"),
        pytest.param(math.nan, Outcome.FAIL, id="nan"),
        pytest.param(math.inf, Outcome.FAIL, id="infinite"),
        pytest.param(-1.0, Outcome.FAIL, id="negative"),
    ],
)
def test_error_at_the_limit(in_noise: float, outcome: Outcome) -> None:
    """One tensor's error passes at the limit exactly and at nothing beyond it."""
    found = changed(errors().assign(noise=1.0, rel_err=1.0), "rel_err", in_noise, leg="fast", step=1, tensor="head.weight")
    verdict = judge_equivalence(records(errors=found), POLICY)

    assert outcome is verdict.outcome
    assert outcome is Outcome.PASS or "fast leg, worst tensor (tensor head.weight, step 1, W=4" in verdict.reason


@pytest.mark.parametrize(
    ("rel_err", "noise", "outcome"),
    [
        pytest.param(0.0, 0.0, Outcome.PASS, id="exact-without-noise"),
        pytest.param(1e-30, 0.0, Outcome.FAIL, id="error-without-noise"),
        pytest.param(0.0, math.nan, Outcome.FAIL, id="noise-nan"),
        pytest.param(1.0, math.inf, Outcome.FAIL, id="noise-infinite"),
    ],
)
def test_noise_edges(rel_err: float, noise: float, outcome: Outcome) -> None:
    """An estimate of no noise allows no error, and a broken estimate allows nothing."""
    found = changed(changed(errors(), "rel_err", rel_err, tensor="body.bias"), "noise", noise, tensor="body.bias")

    assert outcome is judge_equivalence(records(errors=found), POLICY).outcome


@pytest.mark.parametrize(
    ("rel_err", "words"),
    [
        pytest.param(dict.fromkeys(TENSORS, 0.75), "off by the same 0.75: look at the normalisation (as if divided", id="over-W"),
        pytest.param(dict.fromkeys(TENSORS, 3.0), "as if multiplied by the world size 4", id="times-W"),
        pytest.param(dict.fromkeys(TENSORS, 0.01), "off by the same 0.01: look at the normalisation;", id="one-percent"),
        pytest.param({"head.weight": 0.8}, "only tensor head.weight is off: look at that tensor's reduction", id="one-tensor"),
        pytest.param({"head.weight": 0.8, "body.bias": 0.3}, "2 of 3 tensors are off (body.bias, head.weight)", id="some"),
        pytest.param({"head.weight": 0.8, "body.bias": 0.8}, "2 of 3 tensors are off by the same 0.8", id="all-with-a-gradient"),
        pytest.param(dict(zip(TENSORS, (0.1, 0.2, 0.3), strict=True)), "samples left out or repeated", id="each-its-own"),
        pytest.param({"body.bias": math.nan}, "not a number in body.bias", id="nan"),
    ],
)  # fmt: skip
def test_signature(rel_err: dict[str, float], words: str) -> None:
    """The pattern over tensors is put into words."""
    found = errors()
    for name, value in rel_err.items():
        found = changed(found, "rel_err", value, leg="logic", tensor=name)

    assert words in judge_equivalence(records(errors=found), POLICY).action


@pytest.mark.parametrize(
    ("leg", "words"),
    [
        pytest.param("training", "a fault of precision, not of logic", id="training"),
        pytest.param("fast", "torch's own reduction", id="fast"),
    ],
)
def test_other_legs_narrow_the_cause(leg: str, words: str) -> None:
    """A leg that fails alone says where the fault cannot be."""
    verdict = judge_equivalence(records(errors=changed(errors(), "rel_err", 3e-3, leg=leg)), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert words in verdict.action


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"world_sizes": (1, 2, 4, 8)}, "digests of W=8, rank 0", id="world-size"),
        pytest.param({"world_sizes": (1,)}, "a world size above 1", id="one-rank-only"),
        pytest.param({"world_sizes": ()}, "a world size above 1", id="no-world-size"),
        pytest.param({"digests": digests().query("world_size < 4 or rank != 3")}, "digests of W=4, rank 3", id="rank"),
        pytest.param({"digests": digests().iloc[:-1]}, "digests of W=4, rank 3", id="one-digest"),
        pytest.param({"digests": digests().assign(sha256="")}, "gradient digests of W=1, rank 0", id="blank-digests"),
        pytest.param({"digests": pd.DataFrame()}, "gradient digests (world_size, rank", id="no-columns"),
        pytest.param({"digests": digests().query("step == 0")}, "gradient digests of 2 steps", id="one-step"),
        pytest.param({"states": {1: ("state",), 2: ("state",) * 2, 4: ("state",) * 3}}, "final states of all 4 ranks at W=4", id="state"),
        pytest.param({"ledgers": {1: ledger(), 2: ledger()}}, "the ledger at W=4", id="ledger"),
        pytest.param({"ledgers": {w: ledger().iloc[:0] for w in SIZES}}, "the ledger at W=1 (it is absent or empty)", id="empty-ledger"),
        pytest.param({"ledgers": {w: ledger().drop(columns="lane") for w in SIZES}}, "lacks the columns lane", id="ledger-column"),
        pytest.param({"samples": 25}, "the expected order of 25 samples (it names 24)", id="samples"),
        pytest.param(
            {"ledgers": {w: ledger(range(100, 120)) for w in SIZES}, "expected_order": tuple(range(100, 120)), "samples": 20},
            "a ledger of 6 steps at W=1",
            id="few-steps",
        ),
        pytest.param({"errors": errors(legs=("logic", "training"))}, "leg fast at W=4", id="leg"),
        pytest.param({"errors": errors().assign(world_size=2)}, "leg logic at W=4", id="leg-at-largest-size"),
        pytest.param({"errors": errors().query("step == 0")}, "leg logic at W=4: 2 steps", id="leg-steps"),
        pytest.param({"errors": errors().iloc[1:]}, "leg logic at W=4: some of 3 tensors at step 0", id="leg-tensor"),
        pytest.param({"errors": pd.DataFrame()}, "gradient errors (leg, world_size", id="no-errors"),
        pytest.param({"legs": ()}, "gradient errors", id="no-legs"),
    ],
)
def test_missing_evidence_is_inconclusive(changes: dict[str, Any], words: str) -> None:
    """What had to be measured and was not is named, and nothing passes."""
    verdict = judge_equivalence(records(**changes), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert words in verdict.reason
    assert "seatrial gate gradient_equivalence" in verdict.action


@pytest.mark.parametrize(
    "planted", [errors(1.0, ("training",)), errors(1e6, ("training",)).iloc[:0], pd.DataFrame()], ids=["clean", "empty", "none"]
)
def test_missed_control_is_inconclusive(planted: pd.DataFrame) -> None:
    """A planted defect that is not seen takes the verdict's word away."""
    verdict = judge_equivalence(records(planted_errors=planted), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert verdict.control is not None
    assert not verdict.control.caught
    assert "positive control was missed" in verdict.reason


@settings(max_examples=25, deadline=None)
@given(st.randoms(use_true_random=False), st.sampled_from(["clean", "diverged", "off"]))
def test_row_order_does_not_matter(random: Any, kind: str) -> None:
    """Shuffled tables give the same verdict, and it has a canonical JSON form."""
    made = {
        "clean": records(),
        "diverged": records(digests=changed(digests(), "sha256", "other", world_size=2, tensor="body.weight")),
        "off": records(errors=changed(errors(), "rel_err", 0.5, leg="fast")),
    }[kind]
    shuffled = {
        name: getattr(made, name).sample(frac=1, random_state=random.randrange(2**32)) for name in ("digests", "errors", "planted_errors")
    }

    assert canonical_json(judge_equivalence(made, POLICY)) == canonical_json(judge_equivalence(replace(made, **shuffled), POLICY))


def test_few_tensors_of_one_factor_are_no_normalisation() -> None:
    """Two of five tensors off alike are named, since a wrong normalisation would have hit them all."""
    names = (*TENSORS, "tail.bias", "tail.weight")
    rows = [(leg, 4, step, name, NOISE, NOISE) for leg in ("logic", "training", "fast") for step in range(2) for name in names]
    found = pd.DataFrame(rows, columns=list(errors().columns))
    for name in ("tail.bias", "tail.weight"):
        found = changed(found, "rel_err", 0.75, leg="fast", tensor=name)

    assert "2 of 5 tensors are off (tail.bias, tail.weight)" in judge_equivalence(records(errors=found), POLICY).action


def test_plots_hold_no_zero_on_a_log_axis() -> None:
    """An exact tensor stands in the table and is left out of the logarithmic picture."""
    verdict = judge_equivalence(records(errors=changed(errors(), "rel_err", 0.0, tensor="body.bias")), POLICY)

    assert all(value > 0 for plot in verdict.plots for series in plot.series for value in series.y)
    assert {"logic", "training", "fast"} == {series.name for plot in verdict.plots for series in plot.series}
