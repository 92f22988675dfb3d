"""Which recipes may be imported here: SEATRIAL_RECIPES_ALLOWED, checked before anything of a recipe is imported (docs/security.md)."""

from infra.settings import ScheduledSettings
from trainer.recipe_code import SHIPPED, split_path
from validation.errors import ConfigError, RecipeError

VARIABLE = "SEATRIAL_RECIPES_ALLOWED"


def check_allowed(recipe: str, settings: ScheduledSettings) -> None:
    """Refuse a recipe that is not on the list. An empty list allows every one: a person's own machine.

    Args: recipe, a shipped recipe's short name or "package.module:NAME"; a short name and its import path are the same recipe.
    Raises: RecipeError when the recipe is not allowed, or is none; ConfigError when the list cannot be used.
    """
    if not settings.recipes_allowed.strip():
        return
    entries = [entry.strip() for entry in settings.recipes_allowed.split(",") if entry.strip()]
    patterns = [_pattern(entry) for entry in entries]
    path = ":".join(split_path(recipe))
    if not any(path.startswith(pattern[:-1]) if pattern.endswith("*") else path == pattern for pattern in patterns):
        raise RecipeError(
            f"recipe '{recipe[:120]}' may not run here, so none of its code was imported and nothing was written. {VARIABLE} allows "
            f"{', '.join(entries)}. If its code is trusted, add {path[:120]} to that variable of this worker and start it again."
        )


def _pattern(entry: str) -> str:
    """An entry as an import path, or as the beginning of import paths with "*". Raises ConfigError when it is neither."""
    begins = entry.removesuffix("*")
    if entry == "*" or (begins != entry and begins[-1] in ".:" and "*" not in begins):
        return entry
    try:
        return ":".join(split_path(entry))
    except RecipeError:
        raise ConfigError(
            f"{VARIABLE} has the entry '{entry[:120]}', which is neither a shipped recipe ({', '.join(SHIPPED)}) nor an import path, so "
            "nothing may run. Write package.module:NAME, package.module:* or package.*."
        ) from None
