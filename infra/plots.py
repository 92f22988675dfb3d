"""A verdict's plots as PNG: described by data in validation/verdict.py, drawn once (infra/plot_canvas.py), and kept where they are shown.

A release that is judged again shows most of its plots again. Beside its pictures lies an index that says which plot each one shows and
what drew it; what still holds is read, what does not is drawn. matplotlib is loaded only when something has to be drawn.
"""

import json
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

from validation.canonical import digest, sha256_hex
from validation.verdict import Plot

INDEX = "plots.json"
_recalled: dict[str, bytes] = {}  # digest of a plot -> its picture, drawn by this code earlier


def plot_png(plot: Plot) -> bytes:
    """A plot as PNG, 736 pixels wide; the same plot gives the same bytes. Data that cannot be drawn are named in the picture."""
    return (_recalled.get(digest(plot)) if _recalled else None) or _drawn(plot)


def keep(folder: Path, plots: Mapping[str, Plot]) -> None:
    """Write plots as files, by their paths inside the folder, and the index that `recall` reads."""
    pictures = {name: plot_png(plot) for name, plot in plots.items()}
    for name, png in pictures.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png)
    entries = {name: {"plot": digest(plots[name]), "sha256": sha256_hex(png)} for name, png in pictures.items()}
    (folder / INDEX).write_text(json.dumps({"drawn_by": _drawn_by(), "pictures": entries}, indent=1), encoding="utf-8")


def recall(folder: Path) -> None:
    """Take the pictures that `keep` left in a folder, unless other code drew them; not one that was altered since."""
    try:
        index: dict[str, Any] = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        if index["drawn_by"] != _drawn_by():
            return
        pictures = {entry["plot"]: (entry["sha256"], (folder / name).read_bytes()) for name, entry in index["pictures"].items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # they are drawn again
    _recalled.update({plot: png for plot, (sha256, png) in pictures.items() if sha256_hex(png) == sha256})


@lru_cache(maxsize=64)
def _drawn(plot: Plot) -> bytes:
    from infra.plot_canvas import draw

    return draw(plot)


@cache
def _drawn_by() -> str:
    """Digest of all that makes the bytes of a picture."""
    here = Path(__file__).parent
    sources = [*sorted(here.glob("plot_*.py")), here / "drawing.py", here / "wording.py"]
    return digest([version("matplotlib"), version("pillow"), *(sha256_hex(source.read_bytes()) for source in sources)])
