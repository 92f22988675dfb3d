"""December of flights replayed: is a good version left alone, and how soon is a bad one rolled back?

    python benchmarks/december_replay.py [--json] [--quick]

The shipped recipe: a candidate and the baseline trained on January-September, every request of December 2013 scored, outcomes a day late,
the monitor at the end of each day. The month as it was, and months whose days are drawn anew with replacement, each day whole (a seed a
month). Clean: 100 months. With a fault from the 8th on: 20 months each. `ratio` is the share of clean months in which nothing is rolled
back; the goal is met when it is 1 and every month with stale weights or lost history (trainer/recipes/flights_replay.py) is rolled back
within STATED_DAYS of the fault's first day. Stale features (two margins worse) and a dead feed (the fallback is hurt as much) are shown
beside them and demand nothing. The peer is the fallback: what is measured is the version against it, on the same requests.

Limits: one candidate, one month of real weather; a drawn month has no spells of weather, as days are drawn one by one. A dead feed has to
be seen by the inputs' own checks: the outcomes cannot tell it from bad luck of both.
"""

import sys
from collections.abc import Iterator

from support.output import Document, Sample, parser, progress, publish

from flows.replay import December, days_until, load_december, whole_month
from flows.surroundings import make_quiet_place
from trainer import ranks
from validation.policy import Policy, parse_policy

CLEAN_MONTHS, FAULTY_MONTHS = 100, 20
QUICK_CLEAN, QUICK_FAULTY = 3, 1
STATED_DAYS = 18  # from the first day of the fault to the evening of the rollback
DEMANDED = ("stale-weights", "lost-history")
SHOWN = ("stale-features", "dead-feed")


def months(december: December, policy: Policy, regression: str, count: int) -> Iterator[Sample]:
    """The month as it was, then drawn ones."""
    for seed in (None, *range(1, count)):
        ended, found = whole_month(december, policy, seed=seed, regression=regression)
        purse = next((item.observed for item in found.verdict.checks if item.name.startswith("evidence of being worse")), None)
        yield {
            "regression": regression or "none", "month": "as it was" if seed is None else f"seed {seed}", "rolled_back": ended,
            "days": days_until(ended) if regression and ended else None, "purse": purse,
        }  # fmt: skip


def main() -> int:
    """Score once, judge many months."""
    arguments = parser(__doc__).parse_args()
    settings, policy = make_quiet_place(), parse_policy()
    december = load_december(settings, progress)
    ranks.shut_down()
    clean = list(months(december, policy, "", QUICK_CLEAN if arguments.quick else CLEAN_MONTHS))
    faulty: list[Sample] = []
    for regression in (*DEMANDED, *SHOWN):
        found = list(months(december, policy, regression, QUICK_FAULTY if arguments.quick else FAULTY_MONTHS))
        days = sorted(sample["days"] for sample in found if sample["days"])
        told = f"days {days[0]} to {days[-1]}, median {days[len(days) // 2]}" if days else "never"
        progress(f"{regression}: rolled back in {len(days)} of {len(found)} months, {told}")
        faulty += found
    kept = sum(not sample["rolled_back"] for sample in clean) / len(clean)
    soon = all(0 < (sample["days"] or 0) <= STATED_DAYS for sample in faulty if sample["regression"] in DEMANDED)
    progress(f"every demanded fault within {STATED_DAYS} days: {soon}")
    publish(
        Document(
            name="december_replay", peer="the fallback (the recipe's baseline) on the same requests", ratio=kept, goal=1.0,
            met=kept == 1.0 and soon, unit="clean months without a rollback / clean months", samples=[*clean, *faulty],
        ),
        as_json=arguments.json,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
