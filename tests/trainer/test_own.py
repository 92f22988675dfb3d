"""Training with parts that a recipe brings: their weights are the trainer's own within rounding, and what cannot work is refused."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import own_recipes
import pytest
import torch
from helpers_loop import run_attempt, run_job, tiny_job
from own_recipes import Clipper, Saved, plain
from safetensors.torch import load_file
from tiny_recipe import JUDGE
from torch import Tensor, nn

from trainer import runlog
from trainer.config import STEP_PHASES, WINDOW_PHASES, Fault, Poison
from trainer.describe import describe
from trainer.hooks import Hooks, brought
from trainer.own import Losses, _offset, check_held
from trainer.own_data import Taken
from trainer.recipe import Batch, load_recipe
from validation.errors import RecipeError
from validation.records import RunRecord

DOUBLE = {"precision": "float64", "dropout": False}


def trained(folder: Path, name: str, **options: Any) -> tuple[RunRecord, dict[str, Tensor]]:
    """A whole run of an own recipe in float64 without dropout, and its served weights."""
    folder = folder / f"{name}-{options.get('world_size', 1)}"
    run = run_job(tiny_job(folder, recipe=f"own_recipes:{name}", **DOUBLE, **options))
    return run, load_file(folder / "model.safetensors")


def furthest(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the same training without hooks."""
    folder = tmp_path_factory.mktemp("exact")
    trained(folder, "plain")
    trained(folder, "plain_averaged")
    return folder


@pytest.mark.parametrize(
    ("name", "world_size"), [("clipper", 1), ("clipper", 2), ("clipper", 3), ("ddp", 2), ("ddp", 3), ("cutting", 2), ("in_order", 2)]
)
def test_own_parts_end_in_the_same_weights(name: str, world_size: int, exact: Path, tmp_path: Path) -> None:
    """Right hooks leave the trainer's own weights within rounding, at every world size, the same on every rank."""
    run, weights = trained(tmp_path, name, world_size=world_size)

    assert (run.reduction, run.steps, len(set(run.state_sha256_by_rank))) == ("own", 9, 1)
    assert furthest(weights, load_file(exact / "plain-1/model.safetensors")) < 1e-12


@pytest.mark.parametrize(("name", "world_size"), [("averaged", 2), ("fsdp", 2), ("fsdp", 3)])
def test_averaged_weights_are_kept(name: str, world_size: int, exact: Path, tmp_path: Path) -> None:
    """The moving average serves as ever, sharded or not; the quality is measured with it."""
    _, weights = trained(tmp_path, name, world_size=world_size, evaluate=True)

    assert furthest(weights, load_file(exact / "plain_averaged-1/model.safetensors")) < 1e-12
    assert len(runlog.load_curve(tmp_path / f"{name}-{world_size}")) == 3


def test_ledger_is_the_order_of_the_trainer(exact: Path, tmp_path: Path) -> None:
    """Without an own sampler the ledger has the true lanes and positions."""
    trained(tmp_path, "clipper", world_size=3)

    assert runlog.load_ledger(tmp_path / "clipper-3").equals(runlog.load_ledger(exact / "plain-1"))


def test_dropout_draws_differ_and_replicas_do_not(tmp_path: Path) -> None:
    """With dropout and a smaller type all ranks still hold the same weights; a second run has the same bits."""
    runs = [run_job(tiny_job(tmp_path / name, recipe="own_recipes:averaged", world_size=2, steps=4)) for name in ("one", "two")]

    assert len({digest for run in runs for digest in run.state_sha256_by_rank}) == 1


def test_phases_add_up_and_faults_strike_in_all(tmp_path: Path) -> None:
    """Every phase of an own step can be struck once, the accumulation window too, and a straggler's time is its own."""
    phases = [*STEP_PHASES, *WINDOW_PHASES]
    faults = tuple(Fault(kind="delay", rank=1, step=1, phase=phase, ms=1 + 40 * (phase == "forward")) for phase in phases)
    job = tiny_job(tmp_path, recipe="own_recipes:ddp", world_size=2, steps=4, faults=faults)
    done = run_attempt(job)
    assert not done.errors, done.errors
    runlog.collect(job, attempts=1, recoveries=(), faults_fired=(), seconds=1.0, world_sizes=(2,))
    timeline = runlog.load_timeline(tmp_path)
    late = timeline.query("step >= 2").groupby("rank")[["forward_ms", "wait_ms"]].median()

    assert {item["fault"].split("phase=")[1].split(",")[0] for item in done.said("fault")} == set(phases)
    ms = timeline[[name for name in timeline.columns if name.endswith("_ms") and name != "step_ms"]]
    np.testing.assert_allclose(ms.sum(axis=1), timeline["step_ms"], rtol=1e-9)
    assert timeline.groupby("step")["samples"].sum().tolist() == [47] * 4
    assert late.loc[1, "forward_ms"] > 40
    assert late.loc[0, "wait_ms"] > 20


