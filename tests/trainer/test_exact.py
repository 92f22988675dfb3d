"""The same bits with everything on: at every world size, for both ways to lay the model out, and on both ways of one lane's parts."""

import re
from pathlib import Path

import pytest
import torch
from hard_recipes import ALL_ON
from helpers_loop import run_attempt, run_job, tiny_job
from safetensors.torch import load_file

from trainer import fast, runlog
from trainer.recording import SWITCH
from validation.records import RunRecord

LAYOUTS = [("ddp", w) for w in (2, 3, 4, 5, 6, 7, 8)] + [("fsdp2", w) for w in (2, 4, 8)]
IDS = [f"{parallel} W={world_size}" for parallel, world_size in LAYOUTS]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """One rank trains the recipe with everything on."""
    return run_job(tiny_job(tmp_path_factory.mktemp("alone") / "run", recipe="hard_recipes:everything", keep_gradients=3, evaluate=True))


@pytest.mark.parametrize(("parallel", "world_size"), LAYOUTS, ids=IDS)
def test_everything_on_ends_alike(parallel: str, world_size: int, alone: RunRecord, tmp_path: Path) -> None:
    """Dropout, BatchNorm, clipping, accumulation, decay groups, schedule, averaging, bfloat16 and sample weights: still one state."""
    options = {"keep_gradients": 3, "evaluate": True, "parallel": parallel, "world_size": world_size}
    run = run_job(tiny_job(tmp_path, recipe="hard_recipes:everything", **options))

    assert set(run.state_sha256_by_rank) == {alone.state_sha256}
    assert (run.ledger_sha256, run.parallel, run.steps) == (alone.ledger_sha256, parallel, alone.steps)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_recording_changes_no_bit(reduction: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks that write down every operation, and two that write down nothing."""
    ends = set()
    for switch in ("on", "off"):
        monkeypatch.setenv(SWITCH, switch)
        run = run_job(tiny_job(tmp_path / switch, recipe="hard_recipes:everything", world_size=2, reduction=reduction))
        ends.add((run.state_sha256, run.ledger_sha256))
        assert any((tmp_path / switch / "flight").glob("*.ring")) == (switch == "on")

    assert len(ends) == 1


@pytest.mark.parametrize(("parallel", "world_size"), [("fsdp2", 2), ("ddp", 3)], ids=["fsdp2", "ddp"])
def test_what_is_left_behind_is_alike(parallel: str, world_size: int, tmp_path: Path) -> None:
    """Weights that serve, kept gradients and the quality curve do not tell how the model was laid out."""
    folders = [tmp_path / "alone", tmp_path / parallel]
    for folder, layout in zip(folders, ({}, {"parallel": parallel, "world_size": world_size}), strict=True):
        run_job(tiny_job(folder, recipe="hard_recipes:everything", keep_gradients=2, evaluate=True, steps=4, **layout))

    assert runlog.load_curve(folders[0]).equals(runlog.load_curve(folders[1]))
    for name in ("model", "gradients"):
        one, other = (load_file(folder / f"{name}.safetensors") for folder in folders)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ragged_batches_are_sharded_alike(world_size: int, tmp_path: Path) -> None:
    """Indivisible batches and a last one with empty lanes end alike under FSDP2, too; its ledger holds each sample once."""
    plain = run_job(tiny_job(tmp_path / "alone", recipe="tiny_recipe:stub"))
    run = run_job(tiny_job(tmp_path / "run", recipe="tiny_recipe:stub", world_size=world_size, parallel="fsdp2"))

    assert set(run.state_sha256_by_rank) == {plain.state_sha256}
    assert run.ledger_sha256 == plain.ledger_sha256


@pytest.mark.parametrize("recipe", ["flagged", "woven", "parted"])
@pytest.mark.parametrize(("parallel", "world_size"), [("ddp", 3), ("fsdp2", 4)])
def test_odd_models_end_alike(recipe: str, parallel: str, world_size: int, tmp_path: Path) -> None:
    """Flags that move, nested, shared and tied blocks, layers that some samples use, more parts than samples: one result."""
    options = {"recipe": f"hard_recipes:{recipe}", "steps": 4}
    alone = run_job(tiny_job(tmp_path / "alone", **options))
    run = run_job(tiny_job(tmp_path / "run", world_size=world_size, parallel=parallel, **options))

    assert set(run.state_sha256_by_rank) == {alone.state_sha256}


def test_a_block_that_some_samples_use_is_refused_on_shards(tmp_path: Path) -> None:
    """Ranks that run different blocks would mix their weights: the rank that differs says so before anything is exchanged."""
    attempt = run_attempt(tiny_job(tmp_path, recipe="hard_recipes:chosen", world_size=2, parallel="fsdp2"))

    assert any("--parallel ddp" in text for text in attempt.errors.values()), attempt.errors
    assert 0 not in attempt.exitcodes


def test_averaged_weights_serve(tmp_path: Path) -> None:
    """With ema_decay the weights left for serving are the averages, not the last ones, and lie between start and end."""
    run_job(tiny_job(tmp_path, recipe="hard_recipes:averaged", keep_gradients=6, steps=6))
    served, kept = load_file(tmp_path / "model.safetensors"), load_file(tmp_path / "gradients.safetensors")
    average = kept["step0/weights/0.weight"].clone()
    for step in range(1, 6):
        average.lerp_(kept[f"step{step}/weights/0.weight"], 0.1)

    assert not torch.equal(served["0.weight"], kept["step5/weights/0.weight"])
    assert (served["0.weight"] - average).abs().max() < (kept["step5/weights/0.weight"] - kept["step0/weights/0.weight"]).abs().max()


def test_accumulation_changes_memory_and_not_the_sum(tmp_path: Path) -> None:
    """Parts of a lane add up to its gradient within rounding, with dropout off."""
    found = []
    for name in ("tiny_recipe:recipe", "hard_recipes:accumulated"):
        folder = tmp_path / name.rpartition(":")[2]
        run_job(tiny_job(folder, recipe=name, steps=1, keep_gradients=1, dropout=False))
        found.append(load_file(folder / "gradients.safetensors"))

    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-4, atol=1e-6)


def test_overflow_skips_the_update_everywhere(tmp_path: Path) -> None:
    """A float16 loss scale that is too large is halved until nothing overflows; the skipped step consumes its batch on all ranks."""
    one, two = (run_job(tiny_job(tmp_path / f"w{w}", recipe="hard_recipes:half", world_size=w, steps=5)) for w in (1, 2))
    ledger = runlog.load_ledger(tmp_path / "w2")

    assert set(two.state_sha256_by_rank) == {one.state_sha256}
    assert ledger["step"].nunique() == 5


@pytest.mark.parametrize(
    ("recipe", "options", "advice"),
    [
        ("tiny_recipe:recipe", {"world_size": 3, "parallel": "fsdp2"}, "power of two"),
        ("hard_recipes:scalar", {"world_size": 2, "parallel": "fsdp2"}, r"shape \(1,\)"),
        ("hard_recipes:mixing", {"world_size": 2, "parallel": "fsdp2"}, "Adafactor"),
        ("hard_recipes:fused", {"world_size": 2, "parallel": "fsdp2"}, "Leave out fused"),
        ("hard_recipes:small", {"world_size": 2, "parallel": "fsdp2"}, "Keep weights in float32"),
        ("hard_recipes:lonely", {"world_size": 1}, "fewer|drop"),
    ],
    ids=["three ranks", "a scalar parameter", "a mixing optimizer", "a fused kernel", "small weights", "micro-batches of one"],
)  # fmt: skip
def test_what_cannot_be_exact_is_refused(recipe: str, options: dict[str, object], advice: str, tmp_path: Path) -> None:
    """What would change bits with the number of ranks is refused before the first step, with what to use instead."""
    attempt = run_attempt(tiny_job(tmp_path, recipe=recipe, **options))

    assert any(re.search(advice, text) for text in attempt.errors.values()), attempt.errors
    assert not attempt.said("step")


@pytest.mark.parametrize(
    ("recipe", "options", "advice"),
    [
        ("hard_recipes:mixed", {"world_size": 2}, "Let data.. depend on its argument alone"),
        ("hard_recipes:choosy", {"world_size": 2, "reduction": "fast"}, "Train with --reduction exact"),
        ("hard_recipes:listing", {"world_size": 1, "checkpoint_every": 100}, "cannot hold|JSON"),
    ],
    ids=["other data on each rank", "a parameter that some batches use", "a state that no checkpoint holds"],
)  # fmt: skip
def test_what_would_go_wrong_later_is_told_early(
    recipe: str, options: dict[str, object], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mixed data, parameters that some batches use under DDP, and states that no checkpoint holds end the run at once, with a way out."""
    monkeypatch.setattr(fast, "ONE_BUCKET_BYTES", 0)  # before the ranks are forked
    attempt = run_attempt(tiny_job(tmp_path, recipe=recipe, **options))

    assert any(re.search(advice, text) for text in attempt.errors.values()), attempt.errors
    assert len(attempt.said("step")) <= 2


def test_all_on_means_all() -> None:
    """The recipe of this file really has everything on."""
    assert ALL_ON.accumulation > 1
    assert None not in (ALL_ON.clip_norm, ALL_ON.ema_decay)
    assert ALL_ON.autocast
