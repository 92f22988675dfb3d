"""The plain loop of one rank without DDP: what a single process costs that knows nothing of other ranks."""

from typing import Any

from plain import Loop, loop_of


def make_loop(recipe: Any, world_size: int, steps: int) -> Loop:
    """See plain.py."""
    assert world_size == 1  # its ranks would go ways of their own
    return loop_of(recipe, steps, lambda model: model)
