"""The report's record, sentences, JSON document and page."""

import json
import math
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import helpers_report as sample
import pytest

from infra.report import (
    CostLine,
    GateLine,
    ReleaseReport,
    coded,
    control_sentence,
    folded_width,
    headline,
    next_step,
    other_reason,
    refusing_lines,
    release_document,
    render_html,
    serving_sentence,
    tally,
    with_waivers,
)
from infra.wording import said
from validation.verdict import Check, GateVerdict, Outcome, Table, check, conclude, equal, inconclusive

VOID = {"meta", "img", "br", "link", "input", "hr"}
HOSTILE = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"


class Page(HTMLParser):
    """Reads a page: unclosed or crossed tags fail; keeps tags with attributes and the visible text."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.fixture(scope="module")
def refused() -> ReleaseReport:
    return sample.refused()


@pytest.fixture(scope="module")
def refused_html(refused: ReleaseReport) -> str:
    return render_html(refused)


def small(outcome: Outcome = Outcome.PASS, **changes: object) -> ReleaseReport:
    """A report of one gate, without plots."""
    verdict = GateVerdict(gate="scaling", outcome=outcome, reason="efficiency (W=8) is 0.3", action="look at rank 3")
    return replace(sample.release([]), **{"gates": (sample.line(verdict),), **changes})


def test_page_is_well_formed_and_says_every_reason(refused: ReleaseReport, refused_html: str) -> None:
    """Tags are balanced and each gate's reason, action and name can be read."""
    page = Page(refused_html)
    assert page.stack == []
    for line in refused.gates:
        assert said(line.verdict.reason) in page.text
        assert line.verdict.action in page.text


def test_page_loads_nothing(refused_html: str) -> None:
    """No script, style sheet, font or picture comes from elsewhere: the page works offline and tells nobody that it was read."""
    page = Page(refused_html)
    sources = [
        value or "" for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href", "srcset", "data")
    ]
    assert all(source.startswith(("data:image/png;base64,", "#")) for source in sources)
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(word in refused_html for word in ("http://", "https://", "@import", "url("))


def test_every_plot_has_a_picture_words_for_it_and_its_table(refused: ReleaseReport, refused_html: str) -> None:
    """Each plot is inline, with an alternative text, and its values stand beside it as a table."""
    page = Page(refused_html)
    pictures = [attributes for tag, attributes in page.tags if tag == "img"]
    plots = [plot for line in refused.gates for plot in line.verdict.plots]
    assert len(pictures) == len(plots) > 8
    assert all(plot.title in (picture["alt"] or "") for plot, picture in zip(plots[-3:], pictures[:3], strict=True))
    assert "carrier=EV" in page.text
    assert "-1.91 [-2.22, -1.6]" in page.text


def test_gates_that_did_not_pass_come_first_and_stand_open(refused_html: str) -> None:
    """A reader of a refused release meets the failed gate, then the inconclusive one; passed ones are folded."""
    places = [refused_html.index(f'id="gate-{name}"') for name in ("slice-quality", "scaling", "data-contract")]
    assert places == sorted(places)
    assert "<details><summary><h2>data_contract" in refused_html
    assert "<details><summary><h2>slice_quality" not in refused_html


def test_measurement_threshold_owner_and_next_step_stand_in_the_first_screen(refused: ReleaseReport, refused_html: str) -> None:
    """The header alone answers which gate, which measurement, which threshold, whose slice and what to do."""
    header = Page(refused_html.partition("<header")[2].partition("</header>")[0]).text
    for told in (
        "slice_quality",
        "-1.914 [-2.224, -1.604] min/flight",
        "≥ -0.72 min/flight",
        "carrier=EV",
        "seatrial gate slice_quality",
        "version 6",
    ):
        assert told in header


def test_same_report_gives_the_same_bytes(refused: ReleaseReport, refused_html: str) -> None:
    """Rendering a release built anew changes nothing."""
    assert render_html(sample.refused()) == refused_html


