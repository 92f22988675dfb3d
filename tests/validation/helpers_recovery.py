"""Records of kill_and_resume: a clean proof, and what a fault would have left in its place."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from validation.records import (
    CONSUMED_COLUMNS,
    LEDGER_COLUMNS,
    STATE_COLUMNS,
    Machine,
    PlannedFault,
    Recovery,
    RecoveryRecords,
    RecoveryRun,
    RunRecord,
)

MACHINE = Machine(device="cpu", devices=2, memory_gib=8.0, system="Linux x86_64", python="3.11", torch="2.13")
BACKWARD = "kill:rank=1,step=7,phase=backward,attempt=0"
COLLECTIVE = "kill:rank=0,step=20,phase=collective,attempt=1"
SEAL = "kill:rank=0,step=24,phase=seal,attempt=2"
WINDOW = "kill:rank=1,step=31,phase=accumulation,attempt=3"
PLAN = {
    BACKWARD: "in the middle of epoch 1", COLLECTIVE: "again in epoch 1", SEAL: "inside a save", WINDOW: "inside an accumulation window",
}  # fmt: skip
EVERY, STEPS, BATCH = 5, 40, 4
STARTS = (5, 20, 20, 30)  # checkpoints that attempts 1, 2, ... load
MATRICES = ("fc.weight", "head.weight")
NAMES = (
    *(f"weight/{name}" for name in MATRICES), "buffer/norm.running_mean", *(f"ema/{name}" for name in MATRICES),
    *(f"optimizer/{name}/{key}" for name in MATRICES for key in ("exp_avg", "exp_avg_sq", "step")), "plain/groups/0/lr",
    "plain/groups/0/weight_decay", "plain/schedule/last_epoch", "plain/extra/scaler/scale", "plain/position", "plain/step",
    "stream/torch",
)  # fmt: skip

Change = Callable[[int, str, int, str, str], str | None]  # attempt, moment, step, name, sha -> sha, None for a part that is not there


def sha(*parts: object) -> str:
    """A digest that stands for these parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def state(step: int, rank: int) -> dict[str, str]:
    """A whole state by name: the same on every rank but for its stream."""
    return {name: sha(name, step, rank if name.startswith("stream") else 0) for name in NAMES}


def states(starts: tuple[int, ...] = (), change: Change | None = None, ranks: tuple[int, ...] = (2,)) -> pd.DataFrame:
    """Rows of a run whose attempts 1, 2, ... load these checkpoints. Args: ranks, by attempt, the last one repeated."""
    rows: list[tuple[Any, ...]] = []
    for attempt, start in enumerate((0, *starts)):
        until = [*starts, STEPS][attempt]
        moments = [("saved", step) for step in range(start + EVERY, until + 1, EVERY)]
        moments = ([("loaded", start)] if attempt else []) + moments + ([("end", STEPS)] if attempt == len(starts) else [])
        for moment, step in moments:
            for rank in range(ranks[min(attempt, len(ranks) - 1)]):
                for name, digest in state(step, rank).items():
                    found = change(attempt, moment, step, name, digest) if change else digest
                    rows += [(attempt, rank, moment, step, name, found)] if found is not None else []
    return pd.DataFrame(rows, columns=list(STATE_COLUMNS))


def ledger(samples: Any = range(STEPS * BATCH)) -> pd.DataFrame:
    """Four samples a step in four lanes."""
    rows = [(p // BATCH, p % BATCH, p, sample) for p, sample in enumerate(samples)]
    return pd.DataFrame(rows, columns=list(LEDGER_COLUMNS)).astype("int64")


def consumed(samples: Any = range(STEPS * BATCH), contents: Mapping[int, str] | None = None) -> pd.DataFrame:
    """What the losses were computed of, two ranks with two samples a step each. Args: contents, of samples that are not as usual."""
    rows = [
        (p % BATCH // 2, p // BATCH, p % 2, sample, (contents or {}).get(sample, f"{sample:016x}"), False)
        for p, sample in enumerate(samples)
    ]
    return pd.DataFrame(rows, columns=list(CONSUMED_COLUMNS))


def one_batch_back() -> list[int]:
    """Samples of a resume that went one batch back: 16-19 again at step 5, the last batch lost."""
    return [*range(20), *range(16, 156)]


def recovery(**changes: Any) -> Recovery:
    """One way back of 1 s; name what a test is about."""
    usual = Recovery(
        fault=BACKWARD, world_size=2, resumed_world_size=2, resumed_from_step=5,
        detect_s=0.1, teardown_s=0.05, import_s=0.05, rendezvous_s=0.2, load_s=0.1, first_step_s=0.5, total_s=1.0,
    )  # fmt: skip
    return replace(usual, **changes)


def ways() -> tuple[Recovery, ...]:
    """A way back after every death of PLAN."""
    return tuple(recovery(fault=fault, resumed_from_step=start) for fault, start in zip(PLAN, STARTS, strict=True))


def record(**changes: Any) -> RunRecord:
    """A run on two ranks that nobody killed."""
    usual = RunRecord(
        recipe="tiny", world_size=2, parallel="ddp", reduction="exact", precision="float32", steps=STEPS, seed=0, state_sha256="state",
        state_sha256_by_rank=("state", "state"), ledger_sha256="ledger", throughput_sps=100.0, seconds=2.0, worker_seconds=4.0, attempts=1,
        faults_fired=(), recoveries=(), peak_memory_mib=100.0, machine=MACHINE,
    )  # fmt: skip
    return replace(usual, **changes)


def killed_record(**changes: Any) -> RunRecord:
    """A run killed in the four moments of PLAN that ended as its twin."""
    return record(**{"attempts": 5, "faults_fired": tuple(PLAN), "recoveries": ways(), **changes})


def killed(**changes: Any) -> RecoveryRun:
    """A clean killed run; name what a test is about."""
    usual = RecoveryRun(
        record=killed_record(), ledger=ledger(), states=states(STARTS), consumed=consumed(),
        planned=tuple(PlannedFault(fault=fault, purpose=purpose) for fault, purpose in PLAN.items()),
    )  # fmt: skip
    return replace(usual, **changes)


def twin(**changes: Any) -> RecoveryRun:
    """The run that nobody killed."""
    return replace(RecoveryRun(record=record(), ledger=ledger(), states=states(), consumed=consumed()), **changes)


def without_moments(attempt: int, moment: str, step: int, name: str, digest: str) -> str | None:
    """A load that drops the optimizer's moments; what follows is another training."""
    if attempt and moment == "loaded":
        return None if name.startswith("optimizer/") else digest
    return sha("other", digest) if attempt and name.startswith(("weight/", "optimizer/", "ema/")) else digest


def records(**changes: Any) -> RecoveryRecords:
    """A clean proof; name what a test is about."""
    clean = RecoveryRecords(
        twin=twin(), killed=(killed(),), state_mib=20.0, epoch_steps=12.0,
        repeated=killed(
            defect="repeated data", record=killed_record(state_sha256_by_rank=("other", "other"), ledger_sha256="other"),
            ledger=ledger(one_batch_back()), consumed=consumed(one_batch_back()),
        ),
        stale=killed(
            defect="empty moments", record=killed_record(state_sha256_by_rank=("other", "other")), states=states(STARTS, without_moments)
        ),
    )  # fmt: skip
    return replace(clean, **changes)
