"""What an own training path is fed with, and that it goes on where it was, on as many ranks as there are then."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import own_recipes
import pytest
import torch
from helpers_loop import run_job, tiny_job
from own_recipes import TRAINING, plain, sampled
from tiny_recipe import TRAIN

from trainer import runlog
from trainer.config import Fault
from trainer.order import Order
from trainer.own_data import OrderSampler, Source, _overwritten, one_process, own_keys
from trainer.world import World
from validation.errors import RecipeError

ORDER = Order.of(TRAINING, TRAIN)


def test_default_sampler_deals_out_the_order() -> None:
    """At any world size the ranks' micro-batches together are the global batch, in its order."""
    for world_size in (1, 2, 3, 8):
        samplers = [OrderSampler(plain, ORDER, World(rank=rank, world_size=world_size), 0) for rank in range(world_size)]
        for step in range(ORDER.steps):
            taken = np.concatenate([part for sampler in samplers for part in sampler.take()])
            assert np.array_equal(taken, ORDER.rows(ORDER.span(step * TRAINING.global_batch_size)))
        assert all(sampler.take() == [] for sampler in samplers)


def test_default_sampler_goes_on_from_its_state() -> None:
    """Its whole state is a position."""
    one, other = (OrderSampler(plain, ORDER, World(rank=0, world_size=1), 0) for _ in range(2))
    one.take()
    other.load_state_dict(one.state_dict())

    assert all(np.array_equal(a, b) for a, b in zip(one.take(), other.take(), strict=True))


def test_own_keys_differ_by_step_and_sample() -> None:
    """A sample has another stream in every step, and its own."""
    keys = np.concatenate([own_keys(3, step, np.arange(50)) for step in range(4)])

    assert len(set(keys.tolist())) == 200


@pytest.mark.parametrize("name", ["plain", "in_order"])
def test_one_process_follows_the_order(name: str) -> None:
    """Without an own sampler the rows and keys are those of the trainer's order."""
    recipe = getattr(own_recipes, name)
    data = recipe.data("train")
    found = list(one_process(recipe))

    assert len(found) == ORDER.steps
    for step, (rows, keys) in enumerate(found):
        span = ORDER.span(step * TRAINING.global_batch_size)
        assert np.array_equal(rows, ORDER.rows(span))
        assert np.array_equal(keys, ORDER.keys(span, data.sample_ids[rows]))


