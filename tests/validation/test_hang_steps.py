"""Ranks out of step: who noticed is not who did it."""

import pytest
from helpers_hang import LOST, job, one

from validation.diagnose import diagnose
from validation.flight import Marker

STEP_5, STEP_6, STEP_7 = "ar8#5@1 ar9#5@2", "ar8#6@1 ar9#6@2", "ar8#7@1 ar9#7@2"
USUAL = f"{STEP_5} {STEP_6}"
AHEAD = f"{STEP_5} {STEP_7}"


def said(rank: int, step: int, steps: list[int] | None = None) -> str:
    """The trainer's words."""
    seen = f"the ranks' steps are {steps} (by rank)" if steps else "the sum of all ranks' steps is 19"
    return f"RankError: rank {rank} is at step {step}, but {seen}: a rank left out a collective, so gradients ..."


@pytest.mark.parametrize("listed", [True, False], ids=["the error lists steps", "records alone"])
@pytest.mark.parametrize("culprit", [0, 1, 3])
@pytest.mark.parametrize("noticed", ["first", "all"])
def test_the_one_ahead_is_named_whoever_raised(culprit: int, noticed: str, listed: bool) -> None:
    """It left out the operations of step 6; a rank that raised, or all of them, only noticed."""
    steps = [7 if rank == culprit else 6 for rank in range(4)]
    first = min(rank for rank in range(4) if rank != culprit)
    lines = [
        one(rank, f"{AHEAD if rank == culprit else USUAL} |",
            result=said(rank, steps[rank], steps if listed else None) if noticed == "all" or rank == first else LOST)
        for rank in range(4)
    ]  # fmt: skip
    found = diagnose(job(*lines))

    assert (found.verdict, found.kind, found.ranks, found.step, found.confidence) == ("hang", "missing_participant", (culprit,), 6, "high")
    assert (found.collective.op, found.collective.seq) == ("all_reduce", 7)


def test_others_that_wait_for_the_one_that_noticed_do_not_blame_it() -> None:
    """Rank 0 raised at once, and two wait for it in the next operation."""
    steps = [6, 7, 6, 6]
    waits = " ar1@9*"
    found = diagnose(job(one(0, USUAL, result=said(0, 6, steps)), one(1, AHEAD), USUAL + waits, USUAL + waits))

    assert (found.kind, found.ranks) == ("missing_participant", (1,))


def test_of_two_the_one_ahead() -> None:
    """With less certainty."""
    found = diagnose(job(one(0, f"{USUAL} |", result=said(0, 6, [6, 7])), one(1, f"{AHEAD} |", result=said(1, 7, [6, 7]))))

    assert (found.kind, found.ranks, found.confidence) == ("missing_participant", (1,), "medium")


def test_a_caught_exception_is_the_reason() -> None:
    """The rank ahead had noted one."""
    note = Marker(step=7, phase="collective", note="exception: ValueError: empty batch")
    found = diagnose(job(one(0, USUAL, result=said(0, 6, [6, 7, 6])), one(1, AHEAD, marker=note), USUAL))

    assert (found.kind, found.ranks) == ("exception_path", (1,))
    assert "ValueError: empty batch" in found.explanation


def test_one_that_is_alone_behind_made_one_more() -> None:
    """Three are ahead of it."""
    found = diagnose(job(*(one(rank, f"{USUAL} |", result=said(rank, 7, [7, 6, 7, 7])) for rank in range(4))))

    assert (found.kind, found.ranks) == ("extra_collective", (1,))


@pytest.mark.parametrize("steps", [[6, 6, 7, 7], [5, 6, 7, 8], None])
def test_nobody_is_named_where_it_cannot_be_told(steps: list[int] | None) -> None:
    """Every rank raised the same, with as many on each side, or without a word of steps."""
    found = diagnose(job(*(one(rank, "ar8 ar9 |", result=said(rank, 6, steps)) for rank in range(4))))

    assert (found.kind, found.ranks) == ("insufficient_evidence", ())
