"""How numbers, outcomes and checks are put into words, the same on the page, in the registry and in the terminal."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from validation.verdict import Check, GateVerdict, Outcome, Plot, Series, Table
from validation.waivers import Approval, Waiver, human_review_s

OUTCOME_WORDS = {Outcome.PASS: "passed", Outcome.FAIL: "failed", Outcome.INCONCLUSIVE: "inconclusive"}
OUTCOME_MEANINGS = {
    Outcome.PASS: "every check held, with its whole confidence interval, and the gate caught the defect planted in the same run",
    Outcome.FAIL: "at least one check did not hold; a measurement that is NaN counts as failed",
    Outcome.INCONCLUSIVE: (
        "nobody can tell: a measurement is missing, its interval straddles the threshold, or the gate missed its planted defect; "
        "the release treats it like a failure"
    ),
}
CHECK_WORDS = {True: "passed", False: "failed", None: "inconclusive"}
# after "has to be"; words for < and >, because a table cell that begins with ">" is a quotation to a workflow engine's page
COMPARISON_SIGNS = {"<=": "≤ ", ">=": "≥ ", "==": "", "<": "below ", ">": "above "}
CLOSEST = "closest call: "  # before the check of a passed gate that came nearest to its limit
SHORT_ANSWER, SHORT_PLACE = 60, 40  # characters of a measurement, of its place, that a sentence can quote
COUNTS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")

Value = float | int | str | None


def number(value: Value, digits: int = 4) -> str:
    """A value for people: `digits` significant digits, thousands separated, NaN and infinities by name, long digests cut to 12."""
    if value is None:
        return "not measured"
    if isinstance(value, str):
        return value[:12] + "…" if re.fullmatch("[0-9a-f]{25,}", value) else value
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "infinity" if value > 0 else "-infinity"
    return _decimal(value, digits)


def _decimal(value: float, digits: int) -> str:
    if value == 0:
        return "0"
    exponent = math.floor(math.log10(abs(value)))
    if not -7 < exponent < 12:
        mantissa, power = f"{value:.{digits - 1}e}".split("e")
        return f"{_without_zeros(mantissa)}e{int(power)}"
    return _without_zeros(f"{value:,.{max(0, digits - 1 - exponent)}f}")


def _without_zeros(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text


def pair(observed: Value, threshold: Value) -> tuple[str, str]:
    """Both values with as many digits as it takes to tell them apart, so that 0.49996 never reads as 0.5 against 0.5."""
    for digits in (4, 6, 9, 17):
        texts = number(observed, digits), number(threshold, digits)
        if texts[0] != texts[1] or observed == threshold:
            return texts
    return str(observed), str(threshold)


def with_unit(text: str, unit: str) -> str:
    """A shown value and its unit; ratios have none worth printing, and words and missing values take none."""
    bare = unit in ("", "ratio") or text in ("not measured", "NaN", "infinity", "-infinity")
    return text if bare else f"{text} {unit}"


def interval(ends: tuple[float, float] | None, digits: int = 4) -> str:
    """A confidence interval, "" when there is none."""
    return "" if ends is None else f"[{number(ends[0], digits)}, {number(ends[1], digits)}]"


def measured(item: Check) -> str:
    """What a check saw: value, interval, unit."""
    text = pair(item.observed, item.threshold)[0]
    return with_unit(f"{text} {interval(item.interval)}".strip() if item.observed is not None else text, item.unit)


def needed(item: Check) -> str:
    """What a check asked: comparison, threshold, unit."""
    if item.threshold is None:
        return "no threshold"
    return with_unit(f"{COMPARISON_SIGNS[item.comparison]}{pair(item.observed, item.threshold)[1]}", item.unit)


def limit(item: Check) -> str:
    """What a check asked, where its unit stands beside it already."""
    return needed(replace(item, unit=""))


def duration(seconds: float) -> str:
    """Seconds for people: 0.42 s, 3 min 20 s, 2 h 5 min."""
    if not math.isfinite(seconds) or seconds < 0:
        return number(seconds)
    if seconds < 60:
        return f"{number(seconds, 2 if seconds < 10 else 3)} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count(n: int) -> str:
    """Small whole numbers as words."""
    return COUNTS[n] if n < len(COUNTS) else str(n)


def slug(text: str) -> str:
    """Lower-case letters, digits and single dashes: safe in file names, anchors and artifact keys. "x" when nothing is left."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or "x"


def stopped(sentence: str) -> str:
    """A sentence with its full stop, first letter as given; "" stays empty."""
    sentence = " ".join(re.sub(r"\^{4,}", "", sentence).split())  # what a traceback underlines with
    return sentence if not sentence or sentence[-1] in ".!?" else sentence + "."


def said(sentence: str) -> str:
    """A verdict's own sentence for people: with its full stop, and with signs instead of code for what a measurement has to be."""
    return stopped(re.sub("has to be (<=|>=|==|<|>) ", lambda found: f"has to be {COMPARISON_SIGNS[found[1]]}", sentence))


