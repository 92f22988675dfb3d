"""Audited runs of recipes that train their own way: faults of randomness, of a collective and of its type are in the rows."""

from pathlib import Path
from typing import Any

import pytest
from helpers_loop import run_job, tiny_job
from tiny_recipe import recipe as tiny

from trainer import runlog
from trainer.reference import gradient_errors


def audited(folder: Path, recipe: str, **options: Any) -> Path:
    """The folder of an audited run of two ranks."""
    run_job(tiny_job(folder, **({"recipe": f"audit_recipes:{recipe}", "world_size": 2, "audit": True, "steps": 3} | options)))
    return folder


@pytest.mark.parametrize(("recipe", "is_shared"), [("same_masks", True), ("no_fault", False)])
def test_masks_that_ranks_share_are_seen(recipe: str, is_shared: bool, tmp_path: Path) -> None:
    """Ranks that seed their dropout alike are in equal states, step by step; by default no state comes twice."""
    streams = runlog.load_streams(audited(tmp_path, recipe))
    each = streams.groupby(["generator", "state"])["rank"].nunique()

    assert len(streams) == 2 * 3
    assert set(each) == ({2} if is_shared else {1})


@pytest.mark.parametrize(("recipe", "is_copied"), [("copied_workers", True), ("own_workers", False)])
def test_numpy_copied_into_own_workers_is_seen(recipe: str, is_copied: bool, tmp_path: Path) -> None:
    """The workers of a team's own DataLoader leave what they drew from."""
    streams = runlog.load_streams(audited(tmp_path, recipe, dropout=False)).query("generator == 'numpy'")

    assert set(streams["drawer"]) == {"data"}
    assert streams.duplicated("state").any() == is_copied


@pytest.mark.parametrize(("recipe", "odd"), [("rare_fault", 1), ("no_fault", 0)])
def test_a_soak_finds_a_rare_fault(recipe: str, odd: int, tmp_path: Path) -> None:
    """One collective in twenty loses a rank's part: the legs' three steps pass, one of eighteen repeats has another gradient."""
    folder = audited(tmp_path, recipe, soak=18, dropout=False)
    again = runlog.load_digests(folder).query("stage == 'again'")
    kinds = again.groupby(["rank", "step"])["sha256"].agg(tuple)
    usual = kinds.mode()[0]

    assert len(kinds) == 2 * 18
    assert (kinds != usual).groupby("rank").sum().tolist() == [odd] * 2
    assert runlog.load_updates(folder).groupby("step").size().tolist() == [2] * 3
    assert set(again["tensor"]) == {name for name, _ in tiny.model().named_parameters()}


def test_the_type_of_a_reduction_is_named(tmp_path: Path) -> None:
    """Gradients that travel in half the bits are in the table of collectives."""
    rows = runlog.load_collectives(audited(tmp_path, "half"))

    assert set(zip(rows["operation"], rows["dtype"], strict=True)) == {("all_reduce", "float16"), ("all_reduce", "float64")}
    assert rows["calls"].tolist() == [3] * 4


def test_own_rows_are_complete(tmp_path: Path) -> None:
    """An own path leaves digests before and after clipping, clipped norms, every sample's content once, and its stream in the state."""
    folder = audited(tmp_path, "same_masks")
    digests, updates, consumed = runlog.load_digests(folder), runlog.load_updates(folder), runlog.load_consumed(folder)

    assert set(digests["stage"]) == {"reduced", "clipped", "weight"}
    assert digests.groupby(["step", "stage", "tensor"])["sha256"].nunique().eq(1).all()
    assert updates["norm"].between(0, 0.5000001).all()
    assert len(consumed) == len(runlog.load_ledger(folder))
    assert "stream/torch" in set(runlog.load_states(folder)["name"])


def test_a_gradient_that_another_rank_was_handed_is_not_missing(tmp_path: Path) -> None:
    """Ranks that each update a part of the tensors hand the optimizer nothing for the rest: together it is the whole gradient."""
    folder = audited(tmp_path, "each_its_part", precision="float64", dropout=False, keep_gradients=3)
    run = {"leg": "logic", "world_size": 2, "folder": str(folder), "precision": "float64"}
    errors = gradient_errors("audit_recipes:each_its_part", None, [run], 3)

    assert set(errors["stage"]) == {"reduced", "clipped", "weight"}
    assert (errors["rel_err"] <= 8 * errors["noise"]).all()
