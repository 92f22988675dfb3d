"""From the SIGKILL of one of eight ranks to the next optimizer update: rank groups of the trainer against torchrun.

    python benchmarks/restart.py [--json] [--quick]

Both train the same model on the same data (benchmarks/support/network.py: an MLP of the size of the flights recipe's, AdamW, global
batch 4096) with a checkpoint every 5 updates, on gloo, one thread a rank. Each job is killed in rank 1, after its forward pass (ours) or
backward pass (peer), once in each of its first three starts; the clock runs from right before the kill (written by the rank that dies)
until the last rank has made its first update again. Ours: Recovery.total_s, exact reduction, sealed checkpoints. Peer:
benchmarks/peers/torchrun_trainer.py, plain DDP and torch.save, under `torchrun --standalone --max-restarts 3` with
TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, without which torch 2.13 does not come back at all. Jobs in turn. `ratio` is the median of ours /
the median of the peer's.

Limits: one machine; W ranks share few cores, and a cold start's imports (most of torchrun's time) are paid on them. On a machine with a
core a rank the peer's imports run beside one another, and the ratio is smaller by up to that.
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from support.output import Document, Sample, parser, progress, publish

from trainer import ranks
from trainer.config import Fault, TrainJob
from validation.records import Recovery

GOAL = 1 / 20
OURS, THEIRS = "trainer.ranks", "torchrun"
SEGMENTS = ("detect", "teardown", "import", "rendezvous", "load", "first_step")
PEER = Path(__file__).parent / "peers" / "torchrun_trainer.py"
CHECKPOINT_EVERY = 5
KILL_STEPS = (7, 12, 17)  # by start; two updates after a checkpoint each
STEPS = 20
DEADLINE_S = 170.0
PEER_TRIES = 4


def our_recoveries(world_size: int, kill_steps: tuple[int, ...], folder: Path) -> tuple[Recovery, ...]:
    """Each recovery of one job."""
    faults = tuple(Fault(kind="kill", rank=1, step=step, attempt=attempt) for attempt, step in enumerate(kill_steps))
    job = TrainJob(
        recipe="support.recipes:wide", folder=str(folder), world_size=world_size, steps=STEPS, faults=faults,
        checkpoint_every=CHECKPOINT_EVERY, max_restarts=len(faults), deadline_s=DEADLINE_S,
    )  # fmt: skip
    return ranks.run_group(job).recoveries


class NeverBackError(Exception):
    """The peer's job ended instead of going on."""


def torchrun_recoveries(world_size: int, kill_steps: tuple[int, ...], folder: Path) -> list[float]:
    """Seconds of each recovery of one job; nothing of it is alive afterwards."""
    options = ["--standalone", "--nproc-per-node", str(world_size), "--max-restarts", str(len(kill_steps))]
    script = [str(PEER), str(folder), str(STEPS), str(CHECKPOINT_EVERY), *map(str, kill_steps)]
    environ = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1", "OMP_NUM_THREADS": "1"}
    log = folder / "torchrun.log"
    command = [sys.executable, "-m", "torch.distributed.run", *options, *script]
    with log.open("wb") as words:
        agent = subprocess.Popen(command, env=environ, stdout=words, stderr=words, start_new_session=True)
        try:
            status = agent.wait(DEADLINE_S)
        finally:
            end_session(agent)
    if status != 0:
        raise NeverBackError(f"torchrun ended with {status} and did not come back. Its last words:\n{log.read_text()[-2000:]}")
    return [_recovery_s(folder, start, world_size) for start in range(len(kill_steps))]


def end_session(agent: subprocess.Popen[bytes]) -> None:
    """End torchrun and its workers, which live in sessions of their own: the agent ends them when it is asked to."""
    if agent.poll() is None:
        agent.send_signal(signal.SIGTERM)
        try:
            agent.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(agent.pid, signal.SIGKILL)
            agent.wait()


def _recovery_s(folder: Path, start: int, world_size: int) -> float:
    """From the kill of one start to the last rank's first update in the next."""
    updated = [int((folder / f"updated-{start + 1}-{rank}").read_text()) for rank in range(world_size)]
    return (max(updated) - int((folder / f"killed-{start}").read_text())) / 1e9


def as_samples(side: str, job: int, seconds: Sequence[float]) -> list[Sample]:
    """Rows of one job."""
    progress(f"{side}, job {job + 1}: " + ", ".join(f"{value:.2f} s" for value in seconds))
    return [{"side": side, "job": job, "kill": number, "recovery_s": value} for number, value in enumerate(seconds)]


def run_job(side: str, job: int, world_size: int, kill_steps: tuple[int, ...]) -> list[Sample]:
    """One job of one side in a fresh folder."""
    with tempfile.TemporaryDirectory() as folder:
        if side == THEIRS:
            return as_samples(side, job, torchrun_recoveries(world_size, kill_steps, Path(folder)))
        found = our_recoveries(world_size, kill_steps, Path(folder))
    parts = [f"{name} {statistics.median(getattr(item, f'{name}_s') for item in found):.2f} s" for name in SEGMENTS]
    progress(f"medians of its parts: {', '.join(parts)}")
    return as_samples(side, job, [item.total_s for item in found])


def peer_job(job: int, world_size: int, kill_steps: tuple[int, ...]) -> list[Sample]:
    """One job of torchrun. Some of its restarts end in an abort inside gloo; a job that does so is told and begun again, in its favour."""
    for _ in range(PEER_TRIES - 1):
        try:
            return run_job(THEIRS, job, world_size, kill_steps)
        except NeverBackError as error:
            progress(f"{THEIRS}, job {job + 1}: {error}\nbegun again")
    return run_job(THEIRS, job, world_size, kill_steps)


def main() -> int:
    """Kill, measure, print."""
    arguments = parser(__doc__).parse_args()
    world_size, jobs, kill_steps = (2, 1, KILL_STEPS[:1]) if arguments.quick else (8, 2, KILL_STEPS)
    samples = [row for job in range(jobs) for row in (*run_job(OURS, job, world_size, kill_steps), *peer_job(job, world_size, kill_steps))]
    medians = {side: statistics.median(item["recovery_s"] for item in samples if item["side"] == side) for side in (OURS, THEIRS)}
    ratio = medians[OURS] / medians[THEIRS]
    progress(", ".join(f"{side}: {seconds:.2f} s" for side, seconds in medians.items()) + f", {1 / ratio:.0f} times as long")
    document = Document(
        name="restart", peer=f"torchrun --standalone --max-restarts {len(kill_steps)}, W = {world_size}", ratio=ratio, goal=GOAL,
        met=ratio <= GOAL, unit="SIGKILL to next update, ours / torchrun (lower is better)", samples=samples,
    )  # fmt: skip
    publish(document, as_json=arguments.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
