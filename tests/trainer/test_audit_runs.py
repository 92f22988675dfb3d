"""Whole audited runs of real ranks: the same rows at every world size, nothing lost or doubled by a death, and the cost of an audit."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers_loop import run_attempt, run_job, tiny_job
from safetensors.torch import load_file
from tiny_recipe import recipe

from trainer import runlog
from trainer.audit import content_digests
from trainer.audit_tables import AUDIT_TABLES
from trainer.config import Fault, Poison
from validation.records import STAGES

NAMES = [name for name, _ in recipe.model().named_parameters()]
STEPS = 6  # the fifth crosses from the first epoch to the second


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one audited rank's training, dropout on."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_job(tiny_job(folder, audit=True, keep_gradients=2, steps=STEPS))
    return folder


def by_stage(folder: Path) -> pd.Series:
    """(step, stage, tensor) -> every digest that any rank left."""
    return runlog.load_digests(folder).groupby(["step", "stage", "tensor"])["sha256"].unique().map(tuple)


@pytest.mark.parametrize(
    "options", [{"world_size": 2}, {"world_size": 4}, {"world_size": 2, "parallel": "fsdp2"}], ids=["two", "four", "sharded"]
)
def test_every_layout_leaves_the_same_rows(options: dict[str, Any], alone: Path, tmp_path: Path) -> None:
    """Every stage of every tensor has one digest over all ranks and world sizes, samples are the same set, no stream is used twice."""
    run_job(tiny_job(tmp_path, audit=True, keep_gradients=2, steps=STEPS, **options))
    one, many = runlog.load_consumed(alone), runlog.load_consumed(tmp_path)
    sets = [Counter(zip(table["step"], table["sample_id"], table["content"], strict=True)) for table in (one, many)]
    streams, updates = runlog.load_streams(tmp_path), runlog.load_updates(tmp_path)

    assert by_stage(tmp_path).equals(by_stage(alone))
    assert by_stage(tmp_path).map(len).eq(1).all()
    assert sets[0] == sets[1]
    assert set(streams["generator"]) == {"torch"}
    assert not streams.duplicated(["generator", "state"]).any()
    assert updates.groupby("step")[["rates", "norm", "moved", "still"]].nunique().eq(1).all().all()
    assert updates.groupby("step")["weight"].sum().tolist() == pytest.approx(runlog.load_updates(alone)["weight"].tolist())
    carried = {"float32", "int64"} if len(options) == 1 else {"float32", "float64"}  # steps go over the wire, rows through memory
    assert set(runlog.load_collectives(tmp_path)["dtype"]) == carried


def test_a_run_tells_what_it_did(alone: Path) -> None:
    """Digests of every stage, clipped norms within their limit, a rate that falls, weights that all moved, contents of the very samples."""
    digests, updates, consumed = runlog.load_digests(alone), runlog.load_updates(alone), runlog.load_consumed(alone)
    data = recipe.data("train")
    rows = {sample_id: row for row, sample_id in enumerate(data.sample_ids.tolist())}
    contents = content_digests(data.batch(np.array([rows[sample_id] for sample_id in consumed["sample_id"]])))

    assert set(digests["stage"]) == set(STAGES[:3])
    assert digests.groupby(["step", "stage"])["tensor"].apply(list).map(lambda names: names == NAMES).all()
    assert updates["norm"].between(0.1, 0.5000001).all()
    assert (updates["limit"] == 0.5).all()
    assert updates["rates"].nunique() == STEPS
    assert (updates["moved"] > 0).all()
    assert set(updates["still"]) == {"[]"}
    assert consumed["content"].tolist() == contents
    assert consumed["sample_id"].tolist() == runlog.load_ledger(alone)["sample_id"].tolist()
    assert set(runlog.load_states(alone)["moment"]) == {"end"}


def test_tensors_are_kept_in_four_forms(alone: Path) -> None:
    """gradients.safetensors of an audited run has gradients before and after clipping, weights before and after the update."""
    kept = load_file(alone / "gradients.safetensors")

    assert set(kept) == {f"step{step}/{part}{name}" for step in (0, 1) for part in ("", "weights/", "clipped/", "after/") for name in NAMES}
    assert all(kept[f"step0/after/{name}"].equal(kept[f"step1/weights/{name}"]) for name in NAMES)


def test_an_audit_changes_no_bit(alone: Path, tmp_path: Path) -> None:
    """The same run without an audit ends in the same state and leaves none of its tables, though they can be read."""
    run = run_job(tiny_job(tmp_path, steps=STEPS))
    tables = {name: getattr(runlog, f"load_{name}")(tmp_path) for name in AUDIT_TABLES}

    assert run.state_sha256 == runlog.load_run(alone).state_sha256
    assert all(table.empty and tuple(table.columns) == AUDIT_TABLES[name].columns for name, table in tables.items())


def test_double_legs_have_the_samples_of_single_ones(alone: Path, tmp_path: Path) -> None:
    """In float64 the samples were cast; their digests are those of the float32 run."""
    run_job(tiny_job(tmp_path, audit=True, precision="float64", dropout=False, steps=STEPS))

    assert runlog.load_consumed(tmp_path).equals(runlog.load_consumed(alone))
    assert runlog.load_streams(tmp_path).empty


def test_a_death_neither_loses_nor_doubles_rows(alone: Path, tmp_path: Path) -> None:
    """A killed run that went on has the rows of one that was not killed; its states say what was saved and what came back."""
    kill = Fault(kind="kill", rank=1, step=5, phase="backward")
    run = run_job(tiny_job(tmp_path, world_size=2, audit=True, steps=STEPS, checkpoint_every=2, faults=(kill,), max_restarts=1))
    states = runlog.load_states(tmp_path)
    saved, loaded = (states[(states["moment"] == moment) & (states["step"] == 4)] for moment in ("saved", "loaded"))

    assert run.attempts == 2
    assert by_stage(tmp_path).equals(by_stage(alone))
    assert runlog.load_updates(tmp_path).groupby("step").size().tolist() == [2] * STEPS
    assert runlog.load_consumed(tmp_path)["sample_id"].size == runlog.load_consumed(alone)["sample_id"].size
    assert saved["attempt"].unique().tolist() == [0]
    assert loaded["attempt"].unique().tolist() == [1]
    assert loaded[["rank", "name", "sha256"]].to_numpy().tolist() == saved[["rank", "name", "sha256"]].to_numpy().tolist()
    assert {"plain/position", "plain/schedule/last_epoch", "optimizer/0.weight/exp_avg"} <= set(saved["name"])


def test_an_overflow_on_one_rank_stops_all(tmp_path: Path) -> None:
    """An infinite loss of one rank ends every rank before the update."""
    done = run_attempt(tiny_job(tmp_path, world_size=2, poison=Poison(kind="overflow", rank=1, step=2)))

    assert len(done.errors) == 2
    assert all("step 2: the loss sum of lane 4 is inf" in text for text in done.errors.values())


def test_a_spike_is_used_by_all(tmp_path: Path) -> None:
    """One bad micro-batch is marked, and all ranks make the same update of it."""
    run = run_job(tiny_job(tmp_path, world_size=2, audit=True, steps=3, poison=Poison(kind="spike", rank=1, step=1)))
    poisoned = runlog.load_consumed(tmp_path).query("poisoned")

    assert len(set(run.state_sha256_by_rank)) == 1
    assert set(zip(poisoned["rank"], poisoned["step"], poisoned["micro"], strict=True)) == {(1, 1, 0)}


def test_a_sound_soak_has_one_gradient(alone: Path, tmp_path: Path) -> None:
    """Every repeat hands over the same bits on every rank, which are those of the last update; the run ends as without a soak."""
    run = run_job(tiny_job(tmp_path, world_size=2, audit=True, keep_gradients=2, steps=STEPS, soak=5))
    digests = runlog.load_digests(tmp_path)
    again, last = digests.query("stage == 'again'"), digests.query(f"stage == 'clipped' and step == {STEPS - 1}")

    assert sorted(again["step"].unique()) == list(range(5))
    assert set(zip(again["tensor"], again["sha256"], strict=True)) == set(zip(last["tensor"], last["sha256"], strict=True))
    assert run.state_sha256 == runlog.load_run(alone).state_sha256
    assert runlog.load_ledger(tmp_path).equals(runlog.load_ledger(alone))
    assert runlog.load_timeline(tmp_path).groupby("step").size().tolist() == [2] * STEPS
    assert runlog.load_updates(tmp_path).groupby("step").size().tolist() == [2] * STEPS


def test_a_soak_with_workers_that_draw_uses_no_stream_twice(tmp_path: Path) -> None:
    """Loader workers that start anew for a soak fetch again what was fetched ahead: that counts once."""
    run_job(tiny_job(tmp_path, recipe="loader_recipes:jitter2", audit=True, steps=3, soak=2))
    streams = runlog.load_streams(tmp_path)

    assert set(streams["drawer"]) == {"data", "model"}
    assert not streams.duplicated(["generator", "state"]).any()
