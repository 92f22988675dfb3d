"""What an audit leaves of one rank's steps: samples as they were consumed, tensors, updates, states, and a poison where one is planned."""

import hashlib
import json
import math
import pickle
import timeit
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers_audit import Kept, bench
from helpers_loop import tiny_job
from safetensors.torch import load_file
from tiny_recipe import TinyData, recipe, weighted_loss
from torch import Tensor, nn

from trainer.audit import Audit, content_digests
from trainer.audit_state import kept_digests
from trainer.config import SPIKE, Poison
from trainer.recipe import Batch
from trainer.state import State, snapshot, tensor_sha256
from trainer.world import World
from validation.canonical import digest

ROWS = np.arange(12)


def batch_of(rows: Any = ROWS, **changes: Tensor) -> Batch:
    return recipe.data("train").batch(np.array(rows, dtype=np.int64))._replace(**changes)


def test_a_sample_has_one_digest() -> None:
    """A sample's digest does not depend on its batch, and every part of it counts: input, label and weight."""
    batch, found = batch_of(), content_digests(batch_of())

    assert found[3:5] == content_digests(batch_of(ROWS[3:5]))
    assert len(set(found)) == len(ROWS)
    assert {len(value) for value in found} == {16}
    for name in Batch._fields:
        other = content_digests(batch._replace(**{name: getattr(batch, name) + 1}))
        assert not set(other) & set(found)
    assert content_digests(batch_of([])) == []


@pytest.mark.parametrize("kind", [torch.float64, torch.bfloat16])
def test_casting_floats_changes_no_digest(kind: torch.dtype) -> None:
    """A leg that casts its samples up has the digests of what was loaded; whole numbers keep their type."""
    batch = batch_of(inputs=torch.arange(36.0).view(12, 3), weights=torch.ones(12))
    cast = batch._replace(inputs=batch.inputs.to(kind), weights=batch.weights.to(kind))

    assert content_digests(cast) == content_digests(batch)
    assert content_digests(batch._replace(labels=torch.arange(12))) != content_digests(batch._replace(labels=torch.arange(12).int()))


def test_layout_in_memory_does_not_count() -> None:
    """A transposed view and its copy are the same sample; another shape of the same bytes is not."""
    inputs = torch.arange(48.0).view(4, 3, 4)
    batch = Batch(inputs.transpose(1, 2), torch.zeros(4), torch.ones(4))

    assert content_digests(batch) == content_digests(batch._replace(inputs=batch.inputs.contiguous()))
    assert content_digests(batch) != content_digests(batch._replace(inputs=batch.inputs.reshape(4, 12)))


def test_off_is_nothing(tmp_path: Path) -> None:
    """Without an audit the loss, the split and the optimizer are as they were, and no row is left."""
    run = bench(tmp_path, audit=False)
    split = recipe.data("train")
    run.step(0, [1, 2])

    assert type(run.audit) is Audit
    assert run.audit.data(split) is split
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.parts.tables


def test_off_costs_nothing(tmp_path: Path) -> None:
    """A step's calls without an audit take a few microseconds."""
    audit, batch, loss = Audit.of(tiny_job(tmp_path), World(rank=0, world_size=1), Kept(tmp_path)), batch_of(), (torch.ones(()),) * 2

    def calls() -> None:
        audit.begin(0)
        for micro in range(8):
            audit.loss(0, micro, None, batch, lambda: loss)
        audit.reduced(0)
        audit.end(0)

    assert min(timeit.repeat(calls, number=100, repeat=5)) / 100 < 5e-5


def test_consumed_is_what_the_loss_was_computed_of(tmp_path: Path) -> None:
    """Ids are those of the rows, contents those of the batch that was used, also when a faulty step swapped it; stand-ins do not count."""
    run = bench(tmp_path)
    run.audit.begin(0)
    calls = [(np.array([4, 5]), batch_of([4, 5])), (np.array([6]), batch_of([9])), (None, batch_of([7])), (ROWS[:0], batch_of([8]))]
    for micro, (rows, batch) in enumerate(calls):
        run.audit.loss(0, micro, rows, batch, lambda batch=batch: recipe.loss(run.model, batch))
    found = run.rows("consumed")

    assert [row["micro"] for row in found] == [0, 1, 2]
    assert [row["sample_ids"] for row in found] == ["1028 1035", "1042", "-1"]
    assert [row["contents"].split() for row in found] == [content_digests(batch_of(rows)) for rows in ([4, 5], [9], [7])]
    assert not any(row["poisoned"] for row in found)


