"""What a rank is fed: every sample of its lanes once a step, in parts, with a stand-in where there is none."""

import threading
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_recipe import TinyData

from trainer.feed import Feed
from trainer.lanes import rank_lanes
from trainer.order import Order, lane_span
from trainer.recipe import Batch

LANES = 8


class Groups(NamedTuple):
    """The one thing that a feed asks of a reduction: a micro-batch a lane (exact), or all lanes in one (fast)."""

    together: bool

    def groups(self, lanes: range) -> list[range]:
        return [lanes] if self.together else [range(lane, lane + 1) for lane in lanes]


class Numbered(TinyData):
    """Inputs are the row numbers."""

    def batch(self, rows: np.ndarray) -> Batch:
        ones = torch.ones(len(rows))
        return Batch(torch.from_numpy(rows.copy()), ones, ones)


def feed(rank: int = 0, world_size: int = 1, *, size: int = 100, batch: int = 30, **options: object) -> tuple[Feed, Order]:
    """A feed over `size` numbered samples, one epoch."""
    order = Order(seed=5, size=size, epochs=1, global_batch_size=batch)
    usual = {"double": False, "drop_lane": False}
    own = rank_lanes(rank, world_size, LANES)
    return Feed(Numbered(size, 1), order, own, LANES, torch.device("cpu"), **(usual | options)), order


@given(size=st.integers(1, 60), batch=st.integers(1, 60), world_size=st.integers(1, LANES), parts=st.integers(1, 5), together=st.booleans())
@settings(max_examples=60, deadline=None)
def test_parts_of_all_ranks_are_the_batch(size: int, batch: int, world_size: int, parts: int, together: bool) -> None:
    """In lane and part order, over all ranks, the micro-batches are the batch's rows, each once, whatever it is cut into."""
    fed = []
    for rank in range(world_size):
        feeder, order = feed(rank, world_size, size=size, batch=batch, accumulation=parts)
        fed += feeder.micro_batches(order.span(0), Groups(together))
    rows = [row for micro_batch in fed if micro_batch.counts for row in micro_batch.batch.inputs.tolist()]

    assert rows == order.rows(order.span(0)).tolist()
    assert all(len(micro_batch.batch.inputs) for micro_batch in fed)
    lasts = [micro_batch.lane for micro_batch in fed if micro_batch.is_last]
    assert lasts == sorted({micro_batch.lane for micro_batch in fed})


def test_a_lane_is_cut_as_a_batch_is() -> None:
    """Part p of n samples is [p*n//A, (p+1)*n//A); the last one is marked."""
    feeder, order = feed(accumulation=3)
    fed = [item for item in feeder.micro_batches(order.span(0), Groups(False)) if item.lane == 3]
    lane = order.rows(lane_span(order.span(0), 3, LANES)).tolist()

    assert [item.batch.inputs.tolist() for item in fed] == [lane[:1], lane[1:2], lane[2:4]]
    assert [(item.part, item.is_last) for item in fed] == [(0, False), (1, False), (2, True)]


def test_empty_parts_are_left_out() -> None:
    """Lanes of one sample have one part, which is the last one."""
    feeder, order = feed(batch=LANES, accumulation=4)
    fed = feeder.micro_batches(order.span(0), Groups(False))

    assert [(item.lane, item.part, item.is_last, item.counts) for item in fed] == [(lane, 3, True, 1.0) for lane in range(LANES)]


@pytest.mark.parametrize(("batch", "parts"), [(47, 9), (9, 2), (3, 2), (30, 4)])
def test_even_feeds_take_as_many_passes_on_every_rank(batch: int, parts: int) -> None:
    """Under FSDP2 a forward pass is collective: lanes of unequal size have as many parts, and the spare ones count for nothing."""
    fed = []
    for rank in range(4):
        feeder, order = feed(rank, 4, batch=batch, accumulation=parts, even=True)
        fed.append(feeder.micro_batches(order.span(0), Groups(False)))
    rows = [row for items in fed for item in items if item.counts for row in item.batch.inputs.tolist()]

    assert len({tuple(item.is_last for item in items) for items in fed}) == 1
    assert rows == order.rows(order.span(0)).tolist()


