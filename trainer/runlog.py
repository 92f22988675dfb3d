"""What a run leaves in its folder, and reading it back. Torch-free.

    run.json  timeline.parquet  ledger.parquet  curve.parquet  digests.parquet  gradients.safetensors  model.safetensors
    consumed.parquet  streams.parquet  collectives.parquet  updates.parquet  states.parquet  (of an audited run: trainer/audit_tables.py)
    checkpoints/  (trainer/checkpoint.py)      parts/  (trainer/parts.py: what the tables below were merged from)

The merge (trainer/merge.py) takes the same memory for a million steps as for ten thousand; so do the numbers that come out of it.
Reading a table back takes all of it at once: gates read runs of some hundred steps.
"""

import hashlib
import json
import math
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil

from trainer.audit_tables import AUDIT_TABLES, merged, typed
from trainer.config import TrainJob
from trainer.merge import Chunk, ledger_chunks, lineage, timeline_chunks, write_chunks
from trainer.parts import Part, read_parts
from validation.canonical import canonical_json
from validation.errors import EvidenceError
from validation.records import (
    CURVE_COLUMNS,
    LEDGER_COLUMNS,
    TIMELINE_COLUMNS,
    Machine,
    Recovery,
    RunRecord,
)

TABLES = {
    "timeline": TIMELINE_COLUMNS, "ledger": LEDGER_COLUMNS, "curve": CURVE_COLUMNS,
    **{name: table.columns for name, table in AUDIT_TABLES.items()},
}  # fmt: skip


