"""A recipe as plain values: the data digest covers what the model sees."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import tiny_recipe
from tiny_recipe import recipe

from trainer.describe import describe
from trainer.recipe import SplitData
from validation.errors import DataError, RecipeError


def digest_with(monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, data: object) -> str:
    monkeypatch.setattr(type(recipe), "data", data)
    return describe(f"tiny_recipe:{name}", str(folder)).data_sha256


def test_a_changed_input_changes_the_data_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Same ids, same frame, one other pixel: other data."""
    load = type(recipe).data

    def nudged(self: object, split: str) -> SplitData:
        data = load(self, split)
        data.inputs[0, 0] += 1.0
        return data

    before = describe("tiny_recipe:recipe", str(tmp_path)).data_sha256
    same = describe("tiny_recipe:recipe", str(tmp_path)).data_sha256

    assert before == same
    assert before != digest_with(monkeypatch, tmp_path, "recipe", nudged)


def test_a_loader_that_raises_is_the_recipes_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any exception of data() becomes a RecipeError that names it."""

    def broken(self: object, split: str) -> SplitData:
        raise ValueError("no such table")

    with pytest.raises(RecipeError, match="no such table"):
        digest_with(monkeypatch, tmp_path, "recipe", broken)


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (lambda rows: [rows.tolist()] * 3, r"data\('train'\).batch\(rows\) returned a list, not three tensors"),
        (lambda rows: rows[0] / "x", r"data\('train'\).batch\(rows\) raised .*Mend the recipe's loader"),
    ],
)
def test_a_batch_that_cannot_be_fetched_is_the_recipes_fault(
    batch: Callable[[npt.NDArray[np.int64]], object], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensors, and any exception of batch(), become a RecipeError before anything is run."""
    load = type(recipe).data

    def broken(self: object, split: str) -> SplitData:
        data = load(self, split)
        data.batch = batch
        return data

    with pytest.raises(RecipeError, match=f"(?s){said}"):
        digest_with(monkeypatch, tmp_path, "recipe", broken)


def test_inputs_of_a_type_that_numpy_lacks_have_a_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bfloat16 inputs are told apart by their bytes."""
    load = type(recipe).data

    def halved(self: object, split: str) -> SplitData:
        data = load(self, split)
        fetch = data.batch
        data.batch = lambda rows: fetch(rows)._replace(inputs=fetch(rows).inputs.bfloat16())
        return data

    before = describe("tiny_recipe:recipe", str(tmp_path)).data_sha256

    assert before != digest_with(monkeypatch, tmp_path, "recipe", halved)


def test_ids_beyond_int64_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A ledger holds int64: an unsigned id of 64 bits would come out as another one."""
    load = type(recipe).data

    def hashed(self: object, split: str) -> SplitData:
        data = load(self, split)
        data.sample_ids = data.sample_ids.astype(np.uint64) + np.uint64(2**63)
        return data

    with pytest.raises(DataError, match="more than 9223372036854775807"):
        digest_with(monkeypatch, tmp_path, "recipe", hashed)


def test_objects_in_a_frame_are_refused_by_column(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A column of dicts has no digest."""
    load = type(recipe).data

    def nested(self: object, split: str) -> SplitData:
        data = load(self, split)
        data.frame["colour"] = [{} for _ in range(len(data))]
        return data

    with pytest.raises(DataError, match="'colour' holds dict objects"):
        digest_with(monkeypatch, tmp_path, "recipe", nested)


@pytest.mark.parametrize(("tail", "steps"), [("keep", 9), ("drop", 8)])
def test_steps_follow_the_tail(tail: str, steps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The steps of a training count its last, smaller batch only when it is kept."""
    monkeypatch.setattr(tiny_recipe, "recipe", replace(recipe, training=replace(recipe.training, tail=tail)))

    assert describe("tiny_recipe:recipe", str(tmp_path)).steps == steps


@pytest.mark.parametrize("name", ["augmented0", "jitter0"])
def test_random_data_has_one_digest(name: str, tmp_path: Path) -> None:
    """Augmentation, and draws for a whole batch, do not make other data of the same one."""
    digests = {describe(f"loader_recipes:{name}", str(tmp_path)).data_sha256 for _ in range(2)}

    assert len(digests) == 1


def test_sample_ids_twice_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows of one id, in either split, are refused before anything of a release exists."""
    load = type(recipe).data

    def doubled(self: object, split: str) -> SplitData:
        data = load(self, split)
        if split == "judge":
            data.sample_ids[1] = data.sample_ids[0]
        return data

    with pytest.raises(DataError, match=r"1 sample ids of split 'judge' stand for several \(1000\)"):
        digest_with(monkeypatch, tmp_path, "recipe", doubled)


def test_length_that_a_fetch_changes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples that are left out while they are fetched make another length afterwards: refused."""
    load = type(recipe).data

    def shrinking(self: object, split: str) -> SplitData:
        data = load(self, split)
        fetch = data.batch

        def batch(rows: object) -> object:
            found = fetch(rows)
            data.inputs = data.inputs[:-1]
            return found

        data.batch = batch
        return data

    with pytest.raises(DataError, match="length of split 'train' changes: 203 and then 202"):
        digest_with(monkeypatch, tmp_path, "recipe", shrinking)
