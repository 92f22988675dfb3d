"""One rank's training: the same bits at every world size, each sample once, and what happens when numbers or recipes are broken."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_loop import run_attempt, run_job, tiny_job
from safetensors.torch import load_file
from tiny_recipe import TRAIN, recipe

from trainer import runlog
from trainer.config import Fault
from validation.records import CURVE_COLUMNS, DIGEST_COLUMNS, LEDGER_COLUMNS, TIMELINE_COLUMNS


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one rank's whole training; everything is kept and measured."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    run_job(tiny_job(folder, evaluate=True, keep_gradients=9))
    return folder


@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 6, 7, 8])
def test_every_world_size_ends_alike(world_size: int, alone: Path, tmp_path: Path) -> None:
    """W ranks leave the state, ledger, curve, weights and every step's gradients of one rank, bit for bit, on every rank."""
    one = runlog.load_run(alone)
    run = run_job(tiny_job(tmp_path / "run", world_size=world_size, evaluate=True, keep_gradients=9))

    assert set(run.state_sha256_by_rank) == {one.state_sha256}
    assert len(run.state_sha256_by_rank) == world_size
    assert (run.ledger_sha256, run.steps) == (one.ledger_sha256, 9)
    assert runlog.load_curve(tmp_path / "run").equals(runlog.load_curve(alone))
    assert (tmp_path / "run/model.safetensors").read_bytes() == (alone / "model.safetensors").read_bytes()
    digests = [
        runlog.load_digests(folder).groupby(["step", "tensor"])["sha256"].unique().map(tuple) for folder in (alone, tmp_path / "run")
    ]
    assert digests[0].equals(digests[1])


def test_each_sample_comes_once_an_epoch(alone: Path) -> None:
    """The ledger holds every sample once a pass, in the order of positions, the ragged last batch included."""
    ledger = runlog.load_ledger(alone)
    ids = ledger.sort_values("position")["sample_id"].to_numpy().reshape(2, TRAIN)

    assert ledger["position"].is_unique
    assert all(np.array_equal(np.sort(epoch), recipe.data("train").sample_ids) for epoch in ids)
    assert not np.array_equal(ids[0], ids[1])
    assert ledger.groupby("step").size().tolist() == [47] * 8 + [2 * TRAIN - 8 * 47]


def test_tables_have_their_columns(alone: Path) -> None:
    """What gates read has exactly the promised columns, sorted, with one timeline row a step and rank."""
    timeline, ledger, curve, digests = (
        load(alone) for load in (runlog.load_timeline, runlog.load_ledger, runlog.load_curve, runlog.load_digests)
    )

    found = [tuple(table.columns) for table in (timeline, ledger, curve, digests)]
    assert found == [TIMELINE_COLUMNS, LEDGER_COLUMNS, CURVE_COLUMNS, DIGEST_COLUMNS]
    assert timeline["step"].tolist() == list(range(9))
    assert curve["step"].tolist() == [4, 8, 9]
    assert curve["samples"].tolist() == [188, 376, 406]
    assert ledger.equals(ledger.sort_values(["step", "lane", "position"], ignore_index=True))
    assert len(digests) == 9 * 6


def test_phases_add_up_to_the_step(tmp_path: Path) -> None:
    """Every millisecond of a step belongs to one phase; the last rank to arrive waits for nobody."""
    run_job(tiny_job(tmp_path, world_size=2, checkpoint_every=4))
    timeline = runlog.load_timeline(tmp_path)
    phases = timeline[[name for name in TIMELINE_COLUMNS if name.endswith("_ms") and name != "step_ms"]]

    np.testing.assert_allclose(phases.sum(axis=1), timeline["step_ms"], rtol=1e-9)
    assert (phases >= 0).all().all()
    assert (timeline.groupby("step")["wait_ms"].min() == 0).all()
    assert timeline.groupby("step")["samples"].sum().tolist() == [47] * 8 + [30]
    assert (timeline.loc[timeline["step"].isin([3, 7]) & (timeline["rank"] == 0), "checkpoint_ms"] > 0).all()


def test_straggler_shows_as_the_others_wait(tmp_path: Path) -> None:
    """A rank that is late in every forward pass has long forward times; the other one waits for it."""
    slow = Fault(kind="delay", rank=1, step=2, phase="forward", ms=60)
    run_job(tiny_job(tmp_path, world_size=2, faults=(slow,), steps=6))
    late = runlog.load_timeline(tmp_path).query("step >= 2").groupby("rank")[["forward_ms", "wait_ms"]].median()

    assert late.loc[1, "forward_ms"] > 60
    assert late.loc[0, "wait_ms"] > 40
    assert late.loc[1, "wait_ms"] < 20


def test_kept_gradients_are_reduced_and_not_clipped(alone: Path) -> None:
    """gradients.safetensors holds the mean gradient before clipping, and the weights it was taken at."""
    kept = load_file(alone / "gradients.safetensors")
    names = [name for name, _ in recipe.model().named_parameters()]

    assert {f"step{step}/{part}{name}" for step in range(9) for part in ("", "weights/") for name in names} == set(kept)
    torch.manual_seed(recipe.training.seed)
    assert all(torch.equal(kept[f"step0/weights/{name}"], value) for name, value in recipe.model().named_parameters())
    assert torch.cat([kept[f"step0/{name}"].ravel() for name in names]).norm() > 0.05