def test_hostile_text_stays_text() -> None:
    """Strings from recipes, slices and errors cannot open a tag or an attribute, wherever they stand."""
    item = Check(
        name=HOSTILE, observed=HOSTILE, threshold=HOSTILE, unit=HOSTILE, passed=False, source=HOSTILE, where=HOSTILE, action=HOSTILE
    )
    verdict = conclude(HOSTILE, [item], passed_reason="", notes=[HOSTILE])
    report = small(
        gates=(sample.line(verdict, reuse_reason=HOSTILE),), release_id=HOSTILE, recipe=HOSTILE, reason=HOSTILE, action=f"`{HOSTILE}`",
        cost=(CostLine(name=HOSTILE, amount=1.0, unit=HOSTILE, note=HOSTILE),), not_run=(HOSTILE,), decision="held",
    )  # fmt: skip
    page = Page(render_html(report))
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert page.text.count("<script>alert(1)</script>") > 10


def test_nan_and_missing_values_are_named() -> None:
    """NaN is shown as NaN, a measurement that was not made as not measured; neither reads like a number."""
    checks = [
        check("loss", math.nan, "<=", 1.0, unit="nats", source="policy"),
        check("speed", None, ">=", 1.0, unit="samples/s", source="policy"),
    ]
    page = Page(render_html(small(gates=(sample.line(conclude("scaling", checks, passed_reason="")),))))
    assert "NaN" in page.text
    assert "not measured" in page.text
    assert "nan" not in page.text


def test_missed_control_decides() -> None:
    """A gate that did not see its planted defect says so at the top and in its section."""
    verdict = sample.with_control(sample.readiness_gate(), "a drill that never fired", caught=False)
    page = Page(render_html(small(gates=(sample.line(verdict),), decision="held")))
    assert "positive control missed" in page.text
    assert "planted a drill that never fired: MISSED" in page.text
    assert control_sentence(None) == "No defect was planted in this run."


def test_a_later_attempt_and_reuse_stay_visible() -> None:
    """A gate that passed on attempt 2, and one that was not run again, say so and why."""
    page = Page(render_html(sample.promoted()))
    assert "passed on attempt 2" in page.text
    assert "passed, reused" in page.text
    assert "code, data, config, policy and machine digests equal those of flights-20250113-2210." in page.text


FAILED, PASSED, UNKNOWN = (
    sample.line(GateVerdict(gate=gate, outcome=outcome, reason="why", action="do"))
    for gate, outcome in (("scaling", Outcome.FAIL), ("readiness", Outcome.PASS), ("slice_quality", Outcome.INCONCLUSIVE))
)


@pytest.mark.parametrize(
    ("decision", "gates", "not_run", "expected"),
    [
        pytest.param("promoted", (PASSED,) * 6, (), "Promoted: six of six gates pass.", id="all pass"),
        pytest.param(
            "promoted", (PASSED, FAILED), (), "Promoted: one of two gates pass; scaling failed, which the policy does not require.",
            id="a gate that is not required failed",
        ),
        pytest.param(
            "fell_back", (PASSED, UNKNOWN, FAILED), (), "Refused: scaling failed: why; slice_quality is inconclusive: why.",
            id="failed before inconclusive",
        ),
        pytest.param("fell_back", (PASSED, UNKNOWN), (), "Refused: slice_quality is inconclusive: why.", id="inconclusive"),
        pytest.param("held", (FAILED,), ("readiness",), "Held: scaling failed: why.", id="held"),
        pytest.param("held", (PASSED,), (), "Held: the pointer moved.", id="held though every gate passed"),
        pytest.param("held", (), (), "Held: the pointer moved.", id="no gate was run"),
        pytest.param("promoted", (PASSED,) * 14, (), "Promoted: 14 of 14 gates pass.", id="more gates than number words"),
    ],
)  # fmt: skip
def test_headline(decision: str, gates: tuple[GateLine, ...], not_run: tuple[str, ...], expected: str) -> None:
    """The decision is one plain sentence that names the gate that stopped the release."""
    assert headline(small(decision=decision, gates=gates, not_run=not_run, reason="the pointer moved")) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, "The candidate, version 7, serves as of 2025-01-14 09:33 UTC."),
        (
            {"decision": "fell_back", "serving_kind": "last_known_good", "serving_version": "6"},
            "The last known-good, version 6, serves as of 2025-01-14 09:33 UTC. The candidate, version 7, may not serve.",
        ),
        (
            {"decision": "fell_back", "serving_kind": "baseline", "serving_version": "1", "candidate_version": ""},
            "The baseline, version 1, serves as of 2025-01-14 09:33 UTC. The candidate may not serve.",
        ),
        (
            {"decision": "held", "serving_kind": "", "serving_version": ""},
            "Nothing serves as of 2025-01-14 09:33 UTC. The candidate, version 7, waits.",
        ),
    ],
    ids=["promoted", "fell back", "never registered", "nothing serves"],
)
def test_serving_sentence(changes: dict[str, object], expected: str) -> None:
    """What serves is named by role, version and time, since the page outlives it, and the candidate's fate beside it."""
    assert serving_sentence(small(**changes)) == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"decision": "fell_back", "action": "run `x`"}, "run `x`."),
        ({"decision": "fell_back"}, "do. Then `seatrial gate scaling --release flights-20250114-093012-7f3a`."),
        ({"decision": "promoted"}, "Nothing; the release is done."),
        ({"decision": "held", "gates": (PASSED,)}, "Read the gates that did not pass, mend, and release again."),
    ],
    ids=["the decision's own", "the gate's", "promoted", "nobody said"],
)
def test_next_step(changes: dict[str, object], expected: str) -> None:
    """A refused release never says that there is nothing to do."""
    assert next_step(small(**{"gates": (PASSED, FAILED), **changes})) == expected


