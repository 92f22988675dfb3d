"""Known silent errors before the gates: 47 publicly reported ones, synthetic ones and our own variants, each a small mutant; and controls.

    python benchmarks/silent_errors.py [--json] [--quick] [--only ID ...] [--jobs 1]

Every case of examples/mutants/mutants/catalogue.py is held before the gate that has to see it (world sizes 1 and 2), in a process of the
trainer's own warm server. `ratio` is caught / cases over the mutants; a control that does not pass is a false alarm, and there may be none.
A whole run writes docs/gates/silent_errors.md.

Peer: TrainCheck 0.2.0 (benchmarks/peers/traincheck.txt) on those mutants whose fault shows in a plain script of one training: invariants
are inferred from a right run, then each mutant's trace is checked (benchmarks/support/traincheck.py says how).

Limits: a mutant is one way to write an error; the same error elsewhere may show in another way. Seconds are of one machine.
"""

import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from math import isfinite
from multiprocessing import get_context
from pathlib import Path

from support.hearing import CASES, Case, Heard, hear
from support.output import Document, Sample, parser, progress, publish
from support.traincheck import TITLE, PeerResult, peer_results

from trainer.runlog import machine

PAGE = Path(__file__).parents[1] / "docs" / "gates" / "silent_errors.md"
LEFT_OUT = "it was left out of this run (it takes half an hour; leave out --no-peer)."
CLASSES = {
    "A": "normalisation", "B": "batch-coupled losses and statistics", "C": "synchronisation", "D": "clipping and precision",
    "E": "construction", "F": "data and randomness", "G": "resuming the data", "H": "resuming the state",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tally:
    """What came of all cases."""

    caught: int
    named: int  # of the caught: with the right tensor and kind
    mutants: int
    alarms: int  # controls that did not pass
    controls: int

    @classmethod
    def of(cls, heard: Sequence[Heard]) -> "Tally":
        """Count."""
        wrong, right = ([item for item in heard if item.case.is_control is wanted] for wanted in (False, True))
        return cls(
            caught=sum(item.is_right for item in wrong), named=sum(item.is_right and item.is_named for item in wrong), mutants=len(wrong),
            alarms=sum(not item.is_right for item in right), controls=len(right),
        )  # fmt: skip


def hear_all(cases: Sequence[Case], jobs: int) -> list[Heard]:
    """Every case in a folder of its own, `jobs` at a time; people are told as it goes."""
    heard = []
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        for case, item in zip(cases, pool.map(hear_one, cases), strict=True):
            heard.append(item)
            word = "as it should" if item.is_right else "WRONG"
            progress(f"{len(heard)}/{len(cases)} {case.id}: {item.outcome} {item.kind} {item.seconds:.1f} s: {word}")
    return heard


def hear_one(case: Case) -> Heard:
    """One case in a folder of its own."""
    with tempfile.TemporaryDirectory() as folder:
        return hear(case, Path(folder))


def sample_of(item: Heard) -> Sample:
    """One case as a row."""
    return {
        "id": item.case.id, "class": item.case.fault, "outcome": item.outcome, "gate": item.gate, "kind": item.kind,
        "where": item.where[:60], "in_noise": item.in_noise if isfinite(item.in_noise) else -1.0, "seconds": item.seconds,
        "right": item.is_right, "named": item.is_named,
    }  # fmt: skip


def page(heard: Sequence[Heard], beside: Sequence[str], jobs: int) -> str:
    """docs/gates/silent_errors.md. Args: beside, the lines of the peer's part."""
    tally, here = Tally.of(heard), machine()
    lines = [
        "# Silent errors: which gate saw what", "",
        f"Written by `python benchmarks/silent_errors.py` on {datetime.now(UTC):%Y-%m-%d} ({here.system}, {here.devices} cores, torch "
        f"{here.torch}); never by hand.", "",
        f"**{tally.caught} of {tally.mutants} mutants caught, {tally.named} of them with the tensor or kind that was asked for; "
        f"{tally.alarms} false alarms in {tally.controls} controls.** Median {median_s(heard):.1f} s a case at W = 1 and "
        f"2, {jobs} at a time.", "",
        "A mutant is a right recipe or hook of `examples/mutants` with one wrong line. Ids SE-, SYN- and NC- are those of a catalogue of "
        "public reports, OWN- are variants of our own, FU- were written by people who had not seen the gates; what stands behind a second "
        "dash is another form of the same error. Noise is the tensor's own float noise in the leg that failed; where a digest, a sample or "
        "a stream gave it away there is none.", "",
        *by_class(heard),
    ]  # fmt: skip
    for letter, name in CLASSES.items():
        rows = [item for item in heard if item.case.fault == letter]
        lines += ["", f"## {letter}: {name}", "", *rows_of(rows)] if rows else []
    controls = [item for item in heard if item.case.is_control]
    lines += [
        "",
        "## Controls: nothing is wrong with these",
        "",
        *rows_of(controls),
        "",
        *beside,
    ]
    return "\n".join(lines) + "\n"


def standing_part() -> list[str]:
    """What the page that stands says of TrainCheck."""
    _, title, found = PAGE.read_text().partition(TITLE)
    return (
        [title + line if not at else line for at, line in enumerate(found.rstrip().split("\n"))]
        if title
        else PeerResult(missing=LEFT_OUT).page("")
    )


def median_s(heard: Sequence[Heard]) -> float:
    """Of a case."""
    return sorted(item.seconds for item in heard)[len(heard) // 2]


def by_class(heard: Sequence[Heard]) -> list[str]:
    """How many of each class were caught."""
    total = Counter(item.case.fault for item in heard)
    caught = Counter(item.case.fault for item in heard if item.is_right)
    named = Counter(item.case.fault for item in heard if item.is_right and item.is_named)
    lines = ["| class | mutants | caught | named |", "|---|---|---|---|"]
    return lines + [f"| {letter} {name} | {total[letter]} | {caught[letter]} | {named[letter]} |" for letter, name in CLASSES.items()]


def rows_of(heard: Sequence[Heard]) -> list[str]:
    """A markdown table."""
    lines = ["| id | what | source | stopped by | first divergence | kind | x noise | s |", "|---|---|---|---|---|---|---|---|"]
    for item in heard:
        noise = f"{item.in_noise:.2g}" if isfinite(item.in_noise) else ""
        stopped = item.gate or ("" if item.case.is_control and item.outcome == "pass" else f"**{item.outcome}**")
        first = cell(item.where if item.outcome == "refused" else f"{item.check}: {item.where}" if item.check else "")
        cells = (item.case.id, item.case.title, item.case.source or "own", stopped, first, item.kind, noise, f"{item.seconds:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def cell(text: str, limit: int = 160) -> str:
    """Text that fits into a table."""
    flat = " ".join(text.replace("|", "/").split())
    return flat if len(flat) <= limit else f"{flat[: limit - 3]}..."


def main() -> int:
    """Hear, compare, write, print."""
    options = parser(__doc__)
    options.add_argument("--only", nargs="+", metavar="ID", help="these cases alone; no page is written")
    options.add_argument("--no-peer", action="store_true", help="TrainCheck is not run again; what the page says of it stays")
    options.add_argument("--jobs", type=int, default=1, help="cases at a time, each on ranks of its own; seconds grow with them")
    arguments = options.parse_args()
    chosen = [case for case in CASES if case.id in arguments.only] if arguments.only else CASES
    beside = standing_part()
    is_whole = not (arguments.quick or arguments.only)
    if is_whole and not arguments.no_peer:
        with tempfile.TemporaryDirectory() as folder:
            beside = peer_results(Path(folder)).page(f"{datetime.now(UTC):%Y-%m-%d}")
    heard = hear_all([case for case in chosen if case.is_quick][:2] if arguments.quick else chosen, arguments.jobs)
    tally = Tally.of(heard)
    if is_whole:
        PAGE.write_text(page(heard, beside, arguments.jobs))
    progress(f"{tally.caught} of {tally.mutants} caught, {tally.named} named, {tally.alarms} false alarms in {tally.controls} controls")
    document = Document(
        name="silent_errors", peer="TrainCheck 0.2.0 on the mutants of one plain training", ratio=tally.caught / max(tally.mutants, 1),
        goal=1.0, met=tally.caught == tally.mutants and not tally.alarms, unit="share of mutants caught", samples=[*map(sample_of, heard)],
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
