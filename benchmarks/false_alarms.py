"""How often gradient_equivalence refuses a trainer that is right: clean runs over seeds, recipes and world sizes.

    python benchmarks/false_alarms.py [--json] [--quick]

The whole gate (every leg, hard conditions, positive control) is held on unchanged recipes, digits and flights with 14 seeds each and bytes
with 6 (other weights, order, masks), at world sizes 1, 2, 4 and 8: a clean run is one seed of one recipe at one world size above 1, so each
gate judges three, 102 in all. Anything but "pass" makes its three runs false alarms, an inconclusive verdict too. `ratio` is passes / runs,
goal 1; the published peer is TrainCheck with less than 2 % false alarms (OSDI 2025). `nearest` is the largest error of a gate as a share
of the limit that it may have: how close it came to an alarm.

Limits: three recipes; CPU and gloo; runs of one gate share weights and samples; 0 of 102 says that the rate is below 3 % with 95 %
confidence (rule of three), not that it is zero.
"""

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.output import Document, Sample, parser, progress, publish

from flows.checking import check
from validation.verdict import GateVerdict, Outcome

SEEDS = {"digits": range(100, 114), "flights": range(100, 114), "bytes": range(100, 106)}
WORLD_SIZES = (1, 2, 4, 8)
GATE = "gradient_equivalence"
DIGITS = Path(__file__).parents[1] / "examples" / "digits"


def hold(recipe: str, seed: int, world_sizes: Sequence[int]) -> GateVerdict:
    """The gate's verdict on a clean recipe."""
    with tempfile.TemporaryDirectory() as folder:
        path = f"support.seeded:{recipe}_seed_{seed}"
        return check(path, (GATE,), world_sizes, Path(folder), say=lambda _: None)[GATE]


def nearest(verdict: GateVerdict) -> float:
    """The largest observed / threshold of the checks against float noise."""
    measured = [item for item in verdict.checks if item.comparison == "<=" and "noise" in item.unit]
    shares = [
        item.observed / item.threshold
        for item in measured
        if isinstance(item.observed, float) and isinstance(item.threshold, float) and item.threshold
    ]
    return max(shares, default=float("nan"))


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__).parse_args()
    sys.path.insert(0, str(DIGITS))
    gates = [("digits", 1)] if arguments.quick else [(recipe, seed) for recipe, seeds in SEEDS.items() for seed in seeds]
    world_sizes = (1, 2) if arguments.quick else WORLD_SIZES
    samples: list[Sample] = []
    for number, (recipe, seed) in enumerate(gates, 1):
        verdict = hold(recipe, seed, world_sizes)
        near, why = nearest(verdict), "" if verdict.outcome is Outcome.PASS else verdict.reason
        samples += [
            {"recipe": recipe, "seed": seed, "world_size": size, "outcome": str(verdict.outcome), "nearest": near, "reason": why}
            for size in world_sizes[1:]
        ]
        progress(f"{number} of {len(gates)}: {recipe}, seed {seed}: {verdict.outcome}, {near:.2f} of the limit {why}")
    alarms = sum(sample["outcome"] != "pass" for sample in samples)
    document = Document(
        name="false_alarms", peer="TrainCheck's published rate: below 2 % false alarms", ratio=1 - alarms / len(samples), goal=1.0,
        met=alarms == 0, unit="clean runs that pass / clean runs", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
