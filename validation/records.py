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

# What an audited run leaves of each step's tensors, in the order in which they come to be. "reduced": the mean gradient before clipping
# (absent where an own training step does it all at once), "clipped": what the optimizer was handed, "weight" and "buffer": after the
# update, "again": the clipped gradient of a soak, computed once more from the same state (its step is the repeat's number).
STAGES = ("reduced", "clipped", "weight", "buffer", "again")

# One row per (world_size, rank, step, stage, tensor).
DIGEST_COLUMNS = ("world_size", "rank", "step", "stage", "tensor", "sha256")

# One row per sample that a loss was computed of, as the step consumed it and whatever the ledger claims. `content`: first 16 hex digits
# of sha256 over its input, label and weight. `poisoned`: the loss of its micro-batch was spoiled on purpose.
CONSUMED_COLUMNS = ("rank", "step", "micro", "sample_id", "content", "poisoned")

# One row per draw of random numbers: who drew ("model": a loss, "backward": its backward pass, "data": a fetch), from which generator
# ("torch", "numpy", "python") and in which state it found it (first 16 hex digits of sha256). Two equal states are the same numbers twice.
STREAM_COLUMNS = ("rank", "step", "drawer", "generator", "state")

# One row per (rank, operation, type) of the collectives of a run.
COLLECTIVE_COLUMNS = ("rank", "operation", "dtype", "calls", "elements")

# One row per (rank, step). rates: learning rates of the optimizer's groups in that update, canonical JSON; norm: of the gradient handed to
# the optimizer; limit: clip_norm, NaN = none; moved: norm of the change of all weights; still: tensors that did not change although they
# want a gradient, canonical JSON; weight: of this rank's samples; loss: their mean loss.
UPDATE_COLUMNS = ("rank", "step", "rates", "norm", "limit", "moved", "still", "weight", "loss")

# One row per named part of a rank's whole state: "weight/fc.bias", "optimizer/fc.bias/exp_avg", "plain/groups/0/lr", "plain/position" ...
# moment: "saved" (as handed to the save), "loaded" (after a load), "end". sha256 of the bytes or of the canonical JSON.
STATE_COLUMNS = ("attempt", "rank", "moment", "step", "name", "sha256")

# One row per sample and step that one process alone would consume; content as in CONSUMED_COLUMNS, "" where it cannot be foretold.
EXPECTED_COLUMNS = ("step", "sample_id", "content")

# One row per (leg, world_size, step, stage, tensor): distance to the float64 reference and that tensor's own float noise, both relative
# Frobenius norms (dimensionless); scale: <found, expected> / <expected, expected>, 1 when right. Stage "weight" compares the update (after
# minus before), the others the gradient.
GRADIENT_ERROR_COLUMNS = ("leg", "world_size", "step", "stage", "tensor", "rel_err", "noise", "scale")

# One row per tensor: the loss's slope along a random direction of this tensor, by autograd and by finite differences, float64.
SLOPE_COLUMNS = ("tensor", "analytic", "numeric", "rel_err")

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
    reduction: str  # "exact" | "fast" | "own"
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
class Condition:
    """One hard condition that the gate makes so that a fault shows, or why it does not hold."""

    name: str  # see trainer.hardening.CONDITIONS
    held: bool
    detail: str  # what was set; where it does not hold: why, in the recipe's words if it excludes it


