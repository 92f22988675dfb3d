"""Where a recipe's code lies: its import path, its import, and one digest over all of its team's sources.

`imported_sources` reads which modules import which without running any; the gates' own code is found by it, too.
"""

import ast
import importlib
import importlib.util
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from validation.canonical import digest, sha256_hex
from validation.errors import RecipeError

# modules that a source names in a text: "package.module:function", or in code that is handed to an interpreter
_TEXTS = re.compile(rb"""["']((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*):|\b(?:from|import)\s+((?:[A-Za-z_]\w*\.)+[A-Za-z_]\w*)""")
_BLOCKS = ("body", "orelse", "finalbody", "handlers", "cases")  # where statements stand inside statements

SHIPPED = {"flights": "trainer.recipes.flights:recipe", "bytes": "trainer.recipes.bytes_text:recipe"}  # short name -> import path


def split_path(path: str) -> tuple[str, str]:
    """Split "flights" or "package.module:NAME" into module and name. Raises RecipeError when it is neither."""
    module, colon, name = SHIPPED.get(path, path).partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module.split(".")):
        raise RecipeError(
            f"recipe '{path}' is neither shipped ({', '.join(SHIPPED)}) nor an import path. Nothing was started. "
            "Name it like package.module:NAME, for example digits:recipe."
        )
    return module, name


def import_code(path: str, module: str) -> ModuleType:
    """Import the recipe's module, from the current directory too. Raises RecipeError with the line that failed."""
    _find_local_modules()
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and f"{module}.".startswith(f"{error.name}."):
            raise _no_module(path, error.name) from None
        raise _import_failure(path, module, error) from error
    except (Exception, SystemExit) as error:
        raise _import_failure(path, module, error) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One module's file as it was read."""

    path: Path
    body: bytes

    @property
    def is_package(self) -> bool:
        """Whether it is a package's __init__.py."""
        return self.path.name == "__init__.py"


def code_digest(path: str) -> str:
    """sha256 over the recipe's code: its module and every module of the same top-level package or folder that it imports.

    Read from the sources without running them, imports inside functions included; installed packages are left out (the lock
    file pins those). Equal text gives an equal digest wherever it lies.
    Raises: RecipeError when the module or a source cannot be found or read.
    """
    return digest({module: sha256_hex(source.body) for module, source in recipe_sources(path).items()})


def recipe_sources(path: str) -> dict[str, Source]:
    """The sources that `code_digest` covers, by module; raises as it does."""
    module, _ = split_path(path)
    _find_local_modules()
    first = _source(module)
    if first is None:
        raise _no_module(path, module)
    root = _root(module, first)

    def find(wanted: str) -> Path | None:
        found = _source(wanted)
        return found if found is not None and (wanted == module or _is_own(found, root)) else None

    return imported_sources([module], find, of=f"recipe '{path}'")


def imported_sources(
    modules: Iterable[str], find: Callable[[str], Path | None], *, of: str, called: Callable[[str], bool] | None = None
) -> dict[str, Source]:
    """Modules and everything they import, however deep, as far as `find` knows a file for it. Nothing is run.

    Args: of, whose code it is, for errors; called, takes the module of a text such as "package.module:function" (it is called in another
    process) or "from package.module import x" and says whether it counts as imported; None: texts never count.
    Raises: RecipeError when a source cannot be read as Python.
    """
    sources: dict[str, Source] = {}
    waiting = [*modules]
    while waiting:
        module = waiting.pop()
        if module in sources or (path := find(module)) is None:
            continue
        try:
            sources[module] = source = Source(path=path, body=path.read_bytes())
            imported, texts = named_modules(module, source)
        except (OSError, SyntaxError, ValueError) as error:
            raise _unreadable(of, module, path, error) from None
        waiting += imported
        waiting += (parent for name in texts if called and called(name) for parent in _parents(name))
    return sources


def named_modules(module: str, source: Source) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a module imports, and what it names in texts as "package.module:function" or as code to run.

    An imported name may be a module or something inside of one: both are returned. Raises SyntaxError or ValueError.
    """
    return _named(source.body, module if source.is_package else module.rpartition(".")[0])


@lru_cache(maxsize=2048)
def _named(body: bytes, package: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    imported: dict[str, None] = {}
    waiting: list[ast.AST] = [ast.parse(body)]
    while waiting:  # statements only: ast.walk also visits every expression, and takes as long as parsing
        node = waiting.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            imported |= dict.fromkeys(_imports(node, package))
        for block in _BLOCKS:
            waiting += getattr(node, block, ()) if not isinstance(node, ast.expr) else ()
    texts = dict.fromkeys((called or booted).decode() for called, booted in _TEXTS.findall(body))
    return tuple(imported), tuple(texts)


def _find_local_modules() -> None:
    """Put the current directory first on sys.path, once: a team starts a release where its recipe lies."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)


def _source(module: str) -> Path | None:
    """A module's .py file; only its top-level name is asked of the import system, since finding a.b.c that way would run a.b."""
    top, *parts = module.split(".")
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):  # ValueError: a module such as __main__ that was not found by a finder
        return None
    if spec is None:
        return None
    folders = [Path(place) for place in spec.submodule_search_locations or ()]
    source = Path(spec.origin) if spec.has_location and spec.origin else None
    for part in parts:
        beside = [folder / part / "__init__.py" for folder in folders] + [folder / f"{part}.py" for folder in folders]
        source = next((path for path in beside if path.is_file()), None)
        folders = [folder / part for folder in folders if (folder / part).is_dir()]
        if source is None and not folders:
            return None
    return source.resolve() if source is not None and source.suffix == ".py" else None


def _root(module: str, source: Path) -> Path:
    """The top-level package's folder, or the folder that a single module lies in."""
    levels = module.count(".") + (source.name == "__init__.py")
    return source.parents[max(levels - 1, 0)]


def _is_own(source: Path, root: Path) -> bool:
    installed = {"site-packages", "dist-packages"}
    return source.is_relative_to(root) and (not installed & set(source.relative_to(root).parts)) and root.name not in installed


def _imports(node: ast.Import | ast.ImportFrom, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield from _parents(alias.name)
    else:
        base = importlib.util.resolve_name("." * node.level + (node.module or ""), package) if node.level else node.module or ""
        yield from _parents(base)
        yield from (f"{base}.{alias.name}" for alias in node.names)


def _parents(module: str) -> Iterator[str]:
    """A module and the packages around it: importing a.b.c runs a, a.b and a.b.c."""
    while module:
        yield module
        module = module.rpartition(".")[0]


def _no_module(path: str, name: str) -> RecipeError:
    return RecipeError(
        f"recipe '{path}': there is no module {name}. Nothing was started. Check the spelling, start where it can be imported "
        f"(this is {Path.cwd()}), or install its package."
    )


def _unreadable(of: str, module: str, path: Path, error: Exception) -> RecipeError:
    return RecipeError(
        f"{of}: {path} cannot be read as Python ({error}). Its code has no digest, so its evidence could not be tied to it. "
        f'Mend it until `python -c "import {module}"` succeeds.'
    )


def _import_failure(path: str, module: str, error: BaseException) -> RecipeError:
    last = traceback.extract_tb(error.__traceback__)[-1]
    return RecipeError(
        f"recipe '{path}': importing {module} raised {type(error).__name__}: {error} ({last.filename}, line {last.lineno}). "
        f'Its code never became a recipe, so nothing was started. Mend it until `python -c "import {module}"` succeeds.'
    )
