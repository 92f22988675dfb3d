"""Pure quantities of scaling: the chapter's numbers, edges, and what each refuses."""

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from validation.errors import ConfigError, EvidenceError
from validation.scaling import device_efficiency, idle_by_rank, scaling_efficiency
from validation.scaling_quantities import cost_to_target, fit_step_model, mean_interval


def test_chapter_efficiency() -> None:
    """420 samples/s on one worker and 1,390 on four are 0.827 of linear."""
    found = scaling_efficiency({4: 1390.0, 1: 420.0})

    assert list(found) == [1, 4]
    assert {size: round(value, 3) for size, value in found.items()} == {1: 1.0, 4: 0.827}


def test_chapter_idle() -> None:
    """118, 120, 119 and 151 ms: rank 3 is slow and the others wait 33, 31 and 32 ms."""
    assert idle_by_rank([118.0, 120.0, 119.0, 151.0]) == ((33.0, 31.0, 32.0, 0.0), 3)


def test_idle_of_one_rank_and_of_a_tie() -> None:
    """One rank waits for nobody; of equally slow ranks the first is named."""
    assert idle_by_rank([5.0]) == ((0.0,), 0)
    assert idle_by_rank([4.0, 5.0, 5.0]) == ((1.0, 0.0, 0.0), 1)


def test_device_efficiency_counts_devices_not_ranks() -> None:
    """Eight ranks on two devices that do twice one worker's work are perfect by device and a quarter by rank."""
    throughput = {1: 100.0, 2: 180.0, 8: 200.0}

    assert pytest.approx(device_efficiency(throughput, devices=2)) == {1: 1.0, 2: 0.9, 8: 1.0}
    assert pytest.approx(scaling_efficiency(throughput)[8]) == 0.25


@pytest.mark.parametrize("value", [math.nan, math.inf, 0.0, -1.0], ids=["nan", "infinite", "zero", "negative"])
@pytest.mark.parametrize("size", [1, 4])
def test_efficiency_refuses_broken_throughput(value: float, size: int) -> None:
    """A throughput that is not finite and positive is refused, at the baseline too."""
    with pytest.raises(EvidenceError, match="look at those runs' timelines"):
        scaling_efficiency({1: 420.0, 4: 1390.0} | {size: value})


@pytest.mark.parametrize(
    ("throughput", "error", "match"),
    [
        pytest.param({}, EvidenceError, "with world sizes 1,2,4", id="empty"),
        pytest.param({2: 800.0}, EvidenceError, "with world sizes 1,2,4", id="no-baseline"),
        pytest.param({1: 420.0, 0: 1.0}, ConfigError, "whole numbers from 1", id="no-ranks"),
    ],
)
def test_efficiency_refuses_shape(throughput: dict[int, float], error: type[Exception], match: str) -> None:
    """Without W = 1, or with W < 1, there is no efficiency; the message names the next step."""
    with pytest.raises(error, match=match):
        device_efficiency(throughput, devices=2)


def test_device_efficiency_refuses_no_device() -> None:
    """No device can train."""
    with pytest.raises(ConfigError, match="at least 1"):
        device_efficiency({1: 420.0}, devices=0)


@pytest.mark.parametrize(
    "times", [[], [1.0, math.nan], [0.0], [-1.0, 2.0], [math.inf]], ids=["empty", "nan", "zero", "negative", "infinite"]
)
def test_idle_refuses(times: list[float]) -> None:
    """Idle time needs a finite, positive time for each rank."""
    with pytest.raises(EvidenceError, match="look at the timeline of that rank"):
        idle_by_rank(times)


@given(st.dictionaries(st.integers(2, 64), st.floats(1e-3, 1e6), max_size=6), st.floats(1e-3, 1e6), st.integers(1, 64))
def test_device_efficiency_is_efficiency_within_the_devices(throughput: dict[int, float], single: float, devices: int) -> None:
    """Both numbers agree up to the devices, and beyond them the device's is larger; the unit of throughput cancels."""
    given_sps = {1: single} | throughput
    ranks, device = scaling_efficiency(given_sps), device_efficiency(given_sps, devices=devices)

    assert all(device[size] == pytest.approx(ranks[size] * max(1.0, size / devices)) for size in given_sps)
    assert ranks == pytest.approx(scaling_efficiency({size: 60 * value for size, value in given_sps.items()}))


