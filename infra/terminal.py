"""A release in the terminal: what `seatrial show` prints, within 100 columns.

The caller gives the console, and with it the stream: people's text goes to stderr when stdout carries JSON. Text from outside is
printed as it is, never read as markup.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from infra.report import DECISION_WORDS, NAMED, SERVING_WORDS, ReleaseReport, release_document
from infra.wording import COMPARISON_SIGNS, SHORT_PLACE, answered, cut, duration, in_brief, moment, number, said, stopped
from validation.canonical import plain
from validation.verdict import Check, Comparison
from validation.waivers import Approval

WIDTH = 100  # columns
TOLD_CHARS, PROBLEM_CHARS = 160, 500  # of a gate's reason in its row, in its own paragraph
SHORT, SENTENCE = 32, 150  # characters of a cell that has a column; of a sentence under its row
OUTCOMES = {"pass": ("passed", "green"), "fail": ("failed", "bold red"), "inconclusive": ("inconclusive", "yellow")}
DECISION_STYLES = {"promoted": "green", "fell_back": "red", "held": "yellow"}


def render_text(release: ReleaseReport | Mapping[str, Any], console: Console) -> None:
    """Print a release, or its JSON document, to the caller's console: decision, gates, failing measurements, next step.

    Keys that a document lacks (an unfinished release) are left out, never guessed.
    """
    document = release_document(release) if isinstance(release, ReleaseReport) else release
    parts = [_decision(document), _gates(document), *_problems(document), _end(document)]
    console.print(Group(*parts), width=min(console.width, WIDTH))


def render_gates(document: Mapping[str, Any], console: Console) -> None:
    """Print gates alone, as of a document of `seatrial check`: outcomes, failing measurements, next steps."""
    console.print(Group(_gates(document), *_problems(document, "`seatrial check --json` prints all")), width=min(console.width, WIDTH))


def render_rows(rows: Iterable[Any], console: Console, *, title: str = "") -> None:
    """Print records or mappings as a table, one column a key: the overview of releases, the lab's table. Nothing for no rows.

    Ids stay whole, so that they can be copied. Sentences stand under their row, cut to about two lines; `seatrial show ID` has them whole.
    """
    plain_rows = [plain(row) for row in rows]
    if not plain_rows:
        return
    cells = [{name: _cell(row.get(name)) for name in plain_rows[0]} for row in plain_rows]
    widths = {name: max(len(row[name]) for row in cells) for name in plain_rows[0]}
    short = [name for name, width in widths.items() if width <= SHORT]
    console.print(_columns(cells, {name: widths[name] for name in short}, console.width, title), width=min(console.width, WIDTH))
    for row in cells:
        for name in (name for name in widths if name not in short):
            first = f"{row[short[0]]}, {str(name).replace('_', ' ')}: " if short else ""
            console.print(Text.assemble((first, "dim"), cut(said(row[name]), SENTENCE)), width=min(console.width, WIDTH))


def _columns(cells: Sequence[Mapping[str, str]], widths: Mapping[str, int], room: int, title: str) -> RenderableType:
    """A table whose cells stay whole; where it has no room, one line a row that names each value."""
    heading = [Text(title, style="bold")] if title else []
    labels = {name: str(name).replace("_", " ") for name in widths}
    wanted = sum(max(width, *map(len, labels[name].split())) + 2 for name, width in widths.items())
    if wanted > min(room, WIDTH) + 2:
        lines = [Text(" · ".join(f"{label} {row[name] or 'none'}" for name, label in labels.items())) for row in cells]
        return Group(*heading, *lines)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, label in labels.items():
        table.add_column(Text(label), overflow="fold", min_width=widths[name])
    for row in cells:
        table.add_row(*(Text(row[name]) for name in widths))
    return Group(*heading, table)


def _cell(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(str(item) for item in value.values() if item != "")
    return number(value) if isinstance(value, int | float) else str("" if value is None else value)


def _decision(document: Mapping[str, Any]) -> RenderableType:
    decision = str(document.get("decision", "unknown"))
    serving = document.get("serving") or {}
    kind, version = str(serving.get("kind", "")), str(serving.get("version", ""))
    reason = said(str(document.get("reason", "")))
    headline = said(str(document.get("headline") or f"{DECISION_WORDS.get(decision, decision.capitalize())}: {reason}"))
    since = f"as of {moment(str(document['finished_at']))}" if document.get("finished_at") else "now"
    lines = [f"serves {since}: {SERVING_WORDS.get(kind, kind) or 'nothing'}{f', version {version}' if version else ''}"]
    if decision != "promoted" and not document.get("gates") and reason not in headline:
        lines.append(f"why: {reason}")
    lines += [f"condition: {condition}" for condition in document.get("conditions") or ()]
    if approval := document.get("approval"):
        lines.append(f"a person: {answered(Approval(**approval))}")
    body = Text.assemble((headline, "bold"), *(f"\n{line}" for line in lines))
    title = Text(f"release {document.get('release_id', '?')} of {document.get('recipe', '?')}")
    return Panel(body, title=title, title_align="left", border_style=DECISION_STYLES.get(decision, "yellow"))


def _gates(document: Mapping[str, Any]) -> RenderableType:
    """One line a gate; what a passed gate found, what decided another."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("gate", no_wrap=True)
    table.add_column("outcome")
    table.add_column("why", ratio=1, overflow="fold")
    table.add_column("time", no_wrap=True)
    for gate in document.get("gates", ()):
        refusing = _refusing(gate)
        why = refusing[0] if refusing else str(gate.get("reason", ""))
        seconds = gate.get("seconds")
        time = duration(float(seconds)) if isinstance(seconds, int | float) else str(seconds or "")
        earlier = (document.get("attempts") or {}).get(gate.get("name"), ())[:-1]
        table.add_row(Text(str(gate.get("name", "?"))), _outcome(gate, earlier), Text(cut(said(why), TOLD_CHARS)), Text(time))
    for name in document.get("not_run", ()):
        table.add_row(Text(str(name)), Text("not run", style="dim"))
    return Padding(table, (1, 0))


