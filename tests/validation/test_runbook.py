"""The runbook: made from the registry, equal to what stands in docs/, with no link that leads nowhere."""

import re
from pathlib import Path

import pytest

from validation.failure_modes import default_modes
from validation.finding import FINDING_KINDS
from validation.runbook import FOLDER, INDEX, index_page, mode_page, runbook

DOCS = Path(__file__).parents[2] / "docs"
LINK = re.compile(r"\]\(([^)#]+)\)")


@pytest.mark.parametrize("path", list(runbook()))
def test_page_in_docs_is_what_the_registry_says(path: str) -> None:
    """Whoever changes a mode runs `seatrial runbook`, or this fails."""
    assert (DOCS / path).read_text() == runbook()[path], "run `seatrial runbook`"


def test_no_page_is_left_over() -> None:
    """A mode that was renamed leaves no page behind."""
    assert {f"{FOLDER}/{path.name}" for path in (DOCS / FOLDER).iterdir()} | {INDEX} == set(runbook())


def test_index_leads_from_every_finding_and_every_symptom() -> None:
    """Each kind has one row, each symptom one, each mode a row of its own."""
    index = index_page()

    assert all(index.count(f"| `{kind}` |") == 1 for kind in FINDING_KINDS)
    assert all(f"| {symptom} |" in index for mode in default_modes() for symptom in mode.sees)
    assert all(f"`{mode.drill}`: " in index for mode in default_modes())


@pytest.mark.parametrize("path", list(runbook()))
def test_links_lead_somewhere(path: str) -> None:
    """Every link of a page is another page of the runbook."""
    pages = runbook()
    base = Path(path).parent
    found = [Path(*(base / link).parts) for link in LINK.findall(pages[path])]
    resolved = [Path(str(link).replace(f"{FOLDER}/../", "")).as_posix() for link in found]

    assert resolved
    assert set(resolved) <= set(pages)


@pytest.mark.parametrize("mode", default_modes(), ids=lambda mode: mode.name)
def test_page_has_its_eight_numbered_parts_in_order(mode: object) -> None:
    """What you see, wait, confirm, done, do, stop, call, over."""
    numbers = re.findall(r"^(\d)\. \*\*", mode_page(mode), flags=re.MULTILINE)  # type: ignore[arg-type]

    assert numbers == list("12345678")


def test_page_links_the_mode_that_it_sends_to() -> None:
    """ "see NAME" is a link."""
    assert "see [The ranks are out of step](skipped_collective.md)" in runbook()[f"{FOLDER}/hang.md"]


def test_cells_keep_their_bars() -> None:
    """A | inside a cell would end it; commands on pages are lists, not cells."""
    lines = [line for line in index_page().splitlines() if line.startswith("|")]

    assert {re.sub(r"\\\\\|", "", line).count("|") for line in lines} == {3, 8}
