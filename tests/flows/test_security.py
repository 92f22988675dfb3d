"""What is trusted and what is not: recipes, secrets, pickles, paths, addresses (docs/security.md)."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.allowed import check_allowed
from infra.settings import load_settings
from validation.errors import ConfigError, RecipeError

REPOSITORY = Path(__file__).parents[2]

# Which recipes may run


def allow(recipe: str, listed: str, home: Path) -> None:
    """Check a recipe against a list."""
    check_allowed(recipe, load_settings(home=home, recipes_allowed=listed))


@pytest.mark.parametrize(
    ("recipe", "listed"),
    [
        ("acme.churn:recipe", ""),
        ("acme.churn:recipe", "*"),
        ("acme.churn:recipe", "flights, acme.churn:recipe"),
        ("acme.churn:recipe", "acme.*"),
        ("acme.churn:recipe", "acme.churn:*"),
        ("flights", "trainer.recipes.flights:recipe"),
        ("trainer.recipes.flights:recipe", "flights"),
    ],
)
def test_a_listed_recipe_may_run(recipe: str, listed: str, tmp_path: Path) -> None:
    """By its import path, its short name, or the beginning of its path; an empty list allows all."""
    allow(recipe, listed, tmp_path)


@pytest.mark.parametrize(
    ("recipe", "listed"),
    [
        ("acme.churn:recipe", "flights"),
        ("acme.churn:recipe", "acme.churn:other"),
        ("acmes.churn:recipe", "acme.*"),
        ("acme.churns:recipe", "acme.churn:*"),
        ("acme.churn.evil:recipe", "acme.churn:*"),
        ("bytes", "flights"),
    ],
)
def test_any_other_recipe_is_refused_with_what_is_allowed(recipe: str, listed: str, tmp_path: Path) -> None:
    """Names that only begin alike do not count, and the message says how to allow it."""
    with pytest.raises(RecipeError, match=r"SEATRIAL_RECIPES_ALLOWED allows .*add \S+:recipe to that variable"):
        allow(recipe, listed, tmp_path)


@pytest.mark.parametrize("listed", ["acme*", "acme.churn", "*.churn:recipe", "acme.*.churn:*", "fligths", "../x:recipe"])
def test_a_list_that_cannot_be_meant_allows_nothing(listed: str, tmp_path: Path) -> None:
    """A "*" in the middle of a name would allow more than anybody reads in it; a typing error would allow nothing without a word."""
    with pytest.raises(ConfigError, match="Write package.module:NAME"):
        allow("acme.churn:recipe", listed, tmp_path)


@pytest.mark.parametrize("command", [["release"], ["check"], ["train"]])
def test_no_line_of_a_recipe_that_is_not_allowed_runs(command: list[str], tmp_path: Path) -> None:
    """Exit code 2 and the list, before the module is imported or anything is written."""
    (tmp_path / "stranger.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nrecipe = None\n")
    environment = {**os.environ, "SEATRIAL_HOME": str(tmp_path / "home"), "SEATRIAL_RECIPES_ALLOWED": "flights, acme.*"}
    words = [sys.executable, "-m", "flows.cli", *command, "stranger:recipe"]
    run = subprocess.run(words, cwd=tmp_path, env=environment | {"PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=60)

    assert run.returncode == 2, run.stderr
    assert "SEATRIAL_RECIPES_ALLOWED allows flights, acme.*" in run.stderr
    assert not (tmp_path / "ran").exists()
    assert not [*tmp_path.glob("home/runs/*"), *tmp_path.glob("home/store/releases/*")]