def _refusing(gate: Mapping[str, Any]) -> list[str]:
    """Each check that did not pass in one clause, failed ones first; none of a passed gate, or of one that missed its control."""
    if gate.get("outcome") == "pass" or (gate.get("control") or {}).get("caught") is False:
        return []
    items = [item for item in gate.get("checks", ()) if item.get("passed") is not True]
    return [_clause(item) for item in sorted(items, key=lambda item: item.get("passed") is None)]


def _clause(item: Mapping[str, Any]) -> str:
    """A check of a document as `in_brief` has it; words for NaN and infinities, and keys that lack, are taken as they are."""
    ends = item.get("interval")
    numbers = (ends[0], ends[1]) if ends and all(isinstance(end, int | float) for end in ends) else None
    texts = {key: str(item.get(key) or "") for key in ("name", "unit", "source", "where")}
    sign = cast("Comparison", item.get("comparison") if item.get("comparison") in COMPARISON_SIGNS else "==")
    known = Check(
        observed=item.get("observed"), threshold=item.get("threshold"), passed=item.get("passed"), comparison=sign, interval=numbers,
        **texts,
    )  # fmt: skip
    return in_brief(known)


def _outcome(gate: Mapping[str, Any], earlier: Sequence[Mapping[str, Any]] = ()) -> Text:
    """The outcome in its colour, and what became of the attempts before it."""
    word, style = OUTCOMES.get(str(gate.get("outcome")), (str(gate.get("outcome", "missing")), "yellow"))
    attempt = f"\non attempt {gate['attempt']}" if gate.get("attempt", 1) != 1 else ""
    told = "".join(f"\nattempt {item.get('attempt')}: {OUTCOMES.get(str(item.get('outcome')), ('?', ''))[0]}" for item in earlier)
    waived = "\nwaived" if gate.get("waiver") else ""
    return Text.assemble((f"{word}{attempt}{', reused' if gate.get('reused') else ''}{waived}", style), (told, "dim"))


def _problems(document: Mapping[str, Any], rest: str = "all in the report") -> list[RenderableType]:
    """Each gate that did not pass: what else it refused, whose it is, and what to do about it. Args: rest, where the others are said."""
    blocks: list[RenderableType] = []
    stopping = [gate for gate in document.get("gates", ()) if gate.get("outcome") != "pass"]
    for gate in sorted(stopping, key=lambda gate: gate.get("outcome") != "fail"):
        word, style = OUTCOMES.get(str(gate.get("outcome")), ("", "yellow"))
        refusing = _refusing(gate) or [cut(stopped(str(gate.get("reason", ""))), PROBLEM_CHARS)]
        more = [f"and {len(refusing) - NAMED} more, {rest}"] if len(refusing) > NAMED else []
        action = stopped(str(gate.get("action") or ""))
        place = _long_place(gate)
        where = [f"where: {cut(said(place), SENTENCE)}"] if place else []
        lines = [*map(said, refusing[:NAMED]), *more, *where, *([f"do: {action}"] if action else [])]
        waived = " (waived, see the condition above)" if gate.get("waiver") else ""
        blocks.append(Text.assemble((f"{gate.get('name', '?')} {word}", style), waived))
        blocks += [Padding(Text(line), (0, 0, 0, 2)) for line in lines if line]
        blocks.append(Text())
    return blocks


def _long_place(gate: Mapping[str, Any]) -> str:
    """Where the first refusing check that has a long place saw it (step, tensor, rank): a sentence has no room for it."""
    places = (str(item.get("where") or "") for item in gate.get("checks", ()) if item.get("passed") is False)
    return next((place for place in places if len(place) > SHORT_PLACE), "")


def _end(document: Mapping[str, Any]) -> RenderableType:
    end = Text.assemble(("next: ", "bold"), stopped(str(document["action"]))) if document.get("action") else Text()
    if document.get("report"):
        end.append(f"\nreport: {document['report']}")
    return end
