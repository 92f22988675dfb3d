"""A release as markdown: the registry's version page and the workflow engine's artifacts.

The registry's list of versions shows a description's first line raw, so it is a plain sentence. Its page drops data URIs, so plots
are linked as files logged to the run (`plot_files` says which); workflow artifacts show data URIs, so there they are inlined.
Text from outside is escaped: it can break neither a table nor out of its sentence.
"""

import re
from collections.abc import Iterable, Sequence
from urllib.parse import quote

from infra.plots import plot_png
from infra.report import (
    NAMED,
    GateLine,
    ReleaseReport,
    by_urgency,
    control_sentence,
    data_uri,
    gate_words,
    headline,
    is_passed,
    next_step,
    other_reason,
    refusing_checks,
    serving_sentence,
)
from infra.wording import (
    CHECK_WORDS,
    COMPARISON_SIGNS,
    SHORT_ANSWER,
    answered,
    cut,
    duration,
    in_brief,
    interval,
    measured,
    moment,
    number,
    ordered,
    pair,
    said,
    slug,
    stopped,
    waived,
)
from validation.verdict import Check, GateVerdict, Plot

URGENT_PLOTS = 2  # of each gate that did not pass: more of the first one would crowd out the second
_SINCE = {"rolled_back": "Rolled back since", "abandoned": "Abandoned since"}  # status -> how its page begins, over what was said before
KEY_PLOTS = 5  # on the version's page; the report has them all
DESCRIPTION_CHARS = 5000  # what the registry's database column holds; longer ones are refused by PostgreSQL
KEY_GATES = ("scaling", "slice_quality", "gradient_equivalence", "kill_and_resume")  # whose first plot is shown when all is well
LISTED_CHECKS, LISTED_CHARS = 20, 400  # refusing checks in an artifact, characters of an answer in words; the report has them all


def registry_description(report: ReleaseReport, run_id: str, experiment_id: str) -> str:
    """Write the version page: a plain sentence, what to do, the way to the full report, verdicts, key plots.

    The run must hold `report.html` and every file of `plot_files(report)`.
    """
    run, experiment = quote(run_id, safe=""), quote(experiment_id, safe="")
    plots = (f"![{safe(plot.title)}](get-artifact?path={path}&run_uuid={run})" for path, plot in _key_plots(report))
    return _fitted(
        safe(headline(report)),
        safe(serving_sentence(report)),
        f"**Why:** {safe(because)}" if (because := other_reason(report)) else "",
        f"**Do next:** {safe(next_step(report))}",
        _people(report),
        f"[report](#/experiments/{experiment}/runs/{run}/artifacts/report.html): every check, plot, cost and digest of release "
        f"{safe(report.release_id)}.",
        _verdicts(report),
        f"Question: {safe(stopped(report.card.question))} Owner: {safe(report.card.owner)}.",
        *plots,
    )


def headed(description: str, status: str, reason: str) -> str:
    """A version's page under what became of it after its release; of one that serves again, or may, nothing of the kind is left."""
    kept = re.sub(rf"\A({'|'.join(_SINCE.values())}): .*\n\n", "", description)
    return f"{_SINCE[status]}: {safe(stopped(reason))}\n\n{kept}" if status in _SINCE else kept


def plot_files(report: ReleaseReport) -> dict[str, Plot]:
    """Every plot of a release by its artifact path "plots/NAME.png"; the names `registry_description` links."""
    return {path: plot for path, _, plot in _named_plots(report)}


