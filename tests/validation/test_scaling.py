"""scaling: every outcome, at its edges, and its control caught and missed."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from validation.canonical import canonical_json
from validation.policy import ScalingPolicy, parse_policy
from validation.records import PHASES, ScalingPoint, ScalingRecords
from validation.scaling import is_decided, judge_scaling
from validation.verdict import Check, GateVerdict, Outcome

POLICY = parse_policy(
    "scaling: {price_per_device_hour: 3600, oversubscribed_floor: 0.5}"
).scaling  # USD: one a device-second; one floor for all
DRIFT = (1.0, 0.9, 1.1, 1.05)  # of the machine, from repeat to repeat
EFFICIENCY = {1: 1.0, 2: 0.9, 4: 0.8, 8: 0.7}  # of two devices


def point(world_size: int, repeat: int = 0, **changes: Any) -> ScalingPoint:
    """One timed run at 100 samples/s a device times its efficiency and the repeat's drift; name what a test is about."""
    efficiency = EFFICIENCY[world_size] * (1 + 0.01 * (repeat % 2)) if world_size > 1 else 1.0
    throughput = 100.0 * min(world_size, 2) * efficiency * DRIFT[repeat]
    phases = dict.fromkeys(PHASES, 1.0) | {"backward_ms": 50.0 / world_size, "wait_ms": float(world_size)}
    usual = ScalingPoint(
        world_size=world_size, repeat=repeat, reduction="exact", throughput_sps=throughput, step_ms_p50=1e5 / throughput,
        rank_step_ms=tuple(100.0 + rank for rank in range(world_size)), phase_ms=phases, peak_memory_mib=100.0,
    )  # fmt: skip
    return replace(usual, **changes)


def points(sizes: Sequence[int] = (1, 2, 4, 8), repeats: int = 4) -> tuple[ScalingPoint, ...]:
    """Interleaved repeats of every world size."""
    return tuple(point(size, repeat) for repeat in range(repeats) for size in sizes)


def curve(quality: Sequence[float] = (0.5, 0.6, 0.7, 0.68)) -> pd.DataFrame:
    """One measurement every ten steps."""
    steps = [10 * (at + 1) for at in range(len(quality))]
    return pd.DataFrame({"step": steps, "samples": [100 * step for step in steps], "train_loss": [1.0] * len(steps), "quality": quality})


def straggler(world_size: int = 2, rank: int = 1) -> ScalingPoint:
    """A run whose planted rank takes four times as long."""
    return point(world_size, rank_step_ms=tuple(400.0 if each == rank else 100.0 for each in range(world_size)))


def records(**changes: Any) -> ScalingRecords:
    """A sound experiment on two devices; name what a test is about."""
    sound = ScalingRecords(
        points=points(), world_sizes=(1, 2, 4, 8), devices=2, global_batch_size=100, curve=curve(), quality_name="ROC AUC",
        target_quality=0.65, planted_defect="rank 1 is late in every step", planted=(straggler(),), planted_rank=1, worker_seconds=1.0,
    )  # fmt: skip
    return replace(sound, **changes)


def swapped(world_size: int, repeat: int | None = None, **changes: Any) -> tuple[ScalingPoint, ...]:
    """The sound points with those of one world size (and repeat) changed."""
    return tuple(replace(p, **changes) if p.world_size == world_size and repeat in (None, p.repeat) else p for p in points())


def policy(**changes: float) -> ScalingPolicy:
    """The default thresholds with some set."""
    return parse_policy(f"scaling: {changes}").scaling


def named(verdict: GateVerdict, name: str) -> Check:
    """The one check of this name."""
    (found,) = [item for item in verdict.checks if item.name == name]
    return found


def failed(verdict: GateVerdict) -> list[str]:
    """Names of failed checks."""
    return [item.name for item in verdict.checks if item.passed is False]


def test_sound_experiment_passes() -> None:
    """Efficiency above the floor, little idle time and a reached target pass, with the control caught."""
    verdict = judge_scaling(records(), POLICY)

    assert Outcome.PASS is verdict.outcome, verdict.reason
    assert "0.70 at W=8" in verdict.reason
    assert verdict.control is not None
    assert verdict.control.caught
    assert "rank 1 at W=2" in verdict.control.detail


def test_pairs_cancel_drift() -> None:
    """The machine's drift between repeats leaves the paired interval narrow."""
    found = named(judge_scaling(records(), POLICY), "device efficiency at W=4")

    assert found.interval is not None
    assert pytest.approx(found.observed) == 0.804
    assert found.interval[1] - found.interval[0] < 0.02


