"""Planned faults strike where they were planned, a killed run ends like its twin, and each planted defect changes what it must."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers_loop import run_attempt, run_job, tiny_job
from helpers_ranks import state
from safetensors.torch import load_file
from tiny_recipe import recipe

from trainer import ranks, runlog
from trainer.config import FAULT_PHASES, Fault
from trainer.drills import RelabelledData, drill_slice, drilled
from trainer.faults import DEFECTS, FaultPlan, check_defect
from trainer.order import Order
from trainer.world import World
from validation.errors import ConfigError
from validation.records import RunRecord

DAMAGE = {"checkpoint_every": 3, "max_restarts": 1}


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The run that nobody killed."""
    return run_job(tiny_job(tmp_path_factory.mktemp("twin"), world_size=2, checkpoint_every=3, evaluate=True))


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("phase", FAULT_PHASES)
def test_killed_run_ends_like_its_twin(phase: str, rank: int, twin: RunRecord, tmp_path: Path) -> None:
    """SIGKILL in any phase, of either rank, then a resume on three ranks: state and ledger of the twin, each step once."""
    fault = Fault(kind="kill", rank=rank, step=5, phase=phase)
    run = run_job(tiny_job(tmp_path, world_size=2, faults=(fault,), resume_world_sizes=(3,), evaluate=True, **DAMAGE))
    timeline = runlog.load_timeline(tmp_path)

    assert (run.state_sha256, run.ledger_sha256, run.faults_fired) == (twin.state_sha256, twin.ledger_sha256, (str(fault),))
    assert len(run.state_sha256_by_rank) == 3
    assert timeline.groupby("rank")["step"].apply(list).to_dict()[0] == list(range(9))
    assert timeline.groupby("step")["samples"].sum().tolist() == [47] * 8 + [30]
    assert runlog.load_curve(tmp_path)["step"].tolist() == [4, 8, 9]


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_leader_brings_a_killed_group_back(reduction: str, tmp_path: Path) -> None:
    """Under the real leader: three kills in three attempts, on 2, 4 and 1 ranks, cost nothing but time."""
    faults = tuple(
        Fault(kind="kill", rank=0, step=2 + 2 * i, phase=("backward", "collective", "optimizer")[i], attempt=i) for i in range(3)
    )
    options = {"reduction": reduction, "dropout": False, "checkpoint_every": 2}
    calm = ranks.run_group(tiny_job(tmp_path / "calm", world_size=2, **options))
    sizes = (4, 1, 2) if reduction == "exact" else (2, 2, 2)  # DDP's bits depend on the world size
    run = ranks.run_group(tiny_job(tmp_path / "run", world_size=2, faults=faults, max_restarts=3, resume_world_sizes=sizes, **options))

    assert (run.state_sha256, run.ledger_sha256) == (calm.state_sha256, calm.ledger_sha256)
    assert [recovery.resumed_from_step for recovery in run.recoveries] == [2, 4, 6]
    assert run.faults_fired == tuple(map(str, faults))
    assert run == runlog.load_run(tmp_path / "run")


def test_run_that_died_after_its_last_step_only_finishes(twin: RunRecord, tmp_path: Path) -> None:
    """A death in the last checkpoint loses the updates since the one before; a death after it loses none."""
    last = Fault(kind="kill", rank=0, step=8, phase="seal")
    run = run_job(tiny_job(tmp_path, world_size=2, faults=(last,), evaluate=True, **DAMAGE))

    assert (run.state_sha256, run.ledger_sha256) == (twin.state_sha256, twin.ledger_sha256)
    assert runlog.load_curve(tmp_path)["step"].tolist() == [4, 8, 9]


def test_damaged_checkpoint_costs_time_and_no_bits(twin: RunRecord, tmp_path: Path) -> None:
    """A resume that has to pass over a damaged checkpoint says so and still ends like the twin."""
    faults = (Fault(kind="kill", rank=1, step=7), Fault(kind="kill", rank=0, step=0, attempt=1))
    job = tiny_job(tmp_path, world_size=2, faults=faults, checkpoint_every=3, max_restarts=1)
    assert any(run_attempt(job).exitcodes)
    (tensors,) = (tmp_path / "checkpoints/step-00000006").glob("*.distcp")
    tensors.write_bytes(tensors.read_bytes()[:-4])
    done = run_attempt(job, 1)
    run = runlog.collect(job, attempts=2, recoveries=(), faults_fired=(), seconds=1.0, world_sizes=(2, 2))

    assert done.said("loaded")[0]["step"] == 3
    assert "step-00000006 is damaged" in done.said("loaded")[0]["refused"][0]
    assert (run.state_sha256, run.ledger_sha256) == (twin.state_sha256, twin.ledger_sha256)