def gate_artifact_markdown(line: GateLine) -> str:
    """One gate for a workflow artifact: outcome, reason, action, control, what did not pass, plots inline.

    Checks are listed, not tabled: the engine's page cuts off what is wider than its column. `table_rows` has them all.
    """
    verdict = line.verdict
    return paragraphs(
        f"## {safe(verdict.gate)}: {gate_words(line)}",
        safe(said(verdict.reason)),
        f"**Counts as passed on a condition:** {safe(stopped(waived(line.waiver)))}" if line.waiver else "",
        f"**Do next:** {safe(stopped(verdict.action))}" if verdict.action else "",
        f"**Positive control:** {safe(control_sentence(verdict.control))}",
        f"**Reused, not run again:** {safe(stopped(line.reuse_reason))}" if line.reused else "",
        _checks(verdict),
        *(f"![{safe(plot.title)}]({data_uri(plot_png(plot))})" for plot in verdict.plots),
        "**What this gate cannot see:**" if verdict.notes else "",
        "\n".join(f"- {safe(note)}" for note in verdict.notes),
        f"{duration(line.seconds)} of wall clock, {number(line.worker_seconds, 3)} worker-seconds, evidence sha256 "
        f"`{_code(line.evidence_sha256)}`",
    )


def release_summary_markdown(report: ReleaseReport, registry_page: str = "") -> str:
    """A whole release for a workflow artifact: decision, next step, verdicts, cost, and the first plot of each gate that did not pass.

    Args: registry_page, the address of the candidate's page; "" when no server shows one.
    """
    plots = [line.verdict.plots[0] for line in by_urgency(report) if not is_passed(line) and line.verdict.plots]
    cost = [[line.name, number(line.amount), line.unit, line.note] for line in report.cost]
    return paragraphs(
        f"## {safe(headline(report))}",
        safe(serving_sentence(report)),
        f"**Why:** {safe(because)}" if (because := other_reason(report)) else "",
        f"**Do next:** {safe(next_step(report))}",
        f"[Version {safe(report.candidate_version)} in the registry]({registry_page})" if registry_page else "",
        _people(report),
        _verdicts(report),
        *(f"![{safe(plot.title)}]({data_uri(plot_png(plot))})" for plot in plots),
        _table(("cost", "amount", "unit", "how measured"), cost) if cost else "",
        f"Release `{_code(report.release_id)}` of {safe(report.recipe)}, "
        f"{safe(moment(report.started_at))} to {safe(moment(report.finished_at))}.",
    )


_COLUMNS = ("check", "outcome", "measured", "has to be", "whose", "unit", "threshold comes from")


def table_rows(verdict: GateVerdict) -> list[dict[str, str]]:
    """Checks as rows for a table artifact, worst first; every value is text."""
    return [_row(item) for item in ordered(verdict.checks)]


def _row(item: Check) -> dict[str, str]:
    observed, threshold = pair(item.observed, item.threshold)
    values = (
        item.name,
        CHECK_WORDS[item.passed],
        f"{observed} {interval(item.interval)}".strip(),
        f"{COMPARISON_SIGNS[item.comparison]}{threshold}" if item.threshold is not None else "no threshold",
        item.where,
        item.unit,
        item.source,
    )
    return dict(zip(_COLUMNS, values, strict=True))


def _people(report: ReleaseReport) -> str:
    """What people said: waivers as conditions, and their yes or no."""
    conditions = [
        f"**Condition:** {safe(stopped(f'{line.verdict.gate} {waived(line.waiver)}'))}" for line in report.gates if line.waiver
    ]  # fmt: skip
    return "\n\n".join([*conditions, *([f"**A person:** {safe(answered(report.approval))}"] if report.approval else [])])


def _verdicts(report: ReleaseReport) -> str:
    """One line a gate, those that did not pass first: a list, since it wraps where a table would be cut off."""
    lines = [_verdict(line, next_step(report)) for line in by_urgency(report)]
    return "\n".join([*lines, *(f"- **{safe(gate)}** was not run: the release ended before it." for gate in report.not_run)])


def _verdict(line: GateLine, already_told: str) -> str:
    verdict, refusing = line.verdict, refusing_checks(line.verdict)
    told = in_brief(refusing[0]) if refusing and not is_passed(line) else verdict.reason
    action = stopped(verdict.action)
    todo = f" Do: {action}" if action not in ("", already_told) and not is_passed(line) else ""
    more = [*map(in_brief, refusing[1:NAMED]), *([f"and {len(refusing) - NAMED} more"] if len(refusing) > NAMED else [])]
    first = f"- **{safe(verdict.gate)} {gate_words(line)}**: {safe(said(told) + todo)}"
    return "\n".join([first, *(f"    - {safe(item)}" for item in more)])


