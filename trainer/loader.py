"""Loader workers: a rank's future micro-batches, fetched ahead by processes of its own through torch's DataLoader.

What is fetched, in which order and with which random streams is decided by the rank and is a pure function of the position in the data,
so batches have the same bytes at any number of workers, and with none. Workers die with their rank, by a signal of the kernel.
"""

import os
import pickle
import signal
import traceback
import warnings
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils.data import DataLoader, Dataset

from trainer.children import die_with_parent
from trainer.dataset import Rows, fetch
from trainer.recipe import Batch, SplitData
from trainer.slots import Place, Slots
from trainer.streams import Words
from trainer.wires import failure_of
from validation import errors
from validation.errors import RankError

AHEAD = 2  # requests that wait for each worker


class Request(NamedTuple):
    """The samples of one micro-batch."""

    rows: Rows  # (B,)
    keys: Words  # (B,) of the samples' own random streams


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
        # AHEAD a worker are asked for and not taken yet; when one is taken the next is asked for, before it is copied out of its slot
        self._slots = slots = Slots(AHEAD * workers + 1)
        numbered = ((number % len(slots), request) for number, request in enumerate(requests))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # more workers than cores: the recipe asked for them
            loader: DataLoader[Any] = DataLoader(
                _Fetcher(data, slots), batch_size=None, sampler=numbered, num_workers=workers, collate_fn=_same, prefetch_factor=AHEAD,
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
        return self._slots.read(*fetched)

    def close(self) -> None:
        """End the workers."""
        self._batches = None  # torch ends them with the iterator
        self._slots.close()


class _Fetcher(Dataset[Any]):
    """The worker's side: an index is a request and the slot for its batch."""

    def __init__(self, data: SplitData, slots: Slots) -> None:
        self._data = data
        self._slots = slots

    def __getitem__(self, index: tuple[int, Request]) -> tuple[int, tuple[Place, ...]] | Broken:
        slot, request = index
        try:
            return slot, self._slots.write(slot, fetch(self._data, *request))
        except Exception as error:
            return _broken(error)


def _same(value: Any) -> Any:
    return value


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
