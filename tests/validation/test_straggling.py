"""Stragglers in timelines: which ranks, in which phase, why, and that nobody is named without reason."""

import math

import numpy as np
import pandas as pd
import pytest
from helpers_straggling import job, on

from validation.errors import DataError
from validation.finding import CAUSES, FINDING_KINDS
from validation.records import TIMELINE_COLUMNS
from validation.scaling_quantities import idle_by_rank
from validation.straggling import find_stragglers, idle

STEP_MS = 107.0  # of a healthy step of helpers_straggling.job
FIFTH_MS = STEP_MS * 0.2
W = 4


def one(table, **options):
    """The only finding."""
    (found,) = find_stragglers(table, **options)
    assert (found.verdict, found.kind in FINDING_KINDS) == ("straggler", True)
    assert found.cause in CAUSES or found.kind == "uniform_slowness"
    assert found.explanation
    assert found.action
    return found


def named(found):
    return found.kind, found.ranks, found.phase, found.cause


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize(
    ("phase", "cause"),
    [("data", "data"), ("forward", "compute"), ("backward", "compute"), ("optimizer", "compute"), ("transfer", "network")],
)
def test_rank_that_is_a_fifth_slower_is_named_within_20_steps(ranks, phase, cause):
    """Rank, phase and cause of a constant slowdown of 20 %, at every size; all others are its victims."""
    rank = ranks // 2
    found = one(job(ranks=ranks, seed=ranks, late={phase: on(ranks, 20, rank, FIFTH_MS)}))

    assert named(found) == ("late_rank", (rank,), "collective" if phase == "transfer" else phase, cause)
    assert found.waiting == tuple(other for other in range(ranks) if other != rank)
    assert found.lateness_s == pytest.approx(FIFTH_MS / 1e3, rel=0.25)


def test_slowdown_is_the_step_over_the_step_without_the_lateness():
    """Without jitter: 107 ms and a fifth more."""
    found = one(job(jitter=lambda _, shape: np.ones(shape), late={"forward": on(W, 20, 3, FIFTH_MS)}))

    assert found.slowdown == pytest.approx(1.2)
    assert found.lateness_s == pytest.approx(FIFTH_MS / 1e3)


def test_delay_that_hides_in_backward_is_found_by_arrival():
    """Backward walls are alike on all ranks, for the others wait inside them; arrivals tell who is late."""
    table = job(late={"backward": on(W, 20, 1, 26)}, hidden=True)
    walls = table.groupby("rank")["backward_ms"].mean()
    assert np.ptp(walls) / walls.mean() < 0.05

    assert named(one(table)) == ("late_rank", (1,), "backward", "compute")


def test_lateness_that_no_phase_shows_is_in_backward():
    """The same where the steps' walls do not tell that the waiting is inside backward."""
    table = job(late={"backward": on(W, 20, 1, 26)})
    table["backward_ms"] = table["backward_ms"].where(table["rank"] != 1, table["backward_ms"] - 26)

    found = one(table)

    assert named(found) == ("late_rank", (1,), "backward", "compute")
    assert "wait inside" in found.explanation


def test_checkpoint_that_one_rank_makes_now_and_then():
    """Every 5 steps, and once: the others wait in the step after it."""
    often = one(job(steps=40, late={"checkpoint": on(W, 40, 0, 5 * FIFTH_MS, np.arange(2, 40, 5))}))
    once = one(job(late={"checkpoint": on(W, 20, 0, 20 * STEP_MS, [9])}))

    assert named(often) == named(once) == ("late_rank", (0,), "checkpoint", "checkpoint_io")
    assert "every 5 steps" in often.evidence[0]
    assert (often.slowdown, once.step) == (pytest.approx(1.2, abs=0.05), 10)


def test_checkpoint_that_all_make_is_nobodys():
    """Saving together costs time, but nobody waits for one rank."""
    assert find_stragglers(job(late={"checkpoint": np.repeat([[0.0]] * 9 + [[500.0]] + [[0.0]] * 10, W, axis=1)})) == ()


def test_burst_of_a_few_steps_is_named_with_its_steps():
    """Five steps on end at nearly twice the time."""
    found = one(job(steps=40, late={"forward": on(W, 40, 2, 4 * FIFTH_MS, slice(11, 16))}))

    assert named(found) == ("late_rank", (2,), "forward", "compute")
    assert "steps 11-15" in found.explanation


