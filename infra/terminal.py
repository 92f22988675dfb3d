"""A release in the terminal: what `seatrial show` prints, within 100 columns.

The caller gives the console, and with it the stream: people's text goes to stderr when stdout carries JSON. Text from outside is
printed as it is, never read as markup.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from infra.report import DECISION_WORDS, SERVING_WORDS, ReleaseReport, release_document
from infra.wording import COMPARISON_SIGNS, duration, interval, number, stopped
from validation.canonical import plain

WIDTH = 100  # columns
OUTCOMES = {"pass": ("passed", "green"), "fail": ("failed", "bold red"), "inconclusive": ("inconclusive", "yellow")}
DECISION_STYLES = {"promoted": "green", "fell_back": "red", "held": "yellow"}


def render_text(release: ReleaseReport | Mapping[str, Any], console: Console) -> None:
    """Print a release, or its JSON document, to the caller's console: decision, gates, failing measurements, next step.

    Keys that a document lacks (an unfinished release) are left out, never guessed.
    """
    document = release_document(release) if isinstance(release, ReleaseReport) else release
    parts = [_decision(document), _gates(document), *_problems(document), _end(document)]
    console.print(Group(*parts), width=min(console.width, WIDTH))


def render_rows(rows: Iterable[Any], console: Console, *, title: str = "") -> None:
    """Print records or mappings as a table, one column a key: the overview of releases, the lab's table. Nothing for no rows."""
    plain_rows = [plain(row) for row in rows]
    if not plain_rows:
        return
    table = Table(
        box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim", title=Text(title) if title else None, title_justify="left"
    )
    for name in plain_rows[0]:
        table.add_column(Text(str(name).replace("_", " ")), overflow="fold")
    for row in plain_rows:
        table.add_row(*(Text(_cell(row.get(name))) for name in plain_rows[0]))
    console.print(table, width=min(console.width, WIDTH))


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(str(item) for item in value.values() if item != "")
    return number(value) if isinstance(value, int | float) else str("" if value is None else value)


def _decision(document: Mapping[str, Any]) -> RenderableType:
    decision = str(document.get("decision", "unknown"))
    serving = document.get("serving") or {}
    kind, version = str(serving.get("kind", "")), str(serving.get("version", ""))
    reason = stopped(str(document.get("reason", "")))
    headline = str(document.get("headline") or f"{DECISION_WORDS.get(decision, decision.capitalize())}: {reason}")
    lines = [f"serves now: {SERVING_WORDS.get(kind, kind) or 'nothing'}{f', version {version}' if version else ''}"]
    if reason and reason not in headline:
        lines.append(f"why: {reason}")
    body = Text.assemble((headline, "bold"), *(f"\n{line}" for line in lines))
    title = Text(f"release {document.get('release_id', '?')} of {document.get('recipe', '?')}")
    return Panel(body, title=title, title_align="left", border_style=DECISION_STYLES.get(decision, "yellow"))


def _gates(document: Mapping[str, Any]) -> RenderableType:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("gate", no_wrap=True)
    table.add_column("outcome")
    table.add_column("what decided (whose)", ratio=3, overflow="fold")
    table.add_column("measured, has to be", ratio=2, overflow="fold")
    table.add_column("time", no_wrap=True)
    for gate in document.get("gates", ()):
        decided = gate.get("deciding") or _deciding(gate)
        what = f"{decided['what']}\n({decided['where']})" if decided["where"] else decided["what"]
        values = f"{decided['measured']}\n{decided['needed']}".strip()
        seconds = gate.get("seconds")
        time = duration(float(seconds)) if isinstance(seconds, int | float) else str(seconds or "")
        table.add_row(Text(str(gate.get("name", "?"))), _outcome(gate), Text(what), Text(values), Text(time))
    for name in document.get("not_run", ()):
        table.add_row(Text(str(name)), Text("not run", style="dim"))
    return Padding(table, (1, 0))


def _deciding(gate: Mapping[str, Any]) -> dict[str, str]:
    """The first check that did not pass, from a document that does not say what decided; empty texts when all passed."""
    worst = sorted((item for item in gate.get("checks", ()) if item.get("passed") is not True), key=lambda item: item.get("passed") is None)
    if not worst:
        return {"what": "", "where": "", "measured": "", "needed": ""}
    item = worst[0]
    sign, unit = COMPARISON_SIGNS.get(str(item.get("comparison")), "threshold"), str(item.get("unit") or "")
    observed, ends = number(item.get("observed")), item.get("interval")
    span = f" {interval((ends[0], ends[1]))}" if ends and all(isinstance(end, int | float) for end in ends) else ""
    return {
        "what": str(item.get("name", "?")), "where": str(item.get("where") or ""), "measured": f"{observed}{span} {unit}".strip(),
        "needed": f"{sign} {number(item.get('threshold'))} {unit}".strip(),
    }  # fmt: skip


def _outcome(gate: Mapping[str, Any]) -> Text:
    word, style = OUTCOMES.get(str(gate.get("outcome")), (str(gate.get("outcome", "missing")), "yellow"))
    attempt = f"\non attempt {gate['attempt']}" if gate.get("attempt", 1) != 1 else ""
    return Text(f"{word}{attempt}{', reused' if gate.get('reused') else ''}", style=style)


def _problems(document: Mapping[str, Any]) -> list[RenderableType]:
    """Each gate that did not pass: the measurement, whose it is, and what to do about it."""
    blocks: list[RenderableType] = []
    stopping = [gate for gate in document.get("gates", ()) if gate.get("outcome") != "pass"]
    for gate in sorted(stopping, key=lambda gate: gate.get("outcome") != "fail"):
        word, style = OUTCOMES.get(str(gate.get("outcome")), ("", "yellow"))
        blocks.append(Text.assemble((f"{gate.get('name', '?')} {word}", style)))
        blocks.append(Padding(Text(stopped(str(gate.get("reason", "")))), (0, 0, 0, 2)))
        action = stopped(str(gate.get("action") or ""))
        blocks.append(Padding(Text(f"do: {action}" if action else ""), (0, 0, 1 if action else 0, 2)))
    return blocks


def _end(document: Mapping[str, Any]) -> RenderableType:
    end = Text.assemble(("next: ", "bold"), stopped(str(document["action"]))) if document.get("action") else Text()
    if document.get("report"):
        end.append(f"\nreport: {document['report']}")
    return end