def test_a_loss_that_works_in_place_is_seen_before(tmp_path: Path) -> None:
    """The digests are of the samples as the loss got them."""

    def spoils(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        batch.inputs.zero_()
        return weighted_loss(model, batch)

    run = bench(tmp_path, loss=spoils)
    run.step(0, ROWS)

    assert run.rows("consumed")[0]["contents"].split() == content_digests(batch_of())


def test_every_stage_is_digested(tmp_path: Path) -> None:
    """The gradient before and after clipping, weights and buffers after the update, by the model's names in the model's order."""
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    run = bench(tmp_path, model=model, clip_norm=1e-3)
    seen: dict[str, str] = {}
    run.between = lambda run: seen.update({name: tensor_sha256(p.grad) for name, p in run.model.named_parameters() if p.grad is not None})
    run.step(4, ROWS)
    found = run.rows("digests")
    names = [name for name, _ in model.named_parameters()]

    assert {row["step"] for row in found} == {4}
    assert [row["tensor"] for row in found if row["stage"] == "reduced"] == names
    assert {row["tensor"]: row["sha256"] for row in found if row["stage"] == "reduced"} == seen
    clipped = {row["tensor"]: row["sha256"] for row in found if row["stage"] == "clipped"}
    assert clipped == {name: tensor_sha256(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    assert clipped != seen
    assert {row["tensor"]: row["sha256"] for row in found if row["stage"] == "weight"} == {
        name: tensor_sha256(p) for name, p in model.named_parameters()
    }
    assert [row["tensor"] for row in found if row["stage"] == "buffer"] == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]


def test_an_update_is_measured(tmp_path: Path) -> None:
    """Rates as they were used, the norm that was handed over, its limit, how far the weights went, this rank's weight and mean loss."""
    run = bench(tmp_path, clip_norm=0.01, loss=lambda model, batch: weighted_loss(model.eval(), batch))
    loss, weight = weighted_loss(run.model.eval(), batch_of([1, 2, 3]))
    before = [p.detach().clone() for p in run.model.parameters()]
    run.step(0, [1, 2], [3])
    run.optimizer.param_groups[0]["lr"] = 0.05  # a schedule's step, after the update
    moved = math.sqrt(sum(((p - b).double() ** 2).sum().item() for p, b in zip(run.model.parameters(), before, strict=True)))
    [row] = run.rows("updates")

    assert (row["rates"], row["still"], row["limit"]) == ("[0.1]", "[]", 0.01)
    assert row["norm"] == pytest.approx(0.01, rel=1e-4)
    assert row["moved"] == pytest.approx(moved, rel=1e-9)
    assert row["weight"] == pytest.approx(weight.item())
    assert row["loss"] == pytest.approx(loss.item() / weight.item())


def test_tensors_that_stay_are_named(tmp_path: Path) -> None:
    """A weight that wants a gradient and does not change is still; one that wants none is frozen and not named."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 1))
    model[0].bias.requires_grad_(False)
    run = bench(tmp_path, model=model)
    run.between = lambda run: run.model[0].weight.grad.zero_()  # type: ignore[index,union-attr,attr-defined]
    run.step(0, ROWS)

    assert [row["still"] for row in run.rows("updates")] == ['["0.weight"]']
    assert [row["limit"] for row in map(dict, run.rows("updates"))] != [None]


def test_an_update_without_the_optimizer(tmp_path: Path) -> None:
    """A step that was skipped has no handed gradient, did not move, and its rates are those of the groups."""
    run = bench(tmp_path)
    run.audit.begin(0)
    run.audit.end(0)
    [row] = run.rows("updates")

    assert (row["rates"], row["moved"]) == ("[0.1]", 0.0)
    assert math.isnan(row["norm"])
    assert math.isnan(row["limit"])
    assert json.loads(row["still"]) == [name for name, _ in run.model.named_parameters()]
    assert {row["stage"] for row in run.rows("digests")} == {"weight"}


def test_an_update_by_hand(tmp_path: Path) -> None:
    """Weights that moved without the optimizer: what stands in .grad is what they were moved by, at the rates from before."""
    run = bench(tmp_path)
    run.audit.begin(0)
    for parameter in run.model.parameters():
        parameter.grad = torch.ones_like(parameter)
        parameter.data -= 0.1
    run.optimizer.param_groups[0]["lr"] = 0.05  # a schedule's step, after the update
    run.audit.end(0)
    [row] = run.rows("updates")

    assert (row["rates"], row["still"]) == ("[0.1]", "[]")
    assert row["norm"] == pytest.approx(math.sqrt(sum(parameter.numel() for parameter in run.model.parameters())))
    assert {row["stage"] for row in run.rows("digests")} == {"clipped", "weight"}


def test_an_optimizer_of_other_tensors_is_seen(tmp_path: Path) -> None:
    """Gradients of parameters that are not the model's are named by their place, and the weights do not move."""
    run = bench(tmp_path)
    stranger = nn.Parameter(torch.ones(2))
    stranger.grad = torch.ones(2)
    run.optimizer.param_groups[0]["params"] = [stranger]
    run.step(0, ROWS)

    assert [row["tensor"] for row in run.rows("digests") if row["stage"] == "clipped"] == ["optimizer/0/0"]
    assert run.rows("updates")[0]["moved"] == 0.0


def test_tensors_of_the_first_steps_are_kept(tmp_path: Path) -> None:
    """Rank 0 keeps gradients before and after clipping and weights before and after the update; others keep none."""
    for rank in (1, 0):
        run = bench(tmp_path, World(rank=rank, world_size=2), keep_gradients=1, clip_norm=1e-3)
        before = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.step(0, ROWS)
        after = {name: p.detach().clone() for name, p in run.model.named_parameters()}
        run.step(1, ROWS)
        run.audit.close()
        assert (tmp_path / "gradients.safetensors").exists() == (rank == 0)
    kept = load_file(tmp_path / "gradients.safetensors")

    assert set(kept) == {f"step0/{part}{name}" for name in before for part in ("", "weights/", "clipped/", "after/")}
    assert all(torch.equal(kept[f"step0/weights/{name}"], value) for name, value in before.items())
    assert all(torch.equal(kept[f"step0/after/{name}"], value) for name, value in after.items())
    assert sum(float(kept[f"step0/clipped/{name}"].norm() ** 2) for name in before) == pytest.approx(1e-6, rel=1e-3)


def test_only_gradients_are_kept_without_an_audit(tmp_path: Path) -> None:
    """keep_gradients alone leaves digests of the reduced gradients, those tensors and their weights, and no other row."""
    run = bench(tmp_path, audit=False, keep_gradients=1)
    run.step(0, ROWS)
    run.step(1, ROWS)
    run.audit.close()

    names = [name for name, _ in run.model.named_parameters()]
    assert [(row["step"], row["stage"], row["tensor"]) for row in run.rows("digests")] == [(0, "reduced", name) for name in names]
    assert list(run.parts.tables) == ["digests"]
    assert set(load_file(tmp_path / "gradients.safetensors")) == {f"step0/{part}{name}" for name in names for part in ("", "weights/")}


@pytest.mark.parametrize("audit", [True, False], ids=["audited", "alone"])
@pytest.mark.parametrize("kind", ["spike", "overflow"])
def test_a_poison_strikes_one_micro_batch_of_one_rank(kind: Any, audit: bool, tmp_path: Path) -> None:
    """The first micro-batch of its rank at its step, that is no stand-in; its samples are marked. No other loss changes a bit."""
    losses: dict[tuple[int, int], list[float]] = {}
    for rank in (0, 1):
        run = bench(tmp_path, World(rank=rank, world_size=2), audit=audit, poison=Poison(kind=kind, rank=1, step=2))
        run.model.eval()
        for step in (1, 2):
            run.audit.begin(step)
            calls = [(ROWS[:0], [0]), (ROWS[1:3], [1, 2]), (ROWS[3:5], [3, 4])]
            losses[rank, step] = [
                run.audit.loss(step, micro, rows, batch_of(some), partial(recipe.loss, run.model, batch_of(some)))[0].item()
                for micro, (rows, some) in enumerate(calls)
            ]
        if audit:
            assert [row["poisoned"] for row in run.rows("consumed")] == [False, False, rank == 1, False]

    plain = losses[0, 1]
    assert losses[0, 2] == losses[1, 1] == plain
    assert losses[1, 2][::2] == plain[::2]
    assert losses[1, 2][1] == (pytest.approx(SPIKE * plain[1]) if kind == "spike" else math.inf)


def test_an_overflow_makes_the_gradient_overflow(tmp_path: Path) -> None:
    """The gradient of an infinite loss is not finite."""
    run = bench(tmp_path, poison=Poison(kind="overflow", rank=0, step=0))
    run.step(0, ROWS)

    assert not math.isfinite(run.rows("updates")[0]["norm"])


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> State:
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return snapshot(model, optimizer, schedule, step=5, position=47, seed=3, extra={"scaler": {"scale": 8.0}, "recipe": {"a": [1, 2]}})


def test_a_state_is_named(tmp_path: Path) -> None:
    """Tensors and every plain value have a name and a digest of their own; a state is on disk before training goes on."""
    run = bench(tmp_path)
    run.optimizer = torch.optim.AdamW(run.model.parameters(), lr=0.25)
    run.optimizer.zero_grad()
    weighted_loss(run.model, batch_of())[0].backward()
    run.optimizer.step()
    run.audit.state("saved", state_of(run.model, run.optimizer))
    [row] = run.rows("states")
    names = row["names"]

    assert (row["moment"], row["step"], run.parts.flushed) == ("saved", 5, 1)
    assert names["weight/0.weight"] == tensor_sha256(run.model.get_parameter("0.weight"))
    assert {"optimizer/0.weight/exp_avg", "optimizer/0.weight/step", "plain/schedule/last_epoch", "plain/groups/0/betas/1"} <= set(names)
    assert names["plain/groups/0/lr"] == digest(0.25)
    assert (names["plain/step"], names["plain/position"], names["plain/seed"]) == (digest(5), digest(47), digest(3))
    assert (names["plain/extra/scaler/scale"], names["plain/extra/recipe/a/1"]) == (digest(8.0), digest(2))
    assert "stream/torch" not in names


def test_a_teams_stream_is_part_of_the_state(tmp_path: Path) -> None:
    """Where the team starts the random numbers, the generator's state is compared, too."""
    run = bench(tmp_path)
    run.audit.state("end", state_of(run.model, run.optimizer), streams=True)
    before = hashlib.sha256(torch.default_generator.get_state().numpy().tobytes()).hexdigest()

    assert run.rows("states")[0]["names"]["stream/torch"] == before


def test_a_repeat_leaves_the_handed_gradient_only(tmp_path: Path) -> None:
    """Inside `again` the one thing noted is what the optimizer got, under the repeat's number; afterwards all is noted again."""
    run = bench(tmp_path)
    with run.audit.again(7):
        run.step(3, [1, 2], [3])
    assert {table for table, rows in run.parts.tables.items() if rows} == {"digests"}
    names = [name for name, _ in run.model.named_parameters()]
    assert [(row["step"], row["stage"], row["tensor"]) for row in run.rows("digests")] == [(7, "again", name) for name in names]

    run.step(3, [1, 2])
    assert [row["step"] for row in run.rows("updates")] == [3]


def test_an_audit_does_not_change_the_numbers(tmp_path: Path) -> None:
    """The same steps end in the same weights with an audit and without."""
    ends = []
    for audit in (True, False):
        run = bench(tmp_path, audit=audit)
        for step in range(3):
            torch.manual_seed(step)
            run.step(step, [1, 2, 3], [4, 5])
        ends.append([tensor_sha256(p) for p in run.model.parameters()])

    assert ends[0] == ends[1]


def test_a_job_gets_the_audit_it_asks_for(tmp_path: Path) -> None:
    """Everything, the first gradients, a poison, or nothing."""
    wanted = [({"audit": True}, "Recording"), ({"keep_gradients": 2}, "Keeping"), ({}, "Audit")]
    wanted.append(({"poison": Poison(kind="spike", rank=0, step=0)}, "Keeping"))
    found = [type(Audit.of(tiny_job(tmp_path, **options), World(rank=0, world_size=1), Kept(tmp_path))).__name__ for options, _ in wanted]

    assert found == [name for _, name in wanted]


def test_a_split_keeps_what_it_has(tmp_path: Path) -> None:
    """Length, ids, frame and further members are the split's own; it is keyed by sample only if it was."""
    run = bench(tmp_path)
    split = TinyData(5, 1)
    audited = run.audit.data(split)

    assert (len(audited), audited.sample_ids is split.sample_ids, audited.frame is split.frame) == (5, True, True)
    assert not hasattr(audited, "keyed_batch")
    assert not hasattr(audited, "__getitem__")
    assert audited.inputs is split.inputs  # type: ignore[attr-defined]  # TinyData's own


def test_a_split_can_be_sent_to_a_spawned_worker(tmp_path: Path) -> None:
    """A copy in another process fetches the same samples."""
    split = bench(tmp_path).audit.data(TinyData(5, 1))
    sent = pickle.loads(pickle.dumps(split))  # noqa: S301  (its own bytes)

    assert torch.equal(sent.batch(np.arange(5)).inputs, split.batch(np.arange(5)).inputs)
    assert sent.sample_ids.tolist() == split.sample_ids.tolist()


class Keeper:
    """Hooks that keep things."""


def test_what_hooks_keep_is_part_of_the_state() -> None:
    """Loss scalers and averages of the model, under names that say what they are; the trained model itself and caches are none."""
    torch.manual_seed(0)
    model, hooks = nn.Linear(3, 2), Keeper()
    hooks.__dict__ |= {
        "amp": torch.amp.GradScaler("cpu", init_scale=64.0), "average": torch.optim.swa_utils.AveragedModel(model), "inner": model,
        "wrapped": nn.Sequential(model), "ema": {"weight": model.weight.detach().clone()}, "cache": {"weight": torch.ones(2)},
        "emaciated": {"other": torch.ones(1)}, "scale": 3.0,
    }  # fmt: skip
    found = kept_digests(hooks, model)

    assert {name for name in found if name.startswith("plain/")} >= {"plain/extra/hooks/amp/scaler/scale"}
    assert {name for name in found if name.startswith("ema/")} == {
        "ema/hooks.average.n_averaged", "ema/hooks.average.module.weight", "ema/hooks.average.module.bias", "ema/hooks.ema.weight",
    }  # fmt: skip
    assert kept_digests(hooks, model) == found
    hooks.__dict__["amp"] = torch.amp.GradScaler("cpu", init_scale=32.0)
    assert {name for name, sha in kept_digests(hooks, model).items() if sha != found[name]} == {"plain/extra/hooks/amp/scaler/scale"}
    assert kept_digests(object(), model) == {}


def test_averages_are_found_however_they_are_kept() -> None:
    """In an object of the team's own with its counter, by a wrapper's names, by place, flat; what has other shapes is no average."""
    model, averager, hooks = nn.Linear(3, 2), Keeper(), Keeper()
    copies = {name: value.detach().clone() for name, value in model.named_parameters()}
    averager.__dict__ |= {"shadow": copies, "updates": 3, "decay": 0.9}
    hooks.__dict__ |= {
        "ema": averager, "helper": averager, "avg_wrapped": {f"module.{name}": value for name, value in copies.items()},
        "averages": list(copies.values()), "ema_by_parameter": dict(zip(model.parameters(), copies.values(), strict=True)),
        "polyak": torch.cat([value.reshape(-1) for value in copies.values()]),
        "average_norms": {name: value.norm() for name, value in copies.items()}, "ema_every": 4, "average_loss": torch.zeros(()),
        "average_parts": [torch.zeros(3)], "ema_of": list(model.parameters()), "hidden": {"weight": torch.zeros(2, 3)},
    }  # fmt: skip
    names = set(kept_digests(hooks, model))

    both = {"weight", "bias"}
    places = ("ema.shadow", "helper.shadow", "avg_wrapped", "averages", "ema_by_parameter")
    assert names == {f"ema/hooks.{place}.{name}" for place in places for name in both} | {
        "ema/hooks.ema.updates", "ema/hooks.polyak", "ema/hooks.ema_every",
    }  # fmt: skip
