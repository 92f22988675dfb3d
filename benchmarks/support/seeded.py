"""Recipes with another seed: `support.seeded:flights_seed_3` is `flights` drawn with seed 3. Names stand for themselves, none is listed."""

from dataclasses import replace
from typing import Any

from trainer.recipe import Recipe, Training, load_recipe

PATHS = {"flights": "flights", "bytes": "bytes", "digits": "digits:recipe"}


class Seeded:
    """A recipe with another seed: other initial weights, order, dropout masks, and so another clean run."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self._recipe = recipe
        self.training: Training = replace(recipe.training, seed=seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._recipe, name)


def __getattr__(name: str) -> Seeded:
    recipe, found, seed = name.rpartition("_seed_")
    if not found or recipe not in PATHS or not seed.isdigit():
        raise AttributeError(name)
    return Seeded(load_recipe(PATHS[recipe]), int(seed))
