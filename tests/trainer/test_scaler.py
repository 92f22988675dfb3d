"""The loss scale: halved on overflow, doubled when long calm, never touched when the recipe asks for none."""

import math

from trainer.scaler import CALM_STEPS, LARGEST, SMALLEST, LossScaler


def test_no_scaling_is_one_for_ever() -> None:
    """A recipe without loss_scale has the factor 1, and nothing that is not finite is excused."""
    scaler = LossScaler.starting_at(None)
    for _ in range(CALM_STEPS + 1):
        scaler.note(overflowed=False)

    assert (scaler.scale, scaler.calm, scaler.absorbs(math.inf)) == (1.0, 0, False)


def test_overflow_halves_and_calm_doubles() -> None:
    """An overflow halves the scale and starts the count anew; CALM_STEPS updates in a row double it."""
    scaler = LossScaler.starting_at(1024.0)
    scaler.note(overflowed=True)
    for _ in range(CALM_STEPS):
        scaler.note(overflowed=False)

    assert (scaler.scale, scaler.calm) == (1024.0, 0)


def test_scale_has_bounds() -> None:
    """It does not grow past the largest; at the smallest an overflow is a fault and no longer excused."""
    large, small = LossScaler.starting_at(LARGEST), LossScaler.starting_at(SMALLEST)
    for _ in range(CALM_STEPS):
        large.note(overflowed=False)

    assert large.scale == LARGEST
    assert not small.absorbs(math.nan)
    assert LossScaler.starting_at(2.0).absorbs(math.nan)


def test_state_comes_back() -> None:
    """What a checkpoint holds is the whole state."""
    scaler, fresh = LossScaler.starting_at(64.0), LossScaler.starting_at(1.0)
    scaler.note(overflowed=True)
    scaler.note(overflowed=False)
    fresh.load_state_dict(scaler.state_dict())

    assert fresh == scaler