def test_interval_by_hand() -> None:
    """Of 0.8, 0.9, 1.0: mean 0.9, half width 4.303 * 0.1 / sqrt(3)."""
    mean, interval = mean_interval([0.8, 0.9, 1.0], 0.95)

    assert interval is not None
    assert pytest.approx((mean, *interval), abs=1e-4) == (0.9, 0.9 - 0.24841, 0.9 + 0.24841)


@pytest.mark.parametrize(
    ("values", "confidence", "interval"),
    [
        pytest.param([0.9], 0.95, None, id="one-value"),
        pytest.param([0.5, 0.5], 0.95, (0.5, 0.5), id="no-spread"),
        pytest.param([0.5, 0.5], 1.0, (-math.inf, math.inf), id="certainty"),
        pytest.param([0.4, 0.6], 0.0, (0.5, 0.5), id="no-confidence"),
    ],
)
def test_interval_edges(values: list[float], confidence: float, interval: tuple[float, float] | None) -> None:
    """One value has no interval and certainty has no bound."""
    assert interval == mean_interval(values, confidence)[1]


@pytest.mark.parametrize(
    ("values", "confidence", "error"), [([], 0.95, EvidenceError), ([math.nan, 1.0], 0.95, EvidenceError), ([1.0, 2.0], 95.0, ConfigError)]
)
def test_interval_refuses(values: list[float], confidence: float, error: type[Exception]) -> None:
    """Nothing, NaN and a confidence in percent have no interval."""
    with pytest.raises(error, match=r"Run the probe again|Write 0\.95"):
        mean_interval(values, confidence)


def test_fit_finds_the_model_that_made_the_points() -> None:
    """Points made by 100 / min(W, 8) + 0.5 W + 3 log2 W give those terms back with no error."""
    points = {size: 100 / min(size, 8) + 0.5 * size + 3 * math.log2(size) for size in (1, 2, 4, 8, 16)}
    model = fit_step_model(points, devices=8)

    assert pytest.approx((model.compute_ms, model.per_rank_ms, model.per_doubling_ms)) == (100, 0.5, 3)
    assert (pytest.approx(model.rms_ms, abs=1e-9), model.points) == (0, 5)
    assert points[4] == pytest.approx(model.step_ms(4))


def test_fit_stays_physical() -> None:
    """Times that fall faster than ideal give no negative term, but an error that is shown."""
    model = fit_step_model({1: 100.0, 2: 40.0, 4: 15.0}, devices=4)

    assert min(model.compute_ms, model.per_rank_ms, model.per_doubling_ms) >= 0
    assert model.rms_ms > 1


@pytest.mark.parametrize(
    ("points", "devices", "error"),
    [({}, 2, EvidenceError), ({1: math.nan}, 2, EvidenceError), ({0: 1.0}, 2, ConfigError), ({1: 1.0}, 0, ConfigError)],
)
def test_fit_refuses(points: dict[int, float], devices: int, error: type[Exception]) -> None:
    """No point, a broken one, and sizes below 1 cannot be fitted."""
    with pytest.raises(error, match=r"Run the scaling probe again|at least 1"):
        fit_step_model(points, devices=devices)


def test_cost_by_hand() -> None:
    """3,600 steps of 1,000 ms are an hour: on two devices two device-hours, at 0.05 a tenth."""
    found = cost_to_target(steps=3600, step_ms=1000.0, world_size=8, devices=2, price_per_device_hour=0.05)

    assert pytest.approx((found.wall_s, found.device_hours, found.cost)) == (3600.0, 2.0, 0.1)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"step_ms": math.nan}, EvidenceError),
        ({"steps": -1}, EvidenceError),
        ({"price_per_device_hour": 0.0}, ConfigError),
        ({"world_size": 0}, ConfigError),
    ],
)
def test_cost_refuses(change: dict[str, Any], error: type[Exception]) -> None:
    """A broken time or an impossible price is refused with the next step."""
    usual: dict[str, Any] = {"steps": 1, "step_ms": 1.0, "world_size": 1, "devices": 1, "price_per_device_hour": 1.0}

    with pytest.raises(error, match=r"Run the scaling probe again|Set price_per_device_hour"):
        cost_to_target(**usual | change)