@pytest.mark.parametrize("report", [small(gates=()), small(not_run=("readiness",)), small(cost=()), small(Outcome.FAIL, machine="")],
                         ids=["no gates", "not run", "no cost", "no machine"])  # fmt: skip
def test_pages_with_parts_missing_are_well_formed(report: ReleaseReport) -> None:
    """A release that ended early still gives a whole page."""
    assert Page(render_html(report)).stack == []


def test_gate_without_evidence_shows_that_nothing_was_measured() -> None:
    """An inconclusive verdict without checks names the lack instead of showing an empty row."""
    verdict = inconclusive("scaling", reason="no timed runs", action="run the probe")
    assert "nothing was measured" in Page(render_html(small(gates=(sample.line(verdict),)))).text


def test_document_is_json_and_names_what_decided(refused: ReleaseReport) -> None:
    """The document holds what `seatrial release --json` promises, with NaN written as a word."""
    document = json.loads(json.dumps(release_document(refused, report_path="report.html"), allow_nan=False))
    assert document["decision"] == "fell_back"
    assert document["serving"] == {"kind": "last_known_good", "version": "6"}
    gate = next(gate for gate in document["gates"] if gate["name"] == "slice_quality")
    assert gate["outcome"] == "fail"
    assert gate["deciding"]["where"] == "carrier=EV"
    assert {"name", "observed", "threshold", "unit", "passed"} <= set(gate["checks"][0])


@pytest.mark.parametrize(
    ("text", "html"),
    [
        ("run `seatrial show`.", "run <code>seatrial show</code>."),
        ("a ` b", "a ` b"),
        ("`<b>` and <i>", "<code>&lt;b&gt;</code> and &lt;i&gt;"),
        ("`a` and ` b", "<code>a</code> and ` b"),
        ("", ""),
    ],
    ids=["command", "lone backtick", "escaped", "one pair and a lone one", "empty"],
)
def test_commands_are_set_as_code(text: str, html: str) -> None:
    """Backticks around a command become code; everything inside and outside is escaped."""
    assert str(coded(text)) == html


def test_every_refusing_gate_stands_in_the_header() -> None:
    """Two gates refused: both, with what each measured and what to do about each, stand in the first screen."""
    lines = [
        sample.line(conclude(gate, [check("x", 0.3, ">=", 0.5, unit="", source="", where=where, action=f"mend {gate}")], passed_reason=""))
        for gate, where in (("scaling", "W=8"), ("slice_quality", "carrier=EV"))
    ]
    header = Page(render_html(small(decision="fell_back", gates=tuple(lines))).partition("</header>")[0].partition("<header")[2]).text
    for told in ("scaling decided on x, W=8", "slice_quality decided on x, carrier=EV", "mend scaling.", "mend slice_quality."):
        assert told in " ".join(header.split())


def test_the_reason_tells_only_what_the_gates_do_not() -> None:
    """What gates said is not said twice; that no fallback can serve, or a drill, is."""
    told = "scaling is fail: why; slice_quality is inconclusive: why"
    report = small(decision="held", gates=(FAILED, UNKNOWN), reason=f"{told}; no fallback can serve (none)")
    assert other_reason(report) == "no fallback can serve (none)."
    assert other_reason(replace(report, reason=told)) == ""


