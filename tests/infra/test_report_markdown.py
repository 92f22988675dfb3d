"""A release as markdown."""

import re
from dataclasses import replace

import helpers_report as sample
import pytest

from infra.markdown import (
    DESCRIPTION_CHARS,
    gate_artifact_markdown,
    headed,
    plot_files,
    registry_description,
    release_summary_markdown,
    table_rows,
)
from infra.report import ReleaseReport, headline
from validation.verdict import Check, Outcome, check, conclude


@pytest.fixture(scope="module", params=["promoted", "refused"])
def report(request: pytest.FixtureRequest) -> ReleaseReport:
    made: ReleaseReport = getattr(sample, request.param)()
    return made


def test_first_line_is_a_plain_sentence(report: ReleaseReport) -> None:
    """The registry's list shows the first line raw: a sentence without marks."""
    first = registry_description(report, "r1", "7").splitlines()[0]
    assert first.startswith(
        {"promoted": "Promoted: six of six gates pass.", "fell_back": "Refused: slice_quality failed: "}[report.decision]
    )
    assert first.endswith(".")
    assert not re.search(r"[#*`\[\]()!|](?<![\[\]()])", first)


def test_description_links_the_report_and_only_plots_that_are_logged(report: ReleaseReport) -> None:
    """Every picture is an artifact of the run that `plot_files` names; no data URI, which the registry would drop."""
    text = registry_description(report, "r1", "7")
    paths = re.findall(r"!\[[^\]]*\]\(get-artifact\?path=(plots/[a-z0-9-]+\.png)&run_uuid=r1\)", text)
    assert paths
    assert set(paths) <= set(plot_files(report))
    assert "[report](#/experiments/7/runs/r1/artifacts/report.html)" in text
    assert "data:" not in text


def test_failed_gates_plots_come_first() -> None:
    """Who opens a refused version sees the failed gate's picture before any other."""
    paths = re.findall(r"path=plots/([a-z-]+)-\d", registry_description(sample.refused(), "r", "1"))
    assert paths[0] == "slice-quality"
    assert "scaling" in paths


def test_description_fits_the_registrys_column() -> None:
    """A description that is too long loses its last parts, never its sentence or the way to the report."""
    refused = sample.refused()
    text = registry_description(replace(refused, gates=refused.gates * 8), "r" * 32, "1")
    assert len(text) <= DESCRIPTION_CHARS
    assert text.startswith("Refused: ")
    assert "artifacts/report.html" in text


def test_every_plot_is_a_file_of_its_own(report: ReleaseReport) -> None:
    """Names are unique and safe."""
    files = plot_files(report)
    assert len(files) == sum(len(line.verdict.plots) for line in report.gates)
    assert all(re.fullmatch(r"plots/[a-z0-9-]+\.png", name) for name in files)


def test_page_begins_with_what_became_of_the_version() -> None:
    """One line over what the release said, however often it is said; gone when the version serves again. Reasons are no markdown."""
    left = headed("Promoted: all is well.\n\n- x", "rolled_back", "arrivals\n[late](x)")
    assert left.startswith("Rolled back since: arrivals [late")
    assert left.endswith("\n\nPromoted: all is well.\n\n- x")
    assert headed(left, "rolled_back", "arrivals\n[late](x)") == left
    assert headed(left, "promoted", "it was the sensor") == "Promoted: all is well.\n\n- x"
    assert headed("", "abandoned", "out of time") == "Abandoned since: out of time.\n\n"


def test_gate_artifact_shows_checks_control_and_picture() -> None:
    """One gate's artifact holds its reason, action, control, worst checks and inline plots."""
    text = gate_artifact_markdown(sample.refused().gates[4])
    for said in (
        "## slice_quality: failed",
        "carrier=EV",
        "**Do next:**",
        "**Positive control:**",
        "checks passed; the artifact `slice-quality-checks` has them all",
        "](data:image/png;base64,",
    ):
        assert said in text


def test_summary_shows_decision_cost_and_why(report: ReleaseReport) -> None:
    """The release's artifact says what was decided, why, what to do and what it cost."""
    text = release_summary_markdown(report)
    assert headline(report) in text
    assert "| wall clock | 183.2 | s |" in text
    assert ("data:image/png" in text) == (report.decision != "promoted")


