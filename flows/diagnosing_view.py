"""What people see of `seatrial diagnose`: who, what, why, what to do, the lines that show it, and a table of ranks."""

import re
from collections.abc import Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from flows.diagnosing import Diagnosis
from infra.wording import cut
from validation.finding import Finding, Operation
from validation.flight import Dump, RankEvidence

WIDTH = 100  # columns
MOST_RANKS = 16  # rows of the table
MOST_NAMED = 16  # ranks in a sentence
MOST_NOTES = 10
NOTE_CHARS, RESULT_CHARS = 400, 60
_SOURCE = re.compile(r"\[\S*/\S*\] ?")  # "[.../unbound_buffer.cc:78]" in the backends' messages
STYLES = {"hang": "bold red", "crash": "bold red", "straggler": "yellow", "healthy": "green", "inconclusive": "yellow"}


def render(diagnosis: Diagnosis, console: Console) -> None:
    """Print a diagnosis to the caller's console. Text from files is printed as it is, never read as markup."""
    finding = diagnosis.finding
    blocks: list[RenderableType] = [_headline(finding)]
    if finding.evidence:
        blocks += [Text("evidence", style="bold"), *(Padding(Text(line), (0, 0, 0, 2)) for line in finding.evidence), Text()]
    if diagnosis.evidence.ranks:
        blocks.append(_ranks(diagnosis))
    if diagnosis.problems:
        blocks += [Text("what could not be read or trusted", style="bold")]
        blocks += [Padding(Text(cut(line, NOTE_CHARS)), (0, 0, 0, 2)) for line in diagnosis.problems[:MOST_NOTES]]
        if len(diagnosis.problems) > MOST_NOTES:
            blocks.append(Padding(Text(f"and {len(diagnosis.problems) - MOST_NOTES} more, all in --json"), (0, 0, 0, 2)))
    console.print(Group(*blocks), width=min(console.width, WIDTH))


def _headline(finding: Finding) -> RenderableType:
    who = f"rank{'s' if len(finding.ranks) > 1 else ''} {_some(finding.ranks)}" if finding.ranks else "no rank is to blame"
    facts = [
        ("who", who), ("where", _where(finding)), ("waiting", _some(finding.waiting)),
        ("cost", f"{finding.slowdown:.2f} times as long" if finding.slowdown > 0 else ""),
        ("late", f"{finding.lateness_s:.3g} s" if finding.lateness_s > 0 else ""),
        ("sure", finding.confidence), ("do", finding.action),
    ]  # fmt: skip
    body = Text(finding.explanation)
    for label, text in facts:
        if text:
            body.append(f"\n{label}: ", style="bold")
            body.append(text)
    kind = finding.kind.replace("_", " ") + (f" ({finding.cause.replace('_', ' ')})" if finding.cause else "")
    title = Text(finding.verdict if kind == finding.verdict else f"{finding.verdict}: {kind}", style=STYLES[finding.verdict])
    return Panel(body, title=title, title_align="left", border_style=STYLES[finding.verdict].removeprefix("bold "))


def _where(finding: Finding) -> str:
    places = [_operation(finding.collective)]
    if finding.first_visible not in (finding.collective, Operation()):
        places.append(f"first seen at {_operation(finding.first_visible)}")
    if finding.group:
        places.append(f"group {', '.join(finding.group)}")
    if finding.step >= 0:
        places.append(f"step {finding.step}")
    return ", ".join([*filter(None, places), *([f"phase {finding.phase}"] if finding.phase else [])])


def _operation(operation: Operation) -> str:
    number = f"number {operation.seq}" if operation.seq >= 0 else ""
    return " ".join(filter(None, (operation.op, number, f"({operation.where})" if operation.where else "")))


def _ranks(diagnosis: Diagnosis) -> RenderableType:
    """Culprits first, then as many of the others as there is room for."""
    finding, known = diagnosis.finding, diagnosis.evidence.ranks
    order = sorted(known, key=lambda rank: (rank not in finding.ranks, rank))
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("rank", "", "last operation", "program", "ended"):
        table.add_column(name, overflow="fold")
    for rank in order[:MOST_RANKS]:
        role, style = ("culprit", "bold red") if rank in finding.ranks else ("waits", "dim") if rank in finding.waiting else ("", "")
        one = known[rank]
        table.add_row(Text(str(rank)), Text(role, style=style), Text(_last(one)), Text(_program(one)), Text(_ended(one)))
    more = [Text(f"and {len(order) - MOST_RANKS} more ranks", style="dim")] if len(order) > MOST_RANKS else []
    return Padding(Group(table, *more), (0, 0, 1, 0))


def _last(one: RankEvidence) -> str:
    dump = (one.dumps or one.late_dumps or (None,))[-1]
    if dump is None:
        return "no dump"
    if not len(dump.seq):
        return "none recorded"
    return f"{_named(dump, len(dump.seq) - 1)}{'' if dump.finished[-1] else ', not over'}"


def _named(dump: Dump, place: int) -> str:
    group = dump.groups[int(dump.group[place])]
    return f"{dump.signatures[int(dump.signature[place])].op} {int(dump.seq[place])} of group {group.name}"


def _program(one: RankEvidence) -> str:
    """Where the program stood: the marker, else the innermost line of its main thread that is not torch's."""
    marker = one.dumps[-1].marker if one.dumps else None
    if marker and (marker.step >= 0 or marker.phase):
        return " ".join(filter(None, (f"step {marker.step}" if marker.step >= 0 else "", marker.phase)))
    frames = [frame for thread in (one.stacks[-1] if one.stacks else ()) if thread.is_main for frame in thread.frames]
    own = [frame for frame in frames if "/torch/" not in frame.path] or frames
    return f"{own[0].path.rpartition('/')[2]}:{own[0].line} {own[0].function}" if own else ""


def _ended(one: RankEvidence) -> str:
    code = "" if one.exit_code is None else f"signal {-one.exit_code}" if one.exit_code < 0 else f"code {one.exit_code}"
    state = {"T": "stopped", "Z": "dead", "X": "gone"}.get(one.state, "")
    return ", ".join(filter(None, (code or state, cut(_SOURCE.sub("", one.result.splitlines()[-1]), RESULT_CHARS) if one.result else "")))


def _some(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:MOST_NAMED]))
    return names + (f" and {len(ranks) - MOST_NAMED} more" if len(ranks) > MOST_NAMED else "")
