"""Reading along when samples are fetched: which generators a fetch drew from, also in loader workers.

Fetches are seen at two doors: the split that the trainer hands out, and the fetch of any torch DataLoader in a process of the rank's tree
(forked workers inherit it, spawned ones do not). Of a fetch inside a fetch the outer one counts.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from torch.utils.data._utils import fetch as fetching

from trainer.audit_streams import Draw, watched
from trainer.audit_tables import WORKERS_FILE
from trainer.loader import _Fetcher
from trainer.recipe import Batch, SplitData
from validation.canonical import canonical_json

Rows = npt.NDArray[np.int64]


class DrawLog:
    """Where fetches note what they drew: the rank itself through `add`, other processes in the file.

    A worker fetches ahead and cannot know for which step, so its draws are noted under the step during which it was started.
    """

    def __init__(self, folder: Path, add: Callable[[Draw], None]) -> None:
        self._file = str(folder / f"{WORKERS_FILE}.jsonl")  # loader workers append to it, a line a draw
        self._add = add
        self._owner = os.getpid()
        self._inside = False
        self.step = -1  # in work; -1 before the first: what is fetched for checks does not count
        self.silent = False
        self.is_soaked = False  # workers that are started after a soak fetch again what others have fetched ahead

    @contextmanager
    def fetch(self) -> Iterator[None]:
        """One fetch."""
        is_out = self.step < 0 if os.getpid() == self._owner else self.is_soaked
        if self._inside or self.silent or is_out:
            yield
            return
        found: list[Draw] = []
        self._inside = True
        try:
            with watched(found):
                yield
        finally:
            self._inside = False
        self._note(found)

    def _note(self, found: list[Draw]) -> None:
        if os.getpid() == self._owner:
            for draw in found:
                self._add(draw)
        elif found:
            step = max(0, self.step)
            lines = [canonical_json({"step": step, "drawer": "data", **draw._asdict()}) + b"\n" for draw in found]
            file = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            try:
                os.write(file, b"".join(lines))  # one call, far below a page: lines of several workers do not mix
            finally:
                os.close(file)

    def __getstate__(self) -> dict[str, Any]:
        """For workers that are spawned: they write to the file."""
        return self.__dict__ | {"_add": None, "_inside": False}


class AuditedSplit:
    """A split whose fetches are read along; everything else of it is as it was."""

    sample_ids: Rows  # this and the next are the split's
    frame: pd.DataFrame

    def __init__(self, split: SplitData, log: DrawLog) -> None:
        self._split = split
        self._log = log

    def __len__(self) -> int:
        return len(self._split)

    def batch(self, rows: Rows) -> Batch:
        """The split's."""
        with self._log.fetch():
            return self._split.batch(rows)

    def __getattr__(self, name: str) -> Any:
        if name in ("_split", "_log"):  # not there yet: while a copy is made
            raise AttributeError(name)
        value = getattr(self._split, name)
        return self._read_along(value) if name in ("keyed_batch", "__getitems__") else value

    def _read_along(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def fetched(*arguments: Any) -> Any:
            with self._log.fetch():
                return function(*arguments)

        return fetched


class AuditedDataset(AuditedSplit):
    """A split that is a map-style dataset, too."""

    def __getitem__(self, index: Any) -> Any:
        with self._log.fetch():
            return self._split[index]  # type: ignore[index]  # `audited` has looked


def audited(split: SplitData, log: DrawLog) -> AuditedSplit:
    """Read along with a split."""
    return (AuditedDataset if hasattr(type(split), "__getitem__") else AuditedSplit)(split, log)


def watch_loaders(log: DrawLog) -> None:
    """Read along with every torch DataLoader that this process, or one forked from it, fetches with from now on."""
    for kind in (fetching._MapDatasetFetcher, fetching._IterableDatasetFetcher):
        original = getattr(kind.fetch, "original", kind.fetch)
        kind.fetch = _watching(original, log)  # type: ignore[method-assign]


def _watching(original: Callable[..., Any], log: DrawLog) -> Callable[..., Any]:
    def fetch(self: Any, index: Any) -> Any:
        if isinstance(self.dataset, _Fetcher):  # the trainer's own, which seeds inside: its split is read along
            return original(self, index)
        with log.fetch():
            return original(self, index)

    fetch.original = original  # type: ignore[attr-defined]
    return fetch
