"""A release in the terminal."""

import io
import json
from typing import Any

import helpers_report as sample
import pytest
from rich.console import Console

from infra.report import release_document
from infra.terminal import render_rows, render_text


def shown(release: Any, width: int = 140) -> str:
    console = Console(file=io.StringIO(), width=width)
    render_text(release, console)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


@pytest.mark.parametrize("width", [60, 100, 200])
@pytest.mark.parametrize("name", ["promoted", "refused", "conditional"])
def test_text_fits_the_terminal(name: str, width: int) -> None:
    """Nothing is wider than the terminal or than 100 columns."""
    assert max(map(len, shown(getattr(sample, name)(), width).splitlines())) <= min(width, 100)


def test_refused_release_says_what_failed_and_what_to_do() -> None:
    """Decision, serving version, failing measurement, threshold, slice and next step are all there."""
    text = " ".join(shown(sample.refused()).split())
    for said in (
        "Refused: slice_quality failed",
        "last known-good, version 6",
        "-1.914",
        "≥ -0.72",
        "carrier=EV",
        "do: look at",
        "next: look at",
    ):
        assert said in text
    assert text.rindex("slice_quality failed utility") < text.rindex("scaling inconclusive efficiency")


def test_report_and_its_stored_document_look_the_same() -> None:
    """A document read back from JSON prints as the report did on the day."""
    report = sample.refused()
    assert shown(json.loads(json.dumps(release_document(report)))) == shown(report)


def test_a_bare_document_is_shown_as_far_as_it_goes() -> None:
    """An unfinished release, or a document with only the promised keys, prints without guessing the rest."""
    checks = [{"name": "efficiency", "observed": "NaN", "threshold": 0.5, "unit": "ratio", "passed": False}]
    gate = {"name": "scaling", "outcome": "fail", "attempt": 2, "reused": False, "seconds": 3.0, "checks": checks}
    text = shown({"release_id": "r", "recipe": "flights", "decision": "unfinished", "gates": [gate], "reason": "killed"})
    for said in ("Unfinished: killed.", "serves now: nothing", "failed", "on attempt 2", "efficiency", "NaN", "has to be 0.5"):
        assert said in text
    assert "release ? of ?" in shown({})


def test_markup_in_text_is_printed_not_read() -> None:
    """Square brackets from recipes and intervals are text, not styles."""
    assert "[red]boom[/red] [/x]" in shown({"decision": "held", "reason": "[red]boom[/red] [/x]"})


def test_rows_become_a_table_of_their_keys() -> None:
    """Records or mappings print one column a key, nested values flat; no rows print nothing."""
    console = Console(file=io.StringIO(), width=80)
    render_rows([{"workers": 16, "step_ms": 145.6, "serving": {"kind": "baseline", "version": "1"}}], console, title="lab")
    render_rows([], console)
    words = console.file.getvalue().split()  # type: ignore[attr-defined]
    assert words == ["lab", "workers", "step", "ms", "serving", "16", "145.6", "baseline", "1"]


def test_ids_stay_whole_and_sentences_stand_under_the_rows() -> None:
    """In 80 columns an id can be copied, and a long reason is told below the table, cut."""
    console = Console(file=io.StringIO(), width=80)
    rows = [{"release_id": "digits-20261129-191609-dbce", "decision": "fell_back", "reason": "a slice is worse than before " * 20}]
    render_rows(rows, console)
    table, _, sentence = console.file.getvalue().partition("fell_back")  # type: ignore[attr-defined]
    assert "digits-20261129-191609-dbce" in table
    assert sentence.strip().endswith("…")


def test_a_table_without_room_names_each_value() -> None:
    """Too many columns become one line a row: nothing is folded inside a word or cut off."""
    console = Console(file=io.StringIO(), width=60)
    render_rows([{f"a_long_key_{i}": "value-in-one-piece" for i in range(5)}], console)
    assert console.file.getvalue().count("value-in-one-piece") == 5  # type: ignore[attr-defined]


def test_a_condition_and_who_said_yes_are_printed() -> None:
    """Who waived what until when and why, and how long a person was waited for; also from the stored document."""
    report = sample.conditional()
    text = " ".join(shown(json.loads(json.dumps(release_document(report)))).replace("│", " ").split())

    for said in (
        "Promoted on a condition: five of six gates pass; scaling is inconclusive, waived by Ada Lovelace until 2025-02-13 09:40 UTC",
        "condition: scaling waived by Ada Lovelace until 2025-02-13 09:40 UTC: one device until March.",
        "a person: Approved by Grace Hopper on 2025-01-14 10:44 UTC, 1 h 3 min after the question: read the report.",
        "scaling inconclusive (waived, see the condition above)",
    ):
        assert said in text
