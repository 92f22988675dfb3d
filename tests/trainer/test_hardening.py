"""The hard conditions: what is made of a recipe, and which conditions hold for what reason."""

import pickle
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import hard_recipes
import loader_recipes
import numpy as np
import pytest
import tiny_recipe
import torch
from tiny_recipe import TinyData, TinyRecipe, recipe
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

from trainer.choosing import chosen
from trainer.conditions import CONDITIONS, Chosen
from trainer.config import Conditions
from trainer.dataset import seed_streams
from trainer.hardening import choose, draws_without_key, hardened, ragged_weights
from trainer.hooks import Hooks, Sampler
from trainer.order import Order
from trainer.plain import Setting, train
from trainer.problem import load_problem
from trainer.recipe import Batch, Recipe, Training
from trainer.streams import sample_keys
from trainer.world import World
from validation.errors import DataError, RecipeError

SIZES = (1, 2, 4, 8)
GIVEN = Conditions(samples=50, judged=7, global_batch_size=21, accumulation=2, epochs=3, clip_norm=0.1, ragged_weights=True)


def held(made: Chosen) -> dict[str, bool]:
    return {condition.name: condition.held for condition in made.held}


def detail(made: Chosen, name: str) -> str:
    return next(condition.detail for condition in made.held if condition.name == name)


def test_hardened_recipe_is_a_recipe_on_another_training() -> None:
    """The proxy passes the protocol's check, changes what it is told to and hands everything else on."""
    made = hardened(recipe, GIVEN)

    assert isinstance(made, Recipe)
    assert (made.training.global_batch_size, made.training.accumulation, made.training.epochs, made.training.clip_norm) == (21, 2, 3, 0.1)
    assert (made.training.seed, made.training.lanes, made.name) == (3, 8, "tiny")
    assert hardened(recipe, None) is recipe
    assert not hasattr(made, "state_dict")
    assert hardened(hard_recipes.everything, GIVEN).state_dict() == hard_recipes.everything.state_dict()  # type: ignore[attr-defined]


