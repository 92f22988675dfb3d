"""What a run leaves behind and gates read: frozen values and columnar tables, no handles, no tensors.

Tables are pandas frames with the columns named in the constants below (stored as Parquet). Clocks are CLOCK_MONOTONIC nanoseconds.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

# One row per rank and step. *_ms are wall-clock milliseconds of that phase on that rank; `wait_ms` is the time between this rank's
# arrival at the step's first collective and the last rank's arrival (its idle time); `transfer_ms` the rest of the collectives.
TIMELINE_COLUMNS = (
    "rank", "step", "start_ns", "data_ms", "forward_ms", "backward_ms", "wait_ms", "transfer_ms", "optimizer_ms",
    "checkpoint_ms", "step_ms", "samples",
)  # fmt: skip
PHASES = ("data_ms", "forward_ms", "backward_ms", "wait_ms", "transfer_ms", "optimizer_ms", "checkpoint_ms")

# One row per sample consumed on the surviving lineage, sorted by (step, lane, position).
LEDGER_COLUMNS = ("step", "lane", "position", "sample_id")

# One row per quality measurement during training; `quality` in the recipe's own unit, higher is better.
CURVE_COLUMNS = ("step", "samples", "train_loss", "quality")

# One row per (world_size, rank, step, tensor) of the exact leg: sha256 of the reduced gradient, before the update.
DIGEST_COLUMNS = ("world_size", "rank", "step", "tensor", "sha256")

# One row per (leg, world_size, step, tensor): distance to the float64 reference and that tensor's own float noise, both relative
# Frobenius norms (dimensionless).
GRADIENT_ERROR_COLUMNS = ("leg", "world_size", "step", "tensor", "rel_err", "noise")

Frame = pd.DataFrame


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where something was measured; no names, no addresses."""

    device: str  # "cpu" or the GPU's model name
    devices: int  # accelerators, or cores usable by this process when there is none
    memory_gib: float  # of the host, 2**30 bytes
    system: str  # "Linux x86_64"
    python: str
    torch: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """One death and the way back, in seconds between events on one machine's monotonic clock."""

    fault: str  # e.g. "kill:rank=1,step=7,phase=backward"
    world_size: int  # ranks before
    resumed_world_size: int  # ranks after
    resumed_from_step: int  # updates held by the checkpoint that was loaded; 0 = from the start
    detect_s: float  # death -> noticed
    teardown_s: float  # -> every survivor reaped
    import_s: float  # -> every new rank stands and has imported the recipe
    rendezvous_s: float  # -> new group formed on every rank
    load_s: float  # -> checkpoint verified and loaded on every rank
    first_step_s: float  # -> next optimizer update done
    total_s: float  # death -> next optimizer update


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRecord:
    """Summary of one training run of a rank group, over all its attempts."""

    recipe: str
    world_size: int  # at the start
    parallel: str  # "ddp" | "fsdp2"
    reduction: str  # "exact" | "fast"
    precision: str  # "float32" | "float64"
    steps: int  # optimizer updates done
    seed: int
    state_sha256: str  # weights, buffers, optimizer and schedule of rank 0 after the last step
    state_sha256_by_rank: tuple[str, ...]
    ledger_sha256: str
    throughput_sps: float  # samples/s over all ranks, warm-up excluded
    seconds: float  # wall clock from asking for the group to its end
    worker_seconds: float  # ranks x seconds
    attempts: int
    faults_fired: tuple[str, ...]
    recoveries: tuple[Recovery, ...]
    peak_memory_mib: float  # largest resident set of one rank, 2**20 bytes
    machine: Machine
    unsaved: tuple[str, ...] = ()  # checkpoints that could not be written, e.g. "step 30: No space left on device"
    refused: tuple[str, ...] = ()  # damaged or vanished checkpoints that an attempt passed over when it started, in sentences


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """One Great Expectations result on one frame, reduced to plain values."""

    frame: str  # "train" | "judge"
    expectation: str  # e.g. "column_values_to_not_be_null"
    column: str  # "" for a table-level expectation
    success: bool
    observed: str  # what was seen, short
    expected: str  # what was asked, short
    aspect: str = ""  # what it speaks about, see validation.contract.ASPECTS; the gate makes one check per aspect and frame