def test_step_that_does_nothing_is_left_to_the_gates(tmp_path: Path) -> None:
    """A step without loss, gradient or update ends the run as it began, and planned faults fire all the same."""
    faults = tuple(Fault(kind="delay", rank=0, step=2, phase=phase) for phase in STEP_PHASES)
    done = run_attempt(tiny_job(tmp_path, recipe="own_recipes:idle", steps=3, faults=faults))
    torch.manual_seed(plain.training.seed)

    assert not done.errors
    assert len(done.said("fault")) == len(STEP_PHASES)
    assert furthest(load_file(tmp_path / "model.safetensors"), dict(plain.model().state_dict())) == 0.0


def test_hook_that_raises_is_named(tmp_path: Path) -> None:
    """A rank whose hook raises says which one, where and when; its peers only lose it."""
    done = run_attempt(tiny_job(tmp_path, recipe="own_recipes:failing", world_size=2, stall_s=5.0))

    assert "ValueError: no such norm" in done.errors[1]
    assert "raised in the recipe's own hooks.clip on rank 1, at step 2" in done.errors[1]
    assert "hooks." not in done.errors.get(0, "")


def test_sampler_that_ends_on_one_rank_is_told(tmp_path: Path) -> None:
    """The rank whose data is used up says so, before the others give up waiting for it."""
    done = run_attempt(tiny_job(tmp_path, recipe="own_recipes:uneven", world_size=2, stall_s=2.0))

    assert "RankError: rank 1: its data was used up after 4 updates, and others went on" in done.errors[1]


@pytest.mark.parametrize("name", ["clipper", "fsdp"])
def test_infinite_loss_stops_all_ranks(name: str, tmp_path: Path) -> None:
    """The default update makes no step with a gradient that is not finite, whichever rank it comes from."""
    poison = Poison(kind="overflow", rank=1, step=2)
    done = run_attempt(tiny_job(tmp_path, recipe=f"own_recipes:{name}", world_size=2, poison=poison, stall_s=5.0))

    assert all("step 2: the gradient handed to the optimizer is not finite" in text for text in done.errors.values()), done.errors
    assert len(done.errors) == 2
    assert [item["step"] for item in done.said("step") if item["rank"] == 0] == [1, 2]


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("copied", {}, "without 6 of the model's parameters"),
        ("nothing", {}, "hooks.wrap returned a NoneType"),
        ("unreduced", {"world_size": 2}, "Bring hooks.gradients, too"),
        ("early", {"world_size": 2}, "It was built before hooks.wrap replaced them"),
        ("scaled", {}, "Bring hooks.step with a scaler of your own"),
        ("clipper", {"parallel": "fsdp2", "world_size": 2}, "Shard in hooks.wrap"),
        ("stateless", {}, "without take, state_dict, load_state_dict"),
        ("outside", {}, "hooks.sampler gave rows of type int64"),
        ("empty", {"checkpoint_every": 1}, "hooks.save left no file"),
    ],
)
def test_what_cannot_work_is_refused(name: str, options: dict[str, Any], words: str, tmp_path: Path) -> None:
    """Parts that cannot work are mistakes of the input, told with the way out."""
    done = run_attempt(tiny_job(tmp_path, recipe=f"own_recipes:{name}", stall_s=5.0, **options))

    assert done.errors
    assert any(words in text for text in done.errors.values()), done.errors
    assert all(text.startswith(("RecipeError", "ConfigError")) for text in done.errors.values()), done.errors


class Half(Clipper):
    """Saves and cannot load; misspells a hook and takes too little."""

    save = Saved.save

    def gradient(self, step: Any) -> None: ...

    def update(self) -> None: ...  # type: ignore[override]


