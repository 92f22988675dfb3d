"""The bytes recipe's splits: windows of T bytes of the library's text, cut from whole files that belong to one split only."""

import functools
import hashlib

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch

from trainer.recipe import SPLITS, Batch
from trainer.recipes.bytes_source import COMMENT, STRING, Bytes, Corpus, load_corpus
from validation.errors import DataError

# N = windows, B = windows of a batch
T = 64  # bytes that are seen
COLUMNS = tuple(f"byte_{back:02d}" for back in range(T, 0, -1))  # byte_01 is the one typed last
STRIDE = {"train": 128, "judge": 384}  # bytes from one window's start to the next: how much of the text is used
JUDGE_SHARE = 4  # one file of so many is judged
PERIOD = {"train": ("2024-01-01", "2024-10-01"), "judge": ("2024-10-01", "2024-12-01")}  # made up: source text has no dates

LARGE = frozenset({"asyncio", "distutils", "email", "idlelib"})  # packages with enough judged windows of their own
LETTERS = np.isin(np.arange(256), np.frombuffer(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789_", np.uint8))
BLANKS = np.isin(np.arange(256), np.frombuffer(b" \t", np.uint8))
NEWLINE = 10

Rows = npt.NDArray[np.int64]


class BytesSplit:
    """One split (trainer.recipe.SplitData). A window's id is its place in the text."""

    pure = True

    def __init__(self, corpus: Corpus, split: str) -> None:
        self._corpus = corpus
        self._split = split
        chosen = [place for place, path in enumerate(corpus.paths) if split_of(path) == split]
        spans = [np.arange(corpus.starts[place], corpus.starts[place + 1] - T, STRIDE[split]) for place in chosen]
        self._files = np.repeat(chosen, [len(span) for span in spans])  # (N,) which file
        self.sample_ids: Rows = np.concatenate(spans).astype(np.int64)

    @functools.cached_property
    def frame(self) -> pd.DataFrame:
        """Contract, slice and cluster columns; made when first asked for, since training does not need it."""
        return context_frame(self._corpus, self.sample_ids, self._files, *PERIOD[self._split])

    def __len__(self) -> int:
        return len(self.sample_ids)

    def batch(self, rows: Rows) -> Batch:
        """Fetch rows: inputs (B, T) bytes, labels (B, T) each one's follower, both int64; weights (B,) of one a window."""
        windows = torch.from_numpy(windows_at(self._corpus.text, self.sample_ids[rows]).astype(np.int64))
        return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous(), torch.ones(len(windows)))


def load_split(split: str) -> BytesSplit:
    """Open a split, preparing the text on the first call on this machine. Raises DataError when the text cannot be used."""
    if split not in SPLITS:
        raise DataError(f"bytes has no split '{split}'. Nothing was read. Ask for one of: {', '.join(SPLITS)}.")
    return BytesSplit(load_corpus(), split)


def split_of(path: str) -> str:
    """The split that a file belongs to with all of its windows: by its path's digest, so that a new file moves no other."""
    drawn = int.from_bytes(hashlib.sha256(path.encode()).digest()[:8], "big")
    return "judge" if drawn % JUDGE_SHARE == 0 else "train"


def windows_at(text: Bytes, places: Rows) -> Bytes:
    """(N, T + 1): the T bytes from each place on, and the one that follows them."""
    return np.asarray(text[places[:, None] + np.arange(T + 1)])


def context_frame(corpus: Corpus, places: Rows, files: Rows, first: str, last: str) -> pd.DataFrame:
    """What is known when the next byte is about to be typed, and that byte; moments are spread evenly over the period."""
    windows = windows_at(corpus.text, places)
    column = columns_at(corpus, places + T, files)
    facts = pd.DataFrame({
        "typed": pd.date_range(first, last, periods=len(places) + 1)[:-1],
        "file": np.array(corpus.paths, dtype=object)[files],
        "package": np.array([package_of(path) for path in corpus.paths], dtype=object)[files],
        "place": place_of(windows[:, :-1], corpus.inside[places + T], column),
        "column_band": np.select([column < 20, column < 40], ["0-19", "20-39"], default="40 and more"),
        "next_byte": windows[:, -1].astype(np.int64),
    })  # fmt: skip
    return pd.concat([facts, pd.DataFrame(windows[:, :-1], columns=list(COLUMNS))], axis=1)


def package_of(path: str) -> str:
    """The large package that a file is part of, "other packages", or "modules" for a file of its own."""
    package, _, rest = path.partition("/")
    return "modules" if not rest else package if package in LARGE else "other packages"


def columns_at(corpus: Corpus, ends: Rows, files: Rows) -> Rows:
    """How many bytes of its line stand before each end (0 = a line's start)."""
    newlines = np.flatnonzero(corpus.text == NEWLINE)
    before = np.searchsorted(newlines, ends) - 1
    line_start = np.maximum(np.where(before >= 0, newlines[before] + 1, 0), corpus.starts[files])
    return ends - line_start


def place_of(seen_NT: Bytes, inside: Bytes, column: Rows) -> npt.NDArray[np.str_]:
    """Where in the grammar of a line the next byte falls, by the bytes before it."""
    within = np.arange(T, 0, -1)[None, :] <= column[:, None]  # the bytes of the window that stand on its last line
    indented = (BLANKS[seen_NT] | ~within).all(axis=1)
    cases = [inside == STRING, inside == COMMENT, indented, LETTERS[seen_NT[:, -1]]]
    return np.select(cases, ["string", "comment", "indent", "word"], default="between words")
