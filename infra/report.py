"""A release as people see it: the record everything is shown from, its sentences, its JSON document and its HTML page.

ReleaseReport ──> render_html      one self-contained page (this module, templates/report.html.j2)
              ──> infra.markdown   registry description, workflow artifacts
              ──> infra.terminal   `seatrial show`
              ──> release_document the JSON document of `seatrial release --json`
"""

import struct
from base64 import b64encode
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Literal

import jinja2
from markupsafe import Markup, escape

from infra import wording
from infra.plots import plot_png
from validation.canonical import plain
from validation.verdict import Check, Control, GateVerdict, Outcome, Plot, Table
from validation.waivers import Approval, Waiver, human_review_s

Decision = Literal["promoted", "fell_back", "held"]
DECISION_WORDS = {"promoted": "Promoted", "fell_back": "Refused", "held": "Held"}
SERVING_WORDS = {"candidate": "candidate", "last_known_good": "last known-good", "baseline": "baseline"}
FOLD_CHECKS = 8  # more passed checks than these are folded away behind the failed ones
FOLD_ROWS = 14  # longer tables that stand beside no plot are folded
TOLD = 2  # refusing gates whose reasons the headline quotes; the others are named
NAMED = 4  # refusing checks of a gate that are named where there is little room
LONG, BRIEF = 240, 90  # characters of an answer that a table of checks, of gates shows
BESIDE = 52  # characters that fit beside a plot; a table that cannot be folded to them stands below it
SHOWN_PX = 640  # width of a plot on the page


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportCard:
    """Words about the recipe, for people."""

    question: str
    action: str
    owner: str
    utility_unit: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class GateLine:
    """One gate in a release: its verdict and how it came about."""

    verdict: GateVerdict
    attempt: int  # 1-based; more than 1 stays visible
    reused: bool
    reuse_reason: str  # why an earlier verdict is still valid; "" unless reused
    seconds: float  # wall clock of probe and judgement
    worker_seconds: float  # ranks x seconds
    evidence_sha256: str
    waiver: Waiver | None = None  # counts in place of a pass


@dataclass(frozen=True, slots=True, kw_only=True)
class CostLine:
    """One measured cost."""

    name: str
    amount: float | None  # None: not measured
    unit: str
    note: str = ""  # how it was measured, what is in it


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseReport:
    """All that is shown of a release."""

    release_id: str
    recipe: str
    card: ReportCard
    decision: Decision
    serving_kind: str  # "candidate" | "last_known_good" | "baseline"; "" when nothing serves
    serving_version: str  # "" when nothing serves
    candidate_version: str  # "" when it was never registered
    reason: str  # one sentence
    action: str  # what to do next; "" when nothing
    gates: tuple[GateLine, ...]  # in the order they were judged
    cost: tuple[CostLine, ...]
    started_at: str  # UTC, ISO
    finished_at: str
    digests: Mapping[str, str]  # sha256 of everything a verdict depends on: code, data, config, policy, machine
    machine: str = ""  # where it was measured, in words
    not_run: tuple[str, ...] = ()  # gates the release never came to
    approval: Approval | None = None  # what a person said of it
    drill: str = ""  # the regression that was planted in its candidate on purpose; "" = none

    @property
    def drill_gate(self) -> str:
        """The gate that has to catch the drill; "" without one."""
        return "slice_quality" if self.drill else ""


def is_passed(line: GateLine) -> bool:
    """Whether a gate lets the release go on by itself."""
    return line.verdict.outcome is Outcome.PASS


def is_let_through(line: GateLine) -> bool:
    """Whether a gate passed, or a person's waiver counts in its place."""
    return is_passed(line) or line.waiver is not None


def with_waivers(lines: Sequence[GateLine], waivers: Sequence[Waiver]) -> tuple[GateLine, ...]:
    """The lines, each gate that did not pass with the waiver of its very evidence. Args: waivers, those that count."""
    known = {(item.gate, item.evidence): item for item in waivers}
    return tuple(
        line if is_passed(line) else replace(line, waiver=known.get((line.verdict.gate, line.evidence_sha256))) for line in lines
    )  # fmt: skip