def test_episode_in_a_long_job_is_named_with_its_steps():
    """50 of 1,000 steps: hardly seen in the whole, plain in its steps."""
    found = one(job(steps=1000, first=300, late={"data": on(W, 1000, 1, FIFTH_MS, slice(600, 650))}))

    assert named(found) == ("late_rank", (1,), "data", "data")
    assert abs(found.step - 900) <= 2
    assert found.slowdown == pytest.approx(1.2, abs=0.05)


def rotating(steps, ms=250.0, every=12):
    """Each rank in a step of its own, every 12 steps, shifted by rank."""
    pauses = np.zeros((steps, W))
    for rank in range(W):
        pauses[rank * every // W :: every, rank] = ms
    return pauses


@pytest.mark.parametrize("phase", ["between", "forward", "backward"])
@pytest.mark.parametrize("steps", [20, 48])
def test_pauses_that_go_round_are_garbage_collection_and_no_rank_is_to_drain(steps, phase):
    """Medians are perfect; tails and their rhythm tell. Nobody is named, the evidence says whose turn it was when."""
    found = one(job(steps=steps, late={phase: rotating(steps)}))

    assert named(found) == ("late_rank", (), "", "gc")
    assert "no rank to drain" in found.explanation
    assert "rank 1 at step 3" in found.evidence[0]
    assert found.lateness_s == pytest.approx(0.25, rel=0.05)


def test_recorded_pauses_need_no_rhythm():
    """With the pauses on record, those at odd times are explained too."""
    rng = np.random.default_rng(3)
    at = [(int(step), int(rng.integers(W))) for step in np.sort(rng.choice(40, 8, replace=False))]
    late = np.zeros((40, W))
    for step, rank in at:
        late[step, rank] = 250
    table = job(steps=40, late={"forward": late})
    pauses = pd.DataFrame([(rank, step, "gc", 250.0) for step, rank in at], columns=("rank", "step", "cause", "ms"))

    assert find_stragglers(table) == ()
    assert one(table, pauses=pauses).cause == "gc"


def test_single_pauses_of_one_rank_between_its_steps_are_garbage_collection():
    """A rank to look at, but not for its device."""
    found = one(job(steps=40, late={"between": on(W, 40, 2, 200, np.arange(0, 40, 6))}))

    assert (found.ranks, found.cause) == ((2,), "gc")


def test_processor_that_is_slow_in_all_phases():
    """Input, forward, backward and optimizer alike: the host; forward and backward only: the device."""
    everything = np.ones((20, W))
    everything[:, 1] = 1.3
    device = {"forward": on(W, 20, 1, 9), "backward": on(W, 20, 1, 18)}

    assert one(job(factor=everything)).cause == "host_cpu"
    assert one(job(late=device)).cause == "compute"


def test_ranks_of_one_host_are_one_finding():
    """Two of eight ranks, on the same host: its processor."""
    late = {"forward": on(8, 20, 2, 25) + on(8, 20, 3, 25)}
    found = one(job(ranks=8, late=late), hosts={rank: f"host-{rank // 2}" for rank in range(8)})

    assert (found.ranks, found.cause) == ((2, 3), "host_cpu")
    assert "share host host-1" in " ".join(found.evidence)
    assert found.slowdown > 1.15


def test_two_ranks_late_for_two_reasons_are_two_findings():
    """Each with its own phase and cause; neither is the other's victim."""
    found = find_stragglers(job(ranks=8, late={"forward": on(8, 20, 1, 30), "data": on(8, 20, 5, 30)}))

    assert {(one.ranks, one.cause) for one in found} == {((1,), "compute"), ((5,), "data")}
    assert all(not {1, 5} & set(one.waiting) for one in found)


def test_more_samples_on_one_rank():
    """A third more samples at the same pace is imbalance, at twice the time for each it is not."""
    samples = np.full((20, W), 30)
    samples[:, 1] = 40
    fair = {"forward": on(W, 20, 1, 10), "backward": on(W, 20, 1, 20)}
    slow = {"forward": on(W, 20, 1, 40), "backward": on(W, 20, 1, 80)}

    assert one(job(samples=samples, late=fair)).cause == "imbalance"
    assert one(job(samples=samples, late=slow)).cause == "compute"


def test_samples_that_move_from_rank_to_rank():
    """Another rank has the most in each step: imbalance, and no rank to drain."""
    samples = np.random.default_rng(1).integers(20, 60, (40, W))
    late = {"forward": 30 * (samples / 32 - 1), "backward": 60 * (samples / 32 - 1)}

    assert named(one(job(steps=40, samples=samples, late=late))) == ("late_rank", (), "forward", "imbalance")


def test_first_steps_of_a_rank_that_still_compiles():
    """Slow in the first three steps only."""
    assert named(one(job(late={"forward": on(W, 20, 2, 700, slice(0, 3))}))) == ("late_rank", (2,), "forward", "compile")


def test_steps_that_are_slow_for_all_are_nobodys():
    """20 ms more on all ranks in steps 20-40: said as such, with the steps."""
    slow = np.zeros((60, W))
    slow[20:40] = 30
    found = one(job(steps=60, late={"forward": slow}))

    assert named(found) == ("uniform_slowness", (), "forward", "")
    assert (found.step, "steps 20-39" in found.explanation) == (20, True)
    assert found.slowdown == pytest.approx(1.28, abs=0.05)


def waves(low_ms, high_ms):
    """Healthy steps that take 0 to low_ms longer on all ranks, and 15 on end, of 60, that take low_ms to high_ms longer."""
    more = np.zeros((60, W))
    more[np.arange(60) < 40] = np.linspace(0, low_ms, 40)[np.random.default_rng(3).permutation(40), None]
    more[55:] = np.linspace(0, low_ms, 5)[:, None]
    more[40:55] = np.linspace(low_ms + 8, high_ms, 15)[:, None]
    return job(steps=60, late={"forward": more})


def test_load_that_comes_and_goes_is_no_slow_stretch():
    """On an overloaded machine steps differ by half anyway: the longest of them on end are not apart from the rest."""
    assert find_stragglers(waves(60, 80)) == ()


def test_slow_stretch_may_be_unsteady():
    """What makes steps slow may do so by 30 to 90 ms: the other steps are the measure."""
    assert named(one(waves(12, 100))) == ("uniform_slowness", (), "forward", "")


def test_job_that_is_slow_throughout_is_healthy():
    """Without faster steps to compare with nothing is said."""
    assert find_stragglers(job(steps=60, scale=3.0)) == ()


def test_rank_with_less_work_does_not_make_the_others_late():
    """Eight lanes on three ranks: two have three, one has two and waits."""
    lanes = np.ones((40, 3))
    lanes[:, 2] = 2 / 3

    assert find_stragglers(job(ranks=3, steps=40, factor=lanes)) == ()


def test_one_rank_waits_for_nobody():
    """There is no straggler without others."""
    assert find_stragglers(job(ranks=1)) == ()


def test_clocks_and_order_of_rows_do_not_matter():
    """Starts that are hours apart, shuffled rows, steps done twice: the same findings."""
    table = job(late={"forward": on(W, 20, 3, 25)})
    expected = find_stragglers(table)
    skewed = table.assign(start_ns=table["start_ns"] + (table["rank"] == 1) * 3 * 3600 * 10**9)
    again = pd.concat([table[table.step < 5].assign(forward_ms=1e6), table]).sample(frac=1, random_state=0)

    assert find_stragglers(skewed) == expected
    assert find_stragglers(table.sample(frac=1, random_state=2)) == expected
    assert len(find_stragglers(again.sort_values(["forward_ms"], ascending=False, kind="stable"))) == 1


def test_steps_that_lack_a_rank_or_hold_no_number_are_left_out_and_said():
    """What can still be read is used."""
    table = job(steps=40, late={"forward": on(W, 40, 3, 25)})
    table.loc[(table.step == 4) & (table["rank"] == 0), "forward_ms"] = math.nan
    table = table[~((table.step == 7) & (table["rank"] == 2))]

    found = one(table)

    assert found.ranks == (3,)
    assert any("1 of 40 steps" in line for line in found.evidence)
    assert any("1 of 39 steps" in line for line in found.evidence)


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda t: t.drop(columns="wait_ms"), "no column wait_ms"),
        (lambda t: t.iloc[:0], "no rows"),
        (lambda t: t.assign(step_ms=math.inf), "no step of the timeline has finite"),
        (lambda t: t.assign(rank="first"), "no whole numbers"),
    ],
    ids=["column", "empty", "infinite", "words"],
)
def test_bad_timelines_are_refused(spoil, said):
    """An InputError says what is wrong with the table."""
    with pytest.raises(DataError, match=said):
        find_stragglers(spoil(job()))


