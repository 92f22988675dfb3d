"""How often gradient_equivalence refuses a trainer that is right: clean runs over seeds, recipes and world sizes.

    python benchmarks/false_alarms.py [--json] [--quick]

Each of 100 runs holds the whole gate (every leg, hard conditions, positive control) on an unchanged recipe: flights, bytes and digits in
turn, each time with another seed (other weights, order, masks), at world sizes 1 and one of 2, 4, 8. Anything but "pass" is a false alarm,
an inconclusive verdict too. `ratio` is passes / runs, goal 1; the published peer is TrainCheck with less than 2 % false alarms (OSDI 2025).
`nearest` is the largest error of a run as a share of the limit that it may have: how close it came to an alarm.

Limits: three recipes; CPU and gloo; 0 of 100 says that the rate is below 3 % with 95 % confidence (rule of three), not that it is zero.
"""

import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from support.output import Document, Sample, parser, progress, publish
from support.seeded import PATHS

from flows.checking import check
from validation.verdict import GateVerdict, Outcome

RUNS = 100
WORLD_SIZES = (2, 4, 8)
GATE = "gradient_equivalence"
DIGITS = Path(__file__).parents[1] / "examples" / "digits"


def clean_runs(count: int) -> Iterator[tuple[str, int, int]]:
    """(recipe, seed, world size), recipes and world sizes in turn, each pair with ever new seeds."""
    names = sorted(PATHS)
    for number in range(count):
        yield names[number % len(names)], 100 + number, WORLD_SIZES[number // len(names) % len(WORLD_SIZES)]


def hold(recipe: str, seed: int, world_size: int) -> GateVerdict:
    """The gate's verdict on one clean run."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"support.seeded:{recipe}_seed_{seed}"
        return check(path, (GATE,), (1, world_size), Path(folder), say=lambda _: None)[GATE]


def nearest(verdict: GateVerdict) -> float:
    """The largest observed / threshold of the checks against float noise."""
    shares = [
        item.observed / item.threshold
        for item in verdict.checks
        if item.comparison == "<=" and item.observed is not None and item.threshold and re.search("noise", item.unit)
    ]
    return max(shares, default=float("nan"))


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__).parse_args()
    sys.path.insert(0, str(DIGITS))
    runs = [("digits", 1, 2)] if arguments.quick else list(clean_runs(RUNS))
    samples: list[Sample] = []
    for recipe, seed, world_size in runs:
        verdict = hold(recipe, seed, world_size)
        sample = {
            "recipe": recipe, "seed": seed, "world_size": world_size, "outcome": str(verdict.outcome), "checks": len(verdict.checks),
            "nearest": nearest(verdict), "reason": "" if verdict.outcome is Outcome.PASS else verdict.reason,
        }  # fmt: skip
        samples.append(sample)
        near = f"{sample['nearest']:.2f} of the limit"
        progress(f"{len(samples)} of {len(runs)}: {recipe}, seed {seed}, W={world_size}: {verdict.outcome} ({near})")
    alarms = sum(sample["outcome"] != "pass" for sample in samples)
    document = Document(
        name="false_alarms", peer="TrainCheck's published rate: below 2 % false alarms", ratio=1 - alarms / len(samples), goal=1.0,
        met=alarms == 0, unit="clean runs that pass / clean runs", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
