"""Does an own evaluation count every sample once, and measure what one process measures?"""

import math
from collections import Counter

from validation.completeness import listed
from validation.diagnosis_kinds import said
from validation.policy import EquivalencePolicy
from validation.records import EquivalenceRecords, EvaluationCount
from validation.verdict import Check, Table, check

ONCE = "a metric over the split counts each of its samples once, whatever the number of ranks"


def evaluation_checks(records: EquivalenceRecords, policy: EquivalencePolicy) -> list[Check]:
    """Two checks, of the first world size that fails or else of all."""
    counts = sorted(records.evaluations, key=lambda item: item.world_size)
    if not counts:
        return []
    wrong = [(item, *_miscounted(item, records.judged_ids)) for item in counts]
    total = sum(len(twice) + len(never) for _, twice, never in wrong)
    first = next((entry for entry in wrong if entry[1] or entry[2]), None)
    where, action = "", ""
    if first is not None:
        item, twice, never = first
        where = f"first at W={item.world_size}: {len(item.sample_ids)} counted of {len(records.judged_ids)}; "
        where += f"too often: {listed(twice)}; never: {listed(never)}"
        padded = "padding repeats samples" if twice and not never else "the split is not covered once"
        action = said("evaluation", padded)
    off = max(counts, key=lambda item: (math.isnan(_difference(item)), _difference(item)))
    limit = policy.evaluation_max
    words = said("evaluation", "another quality than a plain evaluation of the same weights")
    return [
        check("evaluation: samples counted twice or never", float(total), "==", 0, unit="", source=ONCE, where=where, action=action),
        check(
            "evaluation: difference from a plain one", _difference(off), "<=", limit.value, unit="relative", source=limit.source,
            where=f"W={off.world_size}: {off.quality:.9g} instead of {off.plain_quality:.9g}",
            action="" if _difference(off) <= limit.value else words,
        ),
    ]  # fmt: skip


def _miscounted(item: EvaluationCount, judged: tuple[int, ...]) -> tuple[list[int], list[int]]:
    """Sample ids counted too often, and those counted too seldom."""
    found, wanted = Counter(item.sample_ids), Counter(judged)
    return sorted(found - wanted), sorted(wanted - found)


def _difference(item: EvaluationCount) -> float:
    """Relative difference of the two qualities; NaN when one is no number."""
    size = max(abs(item.quality), abs(item.plain_quality))
    return abs(item.quality - item.plain_quality) / size if size else abs(item.quality - item.plain_quality)


def evaluation_tables(records: EquivalenceRecords) -> list[Table]:
    """What was counted at each world size."""
    rows = tuple(
        (item.world_size, len(item.sample_ids), len(set(item.sample_ids)), item.quality, item.plain_quality)
        for item in sorted(records.evaluations, key=lambda item: item.world_size)
    )
    columns = ("world size", "samples counted", "different ones", "quality", "plain quality")
    return [Table(title=f"Own evaluation of {len(records.judged_ids)} samples", columns=columns, rows=rows)] if rows else []
