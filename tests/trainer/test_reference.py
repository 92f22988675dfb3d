"""The plain float64 reference agrees with the loop within the tensors' own float noise, and not with a planted defect."""

import pickle
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from helpers_loop import run_job, tiny_job
from helpers_reference import leave, leave32
from safetensors.torch import load_file, save_file
from tiny_recipe import TinyRecipe, small_net
from torch import Tensor, nn

from trainer import problem, reference, runlog
from trainer.audit import content_digests
from trainer.checks import is_coupled
from trainer.config import Conditions, Poison
from trainer.hardening import hardened
from trainer.hooks import Hooks, Sampler, Step, StepData
from trainer.order import Order
from trainer.plain import Setting, train
from trainer.problem import Problem, doubled, fresh_model, load_problem, sees_company, trained_type
from trainer.recipe import Training, load_recipe
from trainer.reference import expectations, gradient_errors, places_of
from trainer.reference_noise import Noise, distances, float32_noise, float64_noise
from trainer.world import World
from validation.errors import EvidenceError, RecipeError
from validation.records import EXPECTED_COLUMNS, GRADIENT_ERROR_COLUMNS

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
    return gradient_errors("tiny_recipe:recipe", None, runs, STEPS)


@pytest.mark.parametrize("leg", ["logic", "training", "fast"])
def test_runs_agree_with_the_reference(leg: str, errors: pd.DataFrame) -> None:
    """Every tensor of every step and world size lies within the limit of its own noise."""
    rows = errors[(errors["leg"] == leg) & (errors["stage"] == "reduced")]

    assert tuple(errors.columns) == GRADIENT_ERROR_COLUMNS
    assert len(rows) == rows["world_size"].nunique() * STEPS * 6
    assert (rows["rel_err"] <= LIMIT * rows["noise"]).all(), rows.assign(x=rows["rel_err"] / rows["noise"]).nlargest(5, "x")


@pytest.mark.parametrize("leg", ["divide_twice", "drop_lane", "drop_lane64"])
def test_planted_defects_are_far_outside(leg: str, errors: pd.DataFrame) -> None:
    """A defect moves the gradient by thousands of times its noise, in the very first step."""
    first = errors[(errors["leg"] == leg) & (errors["step"] == 0) & (errors["tensor"] != "0.bias") & (errors["stage"] == "reduced")]

    assert (first["rel_err"] > 1000 * first["noise"]).all()


def test_divide_twice_is_off_by_half(errors: pd.DataFrame) -> None:
    """On two ranks every tensor lies at half its reference, at every step: the comparison is at the run's own weights."""
    rows = errors[(errors["leg"] == "divide_twice") & (errors["stage"] == "reduced")]
    np.testing.assert_allclose(rows["rel_err"], 0.5, rtol=1e-4)
    np.testing.assert_allclose(rows["scale"], 0.5, rtol=1e-4)


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
    errors = gradient_errors(f"hard_recipes:{name}", None, runs, 2)

    assert (errors["rel_err"] <= LIMIT * errors["noise"]).all(), errors.assign(x=errors["rel_err"] / errors["noise"]).nlargest(5, "x")
    assert errors.loc[errors["leg"] == "logic", "rel_err"].max() < 1e-9


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
                "tiny_recipe:recipe", None, [{"leg": "x", "world_size": 1, "folder": str(tmp_path / folder), "precision": "float32"}], 2
            )


HARD = Conditions(samples=89, judged=59, global_batch_size=47, accumulation=2, epochs=3, clip_norm=0.19, ragged_weights=True)
RUNS = [("tiny", leave), ("tiny", leave32), ("normed", leave), ("calm", leave32)]


def hard_problem(name: str = "tiny", steps: int = STEPS) -> tuple[str, Problem]:
    path = "tiny_recipe:recipe" if name == "tiny" else f"hard_recipes:{name}"
    return path, load_problem(hardened(load_recipe(path), HARD, dropout=False), steps)


def in_noise(errors: pd.DataFrame) -> pd.DataFrame:
    return errors.assign(x=errors["rel_err"] / errors["noise"])