def test_baseline_is_the_best_single_worker() -> None:
    """A faster one-worker set-up takes the baseline, and every efficiency falls with it."""
    faster = tuple(replace(point(1, repeat), reduction="fast", throughput_sps=200 * DRIFT[repeat]) for repeat in range(4))
    verdict = judge_scaling(records(points=points() + faster), POLICY)

    assert pytest.approx(named(verdict, "device efficiency at W=4").observed) == 0.402
    assert any("reduction fast" in note for note in verdict.notes)
    assert Outcome.FAIL is verdict.outcome


def test_exact_reduction_is_judged_where_timed() -> None:
    """A set-up of the fast reduction at W > 1 is shown and not judged."""
    faster = tuple(replace(p, reduction="fast", throughput_sps=2 * p.throughput_sps) for p in points((4,)))
    verdict = judge_scaling(records(points=points() + faster), POLICY)
    (setups,) = [table for table in verdict.tables if table.title == "Every set-up that was timed"]

    assert pytest.approx(named(verdict, "device efficiency at W=4").observed) == 0.804
    assert [row[:2] for row in setups.rows if row[0] == 4] == [(4, "exact"), (4, "fast")]


@pytest.mark.parametrize(
    ("share", "outcome"),
    [
        pytest.param(0.5, Outcome.PASS, id="at-the-floor"),
        pytest.param(float(np.nextafter(0.5, 0)), Outcome.FAIL, id="one-ulp-below"),
        pytest.param(0.3, Outcome.FAIL, id="below"),
    ],
)
def test_efficiency_floor(share: float, outcome: Outcome) -> None:
    """A world size passes at the floor exactly and fails one ulp below it."""
    flat = tuple(replace(p, throughput_sps=1.0 if p.world_size == 1 else 2 * share if p.world_size == 8 else 1.8) for p in points())
    verdict = judge_scaling(records(points=flat), POLICY)

    assert outcome is verdict.outcome, verdict.reason
    assert outcome is Outcome.PASS or "device efficiency at W=8 (oversubscribed: 8 ranks on 2 devices)" in verdict.reason


@pytest.mark.parametrize(
    ("share", "outcome"),
    [
        pytest.param(0.2, Outcome.PASS, id="at-its-floor"),
        pytest.param(float(np.nextafter(0.2, 0)), Outcome.FAIL, id="one-ulp-below"),
    ],
)
def test_ranks_that_share_devices_have_a_floor_of_their_own(share: float, outcome: Outcome) -> None:
    """Eight ranks on two devices are held to `oversubscribed_floor`, two ranks on two devices to `efficiency_floor`."""
    flat = tuple(replace(p, throughput_sps=1.0 if p.world_size == 1 else 2 * share if p.world_size == 8 else 1.8) for p in points())
    verdict = judge_scaling(records(points=flat), parse_policy().scaling)

    assert outcome is verdict.outcome, verdict.reason


def test_measuring_goes_on_only_while_an_interval_straddles_its_floor() -> None:
    """`is_decided` is false for repeats on both sides of the floor, true for clear ones, good or bad."""
    wide = tuple(replace(p, throughput_sps=(90.0 + 40 * (p.repeat % 2)) * DRIFT[p.repeat]) if p.world_size == 8 else p for p in points())
    slow = tuple(replace(p, throughput_sps=1.0) for p in points())

    assert [is_decided(records(points=some), POLICY) for some in (points(), wide, slow)] == [True, False, True]


