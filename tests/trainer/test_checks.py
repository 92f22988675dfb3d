"""What a recipe is asked before its first step: each mistake is refused with its fix."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_recipe import FEATURES, TRAIN, TinyData, TinyRecipe, adamw, recipe, small_net, weighted_loss
from torch import Tensor, nn

from trainer.checks import (
    Probed,
    check_coupled,
    check_loss,
    check_model,
    check_modules,
    check_pure,
    check_stepping,
    is_coupled,
    is_random,
    switch_off_dropout,
)
from trainer.hooks import Hooks
from trainer.recipe import Batch
from trainer.sample_ids import check_ids
from validation.errors import DataError, RecipeError


def batch(rows: int = 20) -> Batch:
    return recipe.data("train").batch(torch.arange(rows).numpy())


def ask(made: TinyRecipe, *, dropout: bool = True) -> None:
    model = made.model()
    if not dropout:
        switch_off_dropout(model)
    check_modules(made, model)
    check_model(made, model, made.optimizer(model))
    check_loss(made, model, batch(), dropout=dropout)


def test_good_recipe_passes() -> None:
    """The tiny recipe is asked everything and refused nothing; no gradient is left behind."""
    model = recipe.model()
    check_model(recipe, model, recipe.optimizer(model))

    assert not check_loss(recipe, model, batch(), dropout=True).has_unused
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())


def mean(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    loss_sum, weight = weighted_loss(model, given)
    return loss_sum / weight, weight


def mean_of_one(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    loss_sum, weight = mean(model, given)
    return loss_sum, torch.ones_like(weight)


def detached(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    loss_sum, weight = weighted_loss(model, given)
    return loss_sum.detach(), weight


def weightless(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    return weighted_loss(model, given)[0], torch.tensor(0.0)


def vector(model: nn.Module, given: Batch) -> Any:
    return model(given.inputs).squeeze(-1), given.weights


def alone(model: nn.Module, given: Batch) -> Any:
    return weighted_loss(model, given)[0]


def round_about(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    return weighted_loss(nn.Sequential(*model.children()), given)


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        (mean, "reduction='sum'"), (mean_of_one, "reduction='sum'"), (detached, "Remove detach"),
        (weightless, "Return the sum of the samples' weights"), (alone, "two scalar tensors"),
        (vector, r"got \(a tensor of shape \(20,\), a tensor of shape \(20,\)\)"), (round_about, r"Call model\(batch.inputs\)"),
    ],
    ids=["a mean", "a mean of weight one", "detached", "no weight", "no pair", "one loss a sample", "around the model"],
)  # fmt: skip
def test_wrong_loss_is_refused(loss: Callable[[nn.Module, Batch], Any], advice: str) -> None:
    """A loss that cannot be added over ranks is refused, with what to return instead."""
    with pytest.raises(RecipeError, match=advice):
        ask(replace(recipe, make_loss=loss))


def with_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def with_unmoved_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 1))


def with_sync_batch_norm() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.SyncBatchNorm(4), nn.Linear(4, 1))


def with_two_types() -> nn.Module:
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.Linear(4, 1).double())


def frozen() -> nn.Module:
    return nn.Linear(FEATURES, 1).requires_grad_(False)


class Counting(nn.Module):
    """Counts its own forward passes in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls = self.calls + 1
        result: Tensor = self.inner(inputs)
        return result


class Filled(nn.Module):
    """Makes a table at its first forward pass, in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)
        self.register_buffer("table", None, persistent=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.linspace(0, 1, FEATURES)
        result: Tensor = self.inner(inputs * self.table)
        return result


def test_a_table_made_when_asked_for_is_no_moving_buffer() -> None:
    """A buffer that the first forward pass makes stays as it is."""
    model = Filled()
    probed = check_loss(recipe, model, batch(), dropout=True)

    assert probed.moving == ()
    assert not probed.coupled
    assert dict(model.named_buffers()).keys() == {"table"}


class Restless(nn.Module):
    """Drops out by function, where no module can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(nn.functional.dropout(inputs, 0.5, self.training))
        return result


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (with_sync_batch_norm, "Use BatchNorm"), (with_two_types, "Use one"), (frozen, "Set requires_grad"),
    ],
    ids=["normalised over all ranks", "two types", "nothing to train"],
)  # fmt: skip
def test_wrong_model_is_refused(model: Callable[[], nn.Module], advice: str) -> None:
    """A model whose numbers would depend on the ranks is refused, with what to use instead."""
    with pytest.raises(RecipeError, match=advice):
        ask(replace(recipe, make_model=model, make_optimizer=lambda m: torch.optim.SGD([*m.parameters(), torch.zeros(1)])))


