"""How long a diagnosis of 1,024 ranks x 2,000 recorded operations takes, and how much memory, beside torch's own analyser.

    python benchmarks/flight_recorder.py [--json] [--quick] [--peer-ranks N]

Dumps are made here (seeded) in a temporary folder: one group of all ranks, or 8-way groups beside it; one rank leaves out its last
operation of a group. Timed, each as a process of its own from its start to its end: `seatrial diagnose FOLDER --json` on the pickles and on
the same dumps as JSON, and torch.distributed.flight_recorder.fr_trace (torchfrtrace) on the same pickles. torchfrtrace is mended so that it
runs at all: the dumps have a full pg_config, and it is started with --allow-incomplete-ranks. `ratio` is torchfrtrace's time over ours on
the same files in the same run, the smaller one of the two layouts. `met` also asks for the right culprit, at most 20 s and 300 MiB in all
processes of ours together, and 200,000 operations matched a second once they are read.

Memory: of all processes together (proportional set sizes, sampled every 50 ms), and the largest one alone. torchfrtrace needs some GiB for
1,024 ranks; where less is free, or with --peer-ranks N, it gets the files of the first N ranks only, and its time is scaled by the number
of ranks: less than it would need, since it grows faster than that.

Limits: files are in the page cache; both sides get both cores; wall clock, so a busy machine shows.
"""

import json
import pickle
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import orjson
import psutil
from support.output import Document, Sample, parser, progress, publish

from infra.dumps import read_evidence
from validation.diagnose import diagnose

GOAL, SECONDS, MEMORY_MIB, MATCHED_PER_S = 8.0, 20.0, 300.0, 200_000.0
SIZES = (1024, 2000, 3)  # ranks, operations of each, repeats
QUICK = (64, 200, 1)
GROUP_SIZE = 8
PEER_MIB_PER_RANK = 8.0  # that torchfrtrace takes, with room to spare
STEP_NS, START_NS = 1_000_000, 1_795_972_976_000_000_000
# name; elements of the input and of the output in units of 1024: (a, b) = a + b * ranks of the group
OPS = (
    ("all_reduce", (512, 0), (512, 0)),
    ("_reduce_scatter_base", (0, 1), (1, 0)),
    ("_all_gather_base", (3, 0), (0, 3)),
    ("broadcast", (7, 0), (7, 0)),
)
TORCH = "import sys; from torch.distributed.flight_recorder.fr_trace import main; main(sys.argv[1:])"

Form = Literal["json", "pickle"]


