"""What a sample has to look like when it is consumed: its digest, where that can be foretold."""

import numpy as np

from trainer.audit import content_digests
from trainer.dataset import fetch_keyed, seed_streams
from trainer.problem import Part, Problem, load_problem
from trainer.recipe import Recipe
from trainer.streams import sample_keys

Contents = list[list[str]]  # of each step, by sample


def contents_of(recipe: Recipe, problem: Problem, steps: int) -> Contents:
    """Digests of the samples of a problem as runs consume them; all "" where data draws random numbers that no key decides, and where an
    own loader pads a sample by its company, which is another one on other ranks.

    Args: recipe, hardened as those runs are (dropout on); problem, of the same rows.
    """
    if "loader" in problem.brought and len({_shape(part) for parts in problem.parts for part in parts}) > 1:
        return [[""] * len(samples.rows) for samples in problem.samples]
    seen = _loaded(recipe, problem, steps) if "loader" in problem.brought else _fetched(recipe, problem)
    first = seen[0]
    return first if all(other == first for other in seen) else [[""] * len(samples.rows) for samples in problem.samples]


def draws_by_key(recipe: Recipe, problem: Problem) -> bool:
    """Whether most samples look different in another epoch, and all the same in the same one: augmentation by sample and epoch."""
    if not problem.samples:
        return False
    data, rows = recipe.data("train"), problem.samples[0].rows
    once, again, later = (
        content_digests(fetch_keyed(data, rows, sample_keys(recipe.training.seed, np.full(len(rows), epoch), data.sample_ids[rows])))
        for epoch in (0, 0, 1)
    )
    return once == again and sum(one != two for one, two in zip(once, later, strict=True)) * 2 > len(once)


def _fetched(recipe: Recipe, problem: Problem) -> list[Contents]:
    """Fetched twice, the global streams standing elsewhere each time."""
    data = recipe.data("train")
    seen = []
    for seed in (1, 2):
        seed_streams(seed)
        seen.append([content_digests(fetch_keyed(data, *samples)) for samples in problem.samples])
    return seen


def _loaded(recipe: Recipe, problem: Problem, steps: int) -> list[Contents]:
    """As an own loader makes them: in the problem, and once more."""
    seed_streams(1)
    again = load_problem(recipe, steps)
    return [[_of_parts(parts) for parts in which.parts] for which in (problem, again)]


def _shape(part: Part) -> tuple[tuple[int, ...], ...]:
    """Of a sample's input, label and weight."""
    return tuple(tuple(value.shape[1:]) for value in part.batch)


def _of_parts(parts: tuple[Part, ...]) -> list[str]:
    return [content for part in parts for content in content_digests(part.batch)]