@dataclass(frozen=True, slots=True, kw_only=True)
class ContractRecords:
    """Both frames under the recipe's data contract, and a planted frame that must be refused."""

    expectations: tuple[Expectation, ...]
    planted: tuple[Expectation, ...]  # the same suite on frames with a planted defect
    planted_defect: str
    columns: Mapping[str, tuple[str, ...]]  # frame -> columns the model may see
    forbidden: tuple[str, ...]  # columns known only after the cutoff
    rows: Mapping[str, int]
    span: Mapping[str, tuple[str, str]]  # frame -> first and last event time, ISO


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceRecords:
    """Runs of the same few steps at several world sizes, and their distance to the independent reference."""

    world_sizes: tuple[int, ...]  # every size that had to be run
    digests: Frame  # DIGEST_COLUMNS, exact leg
    states: Mapping[int, tuple[str, ...]]  # world size -> final state sha256 of every rank
    ledgers: Mapping[int, Frame]  # world size -> LEDGER_COLUMNS
    expected_order: tuple[int, ...]  # sample ids in position order, from the permutation alone
    samples: int  # that the steps had to consume, each once
    errors: Frame  # GRADIENT_ERROR_COLUMNS; legs "logic" (float64), "training" (exact float32), "fast" (torch's reduction)
    legs: tuple[str, ...]  # every leg that had to be run
    dropout_excluded: bool  # the reference legs ran without dropout
    planted_defect: str
    planted_errors: Frame  # GRADIENT_ERROR_COLUMNS of a run with the planted defect, leg "training"
    worker_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One timed run at one world size; warm-up steps excluded."""

    world_size: int  # ranks
    repeat: int  # 0-based; repeats are interleaved over world sizes
    reduction: str  # "exact" | "fast"
    throughput_sps: float  # samples/s summed over all ranks
    step_ms_p50: float  # wall clock of one step on the slowest rank
    rank_step_ms: tuple[float, ...]  # per rank: median busy time of a step, its wait at collectives excluded
    phase_ms: Mapping[str, float]  # phase -> median over steps of the mean over ranks
    peak_memory_mib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingRecords:
    """The scaling experiment under a fixed global batch, and the quality curve that all world sizes share."""

    points: tuple[ScalingPoint, ...]
    world_sizes: tuple[int, ...]
    devices: int  # that the ranks shared; more ranks than devices is oversubscribed
    global_batch_size: int  # samples per optimizer update, the same at every world size
    curve: Frame  # CURVE_COLUMNS, measured once: exact reduction gives the same bits at every world size
    quality_name: str
    target_quality: float
    planted_defect: str
    planted: tuple[ScalingPoint, ...]  # points of a run with a planted straggler
    planted_rank: int
    worker_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecords:
    """Killed runs beside the uninterrupted twin."""

    twin: RunRecord
    twin_ledger: Frame  # LEDGER_COLUMNS
    killed: tuple[RunRecord, ...]
    killed_ledgers: tuple[Frame, ...]  # same order as `killed`
    planned: tuple[tuple[str, ...], ...]  # faults planned for each killed run
    planted_defect: str
    planted: RunRecord  # a resume with a planted defect
    planted_ledger: Frame
    state_mib: float  # bytes of one checkpoint / 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class SliceRecords:
    """Per-sample outcomes of every contender on the judge frame.

    `outcomes` has the columns `sample_id`, `cluster` (samples that are not independent share one), the slice columns (as strings),
    and for each contender C: `utility_C` (worth of the decision taken, recipe's unit), `loss_C` (log loss, nats),
    `confidence_C` (probability given to the event or class that was predicted) and `hit_C` (1.0 if it came true).
    """

    outcomes: Frame
    slices: tuple[str, ...]
    contenders: tuple[str, ...]  # "candidate" first; then "last_known_good" (when there is one), "baseline", "rule"
    utility_unit: str
    quality_name: str
    quality: Mapping[str, float]  # contender -> the recipe's quality on the whole judge frame
    target_quality: float
    planted_slice: str  # "column=value" whose candidate was replaced by its opposite decision
    planted_outcomes: Frame
    latency_ms: tuple[float, ...]  # one-row predictions of the exported candidate, in order taken
    latency_machine: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMode:
    """A way to fail that operations must be able to see, name and stop."""

    name: str
    detector: str
    owner: str
    mitigation: str
    stop_condition: str
    drill: str  # which drill of this release has to have fired for it
    critical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A failure that was really caused in this release, and whether its detector saw it."""

    name: str
    fired: bool
    detected: bool
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FallbackCheck:
    """The version that would serve if the candidate may not: was it loaded and asked?"""

    kind: str  # "last_known_good" | "baseline"
    version: str  # "" when there is none
    loaded: bool
    predicted: bool  # a finite prediction of the right shape came back
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadinessRecords:
    """Could we operate it?"""

    modes: tuple[FailureMode, ...]
    drills: tuple[Drill, ...]
    costs: Mapping[str, float]  # what was measured: "worker_seconds", "wall_s", "storage_mib", ...
    fallbacks: tuple[FallbackCheck, ...]
    gates: Mapping[str, str] = field(default_factory=dict)  # gate -> outcome so far
