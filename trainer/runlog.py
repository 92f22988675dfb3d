"""What a run leaves in its folder, and reading it back. Torch-free.

    run.json  timeline.parquet  ledger.parquet  curve.parquet  digests.parquet  gradients.safetensors  model.safetensors
    checkpoints/  (trainer/checkpoint.py)      parts/  (trainer/parts.py: what the tables below were merged from)

Merging keeps the surviving lineage: a step that was done, lost with its attempt and done again counts once, as it was done last.
"""

import json
import os
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from trainer.config import TrainJob
from trainer.parts import Part, read_parts
from validation.canonical import canonical_json, sha256_hex
from validation.errors import EvidenceError
from validation.records import (
    CURVE_COLUMNS,
    DIGEST_COLUMNS,
    LEDGER_COLUMNS,
    TIMELINE_COLUMNS,
    Machine,
    Recovery,
    RunRecord,
)

TABLES = {"timeline": TIMELINE_COLUMNS, "ledger": LEDGER_COLUMNS, "curve": CURVE_COLUMNS, "digests": DIGEST_COLUMNS}


def collect(
    job: TrainJob,
    *,
    attempts: int,
    recoveries: tuple[Recovery, ...],
    faults_fired: tuple[str, ...],
    seconds: float,
    world_sizes: tuple[int, ...],
    unsaved: tuple[str, ...] = (),
) -> RunRecord:
    """Merge the parts of all attempts into the run's tables and its record, after the last attempt finished.

    Args: seconds, wall clock of the whole group; world_sizes, of each attempt; unsaved, checkpoints that could not be written.
    Raises: EvidenceError when a rank of the last attempt left no end.
    """
    folder = Path(job.folder)
    parts = read_parts(folder)
    last = [part for part in parts if part.attempt == max((p.attempt for p in parts), default=0)]
    if len(last) != world_sizes[-1] or not all(part.end for part in last):
        raise EvidenceError(
            f"run {folder.name}: {sum(bool(part.end) for part in last)} of {world_sizes[-1]} ranks of the last attempt left an end. The "
            "run cannot be summed up. Look into logs/ of its folder and run it again in an empty one."
        )
    limits = _lineage(parts)
    tables = {
        "timeline": pd.concat([_timeline(last_rows) for last_rows in _by_attempt(parts, limits)], ignore_index=True),
        "ledger": _ledger(parts, limits),
        "curve": _lines(parts, limits, "curve", CURVE_COLUMNS),
        "digests": _lines(parts, limits, "digests", DIGEST_COLUMNS),
    }
    for name, table in tables.items():
        table.to_parquet(folder / f"{name}.parquet", index=False)
    record = RunRecord(
        recipe=job.recipe, world_size=job.world_size, parallel=job.parallel, reduction=job.reduction, precision=job.precision,
        steps=int(last[0].end["steps"]), seed=int(last[0].start["seed"]), state_sha256=last[0].end["state_sha256"],
        state_sha256_by_rank=tuple(part.end["state_sha256"] for part in last), ledger_sha256=ledger_sha256(tables["ledger"]),
        throughput_sps=throughput_sps(tables["timeline"], int(last[0].start["resumed_from_step"]) + job.warmup_steps), seconds=seconds,
        worker_seconds=_worker_seconds(parts, seconds, world_sizes), attempts=attempts, faults_fired=faults_fired, recoveries=recoveries,
        peak_memory_mib=max(part.end["peak_memory_mib"] for part in parts if part.end),
        machine=machine(device=last[0].start["device"], devices=int(last[0].start["devices"])), unsaved=unsaved,
    )  # fmt: skip
    (folder / "run.json").write_bytes(canonical_json(record))
    return record


def load_run(folder: str | Path) -> RunRecord:
    """Read a run's record. Raises EvidenceError when it is absent or not a record."""
    path = Path(folder) / "run.json"
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        facts["machine"] = Machine(**facts["machine"])
        facts["recoveries"] = tuple(Recovery(**item) for item in facts["recoveries"])
        for name in ("state_sha256_by_rank", "faults_fired", "unsaved"):
            facts[name] = tuple(facts.get(name, ()))
        for name in ("throughput_sps", "seconds", "worker_seconds", "peak_memory_mib"):
            facts[name] = float(facts[name])  # "NaN" is a string in canonical JSON
        return RunRecord(**facts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"{path} is no record of a finished run ({type(error).__name__}). Judge another run, or run it again."
        ) from None


def load_timeline(folder: str | Path) -> pd.DataFrame:
    """TIMELINE_COLUMNS, sorted by (step, rank)."""
    return _load(folder, "timeline")


def load_ledger(folder: str | Path) -> pd.DataFrame:
    """LEDGER_COLUMNS, sorted by (step, lane, position)."""
    return _load(folder, "ledger")


def load_curve(folder: str | Path) -> pd.DataFrame:
    """CURVE_COLUMNS, sorted by step."""
    return _load(folder, "curve")


def load_digests(folder: str | Path) -> pd.DataFrame:
    """DIGEST_COLUMNS, sorted by (step, rank), tensors in the model's order."""
    return _load(folder, "digests")


def checkpoint_bytes(folder: str | Path) -> int:
    """Size of a run's newest sealed checkpoint, all its files; 0 when it has none."""
    sealed = sorted(path for path in Path(folder).glob("checkpoints/step-*") if not path.suffix)
    return sum(file.stat().st_size for file in sealed[-1].iterdir()) if sealed else 0


