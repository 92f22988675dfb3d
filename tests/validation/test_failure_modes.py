"""The registry of failure modes: whole rows, one page for each kind of finding, names that can be typed."""

import re
from collections import Counter
from dataclasses import fields

import pytest

from validation.failure_modes import CHAPTERS, default_modes, mode_of_kind
from validation.finding import FINDING_KINDS
from validation.readiness import PLACEHOLDERS, WORDS, empty_parts
from validation.records import FailureMode

MODES = default_modes("the team")
EXISTING = {
    "rank_killed", "hang", "skipped_collective", "wrong_gradient", "straggler", "bad_data", "slice_regression", "torn_checkpoint",
    "bad_release_served",
}  # fmt: skip
by_name = pytest.mark.parametrize("mode", MODES, ids=lambda mode: mode.name)


def test_every_kind_of_finding_leads_to_exactly_one_mode() -> None:
    """Whatever `seatrial diagnose` says, there is one page for it."""
    listed = Counter(kind for mode in MODES for kind in mode.kinds)

    assert listed == Counter(FINDING_KINDS)
    assert mode_of_kind("p2p_cycle").name == "point_to_point"


def test_an_unknown_kind_has_no_page() -> None:
    """A kind that nobody listed is not sent to some page."""
    with pytest.raises(KeyError):
        mode_of_kind("gremlins")


def test_names_titles_and_drills_are_unique() -> None:
    """A drill has its mode's name, and no two pages share one."""
    assert len({mode.name for mode in MODES}) == len({mode.title for mode in MODES}) == len(MODES)
    assert all(mode.drill == mode.name for mode in MODES)
    assert all(re.fullmatch("[a-z0-9_]+", mode.name) for mode in MODES)


def test_no_mode_of_before_is_gone() -> None:
    """The first nine are still there, and every mode stands in one chapter."""
    assert {mode.name for mode in MODES} >= EXISTING
    assert Counter(mode.name for rows in CHAPTERS.values() for mode in rows) == Counter(mode.name for mode in MODES)


@by_name
def test_row_is_complete(mode: FailureMode) -> None:
    """Detector, owner, mitigation, stop condition and drill are words, and so is what people see and what fires it."""
    said = [getattr(mode, word) for word in (*WORDS, "title", "command", "fired_by", "detector")]

    assert all(text.strip().lower() not in PLACEHOLDERS for text in said)
    assert len(mode.sees) >= 2
    assert len(set(mode.sees)) == len(mode.sees)


@by_name
def test_page_is_complete(mode: FailureMode) -> None:
    """Nothing of a page is left out, and there is a command to confirm it with."""
    assert empty_parts(mode.page) == []
    assert any("`" in line for line in mode.page.confirm)
    for part in fields(mode.page):
        value = getattr(mode.page, part.name)
        lines = (value,) if isinstance(value, str) else value
        assert all(line == line.strip() and "  " not in line for line in lines)


@by_name
def test_page_sends_nobody_to_a_page_that_is_not_there(mode: FailureMode) -> None:
    """Where a page names another mode, that mode exists."""
    names = {other.name for other in MODES}
    sent = re.findall(r"\bsee ([a-z]+(?:_[a-z]+)+)\b", " ".join((*mode.page.act, mode.page.wait)))

    assert set(sent) <= names


def test_owner_answers_for_all_until_told_otherwise() -> None:
    """The recipe card's owner stands in every row."""
    assert {mode.owner for mode in default_modes("post room")} == {"post room"}
