"""Merging parts range by range gives what merging them all at once gives, in memory that does not grow with the run."""

import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers_parts import ledger_of
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer import merge, runlog
from trainer.config import TrainJob
from trainer.parts import TIMELINE_PART, Part, PartWriter, part_folder, read_parts
from validation.records import LEDGER_COLUMNS, TIMELINE_COLUMNS, RunRecord

# One rank's steps in one attempt: where it starts, and what it adds to the step from row to row (0: noted again; below: a second run)
walks = st.tuples(st.integers(0, 9), st.lists(st.sampled_from([0, 1, 1, 1, 2, -3]), max_size=12))
runs = st.lists(st.lists(walks, min_size=1, max_size=3), min_size=1, max_size=3)  # attempts x ranks


def leave(run: Path, attempt: int, rank: int, steps: np.ndarray, draw: np.random.Generator) -> None:
    """A finished part with these steps, random times and one to three ledger rows a step."""
    part = PartWriter(part_folder(run, attempt, rank))
    facts = {
        "resumed_from_step": int(steps.min()) if len(steps) else 0,
        "world_size": 1,
        "seed": 0,
        "t_ns": 0,
        "device": "cpu",
        "devices": 1,
    }
    part.write("start", facts | {"clock_offset_ns": rank * 1000})
    table = np.zeros(len(steps), dtype=TIMELINE_PART)
    for name in TIMELINE_PART.names:
        kind = TIMELINE_PART[name]
        table[name] = draw.integers(0, 10**9, len(steps)) if kind == "<i8" else draw.uniform(0, 50, len(steps))
    table["step"] = steps
    counts = draw.integers(1, 4, len(steps))
    lanes, ids = (draw.integers(0, 8, counts.sum()) for _ in range(2))
    each = [np.repeat(steps, counts), lanes, np.zeros_like(lanes), ids]  # one position for all: no run of walks covers every position
    part.add_ledger(ledger_of(np.stack(each, axis=1)))
    part.add_timeline(table)
    part.flush()
    part.write("end", {"steps": 1, "state_sha256": "a", "peak_memory_mib": 1.0, "t_ns": 1})


def all_at_once(parts: list[Part]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Timeline and ledger by the textbook: everything in memory, then sorted."""
    limits, tables, ledgers = merge.lineage(parts), [], []
    for part in parts:
        rows = pd.DataFrame(part.timeline.read(0, len(part.timeline))).assign(rank=part.rank, attempt=part.attempt)
        rows[["start_ns", "arrival_ns"]] += part.clock_offset_ns
        tables.append(rows[rows["step"] < limits[part.attempt]])
        ledger = pd.DataFrame(part.ledger.read(0, len(part.ledger)))
        ledgers.append(ledger[ledger["step"] < limits[part.attempt]])
    table = pd.concat(tables).drop_duplicates(["attempt", "rank", "step"], keep="last")
    lag_ms = (table.groupby(["attempt", "step"])["arrival_ns"].transform("max") - table["arrival_ns"]) / 1e6
    table["wait_ms"] = np.minimum(lag_ms, table["collective_ms"])
    table["transfer_ms"] = table["collective_ms"] - table["wait_ms"]
    table = table.sort_values(["attempt", "step", "rank"], ignore_index=True)[list(TIMELINE_COLUMNS)]
    ordered = pd.concat(ledgers).sort_values(list(LEDGER_COLUMNS[:3]), kind="stable", ignore_index=True)
    return table, ordered[list(LEDGER_COLUMNS)]


def textbook_throughput(table: pd.DataFrame, first_step: int) -> float:
    """Samples over the longest rank's time from its first timed step to its end."""
    timed = table[table["step"] >= first_step]
    ends = (timed["start_ns"] + timed["step_ms"] * 1e6).groupby(timed["rank"]).max()
    return float(timed["samples"].sum() / ((ends - timed.groupby("rank")["start_ns"].min()).max() / 1e9)) if len(timed) else np.nan


def collected(run: Path, ranks: int) -> RunRecord:
    """The record of a run whose last attempt had so many ranks."""
    job = TrainJob(recipe="none", folder=str(run), world_size=ranks)
    return runlog.collect(job, attempts=1, recoveries=(), faults_fired=(), seconds=1.0, world_sizes=(ranks,))


@settings(max_examples=40, deadline=None)
@given(run=runs, seed=st.integers(0, 99))
@pytest.mark.parametrize(("chunk_bytes", "block_rows"), [(1, 1), (400, 3), (4 << 20, 1 << 16)], ids=["a step", "some steps", "one chunk"])
def test_same_as_all_at_once(chunk_bytes: int, block_rows: int, run: list, seed: int) -> None:
    """Lost, repeated, missing and out-of-order steps come out the same whatever fits into one chunk."""
    draw = np.random.default_rng(seed)
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(merge, "CHUNK_BYTES", chunk_bytes)
        patch.setattr(merge, "BLOCK_ROWS", block_rows)
        folder = Path(name)
        for attempt, ranks in enumerate(run):
            for rank, (first, walk) in enumerate(ranks):
                leave(folder, attempt, rank, np.maximum(0, first + np.cumsum([0, *walk], dtype=np.int64)[: len(walk)]), draw)
        record, (timeline, ledger) = collected(folder, len(run[-1])), all_at_once(read_parts(folder))

        pd.testing.assert_frame_equal(runlog.load_timeline(folder), timeline, check_exact=True)
        pd.testing.assert_frame_equal(runlog.load_ledger(folder), ledger, check_exact=True)
        assert record.ledger_sha256 == hashlib.sha256(ledger.to_numpy(dtype="<i8").tobytes()).hexdigest()
        first_step = int(read_parts(folder)[-len(run[-1])].start["resumed_from_step"])
        assert record.throughput_sps == pytest.approx(textbook_throughput(timeline, first_step), rel=1e-12, nan_ok=True)


def test_small_run_has_the_bytes_of_one_frame(tmp_path: Path) -> None:
    """A run that fits into one chunk leaves the file that pandas would write for its frame."""
    leave(tmp_path, 0, 0, np.arange(30), np.random.default_rng(1))
    collected(tmp_path, 1)

    for name in ("timeline", "ledger"):
        pd.read_parquet(tmp_path / f"{name}.parquet").to_parquet(tmp_path / "again", index=False)
        assert (tmp_path / f"{name}.parquet").read_bytes() == (tmp_path / "again").read_bytes()


GROWTH = """
import resource, sys
from pathlib import Path
from test_merge import collected
collected(Path(sys.argv[1]), 2)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
collected(Path(sys.argv[2]), 2)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def test_memory_does_not_grow_with_the_run(tmp_path: Path) -> None:
    """After a run of 30,000 rows, one of ten times as many takes 15 to 30 MiB more; merged all at once it took 140."""
    draw = np.random.default_rng(0)
    for name, steps in (("short", 15_000), ("long", 150_000)):
        for attempt, rank in ((0, 0), (0, 1), (1, 0), (1, 1)):
            leave(tmp_path / name, attempt, rank, np.arange(steps // 2) + attempt * steps // 2, draw)

    command = [sys.executable, "-c", GROWTH, str(tmp_path / "short"), str(tmp_path / "long")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parent)
    assert float(done.stdout) < 48
    assert len(runlog.load_timeline(tmp_path / "long")) == 300_000