def test_model_file_is_the_state_dict(alone: Path) -> None:
    """model.safetensors can be loaded strictly into a fresh model."""
    matched = recipe.model().load_state_dict(load_file(alone / "model.safetensors"))

    assert (matched.missing_keys, matched.unexpected_keys) == ([], [])


def test_double_precision_starts_at_the_same_weights(tmp_path: Path) -> None:
    """The float64 leg computes in float64 from the float32 start, with dropout off when asked."""
    run_job(tiny_job(tmp_path, precision="float64", dropout=False, steps=2, keep_gradients=1))
    kept = load_file(tmp_path / "gradients.safetensors")

    assert {value.dtype for value in kept.values()} == {torch.float64}
    assert all(torch.equal(value, value.float().double()) for name, value in kept.items() if "/weights/" in name)


def test_fast_is_close_to_exact_without_dropout(tmp_path: Path) -> None:
    """DDP over 1, 2 and 3 ranks, with empty lanes in the ragged batch, gives the exact gradients within rounding."""
    options = {"recipe": "tiny_recipe:long", "dropout": False, "keep_gradients": 18, "precision": "float64"}
    run_job(tiny_job(tmp_path / "exact", **options))
    exact = load_file(tmp_path / "exact/gradients.safetensors")

    for world_size in (1, 2, 3):
        run = run_job(tiny_job(tmp_path / str(world_size), world_size=world_size, reduction="fast", **options))
        fast = load_file(tmp_path / str(world_size) / "gradients.safetensors")
        assert len(set(run.state_sha256_by_rank)) == 1
        assert all(torch.allclose(fast[name], exact[name], rtol=1e-9, atol=1e-12) for name in exact)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_tiny_last_batch_leaves_lanes_empty(reduction: str, tmp_path: Path) -> None:
    """A last batch of fewer samples than lanes still counts each sample once and nothing else."""
    run_job(tiny_job(tmp_path, recipe="tiny_recipe:stub", world_size=8, reduction=reduction))
    ledger = runlog.load_ledger(tmp_path)

    assert ledger.groupby("step").size().tolist() == [200, 3]
    assert sorted(ledger["sample_id"]) == recipe.data("train").sample_ids.tolist()


def test_steps_end_early_under_the_same_schedule(alone: Path, tmp_path: Path) -> None:
    """`steps` cuts a run short; what it did is the beginning of the whole run. More than there is ends with the data."""
    run_job(tiny_job(tmp_path / "short", steps=3, keep_gradients=3))
    whole, short = (load_file(folder / "gradients.safetensors") for folder in (alone, tmp_path / "short"))

    assert all(torch.equal(value, whole[name]) for name, value in short.items())
    assert run_job(tiny_job(tmp_path / "all", steps=1000)).steps == 9


def test_broken_number_stops_every_rank(tmp_path: Path) -> None:
    """A NaN in one lane stops all ranks before the update, naming step and lane."""
    done = run_attempt(tiny_job(tmp_path, recipe="tiny_recipe:poisoned", world_size=2))

    assert len(done.errors) == 2
    assert all("step 2: the loss sum of lane" in text and "The update was not made" in text for text in done.errors.values())
    assert [item["step"] for item in done.said("step") if item["rank"] == 0] == [1, 2]


def test_job_that_cannot_work_is_refused(tmp_path: Path) -> None:
    """Too many ranks, and defects and drills that nobody wrote, are configuration errors before the first step."""
    wrong = {"defect": "none-such", "drill": "none-such", "world_size": 9}
    for number, (field, value) in enumerate(wrong.items()):
        done = run_attempt(replace(tiny_job(tmp_path / str(number)), **{field: value}))
        assert done.errors
        assert all(text.startswith("ConfigError") for text in done.errors.values()), done.errors


def test_events_tell_the_leader(tmp_path: Path) -> None:
    """Each rank says joined, loaded, its first step and finished; rank 0 says every step."""
    done = run_attempt(tiny_job(tmp_path, world_size=2, steps=3))
    names = {rank: [name for name, fields in done.events if fields["rank"] == rank] for rank in (0, 1)}

    assert names[0] == ["imported", "joined", "loaded", "step", "step", "step", "finished"]
    assert names[1] == ["imported", "joined", "loaded", "step", "finished"]
    assert done.said("step")[0].items() >= {"step": 1, "samples": 47}.items()


def test_warm_up_is_left_out_of_throughput(tmp_path: Path) -> None:
    """Throughput counts samples after the warm-up over the time from its end."""
    slow = Fault(kind="delay", rank=0, step=0, phase="data", ms=0)
    run = run_job(tiny_job(tmp_path, warmup_steps=4, faults=(slow,), steps=8))
    timed = runlog.load_timeline(tmp_path).query("step >= 4")
    seconds = (timed["start_ns"].iloc[-1] - timed["start_ns"].iloc[0] + timed["step_ms"].iloc[-1] * 1e6) / 1e9

    assert run.throughput_sps == pytest.approx(4 * 47 / seconds)
    assert run.machine.device == "cpu"
    assert run.peak_memory_mib > 50