def by_urgency(report: ReleaseReport) -> tuple[GateLine, ...]:
    """Failed gates first, then inconclusive ones, then waived and passed ones; the release's order within."""
    rank = {Outcome.FAIL: 0, Outcome.INCONCLUSIVE: 1, Outcome.PASS: 3}
    return tuple(sorted(report.gates, key=lambda line: 2 if line.waiver else rank[line.verdict.outcome]))


def refusing_lines(report: ReleaseReport) -> tuple[GateLine, ...]:
    """The gates that stand in the way: neither passed nor waived; failed ones first."""
    return tuple(line for line in by_urgency(report) if not is_let_through(line))


def headline(report: ReleaseReport) -> str:
    """The decision in one plain sentence, e.g. "Promoted: six of six gates pass."; no marks, one line."""
    conditions = [f"{line.verdict.gate} {_state(line)}, {wording.waived(line.waiver)}" for line in report.gates if line.waiver]
    passed, total = sum(map(is_passed, report.gates)), len(report.gates) + len(report.not_run)
    tally = f"{wording.count(passed)} of {wording.count(total)} gates pass"
    if report.decision == "promoted":
        others = ", ".join(f"{line.verdict.gate} {_state(line)}" for line in refusing_lines(report))
        extra = [f"{others}, which the policy does not require"] if others else []
        return wording.stopped(f"Promoted{_on_conditions(len(conditions))}: {'; '.join([tally, *conditions, *extra])}")
    word = DECISION_WORDS[report.decision] + (f" in drill {report.drill}" if report.drill else "")
    refusing = refusing_lines(report)
    if not refusing and report.approval is not None and not report.approval.approved:
        return wording.stopped(f"Refused by {report.approval.by}: {report.approval.reason}")
    if not refusing:
        return wording.stopped(f"{word}: {report.reason or tally}")
    told = "; ".join(f"{line.verdict.gate} {_state(line)}: {wording.why_not(line.verdict)}" for line in refusing[:TOLD])
    others = ", ".join(line.verdict.gate for line in refusing[TOLD:])
    return wording.stopped(f"{word}: {told}{f'; also {others}' if others else ''}")


def _on_conditions(n: int) -> str:
    return "" if not n else " on a condition" if n == 1 else f" on {wording.count(n)} conditions"


def _state(line: GateLine) -> str:
    return "failed" if line.verdict.outcome is Outcome.FAIL else "is inconclusive"


def tally(report: ReleaseReport) -> str:
    """How many gates passed, failed, were inconclusive or never run."""
    counts = Counter(line.verdict.outcome for line in report.gates)
    parts = [f"{counts[outcome]} {word}" for outcome, word in wording.OUTCOME_WORDS.items() if counts[outcome]]
    told = ", ".join([*parts, *([f"{len(report.not_run)} not run"] if report.not_run else [])]) or "no gate was run"
    waived = sum(line.waiver is not None for line in report.gates)
    return f"{told}; {waived} of them waived" if waived else told


def other_reason(report: ReleaseReport) -> str:
    """What the decision rests on besides the gates that did not pass, which are told one by one; "" when nothing, or promoted."""
    if report.decision == "promoted":
        return ""
    rest = report.reason
    for line in report.gates:
        rest = rest.replace(f"{line.verdict.gate} is {line.verdict.outcome}: {line.verdict.reason}", "")
    return wording.said("; ".join(part for part in (piece.strip() for piece in rest.split(";")) if part))


def refusing_checks(verdict: GateVerdict) -> tuple[Check, ...]:
    """Checks that did not pass, the one that decided first; none when the gate has none, or was blind to its planted defect."""
    missed = verdict.control is not None and not verdict.control.caught
    return () if missed else tuple(item for item in wording.ordered(verdict.checks) if not item.passed)


def serving_sentence(report: ReleaseReport) -> str:
    """What serves since this release, and what became of the candidate; later releases change it, so the time is said."""
    kind = SERVING_WORDS.get(report.serving_kind, report.serving_kind)
    since = f"as of {wording.moment(report.finished_at)}"
    serves = f"The {kind}, version {report.serving_version}, serves {since}." if kind else f"Nothing serves {since}."
    if report.serving_kind == "candidate":
        return serves
    version = f", version {report.candidate_version}," if report.candidate_version else ""
    return f"{serves} The candidate{version} {'may not serve' if report.decision == 'fell_back' else 'waits'}."


