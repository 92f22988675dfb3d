"""The example recipe with a serving module that answers NaN: it cannot be registered."""

from digits import DigitsRecipe
from torch import Tensor, nn


class Nothing(nn.Module):
    """Probabilities that are none."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor) -> Tensor:
        return self.model(inputs) * float("nan")


class NanDigits(DigitsRecipe):
    """Trains like the example, serves nothing."""

    def scorer(self, model: nn.Module) -> nn.Module:
        return Nothing(model)


recipe = NanDigits()
