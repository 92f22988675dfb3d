"""A recipe outside the packages, found through the current directory, is as good as a shipped one."""

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
from torch.export import Dim, export

from trainer.recipe import Recipe, code_digest, load_recipe

FOLDER = Path(__file__).parents[2] / "examples" / "digits"


@pytest.fixture
def recipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Recipe]:
    """The example's recipe, loaded as its team would: from its own folder."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.chdir(FOLDER)
    yield load_recipe("digits:recipe")
    sys.modules.pop("digits", None)


def one_hot(digit: int, confidence: float) -> npt.NDArray[np.float64]:
    scores = np.full((1, 10), (1 - confidence) / 9)
    scores[0, digit] = confidence
    return scores


def test_recipe_is_not_part_of_the_packages(recipe: Recipe) -> None:
    """The recipe's code lies in examples/, and its digest can be taken."""
    assert Path(str(sys.modules[type(recipe).__module__].__file__)) == FOLDER / "digits.py"
    assert len(code_digest("digits:recipe")) == 64


def test_splits_share_no_scan(recipe: Recipe) -> None:
    """1,000 scans train, the other 797 judge, and frames, ids and batches agree row by row."""
    train, judge = recipe.data("train"), recipe.data("judge")

    assert (len(train), len(judge)) == (1000, 797)
    assert not set(train.sample_ids) & set(judge.sample_ids)
    for data in (train, judge):
        batch = data.batch(np.array([7, 0, 7]))
        pixels = data.frame[list(recipe.contract.columns)].to_numpy()[[7, 0, 7]]
        np.testing.assert_array_equal(batch.inputs.numpy() * 16, pixels)
        assert batch.labels.tolist() == data.frame["digit"].iloc[[7, 0, 7]].tolist()


def test_frames_lie_in_their_periods(recipe: Recipe) -> None:
    """Every scan lies in its split's period, and slice columns are strings."""
    for split, (first, last) in recipe.contract.period.items():
        frame = recipe.data(split).frame

        assert frame["scanned"].between(first, last, inclusive="left").all()
        assert frame[[*recipe.slices, recipe.cluster]].map(lambda value: isinstance(value, str)).all().all()


@pytest.mark.parametrize("contender", ["candidate", "baseline"])
def test_serving_modules_export_with_any_batch(contender: str, recipe: Recipe) -> None:
    """Candidate and baseline export with a dynamic batch and return probabilities."""
    data = recipe.data("judge")
    module = (recipe.scorer(recipe.model()) if contender == "candidate" else recipe.baseline(recipe.data("train"))).eval()
    inputs = data.batch(np.arange(50)).inputs
    served = export(module, (inputs[:2],), dynamic_shapes=({0: Dim("batch")},), strict=True).module()(inputs)

    assert served.shape == (50, 10)
    torch.testing.assert_close(served.sum(dim=1), torch.ones(50))


def test_training_reaches_the_target_and_beats_the_baseline(recipe: Recipe) -> None:
    """The whole training, a second of one core, reaches the target quality and more utility than logistic regression."""
    torch.manual_seed(0)
    data, judge, size = recipe.data("train"), recipe.data("judge"), recipe.training.global_batch_size
    model, draw = recipe.model(), np.random.default_rng(0)
    order = np.concatenate([draw.permutation(len(data)) for _ in range(recipe.training.epochs)])
    optimizer = recipe.optimizer(model)
    schedule = recipe.schedule(optimizer, len(order) // size)
    for start in range(0, len(order) - size, size):
        total, weight = recipe.loss(model, data.batch(order[start : start + size]))
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
        assert schedule is not None
        schedule.step()
    inputs = judge.batch(np.arange(len(judge))).inputs
    with torch.no_grad():
        scores = [module.eval()(inputs).double().numpy() for module in (recipe.scorer(model), recipe.baseline(data))]
    candidate, baseline = (recipe.outcomes(judge.frame, found).utility.mean() for found in scores)

    assert recipe.quality(judge.frame, scores[0]) >= recipe.target_quality
    assert candidate > baseline > recipe.outcomes(judge.frame, recipe.rule(judge.frame)).utility.mean() > 0


@pytest.mark.parametrize(
    ("read", "confidence", "utility", "hit"),
    [(3, 0.9, 1.0, 1.0), (4, 0.9, -5.0, 0.0), (3, 0.8, 0.0, 1.0), (3, 5 / 6, 1.0, 1.0), (3, float("nan"), float("nan"), 0.0)],
    ids=["right", "wrong", "handed over", "at the threshold", "NaN"],
)
def test_worth_of_a_reading(read: int, confidence: float, utility: float, hit: float, recipe: Recipe) -> None:
    """A sure reading is worth 1 or costs 5; an unsure one goes to a clerk; NaN stays NaN."""
    worth = recipe.outcomes(pd.DataFrame({"digit": [3]}), one_hot(read, confidence))

    np.testing.assert_allclose([worth.utility[0], worth.confidence[0], worth.hit[0]], [utility, confidence, hit])
