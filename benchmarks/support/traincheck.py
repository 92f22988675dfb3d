"""TrainCheck 0.2.0 (Jiang and others, "Training with Confidence", OSDI 2025) on the same mutants, as far as it can see them.

It infers invariants from the trace of a right training and looks for those that the trace of another one breaks. Here the right DDP hooks
of examples/mutants for 10 updates on two ranks under torchrun are the reference; a second right run says which invariants do not even
hold there; a mutant is found when it breaks one that both right runs keep. Mutants of data, resume and evaluation need more than one
plain training script, so they are not asked.

What it took (torch 2.13, CPU): the default tracker of weights (`--model-tracker-style proxy`) ends in a segmentation fault in the first DDP
step, so the tracker is `sampler`.
"""

import json
import os
import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import copy

from support.output import progress
from support.peers import PEERS, PeersMissing, peers_python

ROOT = Path(__file__).parents[2]
ENVIRONMENT = ROOT / ".venv-traincheck"
REFERENCE, AGAIN = "mutants.synchronisation:right", "right again"
ASKED = {
    "SE-02": "mutants.normalisation:se_02", "SE-05-ranks": "mutants.normalisation:se_05_ranks", "SE-15": "mutants.synchronisation:se_15",
    "SE-18": "mutants.synchronisation:se_18", "SE-19": "mutants.synchronisation:se_19", "SE-24": "mutants.synchronisation:se_24",
    "SE-36": "mutants.precision:se_36", "SE-45": "mutants.construction:se_45",
}  # fmt: skip
RIGHT = {"NC-01": "mutants.synchronisation:nc_01", "right-guard": "mutants.randomness:right_guard"}
UPDATES = 10
PATIENCE_S = 1800.0
TITLE = "## Beside TrainCheck"
PUBLISHED = "Published for TrainCheck (OSDI 2025): 18 of 20 reproduced silent errors found, with under 2 % false alarms."

Broken = frozenset[str]  # invariants in words


@dataclass(frozen=True, slots=True)
class PeerRun:
    """One training under TrainCheck."""

    id: str
    broken: Broken  # invariants that both right runs keep
    plain_s: float  # its updates without TrainCheck
    traced_s: float  # the same while its trace is taken
    check_s: float  # looking for broken invariants


@dataclass(frozen=True, slots=True)
class PeerResult:
    """What TrainCheck said, or why it said nothing."""

    runs: Sequence[PeerRun] = ()
    invariants: int = 0
    unstable: int = 0  # broken by the second right run
    infer_s: float = 0.0
    missing: str = ""

    def page(self, day: str) -> list[str]:
        """Its part of the document. Args: day, when it ran."""
        lines = [TITLE, ""]
        if self.missing:
            return [*lines, f"TrainCheck did not run here: {self.missing}", "", PUBLISHED]
        lines += [
            f"Run on {day}. On mutants that one plain training script can show: {self.invariants} invariants inferred from {UPDATES} right "
            f"updates on two ranks in {self.infer_s:.0f} s; the same training once more broke {self.unstable} of them, left out here. "
            "Seconds are of the updates alone, plain and traced, and of looking for broken invariants.",
            "",
            "| training | TrainCheck | broken invariants | plain s | traced s | checking s |",
            "|---|---|---|---|---|---|",
        ]
        for run in self.runs:
            word = "found" if run.broken else "not found"
            word = ("false alarm" if run.broken else "quiet") if run.id in RIGHT else word
            first = next(iter(sorted(run.broken)), "")
            cells = (run.id, word, f"{len(run.broken)} {first}", f"{run.plain_s:.2f}", f"{run.traced_s:.1f}")
            lines.append(f"| {' | '.join(cells)} | {run.check_s:.0f} |")
        found = sum(bool(run.broken) for run in self.runs if run.id not in RIGHT)
        alarms = sum(bool(run.broken) for run in self.runs if run.id in RIGHT)
        told = f"TrainCheck: {found} of {len(ASKED)} found, {alarms} false alarms in {len(RIGHT)}."
        return [*lines, "", f"{told} {PUBLISHED}"]