@dataclass(frozen=True, slots=True, kw_only=True)
class Leg:
    """One audited run of a few steps."""

    name: str  # see validation.equivalence_legs.LEGS
    world_size: int
    parallel: str  # "ddp" | "fsdp2"
    reduction: str  # "exact" | "fast" | "own"
    precision: str
    stopped: str = ""  # what ended the run before its time, "" when nothing did
    states: tuple[str, ...] = ()  # final state sha256 of every rank
    ledger: Frame = field(default_factory=pd.DataFrame)  # LEDGER_COLUMNS
    digests: Frame = field(default_factory=pd.DataFrame)  # DIGEST_COLUMNS
    consumed: Frame = field(default_factory=pd.DataFrame)  # CONSUMED_COLUMNS
    streams: Frame = field(default_factory=pd.DataFrame)  # STREAM_COLUMNS
    updates: Frame = field(default_factory=pd.DataFrame)  # UPDATE_COLUMNS
    collectives: Frame = field(default_factory=pd.DataFrame)  # COLLECTIVE_COLUMNS


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationCount:
    """What an own evaluation counted at one world size, and its metric beside a plain evaluation of the same weights by one process."""

    world_size: int
    sample_ids: tuple[int, ...]  # as counted, in order
    quality: float
    plain_quality: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EquivalenceRecords:
    """Runs of the same few steps at several world sizes, and their distance to the independent reference."""

    world_sizes: tuple[int, ...]  # every size that had to be run
    brought: tuple[str, ...]  # the recipe's own hooks, see trainer.hooks; () = the trainer is all ours
    conditions: tuple[Condition, ...]
    steps: int  # of every leg
    legs: tuple[Leg, ...]
    expected: Frame  # EXPECTED_COLUMNS, hard conditions
    expected_order: tuple[int, ...]  # sample ids in position order, from the permutation alone; () with an own sampler
    expected_rates: tuple[str, ...]  # by step, as UPDATE_COLUMNS' rates
    frozen: tuple[str, ...]  # parameters that want no gradient: declared not to learn
    errors: Frame  # GRADIENT_ERROR_COLUMNS of the legs that are compared with the reference
    slopes: Frame  # SLOPE_COLUMNS
    slopes_excluded: str  # why there are none, "" when there are
    judged_ids: tuple[int, ...]  # what an evaluation had to count, each once
    evaluations: tuple[EvaluationCount, ...]  # of an own evaluation
    draws_by_key: bool = False  # samples look different by their keys, so another time in another epoch
    planted_defect: str
    planted_errors: Frame  # GRADIENT_ERROR_COLUMNS of a run with the planted defect, leg "training"
    worker_seconds: float
    plain_seconds: float  # wall clock of one plain run of as many steps, which all this judges


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingPoint:
    """One timed run at one world size; warm-up steps excluded."""

    world_size: int  # ranks
    repeat: int  # 0-based; repeats are interleaved over world sizes
    reduction: str  # "exact" | "fast" | "own"
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
class PlannedFault:
    """A fault of the kill plan and what it is there to show."""

    fault: str  # text form, e.g. "kill:rank=1,step=7,phase=backward,attempt=0"
    purpose: str  # e.g. "in the middle of epoch 1"


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRun:
    """One audited run of kill_and_resume: the twin that nobody killed, a killed one, or a killed one with a planted defect."""

    record: RunRecord
    ledger: Frame  # LEDGER_COLUMNS
    states: Frame  # STATE_COLUMNS
    consumed: Frame  # CONSUMED_COLUMNS
    planned: tuple[PlannedFault, ...] = ()
    same_bits: bool = True  # it has to end in the twin's bits (an own reduction on other ranks need not)
    defect: str = ""  # what was planted, in words


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecords:
    """Killed runs beside the uninterrupted twin."""

    twin: RecoveryRun
    killed: tuple[RecoveryRun, ...]
    repeated: RecoveryRun  # planted: data repeated after a resume
    stale: RecoveryRun  # planted: state lost at a resume
    state_mib: float  # bytes of one checkpoint / 2**20
    brought: tuple[str, ...] = ()  # the recipe's own hooks
    conditions: tuple[Condition, ...] = ()
    epoch_steps: float = 0.0  # updates in one epoch of these runs


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
class Page:
    """What an on-call person follows at night, in the order of the fields; the mode's own symptoms and stop condition go with it."""

    wait: str  # is it safe to wait?
    confirm: tuple[str, ...]  # commands, each with what to look for: "`command`: words"
    done: str  # what the system has done already
    act: tuple[str, ...]  # what to do, step by step
    call: str  # whom to call
    over: str  # how to know that it is over


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureMode:
    """A way to fail that operations must be able to see, name and stop: a row of the registry and a page of the runbook."""

    name: str
    title: str
    sees: tuple[str, ...]  # symptoms, in the words of those who see them
    detector: str  # which module says it, and how
    kinds: tuple[str, ...] = ()  # of validation/finding.py, that lead here
    owner: str
    mitigation: str
    is_automatic: bool  # the system does it by itself
    command: str  # what a person types first
    stop_condition: str
    drill: str  # of `seatrial drill`
    fired_by: str  # what the drill really does
    in_release: bool = False  # every release fires it again
    gates: tuple[str, ...] = ()  # gates and alarms that it belongs to
    page: Page
    critical: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Drill:
    """A failure that was really caused, whether its detector saw it, and whether what was promised against it happened."""

    name: str
    fired: bool
    detected: bool
    mitigated: bool
    detail: str
    seconds: float = 0.0  # wall clock; 0 = not measured
    made_at: str = ""  # ISO time of a drill on record; "" = fired in this release


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