def half(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(list(model.parameters())[:2])


def foreign(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([*model.parameters(), nn.Parameter(torch.zeros(1))])


@pytest.mark.parametrize(
    ("optimizer", "advice"), [(half, r"misses 4 parameters \(1.weight, 1.bias, 4.weight\)"), (foreign, "holds 1 parameters that are not")]
)
def test_wrong_optimizer_is_refused(optimizer: Callable[[nn.Module], torch.optim.Optimizer], advice: str) -> None:
    """Parameters that would never learn, and strangers, are named."""
    with pytest.raises(RecipeError, match=advice):
        ask(replace(recipe, make_optimizer=optimizer))


def test_functional_dropout_is_refused_for_the_reference_legs() -> None:
    """With dropout switched off, a model that is still random cannot be compared with a reference; with dropout on it may train."""
    made = replace(recipe, make_model=Restless)
    ask(made)

    with pytest.raises(RecipeError, match=r"Use nn\.Dropout modules"):
        ask(made, dropout=False)


@pytest.mark.parametrize(
    ("make_model", "moving", "coupled"),
    [
        (recipe.model, (), False), (Counting, ("calls",), True), (with_unmoved_batch_norm, (), True),
        (with_batch_norm, ("1.running_mean", "1.running_var", "1.num_batches_tracked"), True),
    ],
    ids=["neither", "a buffer that counts", "without running statistics", "running statistics"],
)  # fmt: skip
def test_coupled_samples_and_moving_buffers_are_seen(make_model: Callable[[], nn.Module], moving: tuple[str, ...], coupled: bool) -> None:
    """What a micro-batch leaves in buffers, and whether its samples see one another, is asked of the model, which stays as it was."""
    model = make_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    probed = check_loss(replace(recipe, make_model=make_model), model, batch(), dropout=True)

    assert (probed.moving, probed.coupled) == (moving, coupled)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class OwnStream(nn.Module):
    """Draws noise from a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)
        self.generator = torch.Generator().manual_seed(1)

    def forward(self, inputs: Tensor) -> Tensor:
        noise = torch.randn(inputs.shape, generator=self.generator) if self.training else 0.0
        result: Tensor = self.inner(inputs + noise)
        return result


def test_a_hidden_state_is_refused() -> None:
    """A module with a random stream of its own gives other numbers at every world size: refused, with what to draw from."""
    with pytest.raises(RecipeError, match="global streams"):
        ask(replace(recipe, make_model=OwnStream))


def test_what_cannot_be_stepped_is_refused() -> None:
    """A schedule that wants a metric and an optimizer that wants a closure are refused, with what to use instead."""
    model = recipe.model()
    with pytest.raises(RecipeError, match="LambdaLR"):
        check_stepping(recipe, adamw(model), torch.optim.lr_scheduler.ReduceLROnPlateau(adamw(model)))
    with pytest.raises(RecipeError, match="AdamW"):
        check_stepping(recipe, torch.optim.LBFGS(model.parameters()), None)


def test_coupled_samples_need_company() -> None:
    """A micro-batch of one sample has no spread to normalise by: refused before the first step, with what to change."""
    with pytest.raises(RecipeError, match="drop"):
        check_coupled(recipe, Probed(has_unused=False, moving=(), coupled=True, together=True), 1)
    check_coupled(recipe, Probed(has_unused=False, moving=("calls",), coupled=True), 1)  # a counter that moves is no company


def test_unused_parameter_is_seen() -> None:
    """DDP has to know whether some parameter takes no part in the loss."""
    model = recipe.model()
    model.register_parameter("spare", nn.Parameter(torch.zeros(2)))

    assert check_loss(recipe, model, batch(), dropout=True).has_unused
    assert adamw(model)


def test_dropout_modules_are_switched_off_with_their_p_kept() -> None:
    """Only Dropout modules go to eval; the rest goes on training."""
    model = recipe.model()
    switch_off_dropout(model)

    assert [module.training for module in model] == [True, True, True, False, True]
    assert model[3].p == 0.2


def not_a_number(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    loss_sum, weight = weighted_loss(model, given)
    return loss_sum * torch.nan, weight


def infinite(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    loss_sum, weight = weighted_loss(model, given)
    return loss_sum - torch.log(loss_sum.detach() * 0), weight


def steep(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    loss_sum, weight = weighted_loss(model, given)
    return loss_sum + (model(given.inputs) * 0).square().sum().sqrt(), weight


@pytest.mark.parametrize(
    ("loss", "advice"),
    [
        (not_a_number, r"loss sum of the first samples is nan.*missing values"), (infinite, r"first samples is inf.*log\(0\)"),
        (steep, r"not the gradient of 6 parameters \(0.weight.*sqrt or norm at 0"),
    ],
    ids=["not a number", "infinite", "a slope without bound"],
)  # fmt: skip
def test_numbers_that_are_none_are_refused(loss: Callable[[nn.Module, Batch], Any], advice: str) -> None:
    """A loss or gradient that is not finite before any update is told beforehand, with where such numbers come from."""
    with pytest.raises(RecipeError, match=advice):
        ask(replace(recipe, make_loss=loss))


def test_missing_value_in_the_data_is_refused() -> None:
    """A NaN in an input, the usual reason for a loss that is none, is refused with what to look for."""
    given = batch()
    given.inputs[3, 2] = torch.nan
    with pytest.raises(RecipeError, match="missing values"):
        check_loss(recipe, recipe.model(), given, dropout=True)


class Attentive(nn.Module):
    """Attention and a recurrent layer, which drop out inside."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(FEATURES, 1, dropout=0.5, batch_first=True)
        self.recurrent = nn.GRU(FEATURES, 5, num_layers=2, dropout=0.5, batch_first=True)
        self.last = nn.Linear(5, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        seen = inputs.unsqueeze(1)
        result: Tensor = self.last(self.recurrent(self.attention(seen, seen, seen)[0])[0][:, 0])
        return result


def test_dropout_inside_torchs_own_layers_is_switched_off() -> None:
    """Attention and recurrent layers drop out without a Dropout module: they, too, can be compared with a reference."""
    made = replace(recipe, make_model=Attentive)
    model = made.model()

    assert is_random(made, model, batch())
    switch_off_dropout(model)
    assert not is_random(made, model, batch())
    ask(made, dropout=False)


def test_batch_norm_that_hardly_moves_the_loss_is_seen_in_float64() -> None:
    """Samples that see one another change an untrained model's loss by little; float64 tells it from rounding."""
    model = with_batch_norm().double()
    nn.init.constant_(model[2].weight, 1e-4)
    given = Batch(*(value.double() for value in batch()))

    assert is_coupled(recipe, model, given)
    assert not is_coupled(recipe, small_net().double(), given)


def refused(made: TinyData, advice: str, **more: int) -> None:
    with pytest.raises(DataError, match=advice):
        check_ids(recipe, "train", made, **more)


def test_samples_that_cannot_be_told_apart_are_refused() -> None:
    """Ids twice, too few, of another type or shape: each is named with what to give instead."""
    for ids, advice in [
        (np.array([1, 2, 3, 3, 5, 5]), r"2 sample ids of split 'train' stand for several \(3, 5\).*drop duplicate rows"),
        (np.arange(5), "6 samples and 5 ids.*filter both alike"),
        (np.arange(6).astype(float), "an array of float64, shape .6,.*numpy array of int64"),
        (np.arange(6).reshape(6, 1), r"shape \(6, 1\)"),
        (list(range(6)), "is a list.*numpy array"),
        (np.array(["a", "b", "c", "d", "e", "f"]), "Samples are told apart by whole numbers"),
    ]:
        made = TinyData(6, 1)
        made.sample_ids = ids  # type: ignore[assignment]
        refused(made, advice)
    check_ids(recipe, "train", TinyData(6, 1))
    check_ids(recipe, "train", TinyData(0, 1))


class Growing(TinyData):
    """Finds out how many samples there are while it is asked."""

    def __len__(self) -> int:
        self.seen = getattr(self, "seen", 4) + 1
        return self.seen


def test_length_that_changes_is_refused() -> None:
    """A length that differs between two questions, or from the one an epoch was made for, is told with the numbers."""
    refused(Growing(6, 1), "changes: 5 and then 6.*Count and filter when data")
    refused(TinyData(6, 1), "changes: 9 and then 6 and then 6", size=9)


def coupling(model: nn.Module, given: Batch) -> tuple[Tensor, Tensor]:
    outputs = model(given.inputs)
    each = nn.functional.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")
    return (each * given.weights).sum(), given.weights.sum()


class OwnPath(Hooks):
    """Reduces by itself."""

    def reduce(self, gradients: Any, weight: Tensor, world: Any) -> None:
        super().reduce(gradients, weight, world)


@dataclass(frozen=True)
class OwnRecipe(TinyRecipe):
    """Trains its own way."""

    hooks: Hooks = field(default_factory=OwnPath)


def test_contrastive_losses_are_for_own_paths() -> None:
    """A loss that couples a batch's samples cannot be cut into lanes; an own path may gather them. A mean is refused there, too."""
    with pytest.raises(RecipeError, match="couples samples"):
        ask(replace(recipe, make_loss=coupling))
    ask(OwnRecipe(make_loss=coupling))
    for loss in (mean, mean_of_one):
        with pytest.raises(RecipeError, match="It is a mean"):
            ask(OwnRecipe(make_loss=loss))


class Drawing(TinyData):
    """Noise on every input."""

    def batch(self, rows: np.ndarray) -> Batch:
        inputs, labels, weights = super().batch(rows)
        return Batch(inputs + torch.randn_like(inputs), labels, weights)


class Counting(TinyData):
    """Remembers how often it was asked."""

    asked = 0

    def batch(self, rows: np.ndarray) -> Batch:
        self.asked += 1
        inputs, labels, weights = super().batch(rows)
        return Batch(inputs + self.asked, labels, weights)


@pytest.mark.parametrize(("kind", "words"), [(Drawing, "draws random numbers"), (Counting, "other bytes")])
def test_a_batch_that_is_not_pure_is_refused_where_it_says_so(kind: type[TinyData], words: str) -> None:
    """It would be fetched behind the step, and take random numbers from it."""
    with pytest.raises(RecipeError, match=words):
        check_pure(recipe, kind(TRAIN, 1), np.arange(5))
    check_pure(recipe, TinyData(TRAIN, 1), np.arange(5))