@dataclass(frozen=True, slots=True)
class Layout:
    """What is recorded. The culprit leaves out the last operation of its narrowest group."""

    name: str
    ranks: int
    entries: int
    group_size: int  # of the narrow groups, 0 = only the group of all ranks

    @property
    def culprit(self) -> int:
        """The rank that leaves out an operation."""
        return self.ranks // 2 + 3

    def group(self, rank: int, place: int) -> list[str]:
        """Name and description of the group of a rank's operation number `place`: every fourth is of all ranks, the last one is not."""
        is_wide = not self.group_size or (place % 4 == 0 and place < self.entries - 1)
        return ["0", "default_pg"] if is_wide else [str(1 + rank // self.group_size), "tensor_parallel"]

    def config(self, rank: int) -> dict[str, Any]:
        """The groups of a rank, as NCCL writes them."""
        members = {"0": ("default_pg", range(self.ranks))}
        if self.group_size:
            first = rank // self.group_size * self.group_size
            members[str(1 + rank // self.group_size)] = ("tensor_parallel", range(first, first + self.group_size))
        return {name: {"name": name, "desc": text, "ranks": str(list(ranks))} for name, (text, ranks) in members.items()}


def entries_of(layout: Layout, rank: int, luck: random.Random) -> list[dict[str, Any]]:
    """One rank's recorded operations, oldest first; the last two of a group are pending."""
    counts: dict[str, int] = {}
    made = []
    for place in range(layout.entries - (rank == layout.culprit)):
        group = layout.group(rank, place)
        number = counts[group[0]] = counts.get(group[0], 0) + 1
        width = layout.ranks if group[0] == "0" else layout.group_size
        op, inputs, outputs = OPS[place % 7 % len(OPS)]
        made.append(
            {
                "record_id": place, "pg_id": 0, "process_group": group, "collective_seq_id": number, "p2p_seq_id": 0, "op_id": number,
                "profiling_name": f"gloo:{op}", "time_created_ns": START_NS + place * STEP_NS + luck.randrange(STEP_NS // 2),
                "input_sizes": [[1024, inputs[0] + inputs[1] * width]], "output_sizes": [[1024, outputs[0] + outputs[1] * width]],
                "input_dtypes": ["Float"], "output_dtypes": ["Float"], "state": "scheduled",
                "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": place < layout.entries - 1,
                "timeout_ms": 600_000, "is_p2p": False, "thread_id": "140546757151616", "thread_name": "python",
            }
        )  # fmt: skip
    return made


def write_dumps(folder: Path, layout: Layout, form: Form) -> int:
    """Write one file a rank; returns the bytes in all."""
    luck = random.Random(0)
    total = 0
    for rank in range(layout.ranks):
        dump = {
            "version": "2.10", "comm_lib_version": "", "nccl_comm_state": {}, "pg_config": layout.config(rank), "pg_status": {},
            "entries": entries_of(layout, rank, luck),
        }  # fmt: skip
        data = orjson.dumps(dump) if form == "json" else pickle.dumps(dump, protocol=2)
        (folder / (f"rank{rank}.hang.json" if form == "json" else f"nccl_trace_rank_{rank}")).write_bytes(data)
        total += len(data)
    return total


class Memory(threading.Thread):
    """Watches a process and all that it starts, until they are gone."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._root = psutil.Process(pid)
        self.together_mib = self.largest_mib = 0.0
        self._over = threading.Event()

    def run(self) -> None:
        while not self._over.wait(0.05):
            found = [sizes for process in self._family() if (sizes := _sizes_mib(process.pid)) is not None]
            self.together_mib = max(self.together_mib, sum(shared for shared, _ in found))
            self.largest_mib = max([self.largest_mib, *(whole for _, whole in found)])

    def _family(self) -> list[psutil.Process]:
        try:
            return [self._root, *self._root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def stop(self) -> None:
        """End the watching."""
        self._over.set()
        self.join()


def _sizes_mib(pid: int) -> tuple[float, float] | None:
    """Proportional and resident set size; None when it is gone."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    sizes = {line.split(":")[0]: int(line.split()[1]) / 1024 for line in lines if line.startswith(("Pss:", "Rss:"))}
    return sizes.get("Pss", 0.0), sizes.get("Rss", 0.0)


def timed(command: Sequence[str], *, errors: int = subprocess.DEVNULL, **facts: Any) -> tuple[Sample, str]:
    """Run a command to its end; its time, memory and output. Raises RuntimeError when it fails."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True) as process:
        memory = Memory(process.pid)
        memory.start()
        output, _ = process.communicate()
        seconds = time.perf_counter() - start
        memory.stop()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command[:4])} ended with code {process.returncode}")
    sizes = {"together_mib": memory.together_mib, "largest_mib": memory.largest_mib}
    return {**facts, "seconds": seconds, **sizes}, output


def ours(folder: Path, layout: Layout, form: Form) -> Sample:
    """`seatrial diagnose` on a folder, and whether it named the culprit."""
    facts = {"side": "seatrial", "layout": layout.name, "form": form, "ranks": layout.ranks}
    sample, output = timed([sys.executable, "-m", "flows.cli", "diagnose", str(folder), "--json"], **facts)
    return {**sample, "is_right": json.loads(output)["ranks"] == [layout.culprit]}


def peer(folder: Path, layout: Layout, ranks: int) -> Sample:
    """torchfrtrace on the first ranks' pickles, and whether it named the culprit. Scaled to all ranks where it did not get them all; then
    the culprit may not be among them, and `is_right` says nothing."""
    facts = {"side": "torchfrtrace", "layout": layout.name, "form": "pickle", "ranks": ranks}
    with tempfile.TemporaryDirectory() as part:
        for rank in range(ranks):
            (Path(part) / f"nccl_trace_rank_{rank}").symlink_to(folder / f"nccl_trace_rank_{rank}")
        sample, output = timed([sys.executable, "-c", TORCH, part, "--allow-incomplete-ranks"], errors=subprocess.STDOUT, **facts)
    return {**sample, "seconds": sample["seconds"] * layout.ranks / ranks, "is_right": f"missing ranks: {{{layout.culprit}}}" in output}


def matched_per_s(folder: Path) -> float:
    """Operations a second that the diagnosis alone judges, once they are read."""
    evidence = read_evidence(folder)
    start = time.perf_counter()
    diagnose(evidence)
    seconds = time.perf_counter() - start
    return sum(len(rank.dumps[-1].seq) for rank in evidence.ranks.values()) / seconds


def measured(layout: Layout, repeats: int, peer_ranks: int) -> list[Sample]:
    """All samples of one layout."""
    samples: list[Sample] = []
    forms: tuple[Form, ...] = ("json", "pickle")
    for form in forms:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            progress(f"{layout.name}, {form}: {write_dumps(folder, layout, form) / 2**20:.0f} MiB of {layout.ranks} ranks")
            own = [ours(folder, layout, form) for _ in range(repeats)]
            rate = matched_per_s(folder)
            samples += [{**sample, "matched_per_s": rate} for sample in own]
            if form == "pickle":
                samples.append({**peer(folder, layout, peer_ranks), "matched_per_s": 0.0})
    return samples


def ranks_for_peer(ranks: int, wanted: int) -> int:
    """How many ranks torchfrtrace gets: all, unless memory is short or fewer are wanted."""
    room = int(psutil.virtual_memory().available / 2**20 / PEER_MIB_PER_RANK)
    return min(ranks, wanted or ranks, max(room, 1))


def ratio_of(samples: Sequence[Sample], layout: str) -> float:
    """torchfrtrace's time over ours on the same pickles."""
    mine = [s["seconds"] for s in samples if (s["side"], s["layout"], s["form"]) == ("seatrial", layout, "pickle")]
    theirs = [s["seconds"] for s in samples if (s["side"], s["layout"]) == ("torchfrtrace", layout)]
    return statistics.median(theirs) / statistics.median(mine)


def main() -> int:
    """Measure, print."""
    options = parser(__doc__)
    options.add_argument("--peer-ranks", type=int, default=0, metavar="N", help="give torchfrtrace N ranks' files only")
    arguments = options.parse_args()
    ranks, entries, repeats = QUICK if arguments.quick else SIZES
    peer_ranks = ranks_for_peer(ranks, arguments.peer_ranks)
    layouts = (Layout("one group", ranks, entries, 0), Layout("8-way groups", ranks, entries, GROUP_SIZE))
    samples = [sample for layout in layouts for sample in measured(layout, repeats, peer_ranks)]
    ratio = min(ratio_of(samples, layout.name) for layout in layouts)
    mine = [sample for sample in samples if sample["side"] == "seatrial"]
    slowest, most = max(sample["seconds"] for sample in mine), max(sample["together_mib"] for sample in mine)
    rate, is_right = min(sample["matched_per_s"] for sample in mine), all(sample["is_right"] for sample in mine)
    progress(
        f"at most {slowest:.1f} s and {most:.0f} MiB in all processes; {rate:,.0f} operations matched a second; culprit right: {is_right}"
    )
    scaled = "" if peer_ranks == ranks else f" (on {peer_ranks} ranks, its time scaled linearly)"
    met = ratio >= GOAL and slowest <= SECONDS and most <= MEMORY_MIB and rate >= MATCHED_PER_S and is_right
    document = Document(
        name="flight_recorder", peer=f"torchfrtrace of torch 2.13, mended so that it runs{scaled}", ratio=ratio, goal=GOAL, met=met,
        unit=f"times as fast, {ranks} ranks x {entries} operations", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
