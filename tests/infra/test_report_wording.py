"""Numbers, outcomes and checks in words."""

import math
from dataclasses import replace

import pytest

from infra.wording import (
    count,
    cut,
    deciding,
    duration,
    in_brief,
    measured,
    moment,
    needed,
    number,
    ordered,
    pair,
    plot_table,
    said,
    slug,
    stopped,
    why_not,
)
from validation.verdict import Check, Plot, Series, check, conclude, controlled, equal


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"), (0.8274, "0.8274"), (1390.04, "1,390"),
        (245817, "245,817"), (0.71, "0.71"), (1e-7, "1e-7"), (2.36e-5, "0.0000236"), (0.000407, "0.000407"), (1.25e-9, "1.25e-9"),
        (3.2e14, "3.2e14"), (-1.9144, "-1.914"), (99999.6, "100,000"), (math.nan, "NaN"), (math.inf, "infinity"), (-math.inf, "-infinity"),
        (None, "not measured"), ("a" * 64, "aaaaaaaaaaaa…"), ("kill:rank=1,step=7,phase=backward", "kill:rank=1,step=7,phase=backward"),
    ],
)  # fmt: skip
def test_number(value: float | str | None, text: str) -> None:
    """Numbers have sensible digits; NaN and missing values have names; digests are cut, other words are not."""
    assert number(value) == text


@pytest.mark.parametrize(
    ("observed", "threshold", "texts"),
    [
        (0.49996, 0.5, ("0.49996", "0.5")), (0.5, 0.5, ("0.5", "0.5")), (0.53, 0.5, ("0.53", "0.5")),
        (0.1 + 0.2, 0.3, ("0.30000000000000004", "0.29999999999999999")), ("ab" * 32, "ab" * 31 + "cd", ("ab" * 32, "ab" * 31 + "cd")),
        (None, 0.5, ("not measured", "0.5")),
    ],
    ids=["close", "equal", "apart", "last bit", "digests with one beginning", "missing"],
)  # fmt: skip
def test_pair_is_told_apart(observed: float | str | None, threshold: float | str, texts: tuple[str, str]) -> None:
    """A measurement that fails by a hair never reads as if it were the threshold."""
    assert pair(observed, threshold) == texts


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.42, "0.42 s"), (12.34, "12.3 s"), (59.99, "60 s"), (200.0, "3 min 20 s"), (7500.0, "2 h 5 min"), (math.nan, "NaN")],
)
def test_duration(seconds: float, text: str) -> None:
    """Durations are read at a glance."""
    assert duration(seconds) == text


def test_check_in_words() -> None:
    """Unit and interval stand with the measurement, the comparison with the threshold; ratios carry no unit."""
    item = check("latency", 3.42, "<=", 50.0, unit="ms", source="policy", interval=(3.1, 3.9))
    assert (measured(item), needed(item)) == ("3.42 [3.1, 3.9] ms", "≤ 50 ms")
    ratio = check("efficiency", 0.3, ">=", 0.5, unit="ratio", source="policy")
    assert (measured(ratio), needed(ratio)) == ("0.3", "≥ 0.5")


def test_failed_check_decides_before_an_undecided_one() -> None:
    """Failed first, then undecided, then passed; what decided is the first of them."""
    undecided = check("a", None, ">=", 1.0, unit="", source="")
    failed = check("b", 0.0, ">=", 1.0, unit="", source="", where="rank 3")
    passed = check("c", 2.0, ">=", 1.0, unit="", source="")
    assert [item.name for item in ordered([passed, undecided, failed])] == ["b", "a", "c"]
    assert deciding(conclude("g", [passed, undecided, failed], passed_reason="")).where == "rank 3"


def test_closest_call_of_a_pass_is_named() -> None:
    """Of a passed gate the limit that was nearly met is shown; counts that sit on their limit and digests are no calls."""
    checks = [
        check("far", 1.0, "<=", 900.0, unit="s", source=""),
        check("near", 0.52, ">=", 0.5, unit="ratio", source=""),
        check("kills", 2.0, ">=", 2.0, unit="", source=""),
        equal("state", "ab", "ab", source=""),
    ]
    assert deciding(conclude("g", checks, passed_reason="")).what == "closest call: near"
    assert deciding(conclude("g", checks[2:], passed_reason="")).what == "all 2 checks"


