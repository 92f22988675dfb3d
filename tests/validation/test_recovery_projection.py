"""The projection of a recovery to more ranks: by hand, and in words."""

import math
from typing import Any

import pytest
from helpers_recovery import records, recovery

from validation.errors import EvidenceError
from validation.policy import parse_policy
from validation.recovery import judge_recovery
from validation.recovery_projection import project_recovery, projection_lines, size_in_words


def test_projection_by_hand() -> None:
    """Four times the ranks: 0.1 + 4 (0.1 + 0.2) + 0.1 + 0.5 = 1.9 s; 20 MiB in 0.1 s are 200 MiB/s for the 898.2 s that others leave."""
    found = project_recovery(recovery(), state_mib=20.0, budget_s=900.0)

    assert pytest.approx((found.total_s, found.headroom_s, found.load_mib_s)) == (1.9, 898.1, 200.0)
    assert pytest.approx(found.state_mib_in_budget) == 898.2 * 200


def test_projection_never_shrinks() -> None:
    """A group larger than the projected one is taken as measured, and a resume from the start bounds no state."""
    found = project_recovery(recovery(resumed_world_size=16, load_s=0.0), state_mib=20.0, budget_s=900.0)

    assert pytest.approx(found.total_s) == 0.9
    assert math.isinf(found.state_mib_in_budget)


@pytest.mark.parametrize("changes", [{"load_s": math.nan}, {"resumed_world_size": 0}], ids=["nan", "no-rank"])
def test_projection_refuses(changes: dict[str, Any]) -> None:
    """A recovery without sound times or ranks has no projection."""
    with pytest.raises(EvidenceError, match="Run the kill again"):
        project_recovery(recovery(**changes), state_mib=20.0, budget_s=900.0)


def test_projection_in_words_names_every_assumption() -> None:
    """The result, what grows, what stays, the load rate and what nobody measured; the gate's notes carry all of it."""
    lines = projection_lines(recovery(), 20.0, 900.0)
    notes = judge_recovery(records(), parse_policy().kill_and_resume).notes

    assert lines[0].startswith("Projected to 8 GPUs of one warm node: 1.90 s of 900 s, from a recovery of 1.00 s on 2 ranks")
    assert all(line.startswith("Assumed: ") for line in lines[1:])
    for words in ("proportion to ranks", "first step (0.50 s)", "200 MiB/s (20 MiB in 0.1 s)", "replacement node"):
        assert sum(words in line for line in lines) == 1
    assert set(lines) <= set(notes)


@pytest.mark.parametrize(
    ("mib", "words"),
    [(0.0, "0 KiB"), (0.0312, "31.9 KiB"), (0.5, "512 KiB"), (1.0, "1 MiB"), (7.26, "7.26 MiB"), (1023.0, "1,023 MiB"), (5e6, "4,883 GiB")],
)
def test_small_states_keep_their_digits(mib: float, words: str) -> None:
    """A state of a few KiB is not "0 MiB"."""
    assert words == size_in_words(mib)


def test_a_load_without_time_says_no_rate() -> None:
    """A resume from the start loads nothing in no time."""
    assert "measured no time at all (20 MiB in 0 s)" in "".join(projection_lines(recovery(load_s=0.0), 20.0, 900.0))
