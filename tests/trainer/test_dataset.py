"""Any map-style dataset as a split: augmentation belongs to the sample and the epoch, and nobody else's random stream moves."""

import random

import numpy as np
import pandas as pd
import pytest
import torch
from loader_recipes import Augmented
from tiny_recipe import TinyData, recipe

from trainer.dataset import MapSplit, fetch, seed_streams
from trainer.drills import drilled
from trainer.order import Order
from trainer.recipe import Batch
from validation.errors import DataError, RecipeError

N = 40


def split() -> MapSplit:
    """Forty augmented points."""
    points = TinyData(N, 1)
    return MapSplit(Augmented(points), points.frame, points.sample_ids)


def keys(positions: range, data: MapSplit, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    """Rows and keys at positions of a run."""
    order = Order(seed=seed, size=N, epochs=100, global_batch_size=8)
    rows = order.rows(positions)
    return rows, order.keys(positions, data.sample_ids[rows])


def listed(items: list[object], **more: object) -> MapSplit:
    """A split over a plain list, which is a map-style dataset too."""
    return MapSplit(items, pd.DataFrame(index=range(len(items))), **more)


def test_a_sample_does_not_depend_on_its_batch() -> None:
    """Asked together, alone, backwards or after other draws, a sample of an epoch has the same bytes."""
    data = split()
    rows, own = keys(range(5, 25), data)
    together = data.keyed_batch(rows, own)
    torch.randn(3), np.random.rand(), random.random()
    backwards = data.keyed_batch(rows[::-1], own[::-1])

    assert torch.equal(together.inputs, backwards.inputs.flip(0))
    alone = [data.keyed_batch(rows[i : i + 1], own[i : i + 1]).inputs for i in range(20)]
    assert torch.equal(together.inputs, torch.cat(alone))
    assert torch.equal(together.labels, TinyData(N, 1).batch(rows).labels)


def test_no_two_samples_and_no_two_epochs_look_alike() -> None:
    """Over 100 epochs of one point forty times, and another seed, every augmentation that is not blank is another one."""
    points = TinyData(N, 1)
    points.inputs[:] = points.inputs[0]
    data = MapSplit(Augmented(points), points.frame, points.sample_ids)
    asked = (keys(range(100 * N), data), keys(range(100 * N), data, seed=4))
    seen = torch.cat([data.keyed_batch(*pair).inputs for pair in asked])

    kept = seen[seen.abs().sum(dim=1) > 0]
    assert len(kept) > 7000
    assert len(torch.unique(kept, dim=0)) == len(kept)


def test_streams_of_torch_numpy_and_python_are_apart() -> None:
    """The three generators do not draw the same numbers from one key."""
    seed_streams(2**64 - 1)

    assert len({random.random(), float(np.random.rand()), float(torch.rand((), dtype=torch.float64))}) == 3


def test_fetching_moves_no_stream_of_the_caller() -> None:
    """After keyed and plain batches, also one that raises, the caller's draws go on where they were."""
    data = split()

    def draws() -> tuple[float, ...]:
        return float(torch.rand(())), float(np.random.rand()), random.random()

    seed_streams(5)
    expected = [draws() for _ in range(4)]
    seed_streams(5)
    seen = [draws()]
    for asked in (lambda: data.keyed_batch(*keys(range(9), data)), lambda: data.batch(np.arange(3)), lambda: data.batch(np.arange(0))):
        asked()
        seen.append(draws())

    assert seen == expected
    with pytest.raises(IndexError, match="out of bounds"):
        data.keyed_batch(np.array([N]), np.array([1], dtype=np.uint64))
    assert draws() != expected[0]


def test_judging_sees_the_first_epoch_of_seed_zero() -> None:
    """Without keys the same rows give the same bytes every time: those of epoch 0 of seed 0."""
    data = split()
    rows, own = keys(range(N), data, seed=0)

    assert torch.equal(data.batch(rows).inputs, data.batch(rows).inputs)
    assert torch.equal(data.batch(rows).inputs, data.keyed_batch(rows, own).inputs)


def test_samples_may_be_numbers_and_need_no_weight() -> None:
    """Tensors, arrays and numbers are stacked; a missing weight is one; ids default to the row."""
    data = listed([(torch.tensor([1.0, 2.0]), 0), (np.array([3.0, 4.0], dtype=np.float32), 1)])
    batch = data.batch(np.array([1, 0, 1]))

    assert batch.inputs.tolist() == [[3.0, 4.0], [1.0, 2.0], [3.0, 4.0]]
    assert (batch.labels.tolist(), batch.weights.tolist()) == ([1, 0, 1], [1.0, 1.0, 1.0])
    assert data.sample_ids.tolist() == [0, 1]


def test_no_rows_have_the_shape_of_some() -> None:
    """An empty request gives empty tensors of the samples' shape and type; an empty dataset gives empty ones of any."""
    empty = split().batch(np.arange(0))

    assert [(tuple(part.shape), part.dtype) for part in empty] == [((0, 6), torch.float32), ((0,), torch.float32), ((0,), torch.float32)]
    assert [len(part) for part in listed([]).batch(np.arange(0))] == [0, 0, 0]


def test_numbers_of_samples_have_to_agree() -> None:
    """A frame or ids of another length are refused."""
    for frame, ids in ((pd.DataFrame(index=range(3)), None), (pd.DataFrame(index=range(2)), np.arange(3))):
        with pytest.raises(DataError, match="one frame row and one id for each sample"):
            MapSplit([(1.0, 0), (2.0, 1)], frame, ids)


@pytest.mark.parametrize(
    ("items", "said"),
    [
        pytest.param([1.0], r"dataset\[0\] returned a float.*Return \(input, label\)", id="no tuple"),
        pytest.param([(1.0,)], r"dataset\[0\] returned a tuple", id="no label"),
        pytest.param([(torch.ones(2), 0), (torch.ones(3), 0)], r"inputs of dataset\[0\].*dataset\[1\].*\(3,\)", id="shapes"),
        pytest.param([(1.0, 0), (1.0, 0.5)], r"labels of dataset\[0\] are torch.int64", id="types"),
    ],
)
def test_samples_that_make_no_batch_are_named(items: list[object], said: str) -> None:
    """What cannot be stacked is told with its row."""
    with pytest.raises(RecipeError, match=said):
        listed(items).batch(np.arange(len(items)))


class Answers(TinyData):
    """Answers with whatever it was given."""

    def __init__(self, answer: object) -> None:
        super().__init__(4, 1)
        self.answer = answer

    def batch(self, rows: np.ndarray) -> Batch:  # noqa: ARG002
        return self.answer  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        pytest.param(None, "returned a NoneType, not three tensors", id="nothing"),
        pytest.param((torch.ones(3), torch.ones(3)), "returned a tuple, not three tensors", id="two"),
        pytest.param((np.ones(3), torch.ones(3), torch.ones(3)), "not three tensors", id="array"),
        pytest.param((torch.ones(3), torch.ones(2), torch.ones(3)), "3, 2, 3 inputs.* for 3 rows", id="one short"),
    ],
)
def test_batches_that_are_none_are_refused(answer: object, said: str) -> None:
    """What a recipe returns is looked at before it is trained on, and the rows are in the error's notes."""
    with pytest.raises(RecipeError, match=said) as caught:
        fetch(Answers(answer), np.array([2, 0, 1]), np.arange(3, dtype=np.uint64))

    assert caught.value.__notes__ == ["raised while rows 2, 0, 1 of the train split were fetched"]


