"""What one rank puts through the model in one step: its lanes' samples, as micro-batches, and their ledger rows."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.dataset import fetch
from trainer.loader import Loader, Request
from trainer.order import Order, Rows, lane_span
from trainer.parts import Ledger
from trainer.recipe import Batch, SplitData
from trainer.reduce import Reduction
from trainer.streams import Words

_NONE: Words = np.empty(0, dtype=np.uint64)
BLOCK_ROWS = 1 << 16  # of a rank, located at once: numpy's calls cost more than their work on a few thousand rows


class MicroBatch(NamedTuple):
    """Samples of one forward and backward pass."""

    lane: int  # its group's first lane: keys the random stream
    part: int  # of the `accumulation` parts that its group is cut into: keys the random stream
    is_last: bool  # the last part of its group: the group's gradient is whole after it
    batch: Batch
    counts: float  # 1.0; 0.0 when its lanes are empty and a stand-in keeps all ranks in step


class Cut(NamedTuple):
    """A micro-batch before its samples are fetched."""

    lane: int
    part: int
    is_last: bool
    positions: range
    counts: float


class Located(NamedTuple):
    """This rank's share of a global batch."""

    batch: range
    positions: Rows  # ascending
    rows: Rows
    ledger: Ledger  # the step is still open


class Coming(NamedTuple):
    """A batch that is being fetched behind the caller's back."""

    batch: range
    samples: Future[list[Batch]]  # of each micro-batch