@pytest.mark.parametrize(("name", "written"), RUNS, ids=[f"{name}-{written.__name__}" for name, written in RUNS])
def test_right_run_under_hard_conditions_is_within_the_noise(name: str, written: Any, tmp_path: Path) -> None:
    """Ragged weights, clipping, an epoch border and a smaller last batch: every stage of every tensor lies within its noise, scale 1."""
    path, problem = hard_problem(name, 6)
    errors = gradient_errors(path, HARD, [written(tmp_path, problem, Setting(limit=HARD.clip_norm))], 6)
    stages = {"reduced", "clipped", "weight"} if written is leave else {"reduced", "clipped"}

    assert set(errors["stage"]) == stages
    assert set(errors["step"]) == set(range(len(problem.parts)))
    assert (errors["rel_err"] <= LIMIT * errors["noise"]).all(), in_noise(errors).nlargest(5, "x")
    assert errors.loc[errors["scale"].notna(), "scale"].between(0.999, 1.001).all()


def twice(name: str, step: int, value: Tensor) -> Tensor:
    return value * 2 if (name, step) == ("1.weight", 1) else value


def hundredth(name: str, step: int, value: Tensor) -> Tensor:
    return value * 1.01


@pytest.mark.parametrize("stage", ["reduced", "clipped"])
def test_one_wrong_tensor_is_named_at_its_stage_and_step(stage: str, tmp_path: Path) -> None:
    """A tensor that is twice as large once is the only row far outside, with the scale 2."""
    path, problem = hard_problem()
    errors = in_noise(gradient_errors(path, HARD, [leave(tmp_path, problem, Setting(limit=HARD.clip_norm), **{stage: twice})], STEPS))
    wrong = errors[errors["x"] > LIMIT]

    assert wrong[["stage", "step", "tensor"]].to_numpy().tolist() == [[stage, 1, "1.weight"]]
    assert wrong["scale"].tolist() == pytest.approx([2.0])


def test_wrong_update_is_seen_beside_a_right_gradient(tmp_path: Path) -> None:
    """An optimizer that moves half as far on one tensor shows in stage "weight" alone."""
    path, problem = hard_problem()
    moments = list(train(problem, Setting(limit=HARD.clip_norm)))

    def half(name: str, step: int, value: Tensor) -> Tensor:
        return value - moments[step].update[name] / 2 if name == "4.weight" else value

    errors = in_noise(gradient_errors(path, HARD, [leave(tmp_path, problem, Setting(limit=HARD.clip_norm), after=half)], STEPS))
    wrong = errors[errors["x"] > LIMIT]

    assert set(zip(wrong["stage"], wrong["tensor"], strict=True)) == {("weight", "4.weight")}
    assert wrong["scale"].tolist() == pytest.approx([0.5] * STEPS)


def test_missing_and_strange_tensors_are_judged(tmp_path: Path) -> None:
    """A tensor that was left without a gradient counts as zero; one that the reference does not know is
    wrong by its whole size."""
    path, problem = hard_problem()
    run = leave(tmp_path, problem, Setting(limit=HARD.clip_norm), reduced=lambda name, _, value: None if name == "4.bias" else value)
    kept = load_file(tmp_path / "gradients.safetensors")
    save_file(kept | {"step2/clipped/untied": torch.ones(2)}, tmp_path / "gradients.safetensors")
    errors = in_noise(gradient_errors(path, HARD, [run], STEPS))
    wrong = errors[errors["x"] > LIMIT]
    places = set(zip(wrong["stage"], wrong["step"], wrong["tensor"], strict=True))
    lost, strange = wrong[wrong["stage"] == "reduced"], wrong[wrong["stage"] == "clipped"]

    assert places == {*(("reduced", step, "4.bias") for step in range(STEPS)), ("clipped", 2, "untied")}
    assert (lost["rel_err"] == 1).all()
    assert (lost["scale"] == 0).all()
    assert strange["rel_err"].item() > 1  # its own size, as a share of the whole gradient's


