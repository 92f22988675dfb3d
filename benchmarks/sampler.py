"""How fast the data order can be asked, on one core, at a size that fits in no memory.

    python benchmarks/sampler.py [--json] [--quick]

Compared: trainer.order.permute over 10^12 samples in blocks of 65,536 positions at random places, against numpy's Generator.permutation and
torch's DistributedSampler (one replica, one epoch's list) over as many samples as were asked (both keep all of them in memory, so 10^12
would take them 8 TB and more). `ratio` is permute's positions/s at 10^12 over the goal of 5 million; `met` also asks that its memory
stays constant. The samples also hold the peers' rates, and permute's at the size that suits it least (2^38 + 1: three of four values
have to be walked on).

Limits: wall clock; small requests are slower (a lane of 512 positions is about a million a second, which is half a millisecond).
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable

import numpy as np
import psutil
import torch
from support.output import Document, Sample, parser, progress, publish
from torch.utils.data import Dataset, DistributedSampler

from trainer.order import permute

SAMPLES, WORST = 10**12, 2**38 + 1
BLOCK = 65_536
FLOOR_PER_S = 5e6
GROWTH_MIB = 16.0  # allowed: the block's own temporaries and the allocator's habits
OURS = "permute, 10^12 samples"


class Numbered(Dataset[int]):
    """N samples that nobody fetches."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> int:
        return index


def rss_mib() -> float:
    """Resident set of this process, 2**20 bytes."""
    return float(psutil.Process().memory_info().rss / 2**20)


def ask_blocks(size: int, positions: int, round_number: int) -> float:
    """Ask permute for `positions` positions; returns the resident set at its largest, MiB."""
    starts = np.random.default_rng(round_number).integers(0, size - BLOCK, positions // BLOCK)
    return max(_rss_after(size, int(start)) for start in starts)


def _rss_after(size: int, start: int) -> float:
    permute(1, 0, size, np.arange(start, start + BLOCK))
    return rss_mib()


def shuffle_all(positions: int, round_number: int) -> float:
    """numpy's way."""
    order = np.random.default_rng(round_number).permutation(positions)
    assert len(order) == positions
    return rss_mib()


def list_all(positions: int, round_number: int) -> float:
    """torch's way."""
    sampler: DistributedSampler[int] = DistributedSampler(Numbered(positions), num_replicas=1, rank=0, seed=round_number)
    order = list(sampler)
    assert len(order) == positions
    return rss_mib()


def measured(side: str, work: Callable[[int], float], positions: int, round_number: int) -> Sample:
    """Time one side once."""
    gc.collect()
    before = rss_mib()
    start = time.perf_counter()
    most = work(round_number)
    seconds = time.perf_counter() - start
    return {"side": side, "round": round_number, "positions_per_s": positions / seconds, "rss_growth_mib": max(0.0, most - before)}


def main() -> int:
    """Measure in turn, print."""
    arguments = parser(__doc__).parse_args()
    torch.set_num_threads(1)
    positions, rounds = (BLOCK * 2, 1) if arguments.quick else (BLOCK * 64, 7)
    sides: dict[str, Callable[[int], float]] = {
        OURS: lambda number: ask_blocks(SAMPLES, positions, number),
        "permute, 2^38 + 1 samples": lambda number: ask_blocks(WORST, positions, number),
        f"numpy permutation, {positions} samples": lambda number: shuffle_all(positions, number),
        f"DistributedSampler, {positions} samples": lambda number: list_all(positions, number),
    }
    ask_blocks(WORST, BLOCK, 0)  # the allocator has seen this before it is measured
    samples = [measured(side, work, positions, number) for number in range(rounds) for side, work in sides.items()]
    for side in sides:
        own = [sample for sample in samples if sample["side"] == side]
        rate, growth = statistics.median(item["positions_per_s"] for item in own), max(item["rss_growth_mib"] for item in own)
        progress(f"{side:>40}: {rate / 1e6:6.1f} million positions/s, at most {growth:6.1f} MiB more memory")
    mine = [sample for sample in samples if sample["side"] == OURS]
    ratio = statistics.median(sample["positions_per_s"] for sample in mine) / FLOOR_PER_S
    constant = max(sample["rss_growth_mib"] for sample in mine) <= GROWTH_MIB
    document = Document(
        name="sampler", peer="5 million positions/s (numpy permutation and DistributedSampler in the samples)", ratio=ratio, goal=1.0,
        met=ratio >= 1 and constant, unit="positions/s on one core at 10^12 samples / 5 million", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
