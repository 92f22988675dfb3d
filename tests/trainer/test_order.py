"""The data order: a bijection a pass, another one each pass, cut into batches and lanes without a gap."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.order import Order, lane_span, permute
from trainer.recipe import Training
from trainer.streams import LANE, SAMPLE, hash64, stream_seed
from validation.errors import ConfigError, DataError

SIZES = st.integers(1, 3000)


@given(seed=st.integers(0, 2**63 - 1), epoch=st.integers(0, 10**6), size=SIZES)
@settings(max_examples=60, deadline=None)
def test_permutation_is_a_bijection(seed: int, epoch: int, size: int) -> None:
    """Every row of a pass comes once, whatever seed, epoch and size."""
    rows = permute(seed, epoch, size, np.arange(size))

    assert np.array_equal(np.sort(rows), np.arange(size))


@given(size=st.integers(1, 2**40), data=st.data())
@settings(max_examples=40, deadline=None)
def test_permutation_is_random_access(size: int, data: st.DataObject) -> None:
    """Any offset can be asked alone and gives what the whole pass gives, also at sizes that no memory holds."""
    offsets = np.array(data.draw(st.lists(st.integers(0, size - 1), min_size=1, max_size=8)))
    together = permute(5, 2, size, offsets)

    assert [int(permute(5, 2, size, offsets[i : i + 1])[0]) for i in range(len(offsets))] == together.tolist()
    assert ((together >= 0) & (together < size)).all()


def test_order_differs_by_epoch_and_seed() -> None:
    """Two passes, and two seeds, agree in no more places than chance."""
    first, again, other = (permute(seed, epoch, 1000, np.arange(1000)) for seed, epoch in ((1, 0), (1, 1), (2, 0)))

    assert (first == again).sum() < 10
    assert (first == other).sum() < 10


def test_order_is_spread_evenly() -> None:
    """A pass has no drift: the first tenth of it draws from all of the data."""
    rows = permute(0, 0, 100_000, np.arange(10_000))

    assert abs(rows.mean() / 50_000 - 1) < 0.02
    assert np.histogram(rows, bins=10, range=(0, 100_000))[0].min() > 850


@given(size=st.integers(1, 200), epochs=st.integers(1, 3), batch=st.integers(1, 70), log_lanes=st.integers(0, 4))
@settings(max_examples=80, deadline=None)
def test_batches_and_lanes_cover_every_position_once(size: int, epochs: int, batch: int, log_lanes: int) -> None:
    """Steps and lanes cut all epochs without a gap or an overlap, across epoch borders and with a ragged end."""
    order, lanes = Order(seed=0, size=size, epochs=epochs, global_batch_size=batch), 2**log_lanes
    spans = [lane_span(order.span(step * batch), lane, lanes) for step in range(order.steps) for lane in range(lanes)]

    assert [position for span in spans for position in span] == list(range(size * epochs))
    assert len(order.span(order.steps * batch)) == 0


@given(size=st.integers(1, 200), epochs=st.integers(1, 3), batch=st.integers(1, 70))
@settings(max_examples=80, deadline=None)
def test_tail_is_trained_on_or_left_out(size: int, epochs: int, batch: int) -> None:
    """With keep each epoch has every row once; with drop exactly the leading full batches are left, position by position."""
    keep = Order(seed=1, size=size, epochs=epochs, global_batch_size=batch)
    rows = np.concatenate([keep.rows(keep.span(step * batch)) for step in range(keep.steps)])

    assert all(np.array_equal(np.sort(epoch), np.arange(size)) for epoch in rows.reshape(epochs, size))
    assert len(keep.span((keep.steps - 1) * batch)) == (size * epochs - 1) % batch + 1
    if size * epochs >= batch:
        drop = replace(keep, tail="drop")
        spans = [drop.span(step * batch) for step in range(drop.steps)]
        assert [len(span) for span in spans] == [batch] * (size * epochs // batch)
        assert np.array_equal(np.concatenate([drop.rows(span) for span in spans]), rows[: drop.steps * batch])
        assert (drop.positions, len(drop.span(drop.positions))) == (drop.steps * batch, 0)


@given(size=st.integers(1, 2**40), epochs=st.integers(1, 4), data=st.data())
@settings(max_examples=40, deadline=None)
def test_order_is_random_access(size: int, epochs: int, data: st.DataObject) -> None:
    """A stretch of positions asked at once gives what each position gives alone, at sizes that no memory holds."""
    order = Order(seed=9, size=size, epochs=epochs, global_batch_size=min(size, 64))
    start = data.draw(st.integers(0, order.positions - 1))
    stretch = range(start, min(start + 40, order.positions))

    assert order.rows(stretch).tolist() == [int(order.rows(range(position, position + 1))[0]) for position in stretch]


@given(size=st.integers(1, 90), start=st.integers(0, 200), length=st.integers(0, 120))
@settings(max_examples=60, deadline=None)
def test_rows_straddle_epochs(size: int, start: int, length: int) -> None:
    """A span over epoch borders gives each position its own epoch's row."""
    order = Order(seed=4, size=size, epochs=10, global_batch_size=8)
    expected = [int(permute(4, p // size, size, np.array([p % size]))[0]) for p in range(start, start + length)]

    assert order.rows(range(start, start + length)).tolist() == expected


@pytest.mark.parametrize("offset", [-1, 10], ids=["below", "at the size"])
def test_offset_out_of_range_is_refused(offset: int) -> None:
    """An offset outside the pass is an error, not a wrapped row."""
    with pytest.raises(DataError, match="Ask for offsets in"):
        permute(0, 0, 10, np.array([offset]))


def test_impossible_orders_are_refused() -> None:
    """No data and no batch are named before the first step."""
    with pytest.raises(DataError, match="Check the recipe's data"):
        Order(seed=0, size=0, epochs=1, global_batch_size=1)
    with pytest.raises(ConfigError, match="Set both to 1 or more"):
        Order(seed=0, size=1, epochs=1, global_batch_size=0)
    with pytest.raises(ConfigError, match="Use tail='keep'"):
        Order(seed=0, size=5, epochs=2, global_batch_size=11, tail="drop")
    with pytest.raises(ConfigError, match="'keep' or 'drop'"):
        Order(seed=0, size=5, epochs=2, global_batch_size=2, tail="cut")  # type: ignore[arg-type]


def test_order_of_a_recipe_follows_its_training() -> None:
    """All that Training says about the order is taken over."""
    training = Training(global_batch_size=4, epochs=3, seed=8, tail="drop")

    assert Order.of(training, 5) == Order(seed=8, size=5, epochs=3, global_batch_size=4, tail="drop")


def test_stream_seeds_are_distinct() -> None:
    """Neighbouring steps and lanes draw from unrelated streams, and no word can be swapped for another."""
    seeds = {stream_seed(seed, step, lane) for seed in range(5) for step in range(20) for lane in range(8)}

    assert len(seeds) == 5 * 20 * 8
    assert stream_seed(3, 4, 5) == stream_seed(3, 4, 5, 0) == hash64(LANE, 3, 4, 5)
    assert len(seeds | {stream_seed(0, step, lane, part) for step in range(20) for lane in range(8) for part in (1, 2)}) == 7 * 20 * 8
    assert hash64(1, 2) != hash64(2, 1)
    assert all(0 <= seed < 2**64 for seed in seeds)


@given(seed=st.integers(0, 2**63 - 1), start=st.integers(0, 10**6), ids=st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))
@settings(max_examples=60, deadline=None)
def test_sample_keys_are_the_hash_of_seed_epoch_and_id(seed: int, start: int, ids: list[int]) -> None:
    """The vectorised keys are hash64's, and know a sample by its id and epoch alone."""
    order = Order(seed=seed, size=7, epochs=10**6, global_batch_size=4)
    keys = order.keys(range(start, start + len(ids)), np.array(ids, dtype=np.int64))

    assert keys.tolist() == [hash64(SAMPLE, seed, (start + i) // 7, sample_id) for i, sample_id in enumerate(ids)]