def test_cut_split_keeps_rows_ids_and_frame_together() -> None:
    """Rows are spread over the split; ids, frame and samples are cut alike, and only train samples are weighed."""
    whole, cut = recipe.data("train"), hardened(recipe, GIVEN).data("train")
    rows = np.arange(50) * 203 // 50

    assert len(cut) == len(cut.frame) == 50
    assert np.array_equal(cut.sample_ids, whole.sample_ids[rows])
    assert cut.frame["when"].tolist() == whole.frame["when"].iloc[rows].tolist()
    assert torch.equal(cut.batch(np.array([3, 1])).inputs, whole.batch(rows[[3, 1]]).inputs)
    assert torch.equal(
        hardened(recipe, GIVEN).data("judge").batch(np.arange(7)).weights, recipe.data("judge").batch(np.arange(7) * 60 // 7).weights
    )


def test_ragged_weights_are_exact_powers_of_two_by_id() -> None:
    """A sample's factor depends on its id alone, lies in 1/8 to 8 and takes every power."""
    ids = np.arange(2000)
    factors = ragged_weights(ids)
    cut = hardened(recipe, GIVEN).data("train")
    ratio = cut.batch(np.arange(50)).weights / recipe.data("train").batch(np.arange(50) * 203 // 50).weights

    assert set(factors.tolist()) == {2.0**power for power in range(-3, 4)}
    assert np.array_equal(ragged_weights(ids[::-1].copy()), factors[::-1])
    assert np.array_equal(ratio.numpy(), ragged_weights(cut.sample_ids))


def test_keyed_split_stays_keyed() -> None:
    """Samples that are drawn from keys are drawn from the same keys; a split without keys gets none."""
    cut = hardened(loader_recipes.augmented0, GIVEN).data("train")
    rows = np.array([4, 9])
    keys = sample_keys(3, np.zeros_like(rows), cut.sample_ids[rows])
    whole = loader_recipes.augmented0.data("train").keyed_batch(rows * 203 // 50, keys)  # type: ignore[attr-defined]

    assert torch.equal(cut.keyed_batch(rows, keys).inputs, whole.inputs)  # type: ignore[attr-defined]
    assert not hasattr(hardened(recipe, GIVEN).data("train"), "keyed_batch")


def test_random_data_stands_still_without_dropout() -> None:
    """Data that draws without keys gives a sample the same numbers wherever it is fetched, in runs that are compared; others draw on."""
    still, random = (hardened(loader_recipes.jitter0, GIVEN, dropout=dropout).data("train") for dropout in (False, True))
    seed_streams(5)
    together, state = still.batch(np.array([3, 8])).inputs, torch.get_rng_state()

    assert torch.equal(together[1:], still.batch(np.array([8])).inputs)
    assert torch.equal(state, torch.get_rng_state())
    assert draws_without_key(random.batch, np.arange(5))
    assert not draws_without_key(still.batch, np.arange(5))


def test_other_members_of_a_split_are_refused_with_what_to_ask() -> None:
    """Code that goes around `batch` would see other rows than it is told: it hears so."""
    with pytest.raises(AttributeError, match=r"no 'inputs'.*Ask data\.batch"):
        hardened(recipe, GIVEN).data("train").inputs  # type: ignore[attr-defined]  # noqa: B018 - the access is the test


@pytest.mark.parametrize("steps", [3, 4, 6, 7, 40])
def test_tiny_recipe_holds_every_condition(steps: int) -> None:
    """An ordinary recipe is brought under all of them, whatever the window; the value travels between processes."""
    made = choose("tiny_recipe:recipe", SIZES, steps)
    asked = made.conditions
    order = Order.of(hardened(recipe, asked).training, asked.samples)

    assert tuple(condition.name for condition in made.held) == CONDITIONS
    assert all(held(made).values()), made.held
    assert order.steps >= steps
    assert all(asked.global_batch_size % parts and asked.samples % parts and asked.judged % parts for parts in (2, 4, 8))
    assert any(border % asked.global_batch_size > 0 for border in range(asked.samples, steps * asked.global_batch_size, asked.samples))
    assert pickle.loads(pickle.dumps(made)) == made  # noqa: S301


def test_window_of_six_ends_its_first_epoch_early_and_with_a_smaller_batch() -> None:
    """An epoch ends within the second or third step, and the schedule is made for the window alone."""
    asked = choose("tiny_recipe:recipe", SIZES, 6).conditions
    order = Order.of(hardened(recipe, asked).training, asked.samples)

    assert asked.global_batch_size < asked.samples < 3 * asked.global_batch_size
    assert order.steps == 6
    assert order.smallest_batch < asked.global_batch_size


def test_every_step_of_the_window_is_clipped() -> None:
    """The limit lies below every norm of the clipped training, also for a recipe that does not clip."""
    free = replace(recipe, training=replace(recipe.training, clip_norm=None))
    for given in (recipe, free):
        asked = chosen(given, SIZES, 6).conditions
        norms = [moment.norm for moment in train(load_problem(hardened(given, asked, dropout=False), 6), Setting(limit=asked.clip_norm))]

        assert asked.clip_norm is not None
        assert all(norm > asked.clip_norm for norm in norms)


def test_coupled_samples_keep_company_and_are_not_spiked() -> None:
    """BatchNorm needs two samples in every micro-batch of every lane, the last batch's too; a spike says why it is left out."""
    made = choose("hard_recipes:normed", SIZES, 6)
    order = Order.of(hardened(hard_recipes.normed, made.conditions).training, made.conditions.samples)

    assert order.smallest_batch // 8 // made.conditions.accumulation >= 2
    assert {name for name, is_held in held(made).items() if not is_held} == {"spike"}
    assert "see one another" in detail(made, "spike")


def test_larger_accumulation_of_the_recipe_is_kept() -> None:
    """Two micro-batches are accumulated, or as many more as the recipe has."""
    assert choose("tiny_recipe:recipe", SIZES, 6).conditions.accumulation == 2
    assert choose("hard_recipes:accumulated", SIZES, 6).conditions.accumulation == 3


def weightless(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    loss_sum, _ = tiny_recipe.weighted_loss(model, batch._replace(weights=torch.ones_like(batch.weights)))
    return loss_sum, torch.tensor(float(len(batch.weights)))


class PlainRecipe(TinyRecipe):
    """No schedule."""

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        del optimizer, steps


def test_what_a_recipe_has_not_is_said() -> None:
    """Without weights, dropout and a schedule these conditions do not hold, in words; the others do."""
    plain = PlainRecipe(make_model=lambda: nn.Linear(tiny_recipe.FEATURES, 1), make_loss=weightless)
    made = chosen(plain, SIZES, 6)

    assert {name for name, is_held in held(made).items() if not is_held} == {"ragged_weights", "dropout", "rate_change"}
    assert not made.conditions.ragged_weights
    assert "does not use" in detail(made, "ragged_weights")
    assert "keeps the rate at [0.01]" in detail(made, "rate_change")


class ExcludingRecipe(TinyRecipe):
    """Excludes conditions by name."""

    excludes: Mapping[str, Any] = {name: f"because of {name}" for name in CONDITIONS}


class WrongRecipe(TinyRecipe):
    """Excludes what is none."""

    excludes: Mapping[str, Any] = {"raggedness": "why not"}


def test_excluded_conditions_are_not_made_and_said_in_the_recipes_words() -> None:
    """Everything excluded leaves the recipe's own sizes rounded to what divides, its own clipping, weights and accumulation."""
    made = chosen(ExcludingRecipe(), SIZES, 6)
    asked = made.conditions

    assert not any(held(made).values())
    assert all(condition.detail == f"excluded by the recipe: because of {condition.name}" for condition in made.held)
    assert (asked.clip_norm, asked.accumulation, asked.ragged_weights) == (0.5, 1, False)
    assert asked.global_batch_size % 8 == 0
    assert asked.samples >= 6 * asked.global_batch_size


@pytest.mark.parametrize("excludes", [{"raggedness": "why not"}, {"clipping": ""}, ["clipping"]], ids=["unknown", "no reason", "a list"])
def test_wrong_exclusions_are_refused(excludes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A name that is no condition, or no reason, is told with all names."""
    monkeypatch.setattr(WrongRecipe, "excludes", excludes)
    with pytest.raises(RecipeError, match="finite_differences"):
        chosen(WrongRecipe(), SIZES, 6)


class SmallRecipe(TinyRecipe):
    """Twenty samples in all."""

    def data(self, split: str) -> TinyData:
        return TinyData(20, 1) if split == "train" else TinyData(3, 2)


def test_little_data_gives_the_closest_that_works() -> None:
    """With fewer samples than a batch has, the window is still reached, and what does not hold says so."""
    made = chosen(SmallRecipe(), SIZES, 6)
    asked = made.conditions

    assert asked.samples <= 20
    assert Order.of(hardened(SmallRecipe(), asked).training, asked.samples).steps >= 6
    assert held(made)["epoch_border"]


class Rows:
    """Rows in their order, shared out in turn, epoch after epoch; the rest of an epoch is left out."""

    def __init__(self, size: int, training: Training, world: World) -> None:
        self.size, self.batch, self.world, self.step = size, training.global_batch_size, world, 0

    def take(self) -> list[Any]:
        place = self.step % (self.size // self.batch) * self.batch
        self.step += 1
        return [np.arange(place, place + self.batch)[self.world.rank :: self.world.world_size]]

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


class OwnOrder(Hooks):
    """An own sampler."""

    def sampler(self, size: int, training: Training, world: World) -> Sampler:
        return Rows(size, training, world)


class OwnReduction(Hooks):
    """An own way to add gradients."""

    def reduce(self, gradients: Any, weight: Tensor, world: World) -> None:
        super().reduce(gradients, weight, world)


class HookedRecipe(TinyRecipe):
    """Brings parts of the trainer."""

    hooks: Hooks = OwnOrder()


def test_own_sampler_has_batches_that_divide() -> None:
    """Each rank's share is whole; only the length of the data does not divide, and its epochs end between batches."""
    made = chosen(HookedRecipe(), SIZES, 6)
    asked = made.conditions

    assert asked.global_batch_size % (8 * asked.accumulation) == 0
    assert all(asked.samples % size for size in SIZES[1:])
    assert asked.epochs * (asked.samples // asked.global_batch_size) >= 6
    assert held(made)["ragged_batches"]
    assert held(made)["epoch_border"]
    assert "own sampler" in detail(made, "ragged_batches")


def test_own_path_with_coupled_samples_accumulates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An own trainer is compared with whole batches, so batches of a BatchNorm model are not cut further than the recipe does."""
    monkeypatch.setattr(HookedRecipe, "hooks", OwnReduction())
    made = chosen(HookedRecipe(make_model=hard_recipes.normed_net), SIZES, 6)

    assert made.conditions.accumulation == 1
    assert not held(made)["accumulation"]
    assert "by design" in detail(made, "accumulation")


class WarmUp(TinyRecipe):
    """Thirty steps of warm-up, then a cosine over what is left: nothing is left of six."""

    def schedule(self, optimizer: torch.optim.Optimizer, steps: int) -> LRScheduler:
        parts: list[LRScheduler] = [LinearLR(optimizer, 0.1, total_iters=3), CosineAnnealingLR(optimizer, T_max=steps - 6)]
        return SequentialLR(optimizer, parts, milestones=[3])


def test_schedule_that_needs_more_updates_gets_the_recipes_own() -> None:
    """Where a schedule breaks on the window's few updates it is made for as many as the recipe has."""
    made = chosen(WarmUp(), SIZES, 6)
    order = Order.of(hardened(WarmUp(), made.conditions).training, made.conditions.samples)

    assert order.steps >= 9
    assert held(made)["rate_change"]


def nothing(model: nn.Module, batch: Batch) -> Any:
    return model(batch.inputs).mean()


def wrong_ids(self: object, split: str) -> TinyData:
    made = TinyData(30, 1)
    made.sample_ids[3] = made.sample_ids[4]
    return made


class WornData(TinyData):
    """Moves the samples that it keeps, a little each time they are fetched."""

    def batch(self, rows: Any) -> Batch:
        self.inputs[rows] += torch.randn(1).item()
        return super().batch(rows)


def penalised(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    """With a penalty on the weights that counts once a micro-batch."""
    loss_sum, weight = tiny_recipe.weighted_loss(model, batch)
    return loss_sum + 1e-3 * sum(parameter.square().sum() for parameter in model.parameters()), weight


def test_data_that_changes_what_it_keeps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows look different the second time, though the streams are the same."""
    monkeypatch.setattr(TinyRecipe, "data", lambda *_: WornData(30, 1))

    with pytest.raises(RecipeError, match=r"fetched twice.*change a copy"):
        chosen(recipe, SIZES, 6)


def test_a_small_part_that_samples_do_not_bring_is_refused() -> None:
    """A thousandth of the loss escapes the check of float32 sums, and depends on how a batch is cut."""
    with pytest.raises(RecipeError, match=r"does not grow with the samples.*weight_decay"):
        chosen(replace(recipe, make_loss=penalised), SIZES, 6)


def test_bad_input_is_told_before_the_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gate's first look refuses what every run would refuse, with its fix and not with a traceback."""
    with pytest.raises(RecipeError, match=r"reduction='sum'"):
        chosen(replace(recipe, make_loss=nothing), SIZES, 6)
    with pytest.raises(RecipeError, match="optimizer misses"):
        chosen(replace(recipe, make_optimizer=lambda model: torch.optim.SGD(list(model.parameters())[1:])), SIZES, 6)
    with pytest.raises(RecipeError, match="Give the lazy modules their sizes"):
        chosen(replace(recipe, make_model=lambda: nn.LazyLinear(1)), SIZES, 6)
    with pytest.raises(RecipeError, match=r"raised ZeroDivisionError on the first .* samples.*Mend the recipe"):
        chosen(replace(recipe, make_loss=lambda *_: 1 / 0), SIZES, 6)
    monkeypatch.setattr(TinyRecipe, "data", wrong_ids)
    with pytest.raises(DataError, match="stand for several"):
        chosen(recipe, SIZES, 6)