def test_bad_pauses_are_refused():
    """So is a table of pauses that cannot be one."""
    pauses = pd.DataFrame([(0, 1, "coffee", 9.0)], columns=("rank", "step", "cause", "ms"))

    with pytest.raises(DataError, match="coffee"):
        find_stragglers(job(), pauses=pauses)
    with pytest.raises(DataError, match="no column ms"):
        find_stragglers(job(), pauses=pauses.drop(columns="ms"))


def test_waiting_that_was_not_recorded_is_reckoned_from_the_phases():
    """A timeline without waits still shows who is late, and says how it was read."""
    found = one(job(late={"forward": on(W, 20, 3, 25)}).assign(wait_ms=0.0))

    assert found.ranks == (3,)
    assert "no waiting was recorded" in found.evidence[-1]


def test_idle_time_by_rank_as_in_the_chapter():
    """Step times 118, 120, 119, 151 ms: slow rank 3, idle 33, 31, 32, 0 ms."""
    busy = [118.0, 120.0, 119.0, 151.0]
    rows = [(rank, 0, 0, 0.0, ms, 0.0, max(busy) - ms, 0.0, 0.0, 0.0, max(busy), 1) for rank, ms in enumerate(busy)]
    table = idle(pd.DataFrame(rows, columns=TIMELINE_COLUMNS))

    assert table.loc[0, [0, 1, 2, 3]].tolist() == [33.0, 31.0, 32.0, 0.0] == list(idle_by_rank(busy).idle_ms)
    assert table.loc[0, "slow_rank"] == 3
    assert table.loc[0, "slowdown"] == pytest.approx(151 / 120)