def collect(
    job: TrainJob,
    *,
    attempts: int,
    recoveries: tuple[Recovery, ...],
    faults_fired: tuple[str, ...],
    seconds: float,
    world_sizes: tuple[int, ...],
    unsaved: tuple[str, ...] = (),
    refused: tuple[str, ...] = (),
) -> RunRecord:
    """Merge the parts of all attempts into the run's tables and its record, after the last attempt finished.

    Args: seconds, wall clock of the whole group; world_sizes, of each attempt; unsaved, checkpoints that could not be written;
        refused, those that could not be used.
    Raises: EvidenceError when a rank of the last attempt left no end, or rows of the ledger are missing.
    """
    folder = Path(job.folder)
    parts = read_parts(folder)
    last = [part for part in parts if part.attempt == max((p.attempt for p in parts), default=0)]
    if len(last) != world_sizes[-1] or not all(part.end for part in last):
        raise EvidenceError(
            f"run {folder.name}: {sum(bool(part.end) for part in last)} of {world_sizes[-1]} ranks of the last attempt left an end. The "
            "run cannot be summed up. Look into logs/ of its folder and run it again in an empty one."
        )
    limits = lineage(parts)
    spans, ledger = Spans(int(last[0].start["resumed_from_step"]) + job.warmup_steps), LedgerDigest()
    write_chunks(folder / "timeline.parquet", TIMELINE_COLUMNS, timeline_chunks(parts, limits), spans.add)
    write_chunks(folder / "ledger.parquet", LEDGER_COLUMNS, ledger_chunks(parts, limits), ledger.add)
    if ledger.rows < ledger.positions and not last[0].start.get("own_order"):  # whose positions are numbers without a meaning
        raise EvidenceError(
            f"run {folder.name}: the ledger has {ledger.rows} of the {ledger.positions} positions that were trained; row files of earlier "
            "attempts are missing or cut short, so it cannot be shown which samples were used. The checkpoints are not touched by this. "
            f"Bring {folder / 'parts'} back (from a backup, or with --mirror from the store into an empty folder), or train anew."
        )
    _curve(parts, limits).to_parquet(folder / "curve.parquet", index=False)
    for name in AUDIT_TABLES if job.audit else ("digests",):
        merged(name, parts, limits).to_parquet(folder / f"{name}.parquet", index=False)
    record = RunRecord(
        recipe=job.recipe, world_size=job.world_size, parallel=job.parallel,
        reduction=last[0].start.get("reduction", job.reduction), precision=job.precision,
        steps=int(last[0].end["steps"]), seed=int(last[0].start["seed"]), state_sha256=last[0].end["state_sha256"],
        state_sha256_by_rank=tuple(part.end["state_sha256"] for part in last), ledger_sha256=ledger.sha256,
        throughput_sps=spans.throughput_sps, seconds=seconds, worker_seconds=_worker_seconds(parts, seconds, world_sizes),
        attempts=attempts, faults_fired=faults_fired, recoveries=recoveries,
        peak_memory_mib=max(part.end["peak_memory_mib"] for part in parts if part.end),
        machine=machine(device=last[0].start["device"], devices=int(last[0].start["devices"])), unsaved=unsaved, refused=refused,
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
        for name in ("state_sha256_by_rank", "faults_fired", "unsaved", "refused"):
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
    """DIGEST_COLUMNS, sorted by (step, rank), stages as they come to be, tensors in the model's order."""
    return _load(folder, "digests")


def load_consumed(folder: str | Path) -> pd.DataFrame:
    """CONSUMED_COLUMNS, sorted by (step, rank, micro), samples in order. Like the next ones empty of a run without an audit."""
    return _load_audited(folder, "consumed")


def load_streams(folder: str | Path) -> pd.DataFrame:
    """STREAM_COLUMNS, sorted by all of them."""
    return _load_audited(folder, "streams")


def load_collectives(folder: str | Path) -> pd.DataFrame:
    """COLLECTIVE_COLUMNS of the last attempt, sorted by all of them."""
    return _load_audited(folder, "collectives")


def load_updates(folder: str | Path) -> pd.DataFrame:
    """UPDATE_COLUMNS, sorted by (step, rank)."""
    return _load_audited(folder, "updates")


def load_states(folder: str | Path) -> pd.DataFrame:
    """STATE_COLUMNS of all attempts, sorted by (attempt, rank), as they came to be."""
    return _load_audited(folder, "states")


def load_evaluation(folder: str | Path) -> dict[str, Any]:
    """What an audited run's last own evaluation counted: sample_ids in order, quality, plain_quality (of one process on the same weights).

    Raises EvidenceError when there is none.
    """
    path = Path(folder) / "evaluation.json"
    try:
        facts = json.loads(path.read_bytes())
        ids = tuple(int(sample_id) for sample_id in facts["sample_ids"])
        return {"sample_ids": ids, "quality": float(facts["quality"]), "plain_quality": float(facts["plain_quality"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise EvidenceError(
            f"{path} says nothing of an evaluation ({type(error).__name__}): the run measured no quality, was not audited, or its recipe "
            "brings no hooks.evaluate. Run it again with all three."
        ) from None


def checkpoint_bytes(folder: str | Path) -> int:
    """Size of a run's newest sealed checkpoint, all its files; 0 when it has none."""
    root = Path(folder) / "checkpoints"
    sealed = sorted(path for name in ("step-*", "own-step-*") for path in root.glob(name) if not path.suffix)
    return sum(file.stat().st_size for file in sealed[-1].rglob("*") if file.is_file()) if sealed else 0


class LedgerDigest:
    """sha256 of sorted ledger rows as little-endian int64, row after row."""

    def __init__(self) -> None:
        self._total = hashlib.sha256()
        self.rows = 0
        self.positions = 0  # up to the highest one

    def add(self, rows: Chunk) -> None:
        """Take the next rows."""
        self.rows += len(rows["position"])
        self.positions = max(self.positions, int(rows["position"].max(initial=-1)) + 1)
        self._total.update(np.stack([rows[name] for name in LEDGER_COLUMNS], axis=1).astype("<i8").tobytes())

    @property
    def sha256(self) -> str:
        """Of all rows so far, 64 hex digits."""
        return self._total.hexdigest()


@dataclass(slots=True)
class Spans:
    """Samples and time of the steps from `first_step` on, rank by rank."""

    first_step: int
    samples: int = 0
    starts_ns: dict[int, int] = field(default_factory=dict)  # by rank, of its first timed step
    ends_ns: dict[int, float] = field(default_factory=dict)  # by rank, of its last

    def add(self, rows: Chunk) -> None:
        """Take timeline rows, in any order."""
        timed = rows["step"] >= self.first_step
        ranks, starts_ns = rows["rank"][timed], rows["start_ns"][timed]
        ends_ns = starts_ns + rows["step_ms"][timed] * 1e6
        self.samples += int(rows["samples"][timed].sum())
        for rank in np.unique(ranks).tolist():
            own = ranks == rank
            self.starts_ns[rank] = min(int(starts_ns[own].min()), self.starts_ns.get(rank, 2**62))
            self.ends_ns[rank] = max(float(ends_ns[own].max()), self.ends_ns.get(rank, -math.inf))

    @property
    def throughput_sps(self) -> float:
        """Samples/s over all ranks, by the rank that took longest; NaN without a step."""
        return self.samples / (max(self.ends_ns[rank] - self.starts_ns[rank] for rank in self.ends_ns) / 1e9) if self.ends_ns else math.nan


def ledger_sha256(ledger: pd.DataFrame) -> str:
    """sha256 of the sorted rows as little-endian int64, row after row."""
    digest = LedgerDigest()
    digest.add(_columns(ledger.sort_values(list(LEDGER_COLUMNS[:3]), kind="stable"), LEDGER_COLUMNS))
    return digest.sha256


def throughput_sps(timeline: pd.DataFrame, first_step: int) -> float:
    """Samples/s over all ranks from `first_step` on, by the rank that took longest; NaN when no step is left.

    What lies between steps (evaluation, checkpoints) is in the time.
    """
    spans = Spans(first_step)
    spans.add(_columns(timeline, TIMELINE_COLUMNS))
    return spans.throughput_sps


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


def _load_audited(folder: str | Path, name: str) -> pd.DataFrame:
    """A table of an audit; without rows when the run had none."""
    if not (Path(folder) / f"{name}.parquet").exists():
        load_run(folder)  # a folder without a finished run has no tables at all
        return typed(pd.DataFrame(columns=list(TABLES[name])))
    return _load(folder, name)


def _columns(table: pd.DataFrame, names: Sequence[str]) -> Chunk:
    return {name: table[name].to_numpy() for name in names}


def _curve(parts: Sequence[Part], limits: Mapping[int, int]) -> pd.DataFrame:
    """Points measured after an update that counts."""
    rows = [row for part in parts for row in part.lines("curve") if row["step"] <= limits[part.attempt]]
    return pd.DataFrame(rows, columns=list(CURVE_COLUMNS)).astype(
        {"step": "int64", "samples": "int64", "train_loss": "float64", "quality": "float64"}
    )


def _worker_seconds(parts: Sequence[Part], seconds: float, world_sizes: Sequence[int]) -> float:
    """Ranks x seconds; an attempt lasts until the next one has loaded its state, the first from the beginning."""
    if len(set(world_sizes)) == 1:
        return seconds * world_sizes[0]
    starts = {part.attempt: min(_t_ns(p, p.start) for p in parts if p.attempt == part.attempt) for part in parts}
    end_ns = max(_t_ns(part, part.end) for part in parts if part.end)
    marks = [end_ns - int(seconds * 1e9), *(starts.get(attempt, end_ns) for attempt in range(1, len(world_sizes))), end_ns]
    return sum(size * max(0, b - a) / 1e9 for size, a, b in zip(world_sizes, marks[:-1], marks[1:], strict=True))


def _t_ns(part: Part, facts: Mapping[str, Any]) -> int:
    """When a part's start or end was written, on rank 0's clock."""
    return int(facts["t_ns"]) + part.clock_offset_ns