def test_interval_across_the_floor_is_inconclusive() -> None:
    """Repeats that spread over both sides of the floor decide nothing."""
    wide = tuple(replace(p, throughput_sps=(90.0 + 40 * (p.repeat % 2)) * DRIFT[p.repeat]) if p.world_size == 8 else p for p in points())
    verdict = judge_scaling(records(points=wide), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "device efficiency at W=8" in verdict.reason
    assert "run scaling again on an idle machine" in verdict.action


def test_one_repeat_has_no_interval() -> None:
    """A single repeat is inconclusive even where the policy asks for no more."""
    verdict = judge_scaling(records(points=points(repeats=1)), policy(repeats=1))

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert named(verdict, "required evidence").passed is True
    assert "is too uncertain at 0.9" in verdict.reason


@pytest.mark.parametrize(
    ("busy", "outcome"),
    [
        pytest.param(100.0, Outcome.PASS, id="at-the-limit"),
        pytest.param(float(np.nextafter(100.0, 0)), Outcome.FAIL, id="one-ulp-beyond"),
        pytest.param(200.0, Outcome.PASS, id="even"),
    ],
)
def test_idle_share(busy: float, outcome: Outcome) -> None:
    """A rank may be idle for half of the slowest rank's step and no more; the slow rank is named."""
    verdict = judge_scaling(records(points=swapped(2, rank_step_ms=(200.0, busy))), POLICY)

    assert outcome is verdict.outcome, verdict.reason
    assert outcome is Outcome.PASS or "idle share at W=2 (rank 0 at W=2)" in verdict.reason


def test_oversubscribed_idle_is_shown_and_not_judged() -> None:
    """With more ranks than devices a rank waits for a core; that is no straggler."""
    uneven = tuple(100.0 if rank else 900.0 for rank in range(8))
    verdict = judge_scaling(records(points=swapped(8, rank_step_ms=uneven)), POLICY)
    (table,) = [table for table in verdict.tables if table.title == "Idle time by rank"]

    assert Outcome.PASS is verdict.outcome
    assert (8, 0, 0.0, "slowest") in table.rows
    assert any(note.startswith("Oversubscribed: W=4, 8 share 2 devices") for note in verdict.notes)


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"throughput_sps": math.nan}, id="throughput-nan"),
        pytest.param({"throughput_sps": 0.0}, id="throughput-zero"),
        pytest.param({"throughput_sps": -1.0}, id="throughput-negative"),
        pytest.param({"step_ms_p50": math.inf}, id="step-infinite"),
        pytest.param({"rank_step_ms": (1.0, math.nan)}, id="rank-nan"),
        pytest.param({"phase_ms": {"wait_ms": math.nan}}, id="phase-nan"),
    ],
)
def test_broken_number_fails(changes: dict[str, Any]) -> None:
    """A number that is not finite and positive fails, and its run is named."""
    verdict = judge_scaling(records(points=swapped(2, repeat=3, **changes)), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert "W=2, repeat 3, exact" in verdict.reason


@pytest.mark.parametrize("column", ["quality", "train_loss"])
def test_nan_in_the_curve_fails(column: str) -> None:
    """A curve with a NaN is a run that diverged, whatever its other points say."""
    broken = curve()
    broken.loc[3, column] = math.nan

    assert failed(judge_scaling(records(curve=broken), POLICY)) == ["quality curve values that are not finite"]


def test_target_never_reached_fails() -> None:
    """The best quality and its step are named when the target is out of reach."""
    verdict = judge_scaling(records(target_quality=0.75), POLICY)

    assert Outcome.FAIL is verdict.outcome
    assert verdict.reason.startswith("best ROC AUC (reached at step 30) is 0.7, has to be >= 0.75")
    assert not [plot for plot in verdict.plots if "to ROC AUC" in plot.title]


def test_target_reached_exactly() -> None:
    """The first step whose quality is the target itself reaches it."""
    verdict = judge_scaling(records(target_quality=0.7), POLICY)

    assert Outcome.PASS is verdict.outcome
    assert pytest.approx(verdict.tables[0].rows[0][-3]) == 30 * 976.190 / 1000


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        pytest.param({"points": ()}, "a timed run at world size 1", id="empty"),
        pytest.param({"points": points((2, 4, 8))}, "a timed run at world size 1", id="no-baseline"),
        pytest.param({"world_sizes": (2, 4, 8)}, "a timed run at world size 1", id="baseline-not-asked"),
        pytest.param({"world_sizes": (1,), "points": points((1,))}, "a world size above 1", id="one-rank-only"),
        pytest.param({"points": points((1, 2, 4))}, "4 repeats at W=8 beside world size 1's (0 usable)", id="world-size"),
        pytest.param({"points": points()[:-1]}, "4 repeats at W=8 beside world size 1's (3 usable)", id="repeat"),
        pytest.param({"points": swapped(8, repeat=2, rank_step_ms=(1.0,) * 7)}, "one time for each rank", id="uneven"),
        pytest.param({"points": swapped(8, repeat=2, phase_ms={})}, "and phases, at W=8, repeat 2", id="no-phases"),
        pytest.param({"points": (*points(), point(2))}, "one point each for W=2 exact repeat 0", id="twice"),
        pytest.param({"curve": curve(())}, "the quality curve", id="empty-curve"),
        pytest.param({"curve": curve().drop(columns="quality")}, "the quality curve (quality absent)", id="curve-column"),
        pytest.param({"devices": 0}, "0 devices", id="no-device"),
    ],
)
def test_missing_evidence_is_inconclusive(changes: dict[str, Any], words: str) -> None:
    """What had to be timed and was not is named, and nothing passes."""
    verdict = judge_scaling(records(**changes), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome, verdict.reason
    assert words in verdict.reason
    assert "seatrial gate scaling" in verdict.action


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"planted": (point(2),)}, id="no-straggler"),
        pytest.param({"planted": (straggler(rank=0),)}, id="another-rank-named"),
        pytest.param({"planted": ()}, id="not-run"),
        pytest.param({"planted": (), "points": swapped(2, rank_step_ms=(100.0, 400.0))}, id="real-straggler-only"),
    ],
)
def test_missed_control_is_inconclusive(changes: dict[str, Any]) -> None:
    """A planted straggler that is not named takes the verdict's word away, also when the real run has one."""
    verdict = judge_scaling(records(**changes), POLICY)

    assert Outcome.INCONCLUSIVE is verdict.outcome
    assert "positive control was missed" in verdict.reason


