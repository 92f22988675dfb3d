"""What the trainer costs over plain torch: steps of the flights recipe with everything on, against three loops without it.

    python benchmarks/step_throughput.py [--json] [--quick]

Ours: trainer.ranks.run_group, `fast` reduction, with timeline, ledger, deadlines, finite checks and a sealed checkpoint every 100 steps, as
`seatrial train` makes them when nobody says otherwise.
Peers: a hand-written loop around torch's DistributedDataParallel that saves nothing (goal: ours is at least 0.98 of it), and the same work
by Hugging Face Accelerate and by Lightning Fabric, each with a checkpoint of its own as often (at least 1.0 each); in
benchmarks/peers, pinned in its requirements.txt and installed beside the project's packages into .venv-peers. Shown beside them, without a
goal: the plain loop on one rank without DDP. All train the same model, optimizer, schedule, loss and clipping on the same rows, global
batch 4096, at W = 1 and 2, in ranks forked from a warm interpreter, one thread each, with the same allocator settings
(trainer/wires.py). Timed are 100 steps after 10 of warm-up by rank 0's clock, from the start of one step to the start of another: one
checkpoint is in it, start-up is not. Sides take turns in rotated order; a ratio is the median over the rounds of throughput ours / peer of
one round, shown with the interval in which 95 % of the medians of resampled rounds lie (a process that does the same as another may be
10 % slower by where its memory lies, so many short runs tell more than few long ones). `ratio` is the worst of (ratio / its goal) over
peers and world sizes; `met` also asks that every peer was measured.

Limits: one machine; gloo; at W = 2 every background thread of ours takes time from a rank when there are two cores. The peers fetch a
batch as ours does, with one indexing call: a DataLoader, as most users have it, would make them slower. Their checkpoints are written by
rank 0 while training waits, and neither flushed to the disk nor read back; ours are both. What a peer does at its first checkpoint alone is
not timed (it makes one before); ours is the first of its process.
"""

import statistics
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from support.output import Document, Sample, parser, progress, publish
from support.peers import PeersMissing, StepServer, peers_python

from flows.training import SELDOM
from trainer import ranks
from trainer.config import TrainJob
from trainer.recipe import load_recipe
from trainer.runlog import load_timeline

OURS = "trainer"
GOALS = {"plain": 0.98, "with_accelerate": 1.0, "with_fabric": 1.0}
ALONE = "unwrapped"  # of one rank only, shown without a goal
RESAMPLED = 4000


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is measured."""

    recipe: str
    world_sizes: tuple[int, ...]
    rounds: int
    warmup: int  # steps before the timed ones
    steps: int  # timed
    peers: tuple[str, ...]


FULL = Plan(recipe="flights", world_sizes=(1, 2), rounds=21, warmup=10, steps=100, peers=tuple(GOALS))
QUICK = Plan(recipe="support.recipes:tiny", world_sizes=(2,), rounds=1, warmup=2, steps=6, peers=("plain",))


def our_seconds(plan: Plan, world_size: int) -> float:
    """The timed steps of one run, by rank 0's timeline."""
    with tempfile.TemporaryDirectory() as folder:
        job = TrainJob(
            recipe=plan.recipe, folder=folder, world_size=world_size, reduction="fast", steps=plan.warmup + plan.steps + 1,
            checkpoint_every=SELDOM, warmup_steps=plan.warmup,
        )  # fmt: skip
        ranks.run_group(job)
        timeline = load_timeline(folder)
    starts = timeline[timeline["rank"] == 0].set_index("step")["start_ns"]
    return float(starts[plan.warmup + plan.steps] - starts[plan.warmup]) / 1e9


def measure(plan: Plan, servers: dict[str, StepServer]) -> list[Sample]:
    """All runs; a first round that does not count has every import, page and prepared file in place."""
    samples: list[Sample] = []
    batch = load_recipe(plan.recipe).training.global_batch_size
    for number in range(0 if plan is QUICK else -1, plan.rounds):
        for world_size in plan.world_sizes:
            sides = [OURS, *(side for side in servers if side != ALONE or world_size == 1)]
            turn = number % len(sides)
            for side in sides[turn:] + sides[:turn]:
                request = {
                    "side": side, "recipe": plan.recipe, "world_size": world_size, "warmup": plan.warmup, "steps": plan.steps,
                    "save_every": SELDOM,
                }  # fmt: skip
                seconds = our_seconds(plan, world_size) if side == OURS else servers[side].seconds(request)
                if number >= 0:
                    samples.append(as_sample(number, world_size, side, seconds / plan.steps, batch))
    return samples


def as_sample(number: int, world_size: int, side: str, step_s: float, batch: int) -> Sample:
    """One measurement."""
    progress(f"round {number + 1}, W={world_size}, {side}: {step_s * 1e3:.2f} ms a step")
    return {
        "round": number, "world_size": world_size, "side": side, "step_ms": step_s * 1e3, "throughput_sps": batch / step_s, "note": "",
    }  # fmt: skip


def pair_ratios(samples: Sequence[Sample], world_size: int, peer: str) -> list[float]:
    """Throughput ours / peer, a value a round."""
    found = {(item["round"], item["side"]): item["throughput_sps"] for item in samples if item["world_size"] == world_size}
    return [found[number, OURS] / found[number, peer] for number, side in found if side == peer]


def median_interval(pairs: Sequence[float]) -> tuple[float, float]:
    """95 % of the medians of rounds drawn anew, with a fixed seed."""
    drawn = np.random.default_rng(0).choice(pairs, (RESAMPLED, len(pairs)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def start_servers(plan: Plan, stack: ExitStack) -> tuple[dict[str, StepServer], str]:
    """A warm interpreter for each peer, one after the other; and why some are missing, or ""."""
    bare = stack.enter_context(StepServer(Path(sys.executable), "plain", ALONE))
    servers = {"plain": bare, ALONE: bare}
    try:
        for side in plan.peers[1:]:
            servers[side] = stack.enter_context(StepServer(peers_python(), side))
    except PeersMissing as missing:
        return servers, str(missing)
    return servers, ""


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__).parse_args()
    plan = QUICK if arguments.quick else FULL
    with ExitStack() as stack:
        servers, missing = start_servers(plan, stack)
        samples = measure(plan, servers)
    shares = []
    for world_size in plan.world_sizes:
        for peer in servers:
            pairs = pair_ratios(samples, world_size, peer)
            if not pairs:
                continue
            goal = GOALS.get(peer)
            if goal is not None:
                shares.append(statistics.median(pairs) / goal)
            low, high = median_interval(pairs)
            wanted = "no goal" if goal is None else f"goal {goal:g}"
            spread = f"rounds from {min(pairs):.3f} to {max(pairs):.3f}"
            progress(f"W={world_size}, ours / {peer}: {statistics.median(pairs):.3f} [{low:.3f}, {high:.3f}], {wanted} ({spread})")
    absent = [side for side in GOALS if side not in servers]
    why = missing or "left out of a quick run"
    samples += [
        {
            "round": -1,
            "world_size": 0,
            "side": side,
            "step_ms": float("nan"),
            "throughput_sps": float("nan"),
            "note": f"not measured: {why}",
        }
        for side in absent
    ]
    document = Document(
        name="step_throughput", peer=f"plain DDP, Accelerate, Fabric; {plan.recipe} at W = 1 and 2", ratio=min(shares), goal=1.0,
        met=min(shares) >= 1.0 and not absent, unit="throughput ours / peer over its goal (0.98, 1, 1), worst", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