@pytest.mark.parametrize(
    ("taken", "words"),
    [
        (None, "hooks.sampler gave a NoneType on rank 0 at step 0"),
        (7, "hooks.sampler gave a int on rank 0"),
        (["a"], "hooks.sampler gave rows of type <U1 and shape \\(\\)"),
        ([[[1, 2], [3]]], "hooks.sampler gave rows that make no array"),
        ([np.array([0.5])], "from 0.5 to 0.5"),
    ],
)
def test_what_is_no_rows_is_refused(taken: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a sampler returns instead of rows is a mistake of the input, told with what was wanted."""
    monkeypatch.setattr(own_recipes.Strided, "take", lambda _: taken)

    with pytest.raises(RecipeError, match=words):
        next(one_process(sampled))


@pytest.mark.parametrize("name", ["sampled", "loaded"])
def test_one_process_asks_the_own_sampler(name: str) -> None:
    """Every step's rows are what the sampler gives one rank, up to its end; the keys are of the step."""
    recipe = getattr(own_recipes, name)
    sampler = sampled.hooks.sampler(TRAIN, TRAINING, World(rank=0, world_size=1))
    ids = recipe.data("train").sample_ids
    found = list(one_process(recipe))

    assert len(found) == 8
    for step, (rows, keys) in enumerate(found):
        assert np.array_equal(rows, np.concatenate(sampler.take()))
        assert np.array_equal(keys, own_keys(TRAINING.seed, step, ids[rows]))


def steps_of(folder: Path) -> list[list[int]]:
    """Sorted sample ids, step by step."""
    return [sorted(group) for _, group in runlog.load_ledger(folder).groupby("step")["sample_id"]]


@pytest.mark.parametrize("name", ["sampled", "loaded"])
def test_own_order_goes_on_at_another_world_size(name: str, tmp_path: Path) -> None:
    """Killed on two ranks and resumed on one, an own order is trained step by step as without the death; it ends where it wants to."""
    options: dict[str, Any] = {"recipe": f"own_recipes:{name}", "checkpoint_every": 2}
    kill = Fault(kind="kill", rank=1, step=5)
    killed = run_job(tiny_job(tmp_path / "killed", world_size=2, resume_world_sizes=(1,), faults=(kill,), max_restarts=1, **options))
    run_job(tiny_job(tmp_path / "one", **options))
    ledger = runlog.load_ledger(tmp_path / "killed")

    assert (killed.attempts, killed.steps, killed.reduction) == (2, 8, "own")
    assert steps_of(tmp_path / "killed") == steps_of(tmp_path / "one")
    assert ledger["position"].is_unique
    assert ledger["position"].is_monotonic_increasing
    assert set(ledger.query("step < 4")["lane"]) == {0, 1}


def test_resumed_own_order_ends_in_the_same_bits(tmp_path: Path) -> None:
    """At the same world size a killed run with an own sampler ends in its twin's state, the sampler's included."""
    options: dict[str, Any] = {"recipe": "own_recipes:sampled", "world_size": 2, "checkpoint_every": 2}
    kill = Fault(kind="kill", rank=0, step=4, phase="accumulation")
    killed = run_job(tiny_job(tmp_path / "killed", faults=(kill,), max_restarts=1, **options))
    twin = run_job(tiny_job(tmp_path / "twin", **options))

    assert (killed.attempts, killed.state_sha256_by_rank) == (2, twin.state_sha256_by_rank)
    assert killed.ledger_sha256 == twin.ledger_sha256


def test_repeated_batch_of_the_planted_defect_shows(tmp_path: Path) -> None:
    """The planted defect of a resume repeats a step's samples with an own sampler, too."""
    kill = Fault(kind="kill", rank=0, step=4)
    run_job(
        tiny_job(
            tmp_path, recipe="own_recipes:sampled", checkpoint_every=2, faults=(kill,), max_restarts=1, defect="repeat_batch_on_resume"
        )
    )
    found = steps_of(tmp_path)

    assert found[4] == found[5]
    assert len({tuple(ids) for ids in found}) == len(found) - 1


def test_a_buffer_that_two_micro_batches_are_read_into_is_known() -> None:
    """Windows of one text that overlap are right, and so are samples that come twice and inputs that are all the same."""
    buffer, text = torch.zeros(6, 2), torch.arange(12)
    first, second = np.array([1, 2, 3]), np.array([7, 8])

    assert _overwritten([(first, buffer[:3]), (second, buffer[:2])])
    assert not _overwritten([(first, buffer[:3]), (second, buffer[3:5])])
    assert not _overwritten([(first, text.unfold(0, 4, 1)[:3]), (second, text.unfold(0, 4, 1)[1:3])])
    assert not _overwritten([(first, buffer[:3]), (first[:2], buffer[:2])])
    assert not _overwritten([(first, torch.zeros(1).expand(3, 2)), (second, torch.zeros(1).expand(2, 2))])
    assert not _overwritten([(first, (zero := torch.zeros(1)).expand(3, 2)), (second, zero.expand(2, 2))])


def test_samples_are_augmented_alike_at_every_world_size() -> None:
    """With an own sampler a sample's augmentation is of (seed, step, sample id), whoever fetches it."""
    recipe = own_recipes.keyed
    data = recipe.data("train")
    seen = []
    for world_size in (1, 2):
        found: dict[tuple[int, int], bytes] = {}
        for rank in range(world_size):
            source = Source(recipe, data, Order.of(recipe.training, len(data)), World(rank=rank, world_size=world_size))
            for step in range(3):
                taken = source.step_data(step, 0)
                assert taken is not None
                for rows, batch in zip(*taken, strict=True):
                    found |= {(step, int(row)): sample.numpy().tobytes() for row, sample in zip(rows, batch.inputs, strict=True)}
        seen.append(found)

    assert seen[0] == seen[1]
    assert len(seen[0]) == 3 * 24
    assert len(list(islice(one_process(recipe), 3))) == 3