def test_summary_links_the_registrys_page(report: ReleaseReport) -> None:
    """Where a server shows one; else the summary says nothing of it."""
    page = "http://localhost:5000/#/models/flights/versions/7"

    assert f"in the registry]({page})" in release_summary_markdown(report, page)
    assert "in the registry](" not in release_summary_markdown(report)


def test_rows_are_text_and_worst_first() -> None:
    """The table artifact's first row is the check that failed; every value is a string."""
    rows = table_rows(sample.slice_gate(regressed="carrier=EV"))
    assert rows[0] | {"threshold comes from": ""} == {
        "check": "utility against last known-good", "outcome": "failed", "measured": "-1.914 [-2.224, -1.604]", "has to be": "≥ -0.72",
        "unit": "min/flight", "whose": "carrier=EV", "threshold comes from": "",
    }  # fmt: skip
    assert all(isinstance(value, str) for row in rows for value in row.values())


@pytest.mark.parametrize(
    ("hostile", "shown"),
    [
        ("a | b", r"a \| b"), ("two\nlines", "two lines"), ("<script>x</script>", r"\<script>x\</script>"),
        ("x <= 3 [1, 2]", "x <= 3 [1, 2]"),
        ("[click](javascript:x)", r"[click\](javascript:x)"), ("run `a|b`", r"run `a\|b`"), ("lone ` tick", "lone ' tick"),
        ("**bold**", r"\*\*bold\*\*"), ("&lt;b&gt;", "&amp;lt;b&amp;gt;"),
    ],
)  # fmt: skip
def test_hostile_text_breaks_no_line(hostile: str, shown: str) -> None:
    """Bars, newlines, tags and links from outside stay text; plain comparisons, intervals and commands stay as written."""
    item = Check(name=hostile, observed="a", threshold="b", unit="", passed=False, where=hostile)
    text = gate_artifact_markdown(sample.line(conclude("scaling", [item], passed_reason="")))
    row = next(line for line in text.splitlines() if line.startswith("- **failed**: "))
    assert row == f"- **failed**: {shown} is a, has to be b."
    assert not re.search(r"(?<!\\)\|", row)


def test_no_cell_of_the_table_artifact_begins_as_a_quotation() -> None:
    """The engine reads cells as markdown: "> 0" would show as a quoted 0."""
    rows = table_rows(conclude("g", [check("gain", 1.0, ">", 0.0, unit="", source="")], passed_reason=""))
    assert rows[0]["has to be"] == "above 0"


def test_each_failed_gate_shows_a_picture() -> None:
    """The first failed gate's plots do not crowd out the second one's."""
    gates = tuple(replace(line, verdict=replace(line.verdict, outcome=Outcome.FAIL)) for line in sample.refused().gates)
    shown = re.findall(r"path=plots/([a-z-]+)-\d", registry_description(replace(sample.refused(), gates=gates), "r", "1"))
    assert len(set(shown)) >= 3


def test_summary_lists_every_gate_with_what_it_refused() -> None:
    """One line a gate, those that did not pass first, with numbers and next step; a list wraps where a table is cut off."""
    lines = [line for line in release_summary_markdown(sample.refused()).splitlines() if line.startswith("- **")]
    assert lines[0].startswith("- **slice_quality failed**: utility against last known-good (carrier=EV) is -1.914")
    assert lines[1].startswith("- **scaling inconclusive**")
    assert len(lines) == 6


def test_what_people_said_stands_above_the_verdicts() -> None:
    """A condition and a yes are told in the registry and on the flow run's page, escaped like everything from outside."""
    report = sample.conditional()
    for text in (registry_description(report, "run-1", "3"), release_summary_markdown(report)):
        assert "**Condition:** scaling waived by Ada Lovelace until 2025-02-13 09:40 UTC: one device until March." in text
        assert "**A person:** Approved by Grace Hopper on 2025-01-14 10:44 UTC" in text
        assert text.index("**Condition:**") < text.index("- **data_contract passed**")
    assert "**Counts as passed on a condition:** waived by Ada" in gate_artifact_markdown(report.gates[3])

    assert report.approval is not None
    hostile = replace(report, approval=replace(report.approval, reason="<b>x</b> | [a](http://b) *c*"))
    assert r"\<b>x\</b> \| [a\](http://b) \*c\*" in release_summary_markdown(hostile)