def test_plot_table_joins_series_by_x() -> None:
    """A plot's table has a row for each x of any series, and an empty cell where a series has none."""
    series = (
        Series(name="a", x=("u", "v"), y=(1.0, math.nan), low=(0.5, 1.0), high=(1.5, 3.0)),
        Series(name="b", x=("v", "w"), y=(3.0, 4.0)),
    )
    table = plot_table(Plot(title="t", kind="bar", x_label="x", y_label="y", series=series))
    assert table.columns == ("x", "a", "b")
    assert table.rows == (("u", "1 [0.5, 1.5]", ""), ("v", "NaN [1, 3]", "3"), ("w", "", "4"))


def test_small_words() -> None:
    """Counts, file names and sentences."""
    assert (count(6), count(40)) == ("six", "40")
    assert (slug("Where a step's time goes: W=8"), slug("../..")) == ("where-a-step-s-time-goes-w-8", "x")
    assert (stopped("so\n it is"), stopped("why?"), stopped("")) == ("so it is.", "why?", "")


def test_check_without_threshold_says_so() -> None:
    """A check that nothing was demanded of does not print a comparison with nothing."""
    assert needed(Check(name="n", observed=1.0, threshold=None, unit="", passed=None)) == "no threshold"


@pytest.mark.parametrize(
    ("sentence", "told"),
    [
        ("a is 0.3, has to be >= 0.5", "a is 0.3, has to be ≥ 0.5."),
        ("a is open, has to be == satisfied", "a is open, has to be satisfied."),
        ("a is 0, has to be > 0", "a is 0, has to be above 0."),
        ("torch >= 2 was found", "torch >= 2 was found."),
        ("raised here ^^^^^^^^^ in line 3", "raised here in line 3."),
    ],
)
def test_a_verdicts_sentence_reads_without_code(sentence: str, told: str) -> None:
    """What a measurement has to be is said with signs and words; other comparisons stay; tracebacks lose their underlining."""
    assert said(sentence) == told


def test_a_check_in_brief_says_its_unit_once_and_leaves_long_places_out() -> None:
    """A clause holds name, short place, value, limit; an answer in many words is left to the table."""
    item = check("utility", -2.3, ">", 0.0, unit="USD", source="", where="carrier=EV")
    assert in_brief(item) == "utility (carrier=EV) is -2.3 USD, has to be above 0"
    assert in_brief(replace(item, where="x" * 41)) == "utility is -2.3 USD, has to be above 0"
    assert in_brief(replace(item, observed=None)) == "utility (carrier=EV) was not measured, has to be above 0 USD"
    assert in_brief(equal("drill", "open: " + "why " * 20, "satisfied", source="")) == "drill is not satisfied"


def test_why_not_counts_what_else_failed() -> None:
    """The first failed check speaks for its gate, and says how many more there are; a blind gate speaks for itself."""
    checks = [check(name, 0.0, ">=", 1.0, unit="", source="") for name in "ab"]
    verdict = conclude("g", checks, passed_reason="")
    assert why_not(verdict) == "a is 0, has to be ≥ 1 (and 1 more of 2 checks)"
    assert why_not(controlled(verdict, "a defect", "c", verdict)).startswith("the positive control was missed")


@pytest.mark.parametrize(("length", "text"), [(20, "one two three"), (11, "one two…"), (9, "one two…")])
def test_a_cut_text_keeps_whole_words(length: int, text: str) -> None:
    """Nothing is longer than asked, and what is left out is marked."""
    assert cut(" one  two three", length) == text


def test_moments_are_read_in_utc() -> None:
    """An ISO time is told to the minute in UTC; anything else as it is."""
    assert moment("2025-01-14T10:33:07+01:00") == "2025-01-14 09:33 UTC"
    assert moment("yesterday") == "yesterday"
