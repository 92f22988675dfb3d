"""Clock offsets between ranks of a real group: found within their own uncertainty, and not measured where there is nothing to measure."""

import time
from pathlib import Path

import pytest
from helpers_loop import run_ranks, tiny_job

from trainer.clocks import ClockOffset, clock_identity, estimate
from trainer.world import World

HOUR_NS = 3600 * 10**9


def shifted(world: World) -> ClockOffset:
    """Every rank is on a machine of its own whose clock is an hour times its rank ahead."""
    return estimate(world, now_ns=lambda: time.monotonic_ns() + world.rank * HOUR_NS, identity=lambda: f"machine {world.rank}".encode())


def untouched(world: World) -> ClockOffset:
    """All ranks on one machine; the clock must not even be read."""
    return estimate(world, now_ns=lambda: 1 // 0)


def test_shifted_clock_is_found(tmp_path: Path) -> None:
    """The offset is right to within the uncertainty that comes with it, and that is a few ms at most."""
    first, second, third = run_ranks(tiny_job(tmp_path, world_size=3), shifted)

    assert first == ClockOffset()
    for rank, found in ((1, second), (2, third)):
        assert abs(found.offset_ns + rank * HOUR_NS) <= found.uncertainty_ns
        assert 0 < found.uncertainty_ns < 50_000_000


def test_one_machine_measures_nothing(tmp_path: Path) -> None:
    """Ranks with one boot id share the clock: offset 0, no ping-pong."""
    assert run_ranks(tiny_job(tmp_path, world_size=2), untouched) == [ClockOffset(), ClockOffset()]


def test_one_rank_needs_no_group() -> None:
    """A rank alone is its own reference."""
    assert estimate(World(rank=0, world_size=1)) == ClockOffset()


def test_identity_is_that_of_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two readings agree; where the system does not tell, no two are alike, so that clocks are measured."""
    assert clock_identity() == clock_identity()

    monkeypatch.setattr("trainer.clocks.BOOT_ID", tmp_path / "absent")
    assert clock_identity() != clock_identity()