def test_a_run_without_clipping_is_compared_with_one(tmp_path: Path) -> None:
    """`clip` False asks the reference without the limit: there both stages are the same gradient."""
    path, problem = hard_problem()
    run = leave(tmp_path, problem, Setting(limit=None))
    right, wrong = (in_noise(gradient_errors(path, HARD, [run | {"clip": clip}], STEPS)) for clip in (False, True))

    assert (right["x"] <= LIMIT).all()
    assert (wrong.loc[(wrong["stage"] == "clipped") & wrong["scale"].notna(), "x"] > 1e6).all()
    assert (wrong.loc[(wrong["stage"] == "reduced") & (wrong["step"] == 0), "x"] <= LIMIT).all()


class OwnClipping(Hooks):
    """An own clipping."""

    def clip(self, step: Step) -> None:
        super().clip(step)


@pytest.mark.parametrize("slack", [1e-6, 0.0, 1e-8, 1e-12])
def test_own_clipping_may_have_another_small_slack(slack: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """limit / norm and limit / (norm + tiny) are as right as torch's limit / (norm + 1e-6); a limit that is off by a hundredth is not."""
    monkeypatch.setattr(TinyRecipe, "hooks", OwnClipping(), raising=False)
    path, problem = hard_problem()
    right = leave(tmp_path / "right", problem, Setting(limit=HARD.clip_norm, slack=slack))
    wrong = leave(tmp_path / "wrong", problem, Setting(limit=HARD.clip_norm, slack=slack), clipped=hundredth)

    assert (in_noise(gradient_errors(path, HARD, [right], STEPS))["x"] <= LIMIT).all()
    errors = in_noise(gradient_errors(path, HARD, [wrong], STEPS))
    assert (errors.loc[(errors["stage"] == "clipped") & errors["scale"].notna(), "x"] > 1000).all()


def poisoned(monkeypatch: pytest.MonkeyPatch, problem: Problem, *, moved: float) -> frozenset[tuple[int, int]]:
    """Let the tables of a run say that its first micro-batch of step 1 was spoiled, and how far step 1 moved the weights."""
    ids = [problem.ids(step) for step in range(STEPS)]
    table = pd.DataFrame([
        {"rank": 1, "step": step, "micro": 0, "sample_id": sample, "content": "", "poisoned": step == 1 and place < 9}
        for step, batch in enumerate(ids) for place, sample in enumerate(batch)
    ])  # fmt: skip
    updates = pd.DataFrame([{"rank": rank, "step": step, "moved": moved if step == 1 else 1.0} for rank in (0, 1) for step in range(STEPS)])
    monkeypatch.setattr(runlog, "load_consumed", lambda _: table, raising=False)
    monkeypatch.setattr(runlog, "load_updates", lambda _: updates, raising=False)
    return frozenset((1, place) for place in range(9))


@pytest.mark.parametrize("written", [leave, leave32])
def test_a_spike_that_all_use_is_in_the_reference(written: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The poisoned samples count ten thousand times in their step; a run that left them out is far off from that step on."""
    path, problem = hard_problem()
    pairs = poisoned(monkeypatch, problem, moved=1.0)
    poison = {"poison": Poison(kind="spike", rank=1, step=1)}
    used = written(tmp_path / "used", problem, Setting(limit=HARD.clip_norm, poisoned=pairs)) | poison
    unused = written(tmp_path / "unused", problem, Setting(limit=HARD.clip_norm)) | poison
    right, wrong = (in_noise(gradient_errors(path, HARD, [run], STEPS)) for run in (used, unused))

    assert set(right["step"]) == set(range(STEPS))
    assert (right["x"] <= LIMIT).all(), right.nlargest(5, "x")
    assert (wrong.loc[wrong["step"] == 0, "x"] <= LIMIT).all()
    assert wrong.loc[(wrong["step"] == 1) & wrong["scale"].notna(), "x"].min() > 1000


def test_an_id_that_stands_twice_in_a_batch_is_found_by_its_content() -> None:
    """Where an epoch ends inside a batch a sample may stand there twice, looking unlike: the poisoned one is the one of that content."""
    problem = load_problem(hardened(load_recipe("loader_recipes:augmented0"), replace(HARD, samples=50), dropout=False), 2)
    ids, contents = problem.ids(1).tolist(), content_digests(problem.parts[1][0].batch)
    twice = next(sample for sample in ids if ids.count(sample) == 2)
    first, second = (place for place, sample in enumerate(ids) if sample == twice)

    assert places_of(problem, 1, [(twice, contents[second])]) == [second]
    assert places_of(problem, 1, [(twice, contents[second]), (twice, contents[first]), (-5, "")]) == [second, first]
    assert places_of(problem, 1, [(twice, "of old")]) == [first]


@pytest.mark.parametrize(
    ("kind", "moved", "written", "steps"),
    [
        ("spike", 0.0, leave, {0}),
        ("overflow", 1.0, leave, {0}),
        ("overflow", 1.0, leave32, {0}),
        ("spike", 0.0, leave32, {0, *range(2, STEPS)}),
    ],
)
def test_a_step_that_nobody_made_is_not_compared(
    kind: Any, moved: float, written: Any, steps: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spike that all skipped, and an infinite loss, leave no number to compare; a float32 run goes on being asked at its own weights."""
    path, problem = hard_problem()
    poisoned(monkeypatch, problem, moved=moved)
    run = written(tmp_path, problem, Setting(limit=HARD.clip_norm)) | {"poison": {"kind": kind, "rank": 1, "step": 1}}

    assert set(gradient_errors(path, HARD, [run], STEPS)["step"]) == steps


def noise_of(problem: Problem, setting: Setting, precision: str) -> Noise:
    moments = list(train(problem, setting))
    if precision == "float64":
        return float64_noise(problem, setting, moments)
    return {place: value for step in range(len(moments)) for place, value in float32_noise(problem, setting, moments, step).items()}


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_noise_is_that_of_the_precision(precision: str) -> None:
    """Noise is at least half a unit in the last place and not many; the last bias, whose terms cancel, is noisier than the rest."""
    problem = hard_problem(steps=2)[1]
    setting = Setting(limit=HARD.clip_norm)
    noise = noise_of(problem, setting, precision)
    table = pd.DataFrame([(*place, value) for place, value in noise.items()], columns=["stage", "step", "tensor", "noise"])
    in_eps = table[table["stage"] != "weight"].groupby("tensor")["noise"].max() / torch.finfo(getattr(torch, precision)).eps

    assert in_eps.min() >= 0.5
    assert in_eps.drop("4.bias").max() < 20
    assert set(table["stage"]) == ({"reduced", "clipped", "weight"} if precision == "float64" else {"reduced", "clipped"})


def test_noise_of_an_update_is_that_of_the_weights() -> None:
    """What is read off as after minus before is rounded as the weights are, and Adam adds its own: far more than half a unit."""
    problem = hard_problem(steps=2)[1]
    setting = Setting(limit=HARD.clip_norm)
    moments = list(train(problem, setting))
    noise = float64_noise(problem, setting, moments)
    weight, update = moments[1].weights["4.weight"], moments[1].update["4.weight"]

    assert noise["weight", 1, "4.weight"] >= torch.finfo(torch.float64).eps / 2 * float(weight.norm() / update.norm())
    assert max(value for (stage, _, _), value in noise.items() if stage == "weight") < 1e-6


def test_one_table_of_noise_serves_all_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs under one setting ask for one noise table a precision; a spike asks anew from its own step on alone."""
    path, problem = hard_problem()
    pairs = poisoned(monkeypatch, problem, moved=1.0)
    asked: list[Any] = []
    for name in ("float64_noise", "float32_noise"):
        measure = getattr(reference, name)
        monkeypatch.setattr(reference, name, lambda *given, measure=measure: asked.append(given[3:]) or measure(*given))
    plain, spiked = Setting(limit=HARD.clip_norm), Setting(limit=HARD.clip_norm, poisoned=pairs)
    runs = [written(tmp_path / f"{written.__name__}{n}", problem, plain) for written in (leave, leave32) for n in (0, 1)]
    gradient_errors(path, HARD, [*runs, leave32(tmp_path / "s", problem, spiked) | {"poison": Poison(kind="spike", rank=1, step=1)}], STEPS)

    assert asked == [(), (0,), (1,), (2,), (3,), (1,), (2,), (3,)]


def test_expectations_of_the_own_order(tmp_path: Path) -> None:
    """Ids in position order over an epoch border, each sample's content, the rates, the judged ids and slopes."""
    found = expectations("tiny_recipe:recipe", HARD, 6)
    problem = hard_problem(steps=6)[1]
    order = Order(seed=3, size=89, epochs=3, global_batch_size=47)

    assert tuple(found.expected.columns) == EXPECTED_COLUMNS
    assert found.order == tuple(problem.data.sample_ids[order.rows(range(order.positions))].tolist())
    assert found.expected["sample_id"].tolist() == list(found.order)
    assert found.expected.loc[found.expected["step"] == 5, "content"].tolist() == content_digests(problem.parts[5][0].batch)
    assert found.rates[0] == "[0.01]"
    assert len(set(found.rates)) == 6
    assert found.judged_ids == tuple(hardened(load_recipe("tiny_recipe:recipe"), HARD).data("judge").sample_ids.tolist())
    assert (found.frozen, found.slopes_excluded, len(found.slopes)) == ((), "", 7)
    assert pickle.loads(pickle.dumps(found)).rates == found.rates  # noqa: S301


def test_expected_order_is_the_ledger(tmp_path: Path) -> None:
    """The permutation alone gives the sample ids that a run on three ranks consumed, over an epoch border."""
    run_job(tiny_job(tmp_path, world_size=3))
    ledger = runlog.load_ledger(tmp_path)

    assert expectations("tiny_recipe:recipe", None, 9).order == tuple(ledger.sort_values("position")["sample_id"])
    assert len(expectations("tiny_recipe:recipe", None, 99).order) == len(ledger)


@pytest.mark.parametrize(("name", "foretold"), [("augmented0", True), ("jitter0", False)])
def test_contents_are_foretold_where_keys_decide(name: str, foretold: bool) -> None:
    """Keyed augmentation is known beforehand, and differs by epoch; data that draws without keys is not."""
    found = expectations(f"loader_recipes:{name}", HARD, 6).expected
    contents = found.groupby("sample_id")["content"].nunique()

    assert (found["content"] != "").all() == foretold
    assert contents.max() == (3 if foretold else 1)


class Backwards(Hooks):
    """Rows from the end on, and a loader that marks what it made."""

    def sampler(self, size: int, training: Training, world: World) -> Sampler:
        return _Backwards(size, training.global_batch_size, world)


class _Backwards:
    def __init__(self, size: int, batch: int, world: World) -> None:
        self.left, self.batch, self.world = size, batch, world

    def take(self) -> list[Any]:
        rows = np.arange(self.left - 1, max(self.left - 1 - self.batch, -1), -1)
        self.left -= len(rows)
        return [rows[self.world.rank :: self.world.world_size]] if len(rows) else []

    def state_dict(self) -> dict[str, Any]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.left = state["left"]


class Marking(Backwards):
    """A loader of its own beside the sampler."""

    def loader(self, data: Any, sampler: Sampler, world: World) -> Any:
        del world
        while rows := list(sampler.take()):
            batches = [data.batch(part) for part in rows]
            yield StepData(rows, [batch._replace(inputs=batch.inputs * 2) for batch in batches])


class Drawing(Marking):
    """A loader that draws without keys."""

    def loader(self, data: Any, sampler: Sampler, world: World) -> Any:
        for rows, batches in super().loader(data, sampler, world):
            yield StepData(rows, [batch._replace(inputs=batch.inputs + torch.rand(1)) for batch in batches])


@pytest.mark.parametrize(
    ("hooks", "foretold"), [(Backwards(), True), (Marking(), True), (Drawing(), False)], ids=["sampler", "loader", "random"]
)
def test_expectations_of_an_own_order(hooks: Hooks, foretold: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are those of the recipe's own sampler at world size 1, contents those of its own loader; no positions are expected."""
    monkeypatch.setattr(TinyRecipe, "hooks", hooks, raising=False)
    found = expectations("tiny_recipe:recipe", HARD, 6)
    data = hardened(load_recipe("tiny_recipe:recipe"), HARD).data("train")
    rows = np.arange(88, -1, -1)
    batch = data.batch(rows)
    marked = batch if type(hooks) is Backwards else batch._replace(inputs=batch.inputs * 2)

    assert found.order == ()
    assert found.expected["sample_id"].tolist() == data.sample_ids[rows].tolist()
    assert found.expected["step"].tolist() == [0] * 47 + [1] * 42
    assert found.expected["content"].tolist() == (content_digests(marked) if foretold else [""] * 89)


def test_own_path_is_never_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """A BatchNorm batch is cut as the loop cuts it, and whole where a recipe trains its own way."""
    assert len(hard_problem("normed")[1].parts[0]) == 16
    monkeypatch.setattr(TinyRecipe, "hooks", OwnClipping(), raising=False)

    assert [len(parts) for parts in hard_problem("normed")[1].parts] == [1] * STEPS


def test_excluded_slopes_and_frozen_parameters_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recipe that excludes finite differences gets none, in its own words; parameters that want no gradient are named."""
    monkeypatch.setattr(TinyRecipe, "excludes", {"finite_differences": "a solver inside"}, raising=False)
    monkeypatch.setattr(TinyRecipe, "model", lambda _: frozen_bias())
    found = expectations("tiny_recipe:recipe", HARD, 2)

    assert found.slopes_excluded == "excluded by the recipe: a solver inside"
    assert found.slopes.empty
    assert found.frozen == ("4.bias",)


def frozen_bias() -> nn.Module:
    model = small_net()
    model.get_parameter("4.bias").requires_grad_(False)
    return model


def test_a_queue_may_be_filled_in_any_order() -> None:
    """Buffers are as far apart as their values, wherever they stand; an empty one is equal to itself."""
    first = torch.arange(6.0, dtype=torch.float64).view(2, 3)

    assert reference._apart(first.flip(0), first) == 0.0
    assert reference._apart(first * 1.5, first) == pytest.approx(0.5)
    assert reference._apart(torch.zeros(2), torch.zeros(2)) == 0.0
    assert reference._apart(torch.ones(2), torch.zeros(2)) == pytest.approx(1.0)


class Company(Hooks):
    """Own hooks."""

    def update(self, step: Step) -> None:
        super().update(step)


class Brought(TinyRecipe):
    """With own hooks."""

    hooks = Company()


class Balanced(Brought):
    """With a term that multiplies two means of a batch: it moves the loss by next to nothing."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        loss_sum, weight = super().loss(model, batch)
        outputs = model(batch.inputs)
        return loss_sum + 1e-7 * outputs.mean() * outputs.square().mean() * weight, weight


def test_company_shows_in_the_gradient() -> None:
    """A small balancing term couples samples, though the loss of two halves is that of the whole to a millionth."""
    batch = doubled(TinyRecipe().data("train").batch(np.arange(16)))

    assert sees_company(Balanced(), batch)
    assert not sees_company(Brought(), batch)
    assert not is_coupled(Balanced(), fresh_model(Balanced(), torch.float64), batch)


class Wide(TinyRecipe):
    """A model in float64."""

    def model(self) -> nn.Module:
        return super().model().double()


def test_a_recipe_is_trained_in_its_own_type() -> None:
    """A model that is float64 all through is not rounded."""
    assert trained_type(Wide()) is torch.float64
    assert trained_type(TinyRecipe()) is torch.float32


class Stuck(Hooks):
    """A loader that waits for ever."""

    def loader(self, data: Any, sampler: Any, world: World) -> Any:
        del data, sampler, world
        time.sleep(60)
        yield from ()


class Waiting(TinyRecipe):
    """Whose loader does."""

    hooks = Stuck()


def test_a_loader_that_waits_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference asks the loader for one process's batches, and does not wait for ever."""
    monkeypatch.setattr(problem, "LOADER_S", 0.2)

    with pytest.raises(RecipeError, match=r"hooks.loader gave one process no batch for step 0 within 0.2 s"):
        load_problem(Waiting(), 2)
