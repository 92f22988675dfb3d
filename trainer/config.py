"""A training job as a value: everything that decides what a group of ranks does. Torch-free."""

from dataclasses import dataclass
from typing import Literal, get_args

from trainer.stalls import FLOOR_S
from validation.errors import ConfigError

Reduction = Literal["exact", "fast"]
Precision = Literal["float32", "float64"]
Parallel = Literal["ddp", "fsdp2"]
FaultKind = Literal[
    "kill", "delay", "skip", "error", "stop", "launcher", "hold", "pause", "starve", "swallow", "extra", "argument", "dtype", "full"
]  # fmt: skip
TIMED_KINDS = ("delay", "hold", "pause")  # these take ms
GENTLE_KINDS = ("delay", "pause", "dtype", "full")  # these end no attempt
DRILLS = ("slice-regression",)  # planted data faults of a release: trainer.drills
STEP_PHASES = ("data", "forward", "backward", "collective", "optimizer")  # of every step
WINDOW_PHASES = ("accumulation",)  # between two micro-batches of one step: only where a rank has more than one
SAVE_PHASES = ("staging", "write", "seal")  # of a checkpoint: copying the state, writing its files, signing for them
FAULT_PHASES = ("load", *STEP_PHASES, *SAVE_PHASES)  # "load": before the state of an attempt is loaded, whatever the fault's step


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A planned fault. Fires once, in the attempt it is planned for, unless `delay` (fires at every step from `step` on).

    kill: SIGKILL to itself; delay: sleep `ms` (a straggler); skip: leave out this step's collective (the others hang); error: raise;
    stop: SIGSTOP to itself (a frozen process); launcher: SIGKILL to the group's leader; hold: keep the interpreter's lock in a C call for
    `ms` (a frozen process that runs); pause: a garbage collection that takes `ms`; starve: wait for data on a queue that nobody feeds;
    swallow: raise, catch it and leave the step's collective out; extra: one more all-reduce, on this rank alone; argument: one more
    all-reduce on every rank, of another size on this one; dtype: the same, of another type with as many bytes (no hang, wrong numbers);
    full: the disk says that it is full while a checkpoint is written. A fault of a SAVE_PHASE fires at the first checkpoint at or after its
    step. Text form: "kill:rank=1,step=7,phase=backward,attempt=0".
    """

    kind: FaultKind
    rank: int
    step: int  # 0-based update during which it fires
    phase: str = "backward"
    attempt: int = 0
    ms: float = 0.0

    def __str__(self) -> str:
        tail = f",ms={self.ms:g}" if self.kind in TIMED_KINDS else ""
        return f"{self.kind}:rank={self.rank},step={self.step},phase={self.phase},attempt={self.attempt}{tail}"


LONGEST_FAULT_MS = 3_600_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditions:
    """What a gate does to a recipe so that a fault shows: small, uneven and everything switched on (trainer/hardening.py)."""

    samples: int  # rows of the train split that are kept: the window crosses epochs
    judged: int  # rows of the judge split that are kept
    global_batch_size: int
    accumulation: int
    epochs: int
    clip_norm: float | None  # below the real norms, so that clipping is active; None = off
    ragged_weights: bool  # samples count for 1/8 to 8, by their id


@dataclass(frozen=True, slots=True, kw_only=True)
class Poison:
    """A bad micro-batch on one rank: the first one of that rank at that step. Ranks have to agree on what becomes of it."""

    kind: Literal["spike", "overflow"]  # its loss is multiplied by SPIKE, or by infinity
    rank: int
    step: int  # 0-based


SPIKE = 1e4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainJob:
    """One run of a rank group over all its attempts."""

    recipe: str  # import path "package.module:NAME" or a shipped recipe's short name
    folder: str  # existing: the run's records and checkpoints; a run that stands there goes on from its newest sealed checkpoint
    world_size: int
    reduction: Reduction = "exact"
    precision: Precision = "float32"
    parallel: Parallel = "ddp"
    steps: int | None = None  # optimizer updates; None = all the recipe's epochs
    dropout: bool = True  # False: every Dropout module is put to eval (for legs compared with a reference)
    faults: tuple[Fault, ...] = ()
    defect: str = ""  # a planted wrong line for positive controls: see trainer.faults.DEFECTS
    drill: str = ""  # a planted data fault for release drills: "slice-regression"
    checkpoint_every: int = 0  # updates between sealed checkpoints; 0 = none
    keep_gradients: int = 0  # of the first N steps: digests on every rank, tensors on rank 0
    audit: bool = False  # leave what gates judge by: tensors, samples, random streams, collectives, whole states (trainer/audit.py)
    conditions: Conditions | None = None  # train the hardened recipe
    poison: Poison | None = None
    soak: int = 0  # the last update is made so many times more, before it counts: its gradient has to be the same each time
    evaluate: bool = False  # measure the quality curve on the judge split every recipe.training.evaluate_every updates
    warmup_steps: int = 0  # excluded from throughput
    max_restarts: int = 0
    resume_world_sizes: tuple[int, ...] = ()  # world size of attempts 1, 2, ...; missing ones repeat the last
    deadline_s: float = 600.0  # for the whole group, all attempts
    stall_s: float = 120.0  # gloo time-out of a collective
    stall_floor_s: float = FLOOR_S  # no stall is looked into before, however fast the steps are; infinite = never: stall_s ends hangs
    blame_planned: bool = False  # planned faults count like real ones where a rank is left out: for drills of that

    def world_size_of(self, attempt: int) -> int:
        """World size of an attempt (0-based)."""
        sizes = (self.world_size, *self.resume_world_sizes)
        return sizes[min(attempt, len(sizes) - 1)]


_PHASE_ALIASES = {"checkpoint": "seal"}  # the moment before a checkpoint counts
_USUAL_PHASES = {"starve": "data", "extra": "collective", "argument": "collective", "dtype": "collective", "full": "write"}


def parse_fault(text: str) -> Fault:
    """Read "kill:rank=1,step=7,phase=backward". Raises ConfigError naming the bad part."""
    kind, _, rest = text.partition(":")
    try:
        parts = [part.split("=", 1) for part in rest.split(",")]
        if len(given := dict(parts)) < len(parts):
            raise ValueError("one part stands there twice")
        phase = given.pop("phase", _USUAL_PHASES.get(kind, "backward"))
        fault = Fault(
            kind=kind,  # type: ignore[arg-type]  # checked below
            rank=int(given.pop("rank")), step=int(given.pop("step")), phase=_PHASE_ALIASES.get(phase, phase),
            attempt=int(given.pop("attempt", "0")), ms=float(given.pop("ms", "0")),
        )  # fmt: skip
    except (KeyError, ValueError) as error:
        raise ConfigError(f"fault '{text}' cannot be read ({error}). Write it like kill:rank=1,step=7,phase=backward.") from None
    if (
        kind not in get_args(FaultKind)
        or fault.phase not in (*FAULT_PHASES, *WINDOW_PHASES)
        or given
        or not 0 <= fault.ms <= LONGEST_FAULT_MS
        or (kind in ("hold", "pause") and fault.ms == 0)
        or (kind == "full" and fault.phase != "write")
        or min(fault.rank, fault.step, fault.attempt) < 0
    ):
        raise ConfigError(
            f"fault '{text}' is unknown or out of range. Use {', '.join(get_args(FaultKind))} with rank, step, phase "
            f"({'|'.join((*FAULT_PHASES, *WINDOW_PHASES))}), attempt and ms (0 to {LONGEST_FAULT_MS:,}, an "
            "hour); hold and pause need ms, full strikes in phase write."
        )
    return fault
