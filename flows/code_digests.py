"""Which code a gate's evidence depends on: the gate's own probe and judge, all that they import, and the recipe's.

Read from the sources without running them (trainer/recipe_code.py). A change in a module makes stale the gates that reach it and no
others: the command line and the report judge nothing. Data that lies beside the code, such as the default policy, has digests of its own.
"""

import ast
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from trainer.recipe_code import Source, imported_sources, named_modules, recipe_sources
from validation.canonical import digest, sha256_hex
from validation.errors import ConfigError

PACKAGES = ("flows", "infra", "trainer", "validation")
HERE = Path(__file__).resolve().parents[1]  # the folder that holds the packages
RECIPES = "trainer.recipes"  # counts where the release's own recipe is one of them, not because each gate could run it
# modules that gates reach, but that make and judge no evidence: a plan's digests bind what it says; the others keep and show
LEFT_OUT = ("flows.plan", "flows.under_way", "flows.incident", "infra.incidents", "infra.journal", "infra.report")

# gate -> the modules that make its records and judge them (flows/hands.py puts the two together); `candidate` is what gates judge
ENTRIES: dict[str, tuple[str, ...]] = {
    "data_contract": ("trainer.describe", "validation.expectations", "validation.contract"),
    "gradient_equivalence": ("flows.equivalence_probe", "validation.equivalence"),
    "kill_and_resume": ("flows.recovery_probe", "validation.recovery"),
    "scaling": ("flows.probes", "validation.scaling"),
    "slice_quality": ("flows.slice_probe", "validation.slices"),
    "readiness": ("flows.drills", "validation.readiness"),
    "candidate": ("flows.probes", "infra.export", "trainer.scoring"),
}
# of these files only the function that puts the modules together: the rest of them reaches other gates' code
JUDGING = ("flows/hands.py", "probe_and_judge")
MAKING = ("flows/candidate.py", "train")


def gate_code_sha256(gate: str, recipe_path: str) -> str:
    """sha256 over all code that a gate's evidence depends on. Args: gate, or "candidate". Raises as `gate_sources` does."""
    return digest(gate_sources(gate, recipe_path))


def gate_sources(gate: str, recipe_path: str, *, folder: Path = HERE) -> dict[str, str]:
    """File -> sha256 of everything that a gate's evidence depends on, e.g. "validation/noise.py"; to be kept beside the digest.

    The four packages are read once a process, since a process does not import a changed module again; the recipe is read each time,
    since every rank group imports it anew. Args: folder, where the four packages lie.
    Raises: ConfigError for an unknown gate, RecipeError when a source cannot be found or read.
    """
    if gate not in ENTRIES:
        raise ConfigError(f"there is no gate '{gate}', so its code has no digest. Choose one of: {', '.join(ENTRIES)}.")
    return _joined(gate, recipe_sources(recipe_path), folder)


def all_sources(recipe_path: str, *, folder: Path = HERE) -> dict[str, dict[str, str]]:
    """`gate_sources` of every gate and of the candidate, at the cost of reading the recipe once."""
    recipe = recipe_sources(recipe_path)
    return {gate: _joined(gate, recipe, folder) for gate in ENTRIES}


def changed_modules(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Files whose text differs between two of `gate_sources`' maps, or that only one of them has, sorted."""
    return sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))


def code_changed(old: Mapping[str, str], new: Mapping[str, str], *, shown: int = 3) -> str:
    """What changed, for people: "code changed (validation/noise.py and 2 more)"; "" = nothing did."""
    changed = changed_modules(old, new)
    more = f" and {len(changed) - shown} more" if len(changed) > shown else ""
    return f"code changed ({', '.join(changed[:shown])}{more})" if changed else ""


def _joined(gate: str, recipe: Mapping[str, Source], folder: Path) -> dict[str, str]:
    used = {name for module, source in recipe.items() for name in named_modules(module, source)[0]}
    ours = frozenset(name for name in used if _is_ours(name))  # a team's recipe may import parts of the trainer
    return _digests(recipe) | _own(gate, ours, folder)


@cache
def _own(gate: str, used: frozenset[str], folder: Path) -> dict[str, str]:
    """A gate's code in the four packages. Args: used, modules of them that the recipe imports."""
    sources = imported_sources(
        sorted({*ENTRIES[gate], *used}), lambda module: _place(module, folder), of=f"gate '{gate}'", called=_is_called
    )
    return _digests(sources) | _function(*(MAKING if gate == "candidate" else JUDGING), folder)


@cache
def _place(module: str, folder: Path) -> Path | None:
    """A module's file; None when it is none of the four packages' or is left out."""
    if module in LEFT_OUT or not _is_ours(module):
        return None
    place = folder.joinpath(*module.split("."))
    return next((path for path in (place.with_suffix(".py"), place / "__init__.py") if path.is_file()), None)


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] in PACKAGES


def _is_called(module: str) -> bool:
    return not f"{module}.".startswith(f"{RECIPES}.")


@cache
def _function(file: str, name: str, folder: Path) -> dict[str, str]:
    """One function's source, as a file of its own."""
    text = (folder / file).read_text()
    function = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name == name)
    return {f"{file}:{name}": sha256_hex((ast.get_source_segment(text, function) or "").encode())}


def _digests(sources: Mapping[str, Source]) -> dict[str, str]:
    """Sources by their files, so that a person can open what changed."""
    ends = {module: "/__init__.py" if source.is_package else ".py" for module, source in sources.items()}
    return {f"{module.replace('.', '/')}{ends[module]}": sha256_hex(source.body) for module, source in sources.items()}