def test_a_long_answer_is_folded() -> None:
    """A traceback as a measurement opens on demand and leaves the table its shape."""
    answer = "open: " + "words of a traceback " * 30
    page = render_html(
        small(gates=(sample.line(conclude("readiness", [equal("drill", answer, "satisfied", source="")], passed_reason="")),))
    )
    assert page.count('<details class="fold"><summary>drill is open: words') == 1
    assert page.count('<details class="fold"><summary>open: words') == 1


@pytest.mark.parametrize(("columns", "width"), [(("rank", "idle (ms)"), 14), (("slice", "x" * 40), 51)])
def test_a_tables_width_is_that_of_its_longest_words(columns: tuple[str, ...], width: int) -> None:
    """Cells fold at spaces, so the longest word of each column decides whether a table fits beside its plot."""
    assert folded_width(Table(title="t", columns=columns, rows=(("W=2 a b", 3.25),))) == width


def test_a_conditional_pass_is_told_where_it_is_decided() -> None:
    """The headline counts what passed and names the condition; no gate is said to stand in the way, and the next step is the decision's."""
    report = replace(sample.conditional(), action="before 2025-02-13 09:40 UTC, mend what scaling says")

    assert headline(report) == (
        "Promoted on a condition: five of six gates pass; scaling is inconclusive, waived by Ada Lovelace until 2025-02-13 09:40 UTC: "
        "one device until March."
    )
    assert tally(report) == "5 passed, 1 inconclusive; 1 of them waived"
    assert refusing_lines(report) == ()
    assert next_step(report) == "before 2025-02-13 09:40 UTC, mend what scaling says."


def test_the_page_shows_conditions_and_the_persons_word() -> None:
    """In the first screen and in the gate's section, with the signed statement; what a person wrote stays text."""
    report = sample.conditional()
    waived = report.gates[3].waiver
    assert waived is not None
    text = " ".join(Page(render_html(report)).text.split())

    assert "Counts as passed on a condition: waived by Ada Lovelace until 2025-02-13 09:40 UTC: one device until March." in text
    assert f"Signed statement sha256 {waived.attestation}" in text
    assert "Approved by Grace Hopper on 2025-01-14 10:44 UTC, 1 h 3 min after the question: read the report." in text
    hostile = replace(report.gates[3], waiver=replace(waived, by=HOSTILE, reason=HOSTILE))
    changed = replace(report, gates=(*report.gates[:3], hostile, *report.gates[4:]))
    assert "<script" not in render_html(changed)


def test_a_waiver_is_shown_at_its_very_evidence_only() -> None:
    """Of a gate that passed, or was held again, nothing is waived."""
    report = sample.conditional()
    waived = report.gates[3].waiver
    assert waived is not None
    others = with_waivers(report.gates, [replace(waived, evidence="0" * 64), replace(waived, gate="readiness")])

    assert [line.waiver for line in others] == [None] * 6


@pytest.mark.parametrize(
    ("decision", "approved", "expected"),
    [
        pytest.param("fell_back", False, "Refused by Grace Hopper: read the report.", id="a-no"),
        pytest.param("held", True, "Held: six of six; waits for a person since 2025-01-14 09:41 UTC.", id="waits"),
    ],
)
def test_the_headline_of_a_release_that_people_hold(decision: Any, approved: bool, expected: str) -> None:
    """Whose no it was, or that somebody is waited for; no gate is blamed."""
    report = sample.conditional()
    assert report.approval is not None
    changed = replace(
        report, decision=decision, approval=replace(report.approval, approved=approved),
        reason="six of six; waits for a person since 2025-01-14 09:41 UTC",
    )  # fmt: skip

    assert headline(changed) == expected


def test_the_document_holds_what_people_said() -> None:
    """Conditions in words, the yes and its wait as values, each gate with its waiver."""
    document = release_document(sample.conditional())

    assert document["conditions"] == ["scaling waived by Ada Lovelace until 2025-02-13 09:40 UTC: one device until March."]
    assert (document["approval"]["by"], document["human_review_s"]) == ("Grace Hopper", 3800.0)
    assert [gate["name"] for gate in document["gates"] if gate["waiver"]] == ["scaling"]
    assert (release_document(sample.promoted())["approval"], release_document(sample.promoted())["human_review_s"]) == (None, None)