@pytest.mark.parametrize(
    ("members", "words"),
    [
        ({"hooks": Clipper}, "hooks is the class Clipper"),
        ({"hooks": object()}, "hooks is a object"),
        ({"hooks": Half()}, r"hooks.load\(\) is missing"),
        ({"hooks": Half()}, r"hooks.gradient\(\) is no hook .*did you mean gradients"),
        ({"hooks": Half()}, r"hooks.update\(\) .*does not take 1 argument"),
        ({"excludes": {"clipping": 3}}, "excludes has to map names"),
        ({"excludes": ("clipping",)}, "excludes has to map names"),
    ],
)
def test_wrong_members_are_told_when_a_recipe_is_loaded(members: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks and excludes are checked with all other members."""
    monkeypatch.setattr(own_recipes, "plain", replace(plain, **members))

    with pytest.raises(RecipeError, match=words):
        load_recipe("own_recipes:plain")


def test_only_overridden_hooks_count_as_brought() -> None:
    """Names come in the order of a run; inherited overrides count, the defaults do not."""
    assert brought(None) == brought(Hooks()) == ()
    assert brought(own_recipes.SavedSampled()) == ("sampler", "save", "load")


def test_describe_names_what_was_brought(tmp_path: Path) -> None:
    """The process that decides learns which parts of the trainer it judges."""
    assert describe("own_recipes:saved_sampled", str(tmp_path)).brought == ("sampler", "save", "load")


@pytest.mark.parametrize("name", ["plain", "clipper", "sampled", "loaded"])
def test_soak_leaves_the_run_as_it_was(name: str, tmp_path: Path) -> None:
    """Repeats of the last update find the same samples, and the run ends in the state and with the rows of one without them."""
    options: dict[str, Any] = {"recipe": f"own_recipes:{name}", "world_size": 2, "steps": 3, "audit": True}
    one, other = (run_job(tiny_job(tmp_path / str(soak), soak=soak, **options)) for soak in (0, 2))

    assert one.state_sha256_by_rank == other.state_sha256_by_rank
    assert one.ledger_sha256 == other.ledger_sha256


@pytest.mark.parametrize("name", ["plain", "clipper"])
def test_death_inside_an_accumulation_window(name: str, tmp_path: Path) -> None:
    """Killed between two micro-batches of a step, a run ends in its twin's bits, ours and own."""
    options: dict[str, Any] = {"recipe": f"own_recipes:{name}", "world_size": 2, "checkpoint_every": 2, "steps": 5}
    kill = Fault(kind="kill", rank=1, step=3, phase="accumulation")
    killed = run_job(tiny_job(tmp_path / "killed", faults=(kill,), max_restarts=1, **options))
    twin = run_job(tiny_job(tmp_path / "twin", **options))

    assert killed.faults_fired == (str(kill),)
    assert killed.state_sha256_by_rank == twin.state_sha256_by_rank


def test_own_order_ends_with_a_point_of_the_curve(tmp_path: Path) -> None:
    """A sampler that ends between two points of the quality curve still leaves the last one."""
    run = run_job(tiny_job(tmp_path, recipe="own_recipes:short", evaluate=True))

    assert run.steps == 8
    assert runlog.load_curve(tmp_path)["step"].tolist() == [3, 6, 8]


def test_own_evaluation_counts_what_it_counts(tmp_path: Path) -> None:
    """Padding duplicates are counted twice, and the audit says so beside a plain evaluation of the same weights; training stays exact."""
    run = run_job(tiny_job(tmp_path, recipe="own_recipes:padded", world_size=7, steps=4, evaluate=True, audit=True))
    found = runlog.load_evaluation(tmp_path)

    assert run.reduction == "exact"
    assert len(found["sample_ids"]) == 63
    assert len(set(found["sample_ids"])) == JUDGE
    assert found["quality"] == runlog.load_curve(tmp_path)["quality"].iloc[-1] != found["plain_quality"]
    assert json.loads((tmp_path / "evaluation.json").read_bytes()).keys() == found.keys()


def test_parts_of_a_batch_are_known_by_their_memory() -> None:
    """A view on some rows says where they start; a copy, a transposed or a foreign tensor does not."""
    whole = torch.arange(12.0).view(6, 2)

    assert [_offset(part, whole) for part in (whole, whole[2:4], whole[5:])] == [0, 2, 5]
    assert [_offset(part, whole) for part in (whole[2:4].clone(), whole.T, whole[::2])] == [None] * 3


def test_micro_batches_in_one_buffer_are_told_apart() -> None:
    """Views on the same memory are known by the object that was handed over."""
    buffer = torch.zeros(4, 3)
    first, second = (Batch(buffer[:4], torch.arange(4) + start, torch.ones(4)) for start in (0, 4))
    taken = Taken((np.arange(4), np.arange(4) + 4), (first, second), None)  # type: ignore[arg-type]
    losses = Losses(None, taken)  # type: ignore[arg-type]

    assert [losses._rows(part).tolist() for part in (first, second)] == [[0, 1, 2, 3], [4, 5, 6, 7]]  # type: ignore[union-attr]


def test_trimmed_samples_are_those_that_were_handed_over() -> None:
    """Padding cut off a part of a micro-batch changes no sample; other labels beside the trimmed inputs do."""
    given = Batch(torch.arange(12).view(4, 3), torch.arange(12).view(4, 3), torch.ones(4))
    losses = Losses(None, Taken((np.arange(4),), (given,), None))  # type: ignore[arg-type]
    trimmed = Batch(given.inputs[1:3, :2], given.labels[1:3, :2], given.weights[1:3])
    strange = trimmed._replace(labels=given.labels[2:4, :2])

    assert all(torch.equal(one, of[1:3]) for one, of in zip(losses._handed_over(trimmed), given, strict=True))
    assert [losses._handed_over(batch) for batch in (strange, given)] == [strange, given]


def test_optimizer_of_other_tensors_is_refused() -> None:
    """Parameters that the model no longer has are named before the first step; a tied one that is held once is none."""
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    recipe: Any = SimpleNamespace(name="r")
    check_held(recipe, model, torch.optim.SGD(model.parameters()))

    with pytest.raises(RecipeError, match=r"holds 2 tensors .* misses 2 of its parameters"):
        check_held(recipe, model, torch.optim.SGD(other.parameters()))
