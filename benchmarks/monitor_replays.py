"""How often the monitor ends a version that is good, and how soon one that is bad: made-up versions, looked at on each of 90 days.

    python benchmarks/monitor_replays.py [--json] [--quick]

1000 versions a scenario. Good ones are as good as their fallback, with days that are independent, that share shocks (three times as large
as flights shows), heavy-tailed shocks, or shocks that go on for days; and, at the edge of the promise, versions that are worse by exactly
what is tolerated or that leave exactly as many requests unanswered as is allowed. Bad ones are worse by 2, 3, 5 and 10 margins, from the
first day or from the 31st on. `ratio` is the smallest share of versions, over the good scenarios, that are never rolled back in 90 days by
any of the monitor's ways; goal 1 - alpha. Peers, at the same alpha: t tests of the days' means and of the rows, looked at daily, which
promise alpha for one look and break it, and a t test of the days that is looked at once, on the last one. Samples: share ended, and the
days that it took.

Limits: shocks are made up; at the edge the days are independent, because the promise is about each day's mean given the past: "shocks
going on for days, at the edge" shows what it is worth when bad days announce one another and a version has no margin left. Rows of a slice
are 100 a day.
"""

import sys
from collections.abc import Iterator

import numpy as np
from support.output import Document, Sample, parser, progress, publish
from support.simulated import DAYS, NEVER, TESTS, Scenario, ended_by_betting, simulate

from validation.policy import parse_policy

VERSIONS, QUICK_VERSIONS = 1000, 20
SHOCK = 1.0  # margins; flights shows 0.13 to 0.4

GOOD = (
    Scenario(name="as good, independent days"),
    Scenario(name="as good, common shocks", spread=SHOCK),
    Scenario(name="as good, heavy-tailed shocks", spread=SHOCK, is_heavy=True),
    Scenario(name="as good, shocks going on for days", spread=SHOCK, persistence=0.5),
    Scenario(name="worse by exactly the margin", mean=-1.0, spread=0.3),
    Scenario(name="as many unanswered as allowed", failing=0.01),
)
BEYOND = (Scenario(name="shocks going on for days, at the edge", mean=-1.0, spread=SHOCK, persistence=0.5),)
BAD = tuple(
    Scenario(name=f"worse by {size:g} margins from day {since}", mean=-size, since=since, spread=0.4)
    for since in (1, 31)
    for size in (2.0, 3.0, 5.0, 10.0)
)


def hold(scenario: Scenario, versions: int, seed: int) -> Iterator[Sample]:
    """One scenario under the monitor and its peers."""
    policy = parse_policy().monitoring
    drawn, alpha = simulate(scenario, versions, seed), policy.alpha.value
    ended = {"monitor": ended_by_betting(drawn, alpha, policy.failures_max.value)}
    for name, days in {**ended, **{name: test(drawn, alpha) for name, test in TESTS.items()}}.items():
        after = days[(days >= scenario.since) & (days < NEVER)] - scenario.since + 1
        median, p90 = (float(value) for value in np.quantile(after, (0.5, 0.9))) if after.size else (None, None)
        yield {
            "scenario": scenario.name, "test": name, "versions": versions, "ended": float((days < NEVER).mean()), "days_median": median,
            "days_p90": p90,
        }  # fmt: skip


def main() -> int:
    """Simulate, print."""
    arguments = parser(__doc__).parse_args()
    versions = QUICK_VERSIONS if arguments.quick else VERSIONS
    samples: list[Sample] = []
    for seed, scenario in enumerate((*GOOD, *BEYOND, *BAD)):
        samples += hold(scenario, versions, seed)
        progress(f"{scenario.name}: the monitor ended {samples[-1 - len(TESTS)]['ended']:.1%} of {versions} in {DAYS} days")
    good = {scenario.name for scenario in GOOD}
    worst = max(sample["ended"] for sample in samples if sample["scenario"] in good and sample["test"] == "monitor")
    goal = 1 - parse_policy().monitoring.alpha.value
    document = Document(
        name="monitor_replays", peer="t tests at the same alpha, looked at daily or once", ratio=1 - worst, goal=goal,
        met=1 - worst >= goal, unit="good versions never rolled back / good versions, worst scenario", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