def test_leader_is_told_before_the_rank_dies(tmp_path: Path) -> None:
    """The "fault" event is out before SIGKILL."""
    fault = Fault(kind="kill", rank=1, step=1, phase="optimizer")
    done = run_attempt(tiny_job(tmp_path, world_size=2, faults=(fault,)))

    assert done.said("fault") == [{"rank": 1, "fault": str(fault)}]
    assert done.exitcodes[1] == -signal.SIGKILL


def test_planned_error_is_raised(tmp_path: Path) -> None:
    """An error fault raises in its phase with its own text."""
    done = run_attempt(tiny_job(tmp_path, faults=(Fault(kind="error", rank=0, step=1, phase="data"),)))

    assert "planned fault error:rank=0,step=1,phase=data,attempt=0 fired" in done.errors[0]


@pytest.mark.parametrize("steps", [9, 3], ids=["in the middle", "in the last step"])
def test_skipped_collective_is_noticed(steps: int, tmp_path: Path) -> None:
    """A rank that leaves out a step's collectives is found by the step number in the next ones, or hangs the others until the time-out."""
    job = tiny_job(tmp_path, world_size=2, faults=(Fault(kind="skip", rank=1, step=2),), stall_s=3.0, steps=steps)
    done = run_attempt(job)

    assert done.errors
    if steps > 3:
        assert any("a rank left out a collective" in text and "[2, 3]" in text for text in done.errors.values())
    assert not done.said("finished")


def test_unplanned_ranks_and_attempts_are_left_alone(tmp_path: Path) -> None:
    """A fault for another attempt or a rank that does not exist never fires."""
    run = run_job(tiny_job(tmp_path, faults=(Fault(kind="kill", rank=0, step=1, attempt=1), Fault(kind="kill", rank=1, step=1))))

    assert run.faults_fired == ()


def gradients(folder: Path, **options: object) -> dict[str, torch.Tensor]:
    run_job(tiny_job(folder, world_size=2, steps=1, keep_gradients=1, **options))
    return {name: value for name, value in load_file(folder / "gradients.safetensors").items() if "weights" not in name}


def test_divide_twice_halves_the_gradient(tmp_path: Path) -> None:
    """On two ranks the planted division leaves exactly half."""
    right, wrong = gradients(tmp_path / "right"), gradients(tmp_path / "wrong", defect="divide_twice")

    assert all(torch.equal(wrong[name], right[name] / 2) for name in right)


@pytest.mark.parametrize("reduction", ["exact", "fast"])
def test_drop_lane_changes_the_gradient_but_not_the_ledger(reduction: str, tmp_path: Path) -> None:
    """The planted loss of a lane shows in the numbers alone."""
    right, wrong = (gradients(tmp_path / name, defect=name, reduction=reduction) for name in ("", "drop_lane"))

    assert all(not torch.allclose(wrong[name], right[name], rtol=1e-3) for name in right)
    assert runlog.load_ledger(tmp_path).equals(runlog.load_ledger(tmp_path / "drop_lane"))


def killed(folder: Path, defect: str) -> RunRecord:
    return run_job(tiny_job(folder, world_size=2, faults=(Fault(kind="kill", rank=1, step=5),), defect=defect, **DAMAGE))


def test_repeat_batch_on_resume_repeats_a_batch(twin: RunRecord, tmp_path: Path) -> None:
    """The planted resume sees the batch before the checkpoint twice and never sees the last one; the steps count on."""
    run = killed(tmp_path, "repeat_batch_on_resume")
    positions = runlog.load_ledger(tmp_path).groupby("position").size()

    assert run.steps == twin.steps
    assert (run.state_sha256 != twin.state_sha256, run.ledger_sha256 != twin.ledger_sha256) == (True, True)
    assert positions[positions == 2].index.tolist() == list(range(2 * 47, 3 * 47))
    assert positions.index.max() == 8 * 47 - 1


def test_stale_moments_change_the_state_alone(twin: RunRecord, tmp_path: Path) -> None:
    """The planted resume without moments consumes the right samples and ends elsewhere."""
    run = killed(tmp_path, "stale_moments_on_resume")

    assert run.state_sha256 != twin.state_sha256
    assert run.ledger_sha256 == twin.ledger_sha256


def test_unknown_defect_is_refused() -> None:
    """A defect that nobody wrote would plant nothing."""
    for name in ("", *DEFECTS):
        check_defect(name)
    with pytest.raises(ConfigError, match="Use one of: divide_twice"):
        check_defect("divide_thrice")


def test_drill_chooses_the_slice_nearest_a_tenth() -> None:
    """Of red 10%, blue, big and small, the drill takes red."""
    train = recipe.data("train")

    assert drill_slice(recipe, train.frame) == ("colour", "red")


