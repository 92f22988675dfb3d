"""What a killed run consumed, step by step, beside its twin: ids and contents, whichever rank took a sample.

Tables with records.CONSUMED_COLUMNS, rows in any order, of the surviving lineage.
"""

from collections import Counter
from dataclasses import dataclass

from validation.completeness import listed
from validation.records import Frame

Sample = tuple[int, str]  # id, content
MOST = 0.5  # share of repeated samples that look different from which on data is augmented


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumedDifference:
    """The steps that did not consume the twin's samples."""

    steps: tuple[int, ...]  # ascending, 0-based; () when every step did
    compared: int  # steps
    words: str  # the first of them; "" when there is none
    same_ids: bool  # the first of them had the right ids, with other contents


def compare_consumed(consumed: Frame, twin: Frame, *, same_bits: bool = True) -> ConsumedDifference:
    """Compare the samples of each step as multisets of (id, content).

    Args: same_bits, False for an own trainer on other ranks: where samples look new in each epoch, its ranks' generators may have drawn
        that, and another number of ranks draws otherwise; there ids alone are compared.
    """
    if not same_bits and _looks_new(twin):
        consumed, twin = (side.assign(content="") for side in (consumed, twin))
    found, expected = _by_step(consumed), _by_step(twin)
    steps = sorted(found.keys() | expected.keys())
    differ = tuple(step for step in steps if found.get(step) != expected.get(step))
    if not differ:
        return ConsumedDifference(steps=(), compared=len(steps), words="", same_ids=False)
    here, there = (side.get(differ[0], Counter()) for side in (found, expected))
    elsewhere = [step for step in steps if step != differ[0] and here and expected.get(step) == here]
    words = f"first at step {differ[0]}: " + (f"it consumed the samples of step {elsewhere[0]}" if elsewhere else _described(here, there))
    same_ids = _ids(here) == _ids(there)
    return ConsumedDifference(steps=differ, compared=len(steps), words=words, same_ids=same_ids)


def _looks_new(consumed: Frame) -> bool:
    """Whether most samples that come again look different."""
    looks = consumed.groupby("sample_id")["content"].agg(["size", "nunique"])
    again = looks[looks["size"] > 1]
    return bool(len(again)) and bool((again["nunique"] > 1).mean() > MOST)


def _by_step(consumed: Frame) -> dict[int, Counter[Sample]]:
    made: dict[int, Counter[Sample]] = {}
    columns = (consumed[name].tolist() for name in ("step", "sample_id", "content"))
    for step, sample_id, content in zip(*columns, strict=True):
        made.setdefault(step, Counter())[sample_id, content] += 1
    return made


def _ids(samples: Counter[Sample]) -> Counter[int]:
    return Counter(sample_id for sample_id, _ in samples.elements())


def _described(found: Counter[Sample], expected: Counter[Sample]) -> str:
    """One step in words: samples that came though they should not, that did not come, that came with other contents."""
    more, less = _ids(found - expected), _ids(expected - found)
    parts = {
        "came unexpectedly": more - less, "are missing": less - more, "came with another input, label or weight": more & less,
    }  # fmt: skip
    return "; ".join(f"samples {listed(sorted(ids.elements()))} {what}" for what, ids in parts.items() if ids)
