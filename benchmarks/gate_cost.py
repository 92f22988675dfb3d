"""What gradient_equivalence costs: the whole gate on flights, against the plain training that it judges.

    python benchmarks/gate_cost.py [--json] [--quick]

The gate: hard conditions chosen, every leg at world sizes 1, 2, 4, 8, positive control, reference, noise of every tensor, finite
differences, verdict; wall clock, with the warm server up and the data prepared. Plain: one training of the whole recipe on 2 ranks,
torch's own reduction, nothing else on. `ratio` is the median of gate / plain over the rounds, sides in turn; the goal is 60 s of wall
clock on 2 cores as a share of the plain training's, so `met` is about seconds.

Limits: one recipe; on 2 cores 8 ranks share a core by four, so the gate takes less time on a machine that has them.
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from support.output import Document, Sample, parser, progress, publish

from flows.checking import check
from trainer import ranks
from trainer.config import TrainJob

GATE = "gradient_equivalence"
GOAL_S = 60.0


def gate_seconds(recipe: str, world_sizes: tuple[int, ...]) -> tuple[float, str]:
    """Wall clock of the gate, and its outcome."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        verdict = check(recipe, (GATE,), world_sizes, Path(folder), say=lambda _: None)[GATE]
        return time.perf_counter() - began, str(verdict.outcome)


def plain_seconds(recipe: str) -> float:
    """Wall clock of one whole training."""
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        ranks.run_group(TrainJob(recipe=recipe, folder=folder, world_size=2, reduction="fast"))
        return time.perf_counter() - began


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__).parse_args()
    recipe, world_sizes, rounds = ("support.recipes:tiny", (1, 2), 1) if arguments.quick else ("flights", (1, 2, 4, 8), 3)
    plain_seconds(recipe)  # imports and prepared data are there before the first round
    samples: list[Sample] = []
    for number in range(rounds):
        plain = plain_seconds(recipe)
        gate, outcome = gate_seconds(recipe, world_sizes)
        samples.append({"round": number, "gate_s": gate, "plain_s": plain, "share": gate / plain, "outcome": outcome})
        progress(f"round {number + 1} of {rounds}: gate {gate:.1f} s ({outcome}), plain training {plain:.1f} s")
    seconds, plain = (statistics.median(sample[side] for sample in samples) for side in ("gate_s", "plain_s"))
    document = Document(
        name="gate_cost", peer=f"one plain training of {recipe} on 2 ranks", ratio=statistics.median(sample["share"] for sample in samples),
        goal=GOAL_S / plain, met=seconds <= GOAL_S and all(sample["outcome"] == "pass" for sample in samples),
        unit="gate / plain training, wall clock (the goal is 60 s)", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