def cut(text: str, length: int) -> str:
    """At most `length` characters of a text, whole words, "…" where something is left out."""
    text = " ".join(text.split())
    return text if len(text) <= length else text[: length - 1].rsplit(" ", 1)[0] + "…"


def moment(iso: str) -> str:
    """An ISO time as people write it, to the minute, UTC; other text as it is."""
    try:
        return datetime.fromisoformat(iso).astimezone(UTC).strftime("%Y-%m-%d %H:%M UTC")
    except ValueError:
        return iso


def waived(waiver: Waiver) -> str:
    """A waiver as a clause: by whom, until when, why."""
    return f"waived by {waiver.by} until {moment(waiver.expires_at)}: {waiver.reason}"


def answered(approval: Approval) -> str:
    """What a person said, when, how long they were waited for, and why."""
    word, wait = "Approved" if approval.approved else "Refused", duration(human_review_s(approval))
    return stopped(f"{word} by {approval.by} on {moment(approval.made_at)}, {wait} after the question: {approval.reason}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deciding:
    """The one line about what decided a gate; texts for people."""

    what: str
    where: str
    measured: str
    needed: str


def deciding(verdict: GateVerdict) -> Deciding:
    """The measurement that decided: a missed control, the first failed or undecided check, or the closest call of a pass."""
    if verdict.control is not None and not verdict.control.caught:
        return Deciding(what="positive control missed", where="", measured="planted defect not seen", needed="caught")
    item = _worst(verdict.checks)
    if item is not None:
        return Deciding(what=item.name, where=item.where, measured=measured(item), needed=needed(item))
    if not verdict.checks:
        return Deciding(what="nothing was measured", where="", measured="no check", needed="at least one check")
    closest = min((c for c in verdict.checks if _is_a_call(c)), key=_headroom, default=None)
    if closest is None:
        return Deciding(what=f"all {len(verdict.checks)} checks", where="", measured="as demanded", needed="all as demanded")
    return Deciding(what=f"{CLOSEST}{closest.name}", where=closest.where, measured=measured(closest), needed=needed(closest))


def in_brief(item: Check) -> str:
    """A check in one short clause: what, whose, measured, has to be; a long place or a long answer stands elsewhere."""
    where = f" ({item.where})" if 0 < len(item.where) <= SHORT_PLACE and item.where not in item.name else ""
    if item.observed is None:
        return f"{item.name}{where} was not measured, has to be {needed(item)}"
    if len(measured(item)) > SHORT_ANSWER:
        return f"{item.name}{where} is not {needed(item)}"
    return f"{item.name}{where} is {measured(item)}, has to be {limit(item)}"


def why_not(verdict: GateVerdict) -> str:
    """Why a gate did not pass, as one clause: the check that decided and how many more, or the gate's own reason without checks."""
    missed = verdict.control is not None and not verdict.control.caught
    refusing = [item for item in ordered(verdict.checks) if not item.passed]
    if missed or not refusing:
        return said(verdict.reason).rstrip(".")
    worst = [item for item in refusing if item.passed is refusing[0].passed]
    more = f" (and {len(worst) - 1} more of {len(verdict.checks)} checks)" if len(worst) > 1 else ""
    return in_brief(worst[0]) + more


def ordered(checks: Sequence[Check]) -> tuple[Check, ...]:
    """Failed checks first, then undecided ones, then the rest; the gate's order within."""
    rank = {False: 0, None: 1, True: 2}
    return tuple(sorted(checks, key=lambda item: rank[item.passed]))


def _worst(checks: Sequence[Check]) -> Check | None:
    first = ordered(checks)[:1]
    return first[0] if first and not first[0].passed else None


def _is_a_call(item: Check) -> bool:
    """Whether "how close was it?" has an answer: a number against a limit it does not merely sit on."""
    numbers = isinstance(item.observed, int | float) and isinstance(item.threshold, int | float)
    return numbers and item.comparison != "==" and item.observed != item.threshold


def _headroom(item: Check) -> float:
    assert isinstance(item.observed, int | float)
    assert isinstance(item.threshold, int | float)
    return abs(item.observed - item.threshold) / max(abs(item.observed), abs(item.threshold))


def plot_table(plot: Plot) -> Table:
    """A plot's own data as a table, one row for each x: what a reader who cannot see the picture gets."""
    rows = tuple(dict.fromkeys(x for series in plot.series for x in series.x))
    names = tuple(series.name or plot.y_label for series in plot.series)
    if len(plot.series) == 1:
        names = (plot.y_label,)
    cells = [_cells(series) for series in plot.series]
    return Table(
        title=plot.title,
        columns=(plot.x_label, *names),
        rows=tuple((x, *(column.get(x, "") for column in cells)) for x in rows),
    )


def _cells(series: Series) -> dict[str | float, str]:
    ends: list[tuple[float, float] | None] = [None] * len(series.x)
    if len(series.low) == len(series.high) == len(series.x):
        ends = list(zip(series.low, series.high, strict=True))
    return {x: f"{number(y, 3)} {interval(span, 3)}".strip() for x, y, span in zip(series.x, series.y, ends, strict=False)}