def test_an_error_names_row_and_sample() -> None:
    """What __getitem__ raises comes out as it is, with its row, sample and batch as notes."""
    data = listed([(1.0, 0)], sample_ids=np.array([77]))
    data._dataset.clear()  # the samples are gone after the split was made
    with pytest.raises(IndexError) as caught:
        fetch(data, np.zeros(20, dtype=np.int64), np.zeros(20, dtype=np.uint64))

    assert caught.value.__notes__[0] == "raised by dataset[0], sample 77"
    assert "and 12 more" in caught.value.__notes__[1]


def test_layouts_without_gaps_stay() -> None:
    """A transposed tensor keeps its strides; one with gaps or repeats is copied to a plain one."""
    turned, gapped = torch.ones(3, 4).t(), torch.ones(4, 6)[:, ::2]
    batch = fetch(Answers(Batch(turned, gapped, torch.ones(1).expand(4))), np.arange(4), np.arange(4, dtype=np.uint64))

    assert [part.stride() for part in batch] == [turned.stride(), (3, 1), (1,)]


def test_a_drill_keeps_the_samples_streams() -> None:
    """Relabelled data is augmented by the same keys; only labels move."""
    data = split()
    rows, own = keys(range(20), data)
    plain, moved = data.keyed_batch(rows, own), fetch(drilled("slice-regression", recipe, data), rows, own)

    assert torch.equal(plain.inputs, moved.inputs)
    assert (plain.labels != moved.labels).sum() == (data.frame["colour"].iloc[rows] == "red").sum()
