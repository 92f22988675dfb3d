"""A sample of the race campaign: two acts on one model at once, one of them killed now and then; and that it sees what must not be."""

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.moves import judge_moves

from infra.journal import Entry, Journal
from infra.store import MemoryStore

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "race_campaign.py"
ONE, OTHER = "boat-20260101-000000-0001", "boat-20260101-000000-0002"


def test_one_wins_and_everything_comes_to_its_end() -> None:
    """A rollback and a reconciliation at once, twice, the second time with a kill."""
    command = [sys.executable, str(CAMPAIGN), "--seed", "7", "--json", "--store", "folder", "--trials", "2", "--only", "rollback|reconcile"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    document = json.loads(run.stdout)

    assert (run.returncode, document["ratio"]) == (0, 1.0), run.stderr[-3000:]
    assert [row["trials"] for row in document["samples"]] == [2]


def pointer(name: str, sequence: int) -> dict[str, Any]:
    """One that a release put in force, as far as it is looked at."""
    return {"release_id": name, "sequence": sequence}


def history(name: str, sequence: int, result: Mapping[str, Any], *, decision: str = "held", reason: str = "") -> tuple[Entry, ...]:
    """A release that meant to make this move, and what it says of it."""
    journal, effect = Journal(MemoryStore(), name), {"effect": "promote", "of": "a decision"}
    journal.append("intent", {**effect, "plan": {"pointer": pointer(name, sequence)}}, time_utc="")
    journal.append("done", {**effect, "result": result}, time_utc="")
    journal.append("decided", {"decision": decision, "reason": reason}, time_utc="")
    return journal.records()


WON = {"overtaken_by": None}


def lost_to(name: str) -> dict[str, Any]:
    """What a release says that another one overtook."""
    return {"overtaken_by": pointer(name, 1)}


def test_one_winner_and_a_loser_that_names_it_are_what_has_to_be() -> None:
    """The control of the tests below."""
    told = f"every required gate passes, but another was faster: version 3 serves since release {ONE}"
    judge_moves({ONE: history(ONE, 1, WON, decision="promoted"), OTHER: history(OTHER, 1, lost_to(ONE), reason=told)}, pointer(ONE, 1))


def given_up_and_moved() -> tuple[Entry, ...]:
    """A release that was abandoned, and whose process went on."""
    journal = Journal(MemoryStore(), OTHER)
    journal.append("abandoned", {"reason": "its machine is gone"}, time_utc="")
    journal.append("intent", {"effect": "promote", "of": "a decision", "plan": {}}, time_utc="")
    return journal.records()


@pytest.mark.parametrize(
    ("other", "now", "words"),
    [
        pytest.param(history(OTHER, 1, WON), pointer(ONE, 1), "two winners of one move", id="two-winners"),
        pytest.param(history(OTHER, 3, WON), pointer(OTHER, 3), "are claimed", id="a-move-that-nobody-made"),
        pytest.param(history(OTHER, 2, WON), pointer(ONE, 2), "the last move is", id="another-pointer"),
        pytest.param(history(OTHER, 1, lost_to("nobody")), pointer(ONE, 1), "lost to nobody", id="unknown-winner"),
        pytest.param(history(OTHER, 1, lost_to(OTHER)), pointer(ONE, 1), "two winners", id="lost-to-itself"),
        pytest.param(history(OTHER, 1, lost_to(ONE), decision="promoted"), pointer(ONE, 1), "moved nothing", id="promoted-nothing"),
        pytest.param(history(OTHER, 1, lost_to(ONE), reason="x since release y"), pointer(ONE, 1), "lost to nobody", id="wrong-words"),
        pytest.param(given_up_and_moved(), pointer(ONE, 1), "did something all the same", id="abandoned-and-went-on"),
    ],
)  # fmt: skip
def test_what_must_not_be_is_seen(other: tuple[Entry, ...], now: dict[str, Any], words: str) -> None:
    """Journals that contradict each other, or the pointer."""
    with pytest.raises(AssertionError, match=words):
        judge_moves({ONE: history(ONE, 1, WON, decision="promoted"), OTHER: other}, now)
