"""Probes make evidence: they run the trainer and return the records that one gate judges. One function a gate."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from flows.incident_desk import READ, Desk, show_incidents
from flows.plan import ReleasePlan
from infra.store import ObjectStore
from trainer import ranks, runlog
from trainer.config import Fault, TrainJob
from trainer.world import Progress
from validation.records import (
    PHASES,
    Frame,
    RunRecord,
    ScalingPoint,
    ScalingRecords,
)
from validation.scaling import is_decided

CALL_DEADLINE_S = 600.0
PLANTED_DELAY = 3.0  # the planted straggler idles its peer this many times longer than the policy's limit allows
Say = Callable[[str], None]


@dataclass
class Bench:
    """Runs a gate's jobs one after the other, each in a fresh folder, and adds up what they cost."""

    plan: ReleasePlan
    gate: str
    say: Say
    folder: Path  # fresh for each attempt of the gate
    worker_seconds: float = 0.0
    watch: Callable[[float, str], None] = field(default=lambda _percent, _where: None)  # told how far a run is, up to 10 times a second
    store: ObjectStore | None = None  # takes what nobody planned; None: it stays in the run's folder
    _count: int = field(default=0, init=False)

    def job(self, label: str, **options: object) -> TrainJob:
        """A job of this release's recipe in its own folder."""
        self._count += 1
        folder = self.folder / f"{self._count:02d}-{label}"
        folder.mkdir(parents=True)
        return TrainJob(recipe=self.plan.request.recipe, folder=str(folder), **options)  # type: ignore[arg-type]

    def run(self, label: str, **options: object) -> tuple[RunRecord, Path]:
        """Run one job to its end; what it did is told to people."""
        job = self.job(label, **options)
        told = _Told(label, self.say, self.watch)
        desk = Desk(self.say, owner=self.plan.release_id, of=f"{self.gate}-{label}", store=self.store)
        try:
            record = ranks.run_group(job, on_progress=told, on_incident=desk, read=READ)
        finally:
            show_incidents(desk.kept)
        self.worker_seconds += record.worker_seconds
        again = f", {record.attempts - 1} restarts" if record.attempts > 1 else ""
        self.say(f"{label}: {record.steps} steps on {record.world_size} ranks, {record.throughput_sps:,.0f} samples/s{again}")
        return record, Path(job.folder)


@dataclass
class _Told:
    """Says how far a long run is, every tenth of it; whoever watches is told each time."""

    label: str
    say: Say
    watch: Callable[[float, str], None]
    _tenth: int = 0
    _first: tuple[float, int] | None = None  # when (s) the first word of progress came, and of which step

    def __call__(self, progress: Progress) -> None:
        if not progress.steps:
            return
        now_s, (first_s, first_step) = time.monotonic(), self._first or (time.monotonic(), progress.step)
        self._first = (first_s, first_step)
        left_s = (now_s - first_s) / max(progress.step - first_step, 1) * (progress.steps - progress.step)
        where = f"{progress.step}/{progress.steps} steps, loss {progress.loss:.4f}, about {left_s:.0f} s to go"
        self.watch(100 * progress.step / progress.steps, where)
        tenth = 10 * progress.step // progress.steps
        if tenth > self._tenth and progress.steps >= 100 and tenth < 10:
            self._tenth = tenth
            self.say(f"{self.label}: {tenth}0% ({where})")


def train_candidate(bench: Bench) -> tuple[RunRecord, Path]:
    """Train the candidate on as many ranks as there are devices, measuring the quality curve; survives two deaths."""
    plan = bench.plan
    world_size = max([w for w in plan.world_sizes if w <= plan.machine.devices] or [min(plan.world_sizes)])
    every = max(1, plan.facts.steps // 4)
    return bench.run("candidate", world_size=world_size, evaluate=True, checkpoint_every=every, max_restarts=2, drill=plan.request.drill)


def probe_scaling(bench: Bench, candidate_folder: Path) -> ScalingRecords:
    """Time every world size several times, interleaved, under the same global batch; then once with a planted straggler."""
    plan, policy = bench.plan, bench.plan.policy.scaling
    steps = {"steps": policy.steps.value + policy.warmup_steps.value, "warmup_steps": policy.warmup_steps.value}
    setups: list[tuple[int, str]] = [(w, "exact") for w in plan.world_sizes]
    if 1 in plan.world_sizes:
        setups.append((1, "fast"))  # the best one-worker set-up is the baseline, not a handicapped one
    records = ScalingRecords(
        points=(),
        world_sizes=plan.world_sizes,
        devices=plan.machine.devices,
        global_batch_size=plan.facts.training.global_batch_size,
        curve=runlog.load_curve(candidate_folder),
        quality_name=plan.facts.card.quality_name,
        target_quality=plan.facts.target_quality,
        planted_defect="",
        planted=(),
        planted_rank=1,
        worker_seconds=0.0,
    )
    for repeat in range(max(policy.repeats.value, policy.repeats_max.value)):
        if repeat >= policy.repeats.value and is_decided(records, policy):
            break
        turned = setups[repeat % len(setups) :] + setups[: repeat % len(setups)]  # nobody is always first
        for world_size, reduction in turned:
            run, folder = bench.run(f"w{world_size}-{reduction}-r{repeat}", world_size=world_size, reduction=reduction, **steps)
            point = scaling_point(run, runlog.load_timeline(folder), repeat, policy.warmup_steps.value)
            records = replace(records, points=(*records.points, point))
    delay_ms = straggler_delay_ms(records.points, policy.idle_share_max.value)
    slow = Fault(kind="delay", rank=1, step=0, phase="forward", ms=delay_ms)
    run, folder = bench.run("planted-straggler", world_size=2, faults=(slow,), **{**steps, "steps": policy.warmup_steps.value + 5})
    return replace(
        records,
        planted_defect=f"rank 1 of 2 is {delay_ms:.0f} ms late in every forward pass",
        planted=(scaling_point(run, runlog.load_timeline(folder), 0, policy.warmup_steps.value),),
        worker_seconds=bench.worker_seconds,
    )


def straggler_delay_ms(points: Sequence[ScalingPoint], idle_share_max: float) -> float:
    """A delay that makes rank 0 of 2 idle for clearly more than the allowed share of a step: share = delay / (step + delay)."""
    step_ms = max(statistics.median(point.step_ms_p50 for point in points if point.world_size == w) for w in {p.world_size for p in points})
    return PLANTED_DELAY * step_ms * idle_share_max / max(1 - idle_share_max, 0.01)


def scaling_point(run: RunRecord, timeline: Frame, repeat: int, warmup_steps: int) -> ScalingPoint:
    """Reduce a timeline to one point: medians over the steps after the warm-up."""
    timed = timeline[timeline["step"] >= warmup_steps]
    busy = (timed["step_ms"] - timed["wait_ms"]).groupby(timed["rank"]).median()
    by_step = timed.groupby("step")
    return ScalingPoint(
        world_size=run.world_size,
        repeat=repeat,
        reduction=run.reduction,
        throughput_sps=run.throughput_sps,
        step_ms_p50=float(by_step["step_ms"].max().median()),
        rank_step_ms=tuple(float(value) for value in busy.sort_index()),
        phase_ms={phase: float(by_step[phase].mean().median()) for phase in PHASES},
        peak_memory_mib=run.peak_memory_mib,
    )