def test_control_needs_no_second_device() -> None:
    """On one device the planted straggler of two ranks is still seen."""
    single = tuple(replace(p, throughput_sps=90.0) for p in points())
    verdict = judge_scaling(records(devices=1, points=single), POLICY)

    assert verdict.control is not None
    assert verdict.control.caught
    assert Outcome.PASS is verdict.outcome, verdict.reason


def test_time_and_cost_to_target() -> None:
    """Thirty steps reach 0.65; two devices for 30 steps cost twice their seconds, and fastest and cheapest are named."""
    flat = tuple(replace(p, step_ms_p50={1: 1000.0, 2: 600.0, 4: 550.0, 8: 700.0}[p.world_size]) for p in points())
    verdict = judge_scaling(records(points=flat), POLICY)
    rows = {row[0]: row[-3:] for row in verdict.tables[0].rows}

    assert {w: pytest.approx(rows[w]) for w in (1, 2, 4)} == {
        1: (30.0, 30 / 3600, 30.0),
        2: (18.0, 36 / 3600, 36.0),
        4: (16.5, 33 / 3600, 33.0),
    }
    assert "Fastest to the target quality: W=4 (16.5 s). Cheapest: W=1 (30 USD)." in verdict.notes


def test_costliest_phase_is_named() -> None:
    """The phase that takes most of a step stands in the table, at each world size its own."""
    table = judge_scaling(records(), POLICY).tables[0]
    column = table.columns.index("costliest phase")

    assert [row[column] for row in table.rows] == ["backward", "backward", "backward", "wait"]


def test_pictures_stand_beside_tables() -> None:
    """Throughput with its ideal line, efficiency with the floor, cost, time, idle and phases are drawn."""
    plots = {plot.title: plot for plot in judge_scaling(records(), POLICY).plots}

    assert {"Throughput", "Efficiency", "Cost to ROC AUC 0.65", "Time to ROC AUC 0.65", "Idle time by rank", "Phases of a step"} == set(
        plots
    )
    assert pytest.approx(plots["Throughput"].series[1].y, rel=0.05) == (100.0, 200.0, 400.0, 800.0)
    assert (plots["Efficiency"].reference, plots["Efficiency"].reference_label) == (0.5, "floor (0.5 where ranks share devices)")
    assert plots["Efficiency"].series[0].low < plots["Efficiency"].series[0].high
    assert len(plots["Idle time by rank"].series[0].x) == 14


def test_fit_is_marked_as_such() -> None:
    """The fitted model is shown with its error and the number of points behind it."""
    notes = judge_scaling(records(), POLICY).notes

    assert any(note.startswith("Fit of 4 points: step_ms(W) = ") and "RMS error" in note for note in notes)


@settings(max_examples=25, deadline=None)
@given(st.permutations(range(16)), st.sampled_from(["sound", "nan", "short"]))
def test_order_of_points_does_not_matter(order: list[int], kind: str) -> None:
    """Shuffled points and curve rows give the same verdict, and it has a canonical JSON form."""
    made = {"sound": points(), "nan": swapped(4, repeat=1, throughput_sps=math.nan), "short": swapped(8, throughput_sps=20.0)}[kind]
    shuffled = records(points=tuple(made[at] for at in order), curve=curve().iloc[[at for at in order if at < 4]])

    assert canonical_json(judge_scaling(records(points=made), POLICY)) == canonical_json(judge_scaling(shuffled, POLICY))
