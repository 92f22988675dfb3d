"""What one rank puts through the model in one step: its lanes' samples, as micro-batches, and their ledger rows."""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainer.order import Order, Rows, lane_span
from trainer.parts import Ledger
from trainer.recipe import Batch, SplitData
from trainer.reduce import Reduction


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


class Feed:
    """Cuts every global batch into this rank's micro-batches."""

    def __init__(
        self, data: SplitData, order: Order, own: range, lanes: int, device: torch.device, *, double: bool, drop_lane: bool,
        accumulation: int = 1, stand_in: int = 1,
    ) -> None:  # fmt: skip
        """Args: own, lanes of this rank, ascending; accumulation, parts of each micro-batch; stand_in, samples for empty lanes."""
        self._data = data
        self._order = order
        self._lanes = lanes
        self._own = own
        self._device = device
        self._double = double
        self._dropped = lanes - 1 if drop_lane and own[-1] == lanes - 1 else None
        self._parts = accumulation
        self._stand_in = stand_in
        self._last: tuple[range, Rows, Rows] | None = None  # the batch asked last, own positions and rows in it

    def positions(self, batch: range) -> Rows:
        """Positions of this rank's lanes in a global batch, ascending; possibly none."""
        return self._asked(batch)[0]

    def ledger(self, step: int, batch: range) -> Ledger:
        """(n, 4): step, lane, position, sample id of every sample of this rank's lanes."""
        positions, rows = self._asked(batch)
        lanes = np.repeat(np.array(self._own), [len(lane_span(batch, lane, self._lanes)) for lane in self._own])
        return np.stack((np.full(len(rows), step), lanes, positions, self._data.sample_ids[rows]), axis=1).astype(np.int64)

    def micro_batches(self, batch: range, reduction: Reduction) -> list[MicroBatch]:
        """Fetch this rank's samples, grouped as the reduction wants them, each group cut into its parts."""
        cuts = [cut for group in reduction.groups(self._own) for cut in self._cuts(group, batch)]
        return [MicroBatch(cut.lane, cut.part, cut.is_last, self._fetch(self._rows_of(cut, batch)), cut.counts) for cut in cuts]

    def probe(self, samples: int) -> Batch:
        """The run's first samples, for checks before the first step; the same on every rank."""
        return self._fetch(self._order.rows(range(min(samples, self._order.size))))

    def _cuts(self, group: range, batch: range) -> list[Cut]:
        """Parts [p * n // A, (p + 1) * n // A) of a group's n samples; empty ones are left out, but one stand-in stays."""
        kept = [lane for lane in group if lane != self._dropped] or [group[0]]
        span = range(lane_span(batch, kept[0], self._lanes).start, lane_span(batch, kept[-1], self._lanes).stop)
        parts = [(part, lane_span(span, part, self._parts)) for part in range(self._parts)]
        full = [(part, positions) for part, positions in parts if positions]
        if not full or list(group) == [self._dropped]:
            return [Cut(group[0], 0, True, batch[: self._stand_in], 0.0)]
        return [Cut(group[0], part, part == full[-1][0], positions, 1.0) for part, positions in full]

    def _rows_of(self, cut: Cut, batch: range) -> Rows:
        if not cut.counts:
            return np.resize(self._order.rows(cut.positions), self._stand_in)  # repeated when the whole batch has fewer
        positions, rows = self._asked(batch)
        offset = int(np.searchsorted(positions, cut.positions.start))
        return rows[offset : offset + len(cut.positions)]

    def _asked(self, batch: range) -> tuple[Rows, Rows]:
        """Positions of this rank's lanes and their rows; asked several times a step, computed once."""
        if self._last is None or self._last[0] != batch:
            spans = [lane_span(batch, lane, self._lanes) for lane in self._own]
            positions = np.concatenate([np.arange(span.start, span.stop, dtype=np.int64) for span in spans])
            self._last = (batch, positions, self._order.rows(positions))
        return self._last[1:]

    def _fetch(self, rows: Rows) -> Batch:
        return Batch(*(cast_input(value, self._device, double=self._double) for value in self._data.batch(rows)))


def cast_input(value: Tensor, device: torch.device, *, double: bool) -> Tensor:
    """Bring a tensor to the device; floats to float64 for the double-precision legs."""
    dtype = torch.float64 if double and value.is_floating_point() else value.dtype
    return value.to(device=device, dtype=dtype, non_blocking=True)
