"""Finite differences tell a wrong backward formula from a right one, and say when they tell nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_recipe import FEATURES, recipe
from torch import Tensor, nn

from trainer.problem import Problem, load_problem
from trainer.slopes import ALL, slopes
from validation.records import SLOPE_COLUMNS

LIMIT = 1e-4  # what separates right from wrong


def problem(**parts: Any) -> Problem:
    return load_problem(replace(recipe, **parts), 1)


def test_right_gradients_agree() -> None:
    """Every tensor's slope and that of all together agree within a thousandth of the limit."""
    table, why = slopes(problem())

    assert why == ""
    assert tuple(table.columns) == SLOPE_COLUMNS
    assert table["tensor"].tolist() == ["0.weight", "0.bias", "1.weight", "1.bias", "4.weight", "4.bias", ALL]
    assert table["rel_err"].max() < LIMIT / 1000
    assert (table["analytic"] != 0).all()


def test_the_same_directions_every_time() -> None:
    """Same recipe, same numbers."""
    assert slopes(problem())[0].equals(slopes(problem())[0])


class Scaled(torch.autograd.Function):
    """The identity with a wrong backward formula: the gradient of every second feature times `factor`."""

    factor = 1.01

    @staticmethod
    def forward(_ctx: Any, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(_ctx: Any, gradient: Tensor) -> Tensor:
        scale = torch.ones(gradient.shape[-1], dtype=gradient.dtype)
        scale[::2] = Scaled.factor
        return gradient * scale


class Wrong(nn.Module):
    """A net whose middle has its own backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 13), nn.Linear(13, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(Scaled.apply(torch.tanh(self.first(inputs))))
        return result


@pytest.mark.parametrize("factor", [1.001, 1.01, 0.5, -1.0])
def test_wrong_backward_is_caught_where_it_is(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A factor that every run and the reference share shows in the tensors before it, and not in those behind."""
    monkeypatch.setattr(Scaled, "factor", factor)
    table = slopes(problem(make_model=Wrong))[0].set_index("tensor")["rel_err"]

    assert (table[["first.weight", "first.bias"]] > LIMIT).all()
    assert (table[["last.weight", "last.bias"]] < LIMIT / 1000).all()


def test_kinks_are_no_error() -> None:
    """A net of ReLUs and a maximum, whose slope jumps, agrees at one width or another."""
    made = nn.Sequential
    net = lambda: made(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 1), nn.Hardtanh(-9, 9))  # noqa: E731

    assert slopes(problem(make_model=net))[0]["rel_err"].max() < LIMIT / 10


class Dead(nn.Module):
    """One layer in front of a LayerNorm that cancels its bias, one that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(FEATURES, 13), nn.BatchNorm1d(13), nn.Linear(13, 1)
        self.spare = nn.Parameter(torch.ones(3))

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.last(self.norm(self.first(inputs)))
        return result


def test_tensors_without_a_gradient_agree() -> None:
    """Zero beside zero, and rounding beside rounding, is no error."""
    table = slopes(problem(make_model=Dead))[0].set_index("tensor")["rel_err"]

    assert table.max() < LIMIT / 10
    assert table["spare"] == 0.0


class Restless(nn.Module):
    """Random where no module can be switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        result: Tensor = self.inner(nn.functional.dropout(inputs, 0.5, self.training))
        return result


class Narrow(nn.Module):
    """Casts to float32 inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.inner(inputs).float().tanh()


@pytest.mark.parametrize(("model", "reason"), [(Restless, "random"), (Narrow, "casts float64 to a smaller type")])
def test_what_cannot_be_told_is_said(model: type[nn.Module], reason: str) -> None:
    """A random loss and one of less than float64 have no slopes, for a reason; that is no failure."""
    table, why = slopes(problem(make_model=model))

    assert reason in why
    assert table.empty
    assert tuple(table.columns) == SLOPE_COLUMNS


class Counting(nn.Module):
    """Keeps a float32 count beside a loss in float64."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(FEATURES, 1)

    def forward(self, inputs: Tensor) -> Tensor:
        self.largest = inputs.abs().max().float()
        result: Tensor = self.inner(inputs)
        return result


def test_a_cast_that_does_no_harm_excludes_nothing() -> None:
    """What is cast beside the loss changes no slope, so slopes are kept."""
    table, why = slopes(problem(make_model=Counting))

    assert (why, len(table)) == ("", 3)


def test_not_a_number_is_not_hidden() -> None:
    """A gradient that is not a number gives an error that no limit lets pass."""

    class Torn(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: Any, given: Tensor) -> Tensor:
            return given.clone()

        @staticmethod
        def backward(_ctx: Any, gradient: Tensor) -> Tensor:
            return gradient * np.nan

    class Tears(Wrong):
        def forward(self, inputs: Tensor) -> Tensor:
            result: Tensor = self.last(Torn.apply(self.first(inputs)))
            return result

    table = slopes(problem(make_model=Tears))[0].set_index("tensor")["rel_err"]

    assert not (table["first.weight"] <= LIMIT)
