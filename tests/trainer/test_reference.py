"""The plain float64 reference agrees with the loop within the tensors' own float noise, and not with a planted defect."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers_loop import run_job, tiny_job
from safetensors.torch import load_file

from trainer import runlog
from trainer.reference import distances, expected_order, gradient_errors, gradient_noise, reference_gradients
from validation.errors import EvidenceError
from validation.records import GRADIENT_ERROR_COLUMNS

STEPS = 4
LIMIT = 8.0  # x noise, the policy's order of magnitude


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> pd.DataFrame:
    """Three legs on several numbers of ranks, and each gradient defect, beside the reference."""
    root = tmp_path_factory.mktemp("legs")
    legs: list[tuple[str, dict[str, Any]]] = [
        *(("logic", {"world_size": w, "precision": "float64"}) for w in (1, 3)),
        *(("training", {"world_size": w}) for w in (1, 2, 5)),
        *(("fast", {"world_size": w, "reduction": "fast"}) for w in (1, 2, 3)),
        ("divide_twice", {"world_size": 2, "defect": "divide_twice"}),
        ("drop_lane", {"world_size": 2, "defect": "drop_lane"}),
        ("drop_lane64", {"world_size": 2, "defect": "drop_lane", "precision": "float64"}),
    ]
    runs = []
    for number, (leg, options) in enumerate(legs):
        folder = root / str(number)
        run = run_job(tiny_job(folder, dropout=False, steps=STEPS, keep_gradients=STEPS, **options))
        runs.append({"leg": leg, "world_size": run.world_size, "folder": str(folder), "precision": run.precision})
    return gradient_errors("tiny_recipe:recipe", runs, STEPS)


@pytest.mark.parametrize("leg", ["logic", "training", "fast"])
def test_runs_agree_with_the_reference(leg: str, errors: pd.DataFrame) -> None:
    """Every tensor of every step and world size lies within the limit of its own noise."""
    rows = errors[errors["leg"] == leg]

    assert tuple(errors.columns) == GRADIENT_ERROR_COLUMNS
    assert len(rows) == rows["world_size"].nunique() * STEPS * 6
    assert (rows["rel_err"] <= LIMIT * rows["noise"]).all(), rows.assign(x=rows["rel_err"] / rows["noise"]).nlargest(5, "x")


@pytest.mark.parametrize("leg", ["divide_twice", "drop_lane", "drop_lane64"])
def test_planted_defects_are_far_outside(leg: str, errors: pd.DataFrame) -> None:
    """A defect moves the gradient by thousands of times its noise, in the very first step."""
    first = errors[(errors["leg"] == leg) & (errors["step"] == 0) & (errors["tensor"] != "0.bias")]

    assert (first["rel_err"] > 1000 * first["noise"]).all()


def test_divide_twice_is_off_by_half(errors: pd.DataFrame) -> None:
    """On two ranks every tensor lies at half its reference, at every step: the comparison is at the run's own weights."""
    np.testing.assert_allclose(errors.loc[errors["leg"] == "divide_twice", "rel_err"], 0.5, rtol=1e-4)


@pytest.mark.parametrize("name", ["everything", "normed", "calm"])
def test_coupled_and_cast_runs_agree_with_the_reference(name: str, tmp_path: Path) -> None:
    """BatchNorm's batches are cut as lanes are, and a smaller type has its own, larger noise: every leg stays within it."""
    legs: list[tuple[str, dict[str, Any]]] = [
        ("logic", {"world_size": 3, "precision": "float64"}), ("training", {"world_size": 2, "parallel": "fsdp2"}),
        ("fast", {"world_size": 2, "reduction": "fast"}), ("sharded", {"world_size": 4, "parallel": "fsdp2", "reduction": "fast"}),
    ]  # fmt: skip
    runs = []
    for leg, options in legs:
        run = run_job(tiny_job(tmp_path / leg, recipe=f"hard_recipes:{name}", dropout=False, steps=2, keep_gradients=2, **options))
        runs.append({"leg": leg, "world_size": run.world_size, "folder": str(tmp_path / leg), "precision": run.precision})
    errors = gradient_errors(f"hard_recipes:{name}", runs, 2)

    assert (errors["rel_err"] <= LIMIT * errors["noise"]).all(), errors.assign(x=errors["rel_err"] / errors["noise"]).nlargest(5, "x")
    assert errors.loc[errors["leg"] == "logic", "rel_err"].max() < 1e-9


def test_noise_is_that_of_the_precision() -> None:
    """Noise is at least half a unit in the last place and not many; the last bias, whose terms cancel, is noisier than the rest."""
    noise = gradient_noise("tiny_recipe:recipe", 2).pivot_table(index="tensor", columns="precision", values="noise", aggfunc="max")

    for precision in ("float32", "float64"):
        in_eps = noise[precision] / torch.finfo(getattr(torch, precision)).eps
        assert in_eps.min() >= 0.5
        assert in_eps.drop("4.bias").max() < 10
        assert in_eps.idxmax() == "4.bias"


def test_expected_order_is_the_ledger(tmp_path: Path) -> None:
    """The permutation alone gives the sample ids that a run on three ranks consumed, over an epoch border."""
    run_job(tiny_job(tmp_path, world_size=3))
    ledger = runlog.load_ledger(tmp_path)

    assert expected_order("tiny_recipe:recipe", 9) == tuple(ledger.sort_values("position")["sample_id"])
    assert expected_order("tiny_recipe:recipe", 99) == expected_order("tiny_recipe:recipe", 9)
    assert len(expected_order("tiny_recipe:recipe", 2)) == 94


def test_reference_training_ends_where_the_float64_run_does(tmp_path: Path) -> None:
    """Optimizer, schedule and clipping of the loop are the plain ones: weights agree after every update."""
    run_job(tiny_job(tmp_path, world_size=2, precision="float64", dropout=False, keep_gradients=9))
    plain = load_file(reference_gradients("tiny_recipe:recipe", 9, str(tmp_path)))
    run = load_file(tmp_path / "gradients.safetensors")

    assert plain.keys() == run.keys()
    assert all(torch.allclose(run[name], plain[name], rtol=1e-9, atol=1e-13) for name in plain)
    assert any("step8/weights" in name for name in plain)


def test_tensor_without_a_gradient_divides_by_the_whole() -> None:
    """A tensor whose true gradient is zero is measured by the whole gradient's norm; an exact zero beside an exact zero is no error."""
    expected = {"a": torch.tensor([3.0, 4.0]).double(), "zero": torch.zeros(2).double()}
    found = {"a": torch.tensor([3.0, 4.0]), "zero": torch.tensor([0.0, 0.5])}

    assert distances(found, expected, frozenset({"zero"})) == {"a": 0.0, "zero": 0.1}
    assert distances(found, {"zero": expected["zero"]}, frozenset({"zero"}))["zero"] == float("inf")
    assert distances(expected, {"zero": expected["zero"]}, frozenset({"zero"}))["zero"] == 0.0


def test_incomplete_run_is_no_evidence(tmp_path: Path) -> None:
    """A run that kept fewer steps than asked for, or none, is refused."""
    run_job(tiny_job(tmp_path / "short", dropout=False, steps=2, keep_gradients=1))

    for folder in ("short", "absent"):
        with pytest.raises(EvidenceError, match="Run it again with keep_gradients=2"):
            gradient_errors(
                "tiny_recipe:recipe", [{"leg": "x", "world_size": 1, "folder": str(tmp_path / folder), "precision": "float32"}], 2
            )
