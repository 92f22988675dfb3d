"""The runbook, made from the registry of failure modes: an index from symptom and finding to page, and one page a mode. Pure."""

import re
from collections.abc import Mapping, Sequence

from validation.failure_modes import CHAPTERS, default_modes, mode_of_kind
from validation.finding import FINDING_KINDS
from validation.records import FailureMode

INDEX = "runbook.md"
FOLDER = "runbook"
SEE = re.compile(r"\bsee (\w+)\b")  # a page that names another one
MADE = "<!-- Made from validation/failure_modes.py by `seatrial runbook`. Change it there. -->"


def runbook() -> Mapping[str, str]:
    """Write the whole runbook: path under docs/ -> markdown."""
    return {INDEX: index_page(), **{page_path(mode): mode_page(mode) for mode in default_modes()}}


def page_path(mode: FailureMode) -> str:
    """Where a mode's page stands under docs/."""
    return f"{FOLDER}/{mode.name}.md"


def index_page() -> str:
    """The first page: from what is seen, from a finding, and the registry as a table."""
    chapters = [
        _chapter(name, [mode for mode in default_modes() if mode.name in {row.name for row in rows}]) for name, rows in CHAPTERS.items()
    ]
    return "\n".join((
        "# Runbook", MADE, "",
        "Something is wrong and it is night. Find what you see in the first table, or type `seatrial diagnose FOLDER` and find its kind "
        "in the second; then follow that page from its first line. FOLDER is the run's folder, `SEATRIAL_HOME/runs/NAME`; ID is a "
        "release; R is a rank, PID its process (group.jsonl has both). Each page's drill causes the failure for real: `seatrial drill "
        "NAME`.", "",
        "## What you see", "", *_table(("what you see", "page"), _symptoms()), "",
        "## What `seatrial diagnose` says", "", *_table(("kind", "page"), [(f"`{kind}`",
        _link(mode_of_kind(kind))) for kind in FINDING_KINDS]),
        "", "## All failure modes", "",
        "Critical: an open row fails the readiness gate. By itself: the system does the first mitigation without a person.", "",
        *(line for chapter in chapters for line in chapter),
    ))  # fmt: skip


def mode_page(mode: FailureMode) -> str:
    """One mode's page, numbered in the order in which an on-call person goes through it."""
    page = mode.page
    kinds = ", ".join(f"`{kind}`" for kind in mode.kinds) or "none"
    return "\n".join((
        f"# {mode.title}", MADE, "", f"`{mode.name}` · findings: {kinds} · gates and alarms: {', '.join(mode.gates) or 'none'} · "
        f"{'critical' if mode.critical else 'not critical'} · [all pages](../{INDEX})", "",
        "1. **What you see.**", *_bullets(mode.sees),
        f"2. **Is it safe to wait?** {_linked(page.wait)}",
        "3. **Confirm it.**", *_bullets(page.confirm),
        f"4. **What the system has done already.** {page.done}",
        f"5. **What you do.** First: `{mode.command}`. Then:", *_bullets([_linked(step) for step in page.act]),
        f"6. **When to stop.** {_sentence(mode.stop_condition)}",
        f"7. **Whom to call.** {_sentence(page.call)} Owner: {mode.owner}.",
        f"8. **How you know that it is over.** {page.over}", "",
        "## Behind it", "",
        f"- Detector: {mode.detector}.",
        f"- Mitigation ({'by itself' if mode.is_automatic else 'by hand'}): {mode.mitigation}.",
        f"- Drill: `seatrial drill {mode.drill}`: {mode.fired_by}."
        + (" Every release fires it again." if mode.in_release else ""), "",
    ))  # fmt: skip


def _symptoms() -> list[tuple[str, str]]:
    return sorted(((symptom, _link(mode)) for mode in default_modes() for symptom in mode.sees), key=lambda row: row[0].strip("'`").lower())


def _chapter(name: str, modes: Sequence[FailureMode]) -> list[str]:
    columns = ("mode", "detector", "mitigation", "by itself", "stop when", "drill", "critical")
    rows = [
        (
            _link(mode), mode.detector, mode.mitigation, _yes(mode.is_automatic), mode.stop_condition, f"`{mode.drill}`: {mode.fired_by}",
            _yes(mode.critical),
        )
        for mode in modes
    ]  # fmt: skip
    return [f"### {name}", "", *_table(columns, rows), ""]


def _link(mode: FailureMode) -> str:
    return f"[{mode.title}]({page_path(mode)})"


def _linked(text: str) -> str:
    """A page's words with a link wherever they send the reader to another mode."""
    titles = {mode.name: mode.title for mode in default_modes()}
    return SEE.sub(lambda found: f"see [{titles[found[1]]}]({found[1]}.md)" if found[1] in titles else found[0], text)


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:].removesuffix(".") + "."


def _bullets(lines: Sequence[str]) -> list[str]:
    return [f"   - {line}" for line in lines]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    return [f"| {' | '.join(row)} |" for row in (columns, ["---"] * len(columns), *escaped)]