class Feed:
    """Cuts every global batch into this rank's micro-batches."""

    def __init__(
        self, data: SplitData, order: Order, own: range, lanes: int, device: torch.device, *, double: bool, drop_lane: bool,
        accumulation: int = 1, stand_in: int = 1, workers: int = 0, even: bool = False, pure: bool = False, ahead: bool = False,
    ) -> None:  # fmt: skip
        """Args: own, lanes of this rank, ascending; accumulation, parts of each micro-batch; stand_in, samples for empty lanes; workers,
        processes that fetch ahead, from the first batch that is asked for on (0: this process fetches); even, every rank has the same
        number of micro-batches, stand-ins among them, because each forward pass is collective (FSDP2); pure, the data's `batch` depends on
        its rows alone; ahead, a thread may fetch such data ahead.
        """
        self._data = data
        self._order = order
        self._lanes = lanes
        self._own = own
        self._device = device
        self._double = double
        self._dropped = lanes - 1 if drop_lane and own[-1] == lanes - 1 else None
        self._parts = accumulation
        self._stand_in = stand_in
        self._workers = workers
        self._even = even
        self._keyed = hasattr(data, "keyed_batch")
        self._streams = not (pure and not workers)  # whether the data's code may draw from streams
        self._loader: Loader | None = None
        self._fetcher = (
            ThreadPoolExecutor(1, thread_name_prefix="fetch") if pure and ahead and not workers else None
        )  # starts when it has work
        self._coming: Coming | None = None
        self._held: list[MicroBatch] | None = None  # of a step that is made several times; None: no step is
        self._next = -1  # position up to which batches were taken from the loader
        self._block: dict[int, Located] = {}  # by the batch's first position: the batch asked last and those after it

    def positions(self, batch: range) -> Rows:
        """Positions of this rank's lanes in a global batch, ascending; possibly none."""
        if self._coming is not None:
            wait((self._coming.samples,))  # it has found them, too
        return self._asked(batch).positions

    def ledger(self, step: int, batch: range) -> Ledger:
        """Every sample of this rank's lanes."""
        ledger = self._asked(batch).ledger
        ledger.spans[:, 0] = step
        return ledger

    def micro_batches(self, batch: range, reduction: Reduction) -> list[MicroBatch]:
        """Fetch this rank's samples, grouped as the reduction wants them, each group cut into its parts.

        Where the random streams stand afterwards is not said: with workers they have not moved, else the recipe's data code has drawn.
        """
        if self._held is not None:
            if not self._held:
                self._held = self._fetched(batch, reduction)
            return [micro._replace(batch=Batch(*(part.clone() for part in micro.batch))) for micro in self._held]  # a loss may write in it
        return self._fetched(batch, reduction)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, the first step that is asked for is asked for again and again, and fetched once."""
        self._held = []
        try:
            yield
        finally:
            self._held = None

    def fetch_ahead(self, batch: range, reduction: Reduction) -> None:
        """Begin to fetch a batch that will be asked for, where the data allows that; the best moment is when a backward pass begins.

        An error of the recipe's code is raised when the batch is asked for.
        """
        if self._fetcher is not None and self._held is None and batch:
            cuts = self._cuts(reduction.groups(self._own), batch)
            self._coming = Coming(batch, self._fetcher.submit(self._fetch_here, cuts, batch))

    def _fetched(self, batch: range, reduction: Reduction) -> list[MicroBatch]:
        groups = reduction.groups(self._own)
        cuts = self._cuts(groups, batch)
        coming, self._coming = self._coming, None
        if self._workers:
            loader = self._loader_at(batch, groups)
            fetched = [loader.take() for _ in cuts]
        elif coming is not None and coming.batch == batch:
            fetched = coming.samples.result()
        else:
            fetched = self._fetch_here(cuts, batch)
        return [MicroBatch(*cut[:3], self._on_device(samples), cut.counts) for cut, samples in zip(cuts, fetched, strict=True)]

    def _fetch_here(self, cuts: Sequence[Cut], batch: range) -> list[Batch]:
        """In this process; also in the thread, which seeds no stream, since they are those of the step under way."""
        return [fetch(self._data, *request) for request in self._requests(cuts, self._asked(batch))]

    def rows(self, batch: range, reduction: Reduction) -> list[Rows]:
        """Rows of each of `micro_batches`, (B,); none where samples only stand in."""
        cuts = self._cuts(reduction.groups(self._own), batch)
        requests = self._requests(cuts, self._asked(batch))
        return [request.rows if cut.counts else request.rows[:0] for cut, request in zip(cuts, requests, strict=True)]

    def probe(self, samples: int) -> Batch:
        """The run's first samples, for checks before the first step; the same on every rank."""
        return self._on_device(fetch(self._data, *self._request(range(min(samples, self._order.size)))))

    def close(self) -> None:
        """End the loader workers and the thread that fetches ahead, if there are any."""
        if self._fetcher is not None:
            self._fetcher.shutdown(cancel_futures=True)
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    def _loader_at(self, batch: range, groups: Sequence[range]) -> Loader:
        """The loader whose next batches are this batch's: started at the first one, and anew when the caller went elsewhere."""
        if self._loader is None or batch.start != self._next:
            self.close()
            self._loader = Loader(self._data, self._upcoming(batch, groups), self._workers)
        self._next = batch.stop
        return self._loader

    def _upcoming(self, batch: range, groups: Sequence[range]) -> Iterator[Request]:
        """Requests of all micro-batches from a batch on, to the end of the order."""
        while batch:
            yield from self._requests(self._cuts(groups, batch), self._locate([batch])[0])
            batch = self._order.span(batch.stop)

    def _requests(self, cuts: Sequence[Cut], own: Located) -> list[Request]:
        """What to fetch; of data that is not keyed by sample only each request's first key, which its streams start from, if it has any."""
        starts = np.searchsorted(own.positions, [cut.positions.start for cut in cuts])
        keys = self._order.keys(own.positions, own.ledger.ids) if self._keyed else None
        found = []
        for start, cut in zip(starts, cuts, strict=True):
            place = slice(start, start + len(cut.positions))
            if not cut.counts:
                found.append(self._stand_in_request(cut))
            else:
                found.append(Request(own.rows[place], self._first_key(cut, own.rows[start]) if keys is None else keys[place]))
        return found

    def _first_key(self, cut: Cut, row: np.int64) -> Words:
        """The key of a micro-batch's first sample, (1,); none, (0,), where data draws from no stream."""
        if not self._streams:
            return _NONE
        return self._order.keys_of(cut.positions.start, int(self._data.sample_ids[row]))

    def _stand_in_request(self, cut: Cut) -> Request:
        """Samples of the batch's start, repeated when the whole batch has fewer."""
        rows, keys = self._request(cut.positions)
        return Request(np.resize(rows, self._stand_in), np.resize(keys, self._stand_in) if self._streams else _NONE)

    def _request(self, positions: range) -> Request:
        rows = self._order.rows(positions)
        return Request(rows, self._order.keys(positions, self._data.sample_ids[rows]))

    def _cuts(self, groups: Sequence[range], batch: range) -> list[Cut]:
        return [cut for group in groups for cut in self._cuts_of(group, batch)]

    def _cuts_of(self, group: range, batch: range) -> list[Cut]:
        """Parts [p * n // A, (p + 1) * n // A) of a group's n samples; empty ones are left out; stand-ins keep ranks in step."""
        kept = [lane for lane in group if lane != self._dropped] or [group[0]]
        span = range(lane_span(batch, kept[0], self._lanes).start, lane_span(batch, kept[-1], self._lanes).stop)
        parts = [(part, lane_span(span, part, self._parts)) for part in range(self._parts)]
        full = [(part, positions) for part, positions in parts if positions]
        if not full or list(group) == [self._dropped]:
            full = []
        cuts = [Cut(group[0], part, False, positions, 1.0) for part, positions in full]
        wanted = max(1, self._most_parts(len(group), batch) if self._even else len(cuts))
        cuts += [Cut(group[0], spare, False, batch[: self._stand_in], 0.0) for spare in range(wanted - len(cuts))]
        return [*cuts[:-1], cuts[-1]._replace(is_last=True)]

    def _most_parts(self, size: int, batch: range) -> int:
        """Parts of the largest of all ranks' groups of `size` lanes."""
        spans = [lane_span(batch, lane, self._lanes) for lane in range(self._lanes)]
        groups = (range(spans[first].start, spans[first + size - 1].stop) for first in range(0, self._lanes, size))
        return min(self._parts, max(map(len, groups)))

    def _asked(self, batch: range) -> Located:
        """This rank's share of a batch; those of the batches that follow are found with it."""
        found = self._block.get(batch.start)
        if found is None or found.batch != batch:
            batches = [batch]
            while batches[-1] and len(batches) * len(batch) * len(self._own) < BLOCK_ROWS * self._lanes:
                batches.append(self._order.span(batches[-1].stop))
            self._block = {share.batch.start: share for share in self._locate(batches)}
            found = self._block[batch.start]
        return found

    def _locate(self, batches: Sequence[range]) -> list[Located]:
        spans = [[lane_span(batch, lane, self._lanes) for lane in self._own] for batch in batches]
        positions = np.concatenate([np.arange(span.start, span.stop, dtype=np.int64) for own in spans for span in own])
        rows = self._order.rows(positions)
        ids = self._data.sample_ids[rows]
        found, start = [], 0
        for batch, own in zip(batches, spans, strict=True):
            place = slice(start, start := start + sum(map(len, own)))
            table = np.array([(0, lane, span.start, len(span)) for lane, span in zip(self._own, own, strict=True)], dtype=np.int64)
            found.append(Located(batch, positions[place], rows[place], Ledger(table[table[:, 3] > 0], ids[place])))
        return found

    def _on_device(self, batch: Batch) -> Batch:
        return Batch(*(cast_input(value, self._device, double=self._double) for value in batch))


def cast_input(value: Tensor, device: torch.device, *, double: bool) -> Tensor:
    """Bring a tensor to the device; floats to float64 for the double-precision legs."""
    dtype = torch.float64 if double and value.is_floating_point() else value.dtype
    return value.to(device=device, dtype=dtype, non_blocking=True)