@pytest.mark.parametrize(("stand_in", "batch", "rows"), [(1, 3, 1), (2, 3, 2), (4, 3, 4)], ids=["one", "two", "more than there are"])
def test_an_empty_lane_has_a_stand_in(stand_in: int, batch: int, rows: int) -> None:
    """Samples of the batch's start stand for an empty lane, repeated if need be, and count for nothing."""
    feeder, order = feed(batch=batch, stand_in=stand_in, accumulation=2)
    fed = feeder.micro_batches(order.span(0), Groups(False))
    first = order.rows(order.span(0)).tolist()

    empty = [item for item in fed if not item.counts]
    assert [item.lane for item in empty] == [0, 1, 3, 4, 6]
    assert {tuple(item.batch.inputs.tolist()) for item in empty} == {tuple((first * 2)[:rows])}
    assert all((item.part, item.is_last) == (0, True) for item in empty)


@pytest.mark.parametrize("together", [False, True], ids=["exact", "fast"])
def test_dropped_lane_is_in_the_ledger_alone(together: bool) -> None:
    """The planted defect leaves out the last lane's samples on the last rank, in all parts; the ledger claims them."""
    feeder, order = feed(1, 2, drop_lane=True, accumulation=2)
    fed = feeder.micro_batches(order.span(0), Groups(together))
    rows = [row for item in fed if item.counts for row in item.batch.inputs.tolist()]

    assert rows == order.rows(range(15, 26)).tolist()
    spans = feeder.ledger(0, order.span(0)).spans
    assert [position for _, _, first, count in spans.tolist() for position in range(first, first + count)] == list(range(15, 30))
    assert fed[-1].is_last


def recorded(fetch: Callable[..., Batch], names: list[str]) -> Callable[..., Batch]:
    """The same, and the name of the thread that asked."""

    def batch(self: Numbered, rows: np.ndarray) -> Batch:
        names.append(threading.current_thread().name)
        return fetch(self, rows)

    return batch


def walked(feeder: Feed, order: Order, together: bool) -> list[tuple[object, ...]]:
    """Every micro-batch of an epoch, as a training loop asks for them."""
    fed, span = [], order.span(0)
    while span:
        feeder.positions(span)
        fed += [(*item[:3], item.batch.inputs.tolist(), item.counts) for item in feeder.micro_batches(span, Groups(together))]
        span = order.span(span.stop)
        feeder.fetch_ahead(span, Groups(together))
    feeder.close()
    return fed


@pytest.mark.parametrize("together", [False, True], ids=["exact", "fast"])
@pytest.mark.parametrize("ahead", [False, True], ids=["here", "ahead"])
def test_what_a_pure_split_gives_is_what_any_would(ahead: bool, together: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its batches, epoch's end included; all but the first come from the thread, where there is one, and no random stream moves."""
    options: dict[str, object] = {"accumulation": 2, "batch": 31}
    plain = walked(*feed(1, 2, **options), together)
    monkeypatch.setattr(Numbered, "batch", recorded(Numbered.batch, names := []))
    feeder, order = feed(1, 2, pure=True, ahead=ahead, **options)
    stood = torch.default_generator.get_state()
    feeder.micro_batches(order.span(0), Groups(together))
    feeder.fetch_ahead(order.span(31), Groups(together))
    feeder.positions(order.span(31))

    assert torch.equal(torch.default_generator.get_state(), stood)
    assert walked(feeder, order, together) == plain
    assert (sum(name.startswith("fetch") for name in names) > len(names) / 2) is ahead


def test_a_caller_that_goes_elsewhere_gets_what_it_asks_for() -> None:
    """A batch that was fetched ahead and is not the next one is dropped."""
    feeder, order = feed(pure=True, ahead=True)
    feeder.fetch_ahead(order.span(30), Groups(True))
    (elsewhere,) = feeder.micro_batches(order.span(60), Groups(True))

    assert elsewhere.batch.inputs.tolist() == order.rows(order.span(60)).tolist()


def test_what_fails_ahead_is_told_when_it_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the rows; the step under way is not disturbed."""
    feeder, order = feed(pure=True, ahead=True)

    def broken(self: Numbered, rows: np.ndarray) -> Batch:
        raise ValueError("the file is gone")

    monkeypatch.setattr(Numbered, "batch", broken)
    feeder.fetch_ahead(order.span(30), Groups(True))
    feeder.positions(order.span(30))
    with pytest.raises(ValueError, match="the file is gone") as caught:
        feeder.micro_batches(order.span(30), Groups(True))

    assert "of the train split were fetched" in caught.value.__notes__[0]