def test_what_cost_most_time_comes_first():
    """Five steps of compiling at thrice the time cost less than 50 late ones, though each of the five is slower."""
    blip = on(W, 90, 0, 10 * FIFTH_MS, slice(11, 16))
    found = find_stragglers(job(steps=90, late={"forward": blip, "data": on(W, 90, 1, 3 * FIFTH_MS, slice(40, 90))}))

    assert [finding.ranks for finding in found] == [(1,), (0,)]
    assert found[0].slowdown < found[1].slowdown


@pytest.mark.parametrize(("phase", "cause"), [("checkpoint", "checkpoint_io"), ("optimizer", "compute")])
def test_what_ends_a_step_makes_late_for_a_barrier_in_it(phase, cause):
    """A barrier after a checkpoint is waited in before the step ends: the phase is of the step that is late."""
    steps, at = 40, np.arange(5, 40, 10)
    table = job(steps=steps).sort_values(["step", "rank"], ignore_index=True)
    late = table["step"].isin(at)
    for column, mine, others in ((f"{phase}_ms", 300.0, 0.0), ("wait_ms", 0.0, 300.0), ("step_ms", 300.0, 300.0)):
        table.loc[late, column] += np.where(table.loc[late, "rank"] == 3, mine, others)
    found = one(table)

    assert named(found) == ("late_rank", (3,), phase, cause)


@pytest.mark.parametrize(("ms", "cause"), [(90.0, "gc"), (1.0, "compute")])
def test_recorded_collections_of_garbage_are_a_cause_when_they_last(ms, cause):
    """Pauses in one phase look like its own work, unless the timeline says that garbage was collected there; a little always is."""
    extra = np.zeros((36, W))
    extra[3::6, 2] = 100.0
    table = job(steps=36, late={"forward": extra})
    table["gc_ms"] = np.where((table["rank"] == 2) & (table["step"] % 6 == 3), ms, 0.5)
    found = one(table)

    assert (found.kind, found.ranks, found.cause) == ("late_rank", (2,), cause)
