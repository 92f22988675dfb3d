"""The running interpreter's standard library as one text: every source file a person typed, one after the other, as bytes.

The same interpreter version gives the same bytes, whatever the machine. Left out is what nobody typed (tables of `encodings`, the text of
`pydoc_data`, build settings of this machine), what is installed beside the library, and tests.
"""

import json
import os
import platform
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from trainer.recipe import cache_folder
from trainer.recipes.prepared import prepared_once
from validation.canonical import digest, sha256_hex
from validation.errors import DataError

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]

LEFT_OUT = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test", "encodings", "pydoc_data"})
MACHINE_MADE = ("_sysconfigdata", "config-", "sitecustomize")  # prefixes of names that the builder of an interpreter adds
LEAST_BYTES = 4_000_000  # of every supported version there are 8 to 10 million: less is an interpreter without its sources

# what a byte stands in, by the text before it
CODE, STRING, COMMENT = 0, 1, 2
_QUOTED = rb'"""(?:[^\\]|\\.)*?"""|\'\'\'(?:[^\\]|\\.)*?\'\'\'|"(?:[^"\\\n]|\\.)*"|\'(?:[^\'\\\n]|\\.)*\''
_SPANS = re.compile(rb"(?P<comment>#[^\n]*)|(?P<string>" + _QUOTED + rb")", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The text on memory maps; ranks on one machine share the pages."""

    paths: tuple[str, ...]  # (F,) relative to the library's folder, sorted
    starts: Places  # (F + 1,) where each file begins; the last one is the text's length
    text: Bytes  # (L,)
    inside: Bytes  # (L,) CODE, STRING or COMMENT: what is open when the byte at this place is about to be typed


def library_folder() -> Path:
    """Where the running interpreter keeps its library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(folder: Path) -> tuple[str, ...]:
    """Relative paths of the files that are read, sorted. Raises DataError when the library has too little source text."""
    found = sorted(path.relative_to(folder).as_posix() for path in _typed_files(folder))
    size = sum((folder / path).stat().st_size for path in found)
    if size < LEAST_BYTES:
        raise DataError(
            f"{folder} holds {size:,} bytes of Python source in {len(found)} files, at least {LEAST_BYTES:,} are needed. This interpreter "
            "came without its library's sources, so the bytes recipe has nothing to train on and nothing was started. Use a regular "
            "CPython 3.11 or newer."
        )
    return tuple(found)


def load_corpus() -> Corpus:
    """Open the text, preparing it on the first call on this machine (some 3 s).

    Raises: DataError when there is no source text, or the prepared text is not what was written.
    """
    folder = prepared_folder(library_folder())
    try:
        facts = json.loads((folder / "facts.json").read_text())
        text, inside = (np.load(folder / f"{name}.npy", mmap_mode="r") for name in ("text", "inside"))
        if sha256_hex(text.data) != facts["text_sha256"] or sha256_hex(inside.data) != facts["inside_sha256"]:
            raise ValueError("its sha256 is not the one that was written down")
        starts = np.array([0, *np.cumsum(facts["sizes"], dtype=np.int64)])
        return Corpus(paths=tuple(facts["paths"]), starts=starts, text=text, inside=inside)
    except (OSError, ValueError, EOFError, KeyError) as error:
        raise DataError(
            f"the prepared text in {folder} cannot be used ({type(error).__name__}: {error}). It was cut short or altered after it was "
            "made, so nothing was started. Delete that folder; the next start prepares it again."
        ) from None


def prepared_folder(library: Path) -> Path:
    """Folder of the prepared text, named by the library's files (path, size, time of change) and by the code that prepares it."""
    files = source_files(library)
    stamps = [(path, stat.st_size, stat.st_mtime_ns) for path in files for stat in [(library / path).stat()]]
    key = digest([platform.python_version(), str(library), stamps, sha256_hex(Path(__file__).read_bytes())])
    return prepared_once(cache_folder() / f"bytes-{key[:20]}", lambda building: _prepare(library, files, building))


def open_spans(source: bytes) -> Bytes:
    """(n,) what is open before each byte of a file: a comment up to its line's end, a string up to its closing quote, else code."""
    inside = np.zeros(len(source), np.uint8)
    for span in _SPANS.finditer(source):
        if span.lastgroup == "comment":
            inside[span.start() + 1 : span.end() + 1] = COMMENT
        else:
            inside[span.start() + 1 : span.end()] = STRING
    return inside


def _typed_files(folder: Path) -> Iterator[Path]:
    # pruned on the way down: an interpreter's site-packages may hold many times more files than its library
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if name not in LEFT_OUT and not name.startswith(MACHINE_MADE)]
        yield from (Path(parent, name) for name in files if name.endswith(".py") and not name.startswith(MACHINE_MADE))


def _prepare(library: Path, files: tuple[str, ...], folder: Path) -> None:
    bodies = [(library / path).read_bytes() for path in files]
    text = np.frombuffer(b"".join(bodies), np.uint8)
    inside = np.concatenate([open_spans(body) for body in bodies])
    np.save(folder / "text.npy", text)
    np.save(folder / "inside.npy", inside)
    facts = {"paths": files, "sizes": [len(body) for body in bodies]}
    digests = {"text_sha256": sha256_hex(text.tobytes()), "inside_sha256": sha256_hex(inside.tobytes())}
    (folder / "facts.json").write_text(json.dumps(facts | digests))