def test_drill_flips_the_labels_of_its_slice_alone() -> None:
    """Red labels are flipped, everything else is as it was; without a drill nothing is wrapped."""
    train = recipe.data("train")
    rows = np.arange(len(train))
    before, after = train.batch(rows), drilled("slice-regression", recipe, train).batch(rows)
    red = torch.from_numpy((train.frame["colour"] == "red").to_numpy(copy=True))

    assert torch.equal(after.labels, torch.where(red, 1 - before.labels, before.labels))
    assert torch.equal(after.inputs, before.inputs)
    assert drilled("", recipe, train) is train
    with pytest.raises(ConfigError, match="Use one of: slice-regression"):
        drilled("slice-regress", recipe, train)


def test_drill_shifts_classes_in_a_ring() -> None:
    """With classes 2, 5 and 9 the next one is taken, and 2 after 9."""
    data = recipe.data("train")
    data.labels = np.resize(np.array([9, 2, 5]), len(data)).astype(np.int64)
    moved = RelabelledData(data, np.ones(len(data), dtype=bool)).batch(np.arange(3)).labels

    assert moved.tolist() == [2, 5, 9]


def test_drilled_run_reads_the_order_of_the_plain_one(tmp_path: Path) -> None:
    """The drill changes labels, not which samples are read."""
    run = run_job(tiny_job(tmp_path, drill="slice-regression", steps=2))
    order = Order(seed=recipe.training.seed, size=len(recipe.data("train")), epochs=2, global_batch_size=47)

    assert run.steps == 2
    assert runlog.load_ledger(tmp_path)["sample_id"].tolist() == recipe.data("train").sample_ids[order.rows(range(94))].tolist()


def plan(*faults: Fault, rank: int = 0, attempt: int = 0, first_attempt: int = 0, said: list[str] | None = None) -> FaultPlan:
    """The plan of one rank; what it tells its leader goes into `said`."""
    world = World(rank=rank, world_size=2, attempt=attempt, first_attempt=first_attempt)
    return FaultPlan(faults, world, lambda _event, **fields: (said if said is not None else []).append(fields["fault"]))


@pytest.mark.parametrize(
    ("phase", "planned", "asked", "fires"),
    [
        pytest.param("data", 3, 3, True, id="its step"),
        pytest.param("data", 3, 4, False, id="a step's phase after its step"),
        pytest.param("load", 9, 0, True, id="load whatever its step"),
        pytest.param("write", 3, 5, True, id="the first checkpoint after its step"),
        pytest.param("write", 5, 3, False, id="a checkpoint before its step"),
    ],
)
def test_fault_fires_at_its_moment(phase: str, planned: int, asked: int, fires: bool) -> None:
    """Steps' phases strike at their step, a checkpoint's at the first one from there on, loading once an attempt."""
    said: list[str] = []
    given = plan(Fault(kind="error", rank=0, step=planned, phase=phase), said=said)
    with pytest.raises(RuntimeError, match="planned fault") if fires else nullcontext():
        given.at(phase, asked)
    given.at(phase, asked)  # once is enough

    assert len(said) == fires


def test_attempts_of_a_plan_count_from_the_call() -> None:
    """On a folder with three attempts the first one of a new call is number 3, and a fault of attempt 0 is meant for it."""
    fault = Fault(kind="skip", rank=0, step=1)

    assert plan(fault, attempt=3, first_attempt=3).skips(1)
    assert not plan(fault, attempt=4, first_attempt=3).skips(1)
    assert not plan(fault, attempt=3).skips(1)


def test_two_threads_fire_a_fault_once() -> None:
    """The loop and the thread that saves may ask in the same moment; the leader hears of one fault."""
    said: list[str] = []
    given = plan(*(Fault(kind="skip", rank=0, step=step) for step in range(200)), said=said)
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(given.skips, [step for step in range(200) for _ in range(4)]))

    assert (sum(found), len(said), len(set(said))) == (200, 200, 200)


def test_delay_is_told_once_and_sleeps_each_step() -> None:
    """A straggler is slow at every step from its own on, once in each."""
    said: list[str] = []
    given = plan(Fault(kind="delay", rank=0, step=1, phase="data", ms=20), said=said)
    began = time.monotonic()
    for step in (0, 1, 1, 2):
        given.at("data", step)

    assert time.monotonic() - began >= 0.04
    assert len(said) == 1


def test_stopped_rank_goes_on_where_it_was() -> None:
    """SIGSTOP strikes after the leader has been told; continued, the rank returns from it as if nothing had been."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        given = plan(Fault(kind="stop", rank=0, step=2, phase="data"))
        given.at("data", 2)
        os.write(writer, b"on")
        os._exit(0)
    os.waitpid(pid, os.WUNTRACED)
    assert state(pid) == "T"
    os.kill(pid, signal.SIGCONT)

    assert os.read(reader, 2) == b"on"
    assert os.waitpid(pid, 0)[1] == 0
    for fd in (reader, writer):
        os.close(fd)
