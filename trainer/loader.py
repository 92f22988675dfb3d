"""Loader workers: a rank's future micro-batches, fetched ahead by processes of its own through torch's DataLoader.

What is fetched, in which order and with which random streams is decided by the rank and is a pure function of the position in the data,
so batches have the same bytes at any number of workers, and with none. Workers die with their rank, by a signal of the kernel. Batches come
through a pipe as plain bytes, not through shared memory, of which a killed process leaves files behind.
"""

import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from trainer.children import die_with_parent
from trainer.dataset import Rows, fetch
from trainer.recipe import Batch, SplitData
from trainer.streams import Words
from trainer.wires import failure_of
from validation import errors
from validation.errors import RankError

AHEAD = 2  # requests that wait for each worker


class Request(NamedTuple):
    """The samples of one micro-batch."""

    rows: Rows  # (B,)
    keys: Words  # (B,) of the samples' own random streams


class Packed(NamedTuple):
    """A tensor on its way between processes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    body: npt.NDArray[np.uint8]


class Broken(NamedTuple):
    """What the recipe's data code raised in a worker."""

    error: bytes  # pickled; empty when it would not come out as it was
    module: str
    kind: str  # its class's name
    base: str  # nearest class of validation.errors, else ""
    text: str
    notes: tuple[str, ...]
    trace: str


class WorkerTraceError(Exception):
    """Where in a worker an error came from; the cause of the same error in the rank."""


class Loader:
    """Batches of a row of requests, in their order."""

    def __init__(self, data: SplitData, requests: Iterable[Request], workers: int) -> None:
        """Start the workers. `requests` is read as far ahead as they work; the caller's random streams stay as they are."""
        rank = os.getpid()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores: the recipe asked for them
            loader: DataLoader[Any] = DataLoader(
                _Fetcher(data), batch_size=None, sampler=requests, num_workers=workers, collate_fn=_same, prefetch_factor=AHEAD,
                worker_init_fn=lambda _: die_with_parent(rank, signal.SIGKILL), multiprocessing_context="fork", generator=torch.Generator(),
            )  # fmt: skip
            self._batches: Iterator[Any] | None = iter(loader)  # one pass over the whole run: the workers live as long as it does

    def take(self) -> Batch:
        """The next request's batch. Raises what its data code raised; RankError when a worker is dead or the requests are used up."""
        try:
            fetched = next(iter(()) if self._batches is None else self._batches)
        except StopIteration:
            raise RankError("a batch was asked for that no request was made for. Ask the feed for the steps in their order.") from None
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise RankError(
                f"a loader worker of this rank ended before its time ({str(error).strip()}). Its batches are lost, the run can go on from "
                "its last checkpoint. Look for memory that ran out, or a crash in the recipe's data code; loader_workers=0 shows it there."
            ) from error
        if isinstance(fetched, Broken):
            raise _mended(fetched) from WorkerTraceError(f"\n{fetched.trace}")
        return Batch(*map(_unpacked, fetched))

    def close(self) -> None:
        """End the workers."""
        self._batches = None  # torch ends them with the iterator


class _Fetcher(Dataset[Any]):
    """The worker's side: a request is an index."""

    def __init__(self, data: SplitData) -> None:
        self._data = data

    def __getitem__(self, request: Request) -> tuple[Packed, ...] | Broken:
        try:
            return tuple(map(_packed, fetch(self._data, *request)))
        except Exception as error:
            return _broken(error)


def _same(value: Any) -> Any:
    return value


def _packed(value: Tensor) -> Packed:
    """Copied here and now: the recipe may use its memory again while the bytes are still on their way."""
    copied = value.detach().clone()  # without gaps, like every tensor that `fetch` returns
    body = copied.as_strided((copied.numel(),), (1,)).view(torch.uint8).numpy()
    return Packed(copied.dtype, tuple(copied.shape), copied.stride(), body)


def _unpacked(packed: Packed) -> Tensor:
    return torch.from_numpy(packed.body).view(packed.dtype).as_strided(packed.shape, packed.stride)


def _broken(error: Exception) -> Broken:
    kind = type(error)
    try:
        body = pickle.dumps(error)
        again = pickle.loads(body)  # noqa: S301  (this process's own bytes)
        is_same = type(again) is kind and str(again) == str(error)
    except Exception:
        is_same = False
    return Broken(
        error=body if is_same else b"", module=kind.__module__, kind=kind.__qualname__, base=failure_of(error).kind, text=str(error),
        notes=tuple(getattr(error, "__notes__", ())), trace="".join(traceback.format_exception(error)).rstrip(),
    )  # fmt: skip


def _mended(broken: Broken) -> Exception:
    """The same error again; one of the same name and text when its class cannot travel."""
    if broken.error:
        error: Exception = pickle.loads(broken.error)  # noqa: S301  (of a process of our own tree, over an anonymous pipe)
        return error
    base = getattr(errors, broken.base) if broken.base else Exception
    alike: Exception = type(broken.kind, (base,), {"__module__": broken.module})(broken.text)
    for note in broken.notes:
        alike.add_note(note)
    return alike