def ledger_sha256(ledger: pd.DataFrame) -> str:
    """sha256 of the sorted rows as little-endian int64, row after row."""
    ordered = ledger[list(LEDGER_COLUMNS)].sort_values(list(LEDGER_COLUMNS[:3]), kind="stable")
    return sha256_hex(ordered.to_numpy(dtype="<i8").tobytes())


def throughput_sps(timeline: pd.DataFrame, first_step: int) -> float:
    """Samples/s over all ranks from `first_step` on, by the rank that took longest; NaN when no step is left.

    What lies between steps (evaluation, checkpoints) is in the time.
    """
    timed = timeline[timeline["step"] >= first_step]
    if timed.empty:
        return float("nan")
    spans = timed.assign(end_ns=timed["start_ns"] + timed["step_ms"] * 1e6).groupby("rank").agg({"start_ns": "min", "end_ns": "max"})
    return float(timed["samples"].sum() / ((spans["end_ns"] - spans["start_ns"]).max() / 1e9))


def machine(*, device: str = "", devices: int = 0) -> Machine:
    """This machine; without arguments the GPUs are those that the driver lists, and without any the cores count."""
    if not device:
        models = _gpu_models()
        device, devices = (models[0], len(models)) if models else ("cpu", len(os.sched_getaffinity(0)))
    return Machine(
        device=device, devices=devices, memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        system=f"{platform.system()} {platform.machine()}", python=platform.python_version(), torch=metadata.version("torch"),
    )  # fmt: skip


def _gpu_models() -> list[str]:
    files = sorted(Path("/proc/driver/nvidia/gpus").glob("*/information"))
    lines = [line for file in files for line in file.read_text().splitlines()]
    return [line.partition(":")[2].strip() for line in lines if line.startswith("Model:")]


def _load(folder: str | Path, name: str) -> pd.DataFrame:
    path = Path(folder) / f"{name}.parquet"
    try:
        table = pd.read_parquet(path)
        return table[list(TABLES[name])]
    except (OSError, ValueError, KeyError) as error:
        raise EvidenceError(
            f"{path} cannot be read as the {name} of a run ({type(error).__name__}). Judge another run, or run it again."
        ) from None


def _lineage(parts: Sequence[Part]) -> dict[int, int]:
    """attempt -> the step where its rows stop counting: where a later attempt resumed."""
    limits: dict[int, int] = {}
    limit = 2**62
    for attempt in sorted({part.attempt for part in parts}, reverse=True):
        limits[attempt] = limit
        limit = min([limit, *(int(part.start["resumed_from_step"]) for part in parts if part.attempt == attempt)])
    return limits


def _by_attempt(parts: Sequence[Part], limits: Mapping[int, int]) -> list[pd.DataFrame]:
    """Timeline rows of each attempt that count, one row a step and rank."""
    found = []
    for attempt, limit in sorted(limits.items()):
        rows = [pd.DataFrame(part.timeline).assign(rank=part.rank) for part in parts if part.attempt == attempt]
        table = pd.concat(rows, ignore_index=True)
        found.append(table[table["step"] < limit].drop_duplicates(["rank", "step"], keep="last"))
    return found


def _timeline(rows: pd.DataFrame) -> pd.DataFrame:
    """Split the collectives' time: until the last rank arrived is waiting, the rest transfer."""
    lag_ms = (rows.groupby("step")["arrival_ns"].transform("max") - rows["arrival_ns"]) / 1e6
    wait_ms = np.minimum(lag_ms, rows["collective_ms"])
    full = rows.assign(wait_ms=wait_ms, transfer_ms=rows["collective_ms"] - wait_ms)
    return full[list(TIMELINE_COLUMNS)].sort_values(["step", "rank"])


def _ledger(parts: Sequence[Part], limits: Mapping[int, int]) -> pd.DataFrame:
    rows = np.concatenate([part.ledger[part.ledger[:, 0] < limits[part.attempt]] for part in parts])
    table = pd.DataFrame(rows, columns=list(LEDGER_COLUMNS))
    return table.sort_values(list(LEDGER_COLUMNS[:3]), kind="stable", ignore_index=True)


def _lines(parts: Sequence[Part], limits: Mapping[int, int], name: str, columns: Sequence[str]) -> pd.DataFrame:
    """Rows of "curve" (after an update: step <= limit) or "digests" (during one: step < limit)."""
    rows = [
        {"world_size": part.start["world_size"], "rank": part.rank, **row}
        for part in parts
        for row in getattr(part, name)
        if row["step"] < limits[part.attempt] + (name == "curve")
    ]
    table = pd.DataFrame(rows, columns=list(columns))
    if name == "curve":
        return table.astype({"step": "int64", "samples": "int64", "train_loss": "float64", "quality": "float64"})
    return table.astype({"world_size": "int64", "rank": "int64", "step": "int64"})


def _worker_seconds(parts: Sequence[Part], seconds: float, world_sizes: Sequence[int]) -> float:
    """Ranks x seconds; an attempt lasts until the next one has loaded its state, the first from the beginning."""
    if len(set(world_sizes)) == 1:
        return seconds * world_sizes[0]
    starts = {part.attempt: min(int(p.start["t_ns"]) for p in parts if p.attempt == part.attempt) for part in parts}
    end_ns = max(int(part.end["t_ns"]) for part in parts if part.end)
    marks = [end_ns - int(seconds * 1e9), *(starts.get(attempt, end_ns) for attempt in range(1, len(world_sizes))), end_ns]
    return sum(size * max(0, b - a) / 1e9 for size, a, b in zip(world_sizes, marks[:-1], marks[1:], strict=True))