def _checks(verdict: GateVerdict) -> str:
    """The checks that did not pass, with the source of their threshold, and how many did."""
    refusing = [item for item in ordered(verdict.checks) if not item.passed]
    passed, total = len(verdict.checks) - len(refusing), len(verdict.checks)
    counted = f"{passed} of {total} checks passed; the artifact `{artifact_key(verdict)}-checks` has them all."
    return paragraphs("\n".join(map(_refusing, refusing[:LISTED_CHECKS])), counted).rstrip() if total else ""


def _refusing(item: Check) -> str:
    answer = f" Measured: {stopped(cut(measured(item), LISTED_CHARS))}" if len(measured(item)) > SHORT_ANSWER else ""
    source = f" Threshold: {stopped(item.source)}" if item.source else ""
    return f"- **{CHECK_WORDS[item.passed]}**: {safe(stopped(in_brief(item)) + answer + source)}"


def gate_gist(line: GateLine) -> str:
    """A gate in one sentence, for lists of artifacts."""
    return f"{gate_words(line)}: {said(line.verdict.reason)}"


def artifact_key(verdict: GateVerdict) -> str:
    """A gate's name as a workflow artifact's key: lower-case letters, digits, dashes."""
    return slug(verdict.gate)


def _named_plots(report: ReleaseReport) -> list[tuple[str, str, Plot]]:
    """(artifact path, gate, plot) of every plot; the position keeps equal titles apart."""
    return [
        (f"plots/{slug(line.verdict.gate)}-{position}-{slug(plot.title)}.png", line.verdict.gate, plot)
        for line in report.gates
        for position, plot in enumerate(line.verdict.plots, start=1)
    ]


def _key_plots(report: ReleaseReport) -> list[tuple[str, Plot]]:
    """The first plot of each gate that did not pass, then their second ones, then the first plot of each key gate."""
    named = _named_plots(report)
    urgent = [line.verdict.gate for line in by_urgency(report) if not is_passed(line)]
    of_gate = {gate: [(path, plot) for path, owner, plot in named if owner == gate] for gate in (*urgent, *KEY_GATES)}
    shown = [plots[rank] for rank in range(URGENT_PLOTS) for gate in urgent if len(plots := of_gate[gate]) > rank]
    shown += [plots[0] for gate in KEY_GATES if gate not in urgent and (plots := of_gate[gate])]
    return shown[:KEY_PLOTS]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *([safe(value) for value in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def safe(text: str) -> str:
    """Text on one line that opens no tag, link, emphasis or table cell; sentences and their `commands` stay as they were written."""
    parts = " ".join(text.split()).split("`")
    if len(parts) % 2 == 0:  # a backtick without a partner would open code that never ends
        parts = ["'".join(parts)]
    return "`".join(part.replace("|", r"\|") if i % 2 else _prose(part) for i, part in enumerate(parts))


def _prose(text: str) -> str:
    line = re.sub(r"([\\*|])", r"\\\1", text)
    line = re.sub(r"<(?=[A-Za-z/!?])", r"\\<", line)
    line = re.sub(r"&(?=#|[A-Za-z]+;)", "&amp;", line)
    return re.sub(r"\](?=[(\[:])", r"\\]", line)


def _code(text: str) -> str:
    return " ".join(text.replace("`", "'").split())


def _fitted(*parts: str) -> str:
    """Paragraphs in order of importance, the last ones left out where the registry's limit would cut them."""
    kept = [part for part in parts if part]
    while len(kept) > 1 and len(paragraphs(*kept)) > DESCRIPTION_CHARS:
        kept.pop()
    return paragraphs(*kept)[:DESCRIPTION_CHARS]


def paragraphs(*parts: str) -> str:
    """Markdown of what is not empty."""
    return "\n\n".join(part for part in parts if part) + "\n"
