"""What holding one gate again costs beyond that gate's own time, and beside a whole release again.

    python benchmarks/rerun.py [--json] [--quick]

A release in a fresh home, then `seatrial gate NAME --release ID` for a short gate, a long one and one that judges the candidate: each
command from its start to its end, minus the seconds that the gate's new evidence says it took. `ratio` is the most of these differences
in seconds; the goal is 10. The peer is the release again: the samples hold both commands' wall clock and their share. A re-run that held
any other gate again, or trained anew, would not count: it is refused here.

Limits: servers start with every command; a deployment's are up already. The same code, data and machine: nothing is stale. --quick holds
one gate of the small digits recipe.
"""

import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from support.output import Document, Sample, parser, progress, publish
from support.releases import Yard

GOAL_S = 10.0
GATES = ("data_contract", "gradient_equivalence", "slice_quality")


def again(yard: Yard, gate: str, release_id: str, whole_s: float) -> Sample:
    """One gate held again."""
    document, wall_s = yard.seatrial("gate", gate, "--release", release_id)
    held = {item["name"]: item for item in document["gates"]}
    _demand_only(gate, held)
    gate_s = float(held[gate]["seconds"])
    progress(f"{gate}: {wall_s:.1f} s, {wall_s - gate_s:.1f} s beyond the gate; the whole release took {whole_s:.1f} s")
    return {
        "gate": gate, "attempt": held[gate]["attempt"], "wall_s": wall_s, "gate_s": gate_s, "beyond_s": wall_s - gate_s,
        "whole_release_s": whole_s, "share_of_release": wall_s / whole_s,
    }  # fmt: skip


def _demand_only(gate: str, held: Mapping[str, Mapping[str, Any]]) -> None:
    others = [name for name, item in held.items() if name != gate and not item["reused"]]
    if others:
        raise SystemExit(f"the re-run of {gate} held {', '.join(others)} again too: nothing was stale, so this is a defect")


def main() -> int:
    """Measure, print."""
    arguments = parser(__doc__ or "").parse_args()
    gates = GATES[:1] if arguments.quick else GATES
    with tempfile.TemporaryDirectory() as folder:
        yard = Yard(Path(folder) / "home", arguments.quick)
        released, whole_s = yard.release()
        if not arguments.quick:
            released, whole_s = yard.release()  # databases and data are there: the fair peer
        samples = [again(yard, gate, released["release_id"], whole_s) for gate in gates]
    beyond = max(float(sample["beyond_s"]) for sample in samples)
    shares = ", ".join(f"{sample['share_of_release']:.2f}" for sample in samples)
    document = Document(
        name="rerun", peer=f"the goal; a re-run takes {shares} of a whole release", ratio=beyond, goal=GOAL_S, met=beyond <= GOAL_S,
        unit="seconds beyond the gate's own (lower is better)", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