def next_step(report: ReleaseReport) -> str:
    """What to do next: the decision's own word, else the action of the gate that stopped the release. Always says something."""
    refusing = refusing_lines(report)
    if any(line.verdict.gate == report.drill_gate and line.verdict.outcome is Outcome.FAIL for line in refusing):
        return f"Nothing: the drill broke this candidate on purpose, and {report.drill_gate} refused it, as it has to."
    actions = [(line.verdict.action, line.verdict.gate) for line in refusing if line.verdict.action]
    if report.action or (actions and report.decision != "promoted"):
        action = report.action or actions[0][0]
        gate = next((gate for said, gate in actions if said == action), "")
        return wording.stopped(action) + (f" Then `seatrial gate {gate} --release {report.release_id}`." if gate else "")
    return (
        "Nothing; the release is done." if report.decision == "promoted" else "Read the gates that did not pass, mend, and release again."
    )


def gate_words(line: GateLine) -> str:
    """Outcome in words; a later attempt and reuse stay visible."""
    words = wording.OUTCOME_WORDS[line.verdict.outcome]
    attempt = f" on attempt {line.attempt}" if line.attempt > 1 else ""
    waived = f", waived until {wording.moment(line.waiver.expires_at)}" if line.waiver else ""
    return f"{words}{attempt}{', reused' if line.reused else ''}{waived}"


def control_sentence(control: Control | None) -> str:
    """What was planted and whether the gate saw it."""
    if control is None:
        return "No defect was planted in this run."
    return wording.said(f"planted {control.planted}: {'caught' if control.caught else 'MISSED'} ({control.detail})")


def release_document(report: ReleaseReport, *, report_path: str = "") -> dict[str, Any]:
    """The release as JSON types, as `seatrial release --json` prints it; NaN and infinities become words."""
    document: dict[str, Any] = plain(
        {
            "release_id": report.release_id, "recipe": report.recipe, "decision": report.decision, "headline": headline(report),
            "serving": {"kind": report.serving_kind, "version": report.serving_version},
            "candidate_version": report.candidate_version, "reason": report.reason, "action": next_step(report),
            "gates": [_gate_document(line) for line in report.gates], "not_run": report.not_run,
            "cost": {line.name: line.amount for line in report.cost}, "started_at": report.started_at, "finished_at": report.finished_at,
            "digests": report.digests, "report": report_path, "approval": report.approval,
            "conditions": [wording.stopped(f"{line.verdict.gate} {wording.waived(line.waiver)}") for line in report.gates if line.waiver],
            "human_review_s": None if report.approval is None else human_review_s(report.approval),
        }
    )  # fmt: skip
    return document


def _gate_document(line: GateLine) -> dict[str, Any]:
    verdict = line.verdict
    return {
        "name": verdict.gate, "outcome": verdict.outcome, "attempt": line.attempt, "reused": line.reused,
        "reuse_reason": line.reuse_reason, "seconds": line.seconds, "worker_seconds": line.worker_seconds,
        "reason": verdict.reason, "action": verdict.action, "deciding": wording.deciding(verdict), "checks": verdict.checks,
        "control": verdict.control, "waiver": line.waiver,
        "evidence": f"evidence/sha256/{line.evidence_sha256}", "sha256": line.evidence_sha256,
    }  # fmt: skip