def peer_results(folder: Path) -> PeerResult:
    """Infer from a right training, check a second one, then every asked one; folder takes the traces. About half an hour on two cores."""
    try:
        bins = peers_python(PEERS / "traincheck.txt", ENVIRONMENT).parent
        _collect(bins, REFERENCE, folder / "reference")
        progress("TrainCheck: inferring invariants")
        invariants = folder / "invariants.json"
        infer_s = _timed([str(bins / "traincheck-infer"), "-f", "trace", "-o", str(invariants)], folder / "reference")
        unstable, _ = _checked(bins, REFERENCE, folder / "again", invariants)
        runs = [_run(bins, id, path, folder / id, invariants, unstable) for id, path in (ASKED | RIGHT).items()]
    except (PeersMissing, RuntimeError, OSError, ValueError) as error:
        return PeerResult(missing=str(error))
    return PeerResult(runs, len(invariants.read_text().splitlines()), len(unstable), infer_s)


def _run(bins: Path, id: str, path: str, folder: Path, invariants: Path, unstable: Broken) -> PeerRun:
    plain_s = _plain(bins, path, folder)
    broken, check_s = _checked(bins, path, folder, invariants)
    traced_s = _seconds((folder / "trace" / "program_output.txt").read_text())
    progress(f"TrainCheck: {id}: {len(broken - unstable)} broken")
    return PeerRun(id, broken - unstable, plain_s, traced_s, check_s)


def _script(folder: Path, bins: Path, path: str) -> dict[str, str]:
    """The training script and how it is launched; returns the environment."""
    folder.mkdir(exist_ok=True)
    copy(PEERS / "mutant_training.py", folder / "script.py")
    paths = f"{ROOT}:{ROOT / 'examples' / 'mutants'}"
    launch = f"{bins / 'python'} -m torch.distributed.run --standalone --nproc-per-node 2 script.py"
    (folder / "run.sh").write_text(f"export PYTHONPATH={paths}\n{launch}\n")
    return os.environ | {"MUTANT": path, "MUTANT_STEPS": str(UPDATES), "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def _plain(bins: Path, path: str, folder: Path) -> float:
    environ = _script(folder, bins, path)
    return _seconds(_asked(["bash", "run.sh"], folder, environ))


def _collect(bins: Path, path: str, folder: Path, *options: str) -> None:
    environ = _script(folder, bins, path)
    command = [
        str(bins / "traincheck-collect"), "--pyscript", "script.py", "--shscript", "run.sh", "--models-to-track", "model",
        "--model-tracker-style", "sampler", "--output-dir", "trace", *options,
    ]  # fmt: skip
    _asked(command, folder, environ)


def _checked(bins: Path, path: str, folder: Path, invariants: Path) -> tuple[Broken, float]:
    """Invariants that a training breaks, and how long they were looked for."""
    _collect(bins, path, folder, "--invariants", str(invariants), "--sampling-interval", "1")
    check_s = _timed([str(bins / "traincheck-check"), "-f", "trace", "-i", str(invariants)], folder)
    logs = [log.read_text() for log in folder.glob("traincheck_checker_results*/trace/failed.log")]
    return frozenset(words for log in logs for words in _words(log)), check_s


def _words(log: str) -> list[str]:
    """What each failure in a log of JSON documents, one after the other, is about."""
    decoder, place, found = json.JSONDecoder(), 0, []
    while place < len(log):
        document, place = decoder.raw_decode(log, place)
        found.append(f"{document['invariant']['relation']}: {document['invariant']['text_description']}")
        place += len(log[place:]) - len(log[place:].lstrip())
    return found


def _timed(command: list[str], folder: Path) -> float:
    """Wall clock of a command."""
    began = os.times().elapsed
    _asked(command, folder, dict(os.environ))
    return os.times().elapsed - began


def _asked(command: list[str], folder: Path, environ: dict[str, str]) -> str:
    """What a command printed. Raises RuntimeError when it ended badly."""
    done = subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} ended with {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    return done.stdout


def _seconds(text: str) -> float:
    """What the training script said its updates took: the slower rank."""
    return max(float(value) for value in re.findall(r"seconds ([0-9.]+)", text))
