"""The flights recipe: model, loss, schedule, contenders and what a decision is worth."""

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch
from helpers_flights import few_days, write_source
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.export import Dim, export

from trainer.recipe import Recipe, SplitData, load_recipe
from trainer.recipes import flights_data
from trainer.recipes.flights import RULE_SHARES, WARN_ABOVE, recipe
from trainer.recipes.flights_data import CONTINUOUS, FEATURES


@pytest.fixture(scope="module", autouse=True)
def small_source(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Ten days of January and two of October in place of the whole package."""
    folder = tmp_path_factory.mktemp("flights")
    source = write_source(folder / "data", few_days((1, range(1, 11)), (10, range(1, 3))))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flights_data, "source_folder", lambda: source)
        patch.setenv("SEATRIAL_CACHE", str(folder / "cache"))
        yield folder


def seeded_model() -> nn.Module:
    torch.manual_seed(0)
    return recipe.model()


def rows(data: SplitData, count: int) -> torch.Tensor:
    return data.batch(np.arange(count)).inputs


def test_shipped_name_loads_and_passes_every_check() -> None:
    """`flights` is a complete recipe."""
    assert load_recipe("flights") is recipe
    assert isinstance(recipe, Recipe)


def test_frame_has_what_the_recipe_names_and_nothing_from_later() -> None:
    """Contract, slice, cluster, label and time columns are there; of what is known after the cutoff only the label."""
    frame, contract = recipe.data("judge").frame, recipe.contract
    wanted = {*contract.columns, *recipe.slices, recipe.cluster, contract.label, contract.event_time}

    assert wanted <= set(frame.columns)
    assert not set(contract.known_after_cutoff) & set(frame.columns)
    assert frame[[*recipe.slices, recipe.cluster]].map(lambda value: isinstance(value, str)).all().all()


def test_loss_is_a_sum_and_its_weight() -> None:
    """Two halves of a batch add up to the whole, so any split has the same global mean."""
    model, data = seeded_model().eval(), recipe.data("train")
    parts = [recipe.loss(model, data.batch(chosen)) for chosen in (np.arange(10), np.arange(10, 30), np.arange(30))]

    assert [float(weight) for _, weight in parts] == [10.0, 20.0, 30.0]
    torch.testing.assert_close(parts[0][0] + parts[1][0], parts[2][0])


def test_optimizer_decays_matrices_only() -> None:
    """Every parameter is in one group; biases, LayerNorms and embeddings are not decayed."""
    model = seeded_model()
    decayed, free = recipe.optimizer(model).param_groups

    assert len(decayed["params"]) + len(free["params"]) == len(list(model.parameters()))
    assert {weight.ndim for weight in decayed["params"]} == {2}
    assert (decayed["weight_decay"] > 0, free["weight_decay"]) == (True, 0.0)


@pytest.mark.parametrize(("step", "share"), [(0, 1 / 30), (30, 0.78), (99, 0.02), (100, 0.02), (250, 0.02)])
def test_schedule_warms_up_and_ends_low(step: int, share: float) -> None:
    """The rate starts at a thirtieth, follows a cosine and stays low beyond the end."""
    optimizer = recipe.optimizer(seeded_model())
    schedule = recipe.schedule(optimizer, 100)
    for _ in range(step):
        optimizer.step()
        schedule.step()

    assert optimizer.param_groups[0]["lr"] / 3e-3 == pytest.approx(share, abs=0.03)


@pytest.mark.parametrize("contender", ["candidate", "baseline"])
@pytest.mark.parametrize("strict", [True, False])
def test_serving_modules_export_with_any_batch(contender: str, strict: bool) -> None:
    """Candidate and baseline export with a dynamic batch and give the same probabilities as before, for 1, 2 and 300 rows."""
    data = recipe.data("train")
    module = (recipe.scorer(seeded_model()) if contender == "candidate" else recipe.baseline(data)).eval()
    exported = export(module, (rows(data, 2),), dynamic_shapes=({0: Dim("batch")},), strict=strict).module()

    for count in (1, 2, 300):
        inputs = rows(data, count)
        torch.testing.assert_close(exported(inputs), module(inputs))
        assert module(inputs).shape == (count,)


def test_one_input_row_is_numbers_then_codes() -> None:
    """The codes are whole numbers and categories never seen, code 0, still get a score."""
    data, model = recipe.data("judge"), seeded_model().eval()
    inputs = rows(data, 500)
    unseen = torch.cat([inputs[:, :CONTINUOUS], torch.zeros(500, FEATURES - CONTINUOUS)], dim=1)

    assert inputs.shape == (500, FEATURES)
    assert (inputs[:, CONTINUOUS:] % 1 == 0).all()
    assert torch.isfinite(model(unseen)).all()


def test_few_steps_learn() -> None:
    """Thirty updates on ten days lower the log loss below that of the base rate."""
    data, model = recipe.data("train"), seeded_model()
    optimizer, draw = recipe.optimizer(model), np.random.default_rng(0)
    for _ in range(30):
        total, weight = recipe.loss(model, data.batch(draw.integers(0, len(data), 512)))
        optimizer.zero_grad()
        (total / weight).backward()
        optimizer.step()
    total, weight = recipe.loss(model.eval(), data.batch(np.arange(len(data))))
    log_loss = (total / weight).item()
    share = float(data.frame["late"].mean())

    assert log_loss < 0.95 * -(share * math.log(share) + (1 - share) * math.log(1 - share))


def test_baseline_ranks_flights() -> None:
    """The logistic regression tells late from punctual flights on the days it was fitted on."""
    data = recipe.data("train")
    with torch.no_grad():
        scores = recipe.baseline(data)(rows(data, len(data))).double().numpy()

    assert recipe.quality(data.frame, scores) > 0.75
    assert scores.mean() == pytest.approx(data.frame["late"].mean(), abs=0.01)


@pytest.mark.parametrize(
    ("late", "score", "utility", "loss"),
    [
        pytest.param(1.0, 0.9, 30.0, -math.log(0.9), id="right warning"),
        pytest.param(0.0, 0.9, -10.0, -math.log(0.1), id="false alarm"),
        pytest.param(1.0, 0.1, 0.0, -math.log(0.1), id="missed"),
        pytest.param(0.0, 0.1, 0.0, -math.log(0.9), id="rightly quiet"),
        pytest.param(1.0, WARN_ABOVE, 30.0, -math.log(WARN_ABOVE), id="at the threshold"),
        pytest.param(1.0, math.nextafter(WARN_ABOVE, 0), 0.0, -math.log(WARN_ABOVE), id="an ulp below"),
        pytest.param(1.0, 0.0, 0.0, -math.log(1e-7), id="certain and wrong is finite"),
        pytest.param(1.0, math.nan, math.nan, math.nan, id="NaN stays NaN"),
    ],
)
def test_worth_of_a_decision(late: float, score: float, utility: float, loss: float) -> None:
    """A warning is worth 30 minutes if the flight is late and costs 10 if not."""
    worth = recipe.outcomes(pd.DataFrame({"late": [late]}), np.array([score]))

    np.testing.assert_allclose([worth.utility[0], worth.loss[0], worth.hit[0]], [utility, loss, late])
    assert worth.confidence[0] == pytest.approx(score, nan_ok=True)


def test_threshold_is_where_a_warning_breaks_even() -> None:
    """At the threshold the expected worth of a warning is zero."""
    assert pytest.approx(0) == WARN_ABOVE * 30 - (1 - WARN_ABOVE) * 10


def quality(late: list[float], scores: npt.NDArray[np.float64]) -> float:
    return recipe.quality(pd.DataFrame({"late": late}), scores)


def test_quality_is_roc_auc_with_ties() -> None:
    """Ties count half, as in scikit-learn."""
    draw = np.random.default_rng(0)
    late, scores = draw.integers(0, 2, 500).astype(float), draw.integers(0, 20, 500) / 20

    assert quality(late.tolist(), scores) == pytest.approx(roc_auc_score(late, scores), abs=1e-12)


@pytest.mark.parametrize(("late", "score"), [([1.0, 1.0], 0.5), ([0.0, 0.0], 0.5), ([0.0, 1.0], math.nan), ([], 0.5)])
def test_quality_without_meaning_is_nan(late: list[float], score: float) -> None:
    """One class only, no rows or a NaN score have no AUC, and NaN passes no gate."""
    assert math.isnan(quality(late, np.full(len(late), score)))


def test_rule_follows_the_board() -> None:
    """The rule looks at the airport's last two hours and at the clock, and warns only when the airport runs late."""
    frame = pd.DataFrame({"origin_left_delay_120m": [16.0, 16.0, 15.0, 15.0], "hour": [15.0, 14.9, 15.0, 14.9]})
    scores = recipe.rule(frame)

    assert scores.tolist() == list(RULE_SHARES.values())
    assert (scores >= WARN_ABOVE).tolist() == [True, True, False, False]


def test_same_rows_have_the_same_bytes(small_source: Path) -> None:
    """Two loads of a split give the same ids, inputs and labels."""
    first, second = recipe.data("train"), recipe.data("train")
    chosen = np.array([3, 1, 4, 1, 5])

    assert first.sample_ids.tobytes() == second.sample_ids.tobytes()
    assert all(a.numpy().tobytes() == b.numpy().tobytes() for a, b in zip(first.batch(chosen), second.batch(chosen), strict=True))