# --- the page --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A plot with the table that stands beside it."""

    plot: Plot
    image: str  # data URI
    height_px: int  # shown at a width of 640
    table: Table
    is_wide: bool  # the table has no room beside the plot


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One gate on the page."""

    line: GateLine
    anchor: str
    deciding: wording.Deciding
    checks: tuple[Check, ...]  # shown
    folded: tuple[Check, ...]  # passed ones behind a fold
    figures: tuple[Figure, ...]
    tables: tuple[Table, ...]  # those that stand beside no plot


def render_html(report: ReleaseReport) -> str:
    """Build the page: one file, no script, no network, images inline; the same report gives the same bytes."""
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            report=report,
            headline=headline(report),
            tally=tally(report),
            serving=serving_sentence(report),
            next_step=next_step(report),
            other_reason=other_reason(report),
            sections=[_section(line) for line in by_urgency(report)],
            rows=[_section_anchor(line) for line in report.gates],
            refusing=[_section_anchor(line) for line in refusing_lines(report)],
            conditions=[_section_anchor(line) for line in report.gates if line.waiver],
        )
    )


def _section_anchor(line: GateLine) -> Mapping[str, Any]:
    return {
        "line": line, "anchor": _anchor(line), "deciding": wording.deciding(line.verdict), "refused_by": refusing_checks(line.verdict),
    }  # fmt: skip


def _anchor(line: GateLine) -> str:
    return f"gate-{wording.slug(line.verdict.gate)}"


def _section(line: GateLine) -> Section:
    verdict = line.verdict
    checks = wording.ordered(verdict.checks)
    passed = tuple(item for item in checks if item.passed)
    shown = tuple(item for item in checks if not item.passed) if len(passed) > FOLD_CHECKS else checks
    titles = {plot.title for plot in verdict.plots}
    beside = {table.title: table for table in reversed(verdict.tables) if table.title in titles}
    figures = tuple(_figure(plot, beside.get(plot.title)) for plot in verdict.plots)
    tables = tuple(table for table in verdict.tables if table is not beside.get(table.title))
    return Section(
        line=line, anchor=_anchor(line), deciding=wording.deciding(verdict), checks=shown,
        folded=passed if len(passed) > FOLD_CHECKS else (), figures=figures, tables=tables,
    )  # fmt: skip


def _figure(plot: Plot, table: Table | None) -> Figure:
    png = plot_png(plot)
    width, height = struct.unpack(">II", png[16:24])  # of the PNG's first chunk
    shown = table or wording.plot_table(plot)
    return Figure(
        plot=plot, image=data_uri(png), height_px=round(height * SHOWN_PX / width), table=shown, is_wide=folded_width(shown) > BESIDE
    )  # fmt: skip


def folded_width(table: Table) -> int:
    """Characters that a table takes when every cell is folded at its spaces; three a column for the gaps."""
    columns = [[name, *(wording.number(row[i]) for row in table.rows)] for i, name in enumerate(table.columns)]
    return sum(3 + max(len(word) for cell in column for word in (cell.split() or [""])) for column in columns)


def coded(text: str) -> Markup:
    """Text for the page with its `commands` set as code; everything else in it is escaped."""
    parts = text.split("`")
    whole = len(parts) if len(parts) % 2 else len(parts) - 1  # a backtick without a partner is a backtick
    shown = [Markup("<code>{}</code>").format(part) if i % 2 else escape(part) for i, part in enumerate(parts[:whole])]
    return Markup("").join([*shown, *(escape("`" + part) for part in parts[whole:])])


def data_uri(png: bytes) -> str:
    """A PNG as text that a page or a markdown image can hold."""
    return "data:image/png;base64," + b64encode(png).decode()


@cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("infra"), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters |= {
        "number": wording.number, "duration": wording.duration, "coded": coded, "stopped": wording.stopped,
        "measured": wording.measured, "said": wording.said,
        "needed": wording.needed, "limit": wording.limit, "gate_words": gate_words, "control_sentence": control_sentence,
        "cut": wording.cut, "in_brief": wording.in_brief, "moment": wording.moment, "waived": wording.waived, "answered": wording.answered,
    }  # fmt: skip
    environment.globals |= {
        "CHECK_WORDS": wording.CHECK_WORDS, "OUTCOME_WORDS": wording.OUTCOME_WORDS, "OUTCOME_MEANINGS": wording.OUTCOME_MEANINGS,
        "CLOSEST": wording.CLOSEST, "NAMED": NAMED, "LONG": LONG, "BRIEF": BRIEF, "FOLD_ROWS": FOLD_ROWS,
        "SHOWN_PX": SHOWN_PX, "is_passed": is_passed,
    }  # fmt: skip
    return environment
