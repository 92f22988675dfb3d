"""What a run leaves: parts survive a torn tail, attempts merge along the surviving lineage, and records come back as they were."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers_parts import ledger_of

from trainer import parts, runlog
from trainer.config import TrainJob
from trainer.parts import TIMELINE_PART, PartWriter, part_folder, read_parts
from validation.errors import EvidenceError
from validation.records import Recovery

MS = 1_000_000  # ns
RECOVERY = Recovery(
    fault="kill:rank=1,step=5,phase=backward,attempt=0", world_size=2, resumed_world_size=1, resumed_from_step=4, detect_s=0.1,
    teardown_s=0.05, import_s=0.05, rendezvous_s=0.1, load_s=0.1, first_step_s=0.1, total_s=0.5,
)  # fmt: skip


def tiny_job(folder: Path, *, world_size: int = 1) -> TrainJob:
    """A job that nobody runs."""
    folder.mkdir(parents=True, exist_ok=True)
    return TrainJob(recipe="tiny", folder=str(folder), world_size=world_size)


def rows(steps: range, *, samples: int, arrival_ms: int = 0, step_ms: float = 10.0) -> np.ndarray:
    """Timeline rows of steps that begin 10 ms apart, with 6 ms in collectives."""
    table = np.zeros(len(steps), dtype=TIMELINE_PART)
    table["step"], table["samples"], table["step_ms"], table["collective_ms"] = steps, samples, step_ms, 6.0
    table["start_ns"] = np.array(steps) * 10 * MS
    table["arrival_ns"] = table["start_ns"] + arrival_ms * MS
    return table


def leave_part(
    run: Path, attempt: int, rank: int, steps: range, *, world_size: int, end: bool = True, arrival_ms: int = 0, clock: int | None = None
) -> None:
    """The part of one rank that did some steps, four samples each over all ranks; `clock`, ns that its clock is behind rank 0's."""
    part = PartWriter(part_folder(run, attempt, rank))
    start = {
        "resumed_from_step": steps.start,
        "world_size": world_size,
        "seed": 3,
        "t_ns": attempt * 4 * 10**9,
        "device": "cpu",
        "devices": 2,
    }
    part.write("start", start if clock is None else start | {"clock_offset_ns": clock, "clock_uncertainty_ns": 9})
    share = 4 // world_size
    for step in steps:
        places = range(4 * step + rank * share, 4 * step + (rank + 1) * share)
        part.add_ledger(ledger_of([(step, place % 4, place, 100 + place) for place in places]))
        part.add_line("digests", {"step": step, "stage": "reduced", "tensor": "w", "sha256": f"{attempt}"})
    if rank == 0:
        part.add_line("curve", {"step": steps.stop, "samples": 4 * steps.stop, "train_loss": 0.5, "quality": float("nan")})
    table = rows(steps, samples=share, arrival_ms=arrival_ms)
    for name in ("start_ns", "arrival_ns"):
        table[name] -= clock or 0
    part.add_timeline(table)
    part.flush()
    if end:
        part.write("end", {"steps": steps.stop, "state_sha256": "ab", "peak_memory_mib": 7.5, "t_ns": 10 * 10**9})


def collected(run: Path) -> pd.DataFrame:
    """Two ranks lost in step 6, resumed by one from step 4; ten seconds in all."""
    for rank in (0, 1):
        leave_part(run, 0, rank, range(6 + rank), world_size=2, end=False, arrival_ms=rank * 2)
    leave_part(run, 1, 0, range(4, 8), world_size=1)
    job = tiny_job(run, world_size=2)
    runlog.collect(job, attempts=2, recoveries=(RECOVERY,), faults_fired=("kill",), seconds=10.0, world_sizes=(2, 1))
    return runlog.load_ledger(run)


def test_lost_steps_count_once(tmp_path: Path) -> None:
    """Steps done before the death and again after it are those of the attempt that survived."""
    ledger, timeline, digests = collected(tmp_path), runlog.load_timeline(tmp_path), runlog.load_digests(tmp_path)

    assert ledger["position"].tolist() == list(range(32))
    assert timeline.groupby("step")["rank"].apply(list).tolist() == [[0, 1]] * 4 + [[0]] * 4
    assert digests.groupby("step")["sha256"].unique().str.len().eq(1).all()
    assert digests.query("step >= 4")["sha256"].unique().tolist() == ["1"]
    assert runlog.load_curve(tmp_path)["step"].tolist() == [8]


def test_record_comes_back_as_it_was(tmp_path: Path) -> None:
    """run.json holds the whole record; each attempt costs its own ranks for its own time."""
    collected(tmp_path)
    run = runlog.load_run(tmp_path)

    assert run.recoveries == (RECOVERY,)
    assert (run.attempts, run.steps, run.world_size, run.seed, run.peak_memory_mib) == (2, 8, 2, 3, 7.5)
    assert run.worker_seconds == pytest.approx(2 * 4.0 + 1 * 6.0)
    assert run.throughput_sps == pytest.approx(16 / 0.040)
    assert run.ledger_sha256 == runlog.ledger_sha256(runlog.load_ledger(tmp_path).sample(frac=1.0, random_state=1))


def test_waiting_is_the_lag_behind_the_last_arrival(tmp_path: Path) -> None:
    """The early rank waits 2 ms for the late one; the rest of its 6 ms is transfer."""
    collected(tmp_path)
    first = runlog.load_timeline(tmp_path).query("step < 4").groupby("rank")[["wait_ms", "transfer_ms"]].first()

    assert first.loc[0].tolist() == [2.0, 4.0]
    assert first.loc[1].tolist() == [0.0, 6.0]


def test_torn_tails_are_left_out(tmp_path: Path) -> None:
    """Half a row or half a line, as SIGKILL in the middle of a write leaves it, is not read."""
    leave_part(tmp_path, 0, 0, range(3), world_size=1)
    folder = part_folder(tmp_path, 0, 0)
    for name, tail in (("timeline.bin", b"\0" * 9), ("ids.bin", b"\0" * 7), ("spans.bin", b"\0" * 31), ("digests.jsonl", b'{"step":')):
        (folder / name).write_bytes((folder / name).read_bytes() + tail)

    [part] = read_parts(tmp_path)
    assert (len(part.timeline), len(part.ledger), len(part.lines("digests"))) == (3, 12, 3)
    assert part.ledger.read(10, 12)["position"].tolist() == [10, 11]


def test_clocks_are_laid_over_one_another(tmp_path: Path) -> None:
    """Times of a rank whose clock is an hour behind are moved to rank 0's before waiting is told from transfer."""
    hour_ns = 3600 * 10**9
    for rank, clock in ((0, None), (1, hour_ns)):
        leave_part(tmp_path, 0, rank, range(3), world_size=2, arrival_ms=rank * 2, clock=clock)
    runlog.collect(tiny_job(tmp_path, world_size=2), attempts=1, recoveries=(), faults_fired=(), seconds=1.0, world_sizes=(2,))
    timeline = runlog.load_timeline(tmp_path)

    assert timeline.groupby("rank")["wait_ms"].unique().str[0].tolist() == [2.0, 0.0]
    assert timeline.groupby("step")["start_ns"].nunique().eq(1).all()


def test_large_ledger_does_not_wait_for_the_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows above the limit are appended at once, and none is lost or doubled by the flush that follows."""
    monkeypatch.setattr(parts, "LEDGER_BYTES", 100)
    leave_part(tmp_path, 0, 0, range(1), world_size=1)
    part = PartWriter(part_folder(tmp_path, 0, 0))
    part.add_ledger(ledger_of([(1, 0, place, place) for place in range(4)]))
    [before] = [len(part.ledger) for part in read_parts(tmp_path)]
    part.add_ledger(ledger_of([(1, 1, 4, 4)]))
    part.add_timeline(rows(range(1, 2), samples=5))
    part.flush()

    [after] = read_parts(tmp_path)
    assert (before, len(after.ledger)) == (8, 9)


def test_later_row_of_a_step_counts(tmp_path: Path) -> None:
    """A step noted before and after its checkpoint has one row, the later one."""
    leave_part(tmp_path, 0, 0, range(2), world_size=1)
    again = PartWriter(part_folder(tmp_path, 0, 0))
    again.add_timeline(rows(range(1, 2), samples=4, step_ms=77.0))
    again.flush()
    runlog.collect(tiny_job(tmp_path), attempts=1, recoveries=(), faults_fired=(), seconds=1.0, world_sizes=(1,))

    assert runlog.load_timeline(tmp_path)["step_ms"].tolist() == [10.0, 77.0]


def test_unfinished_group_has_no_record(tmp_path: Path) -> None:
    """A rank without an end, or no rank at all, is no run."""
    leave_part(tmp_path / "one", 0, 0, range(2), world_size=2)
    for folder in (tmp_path / "one", tmp_path / "none"):
        with pytest.raises(EvidenceError, match=r"of 2 ranks of the last attempt left an end.*run it again"):
            runlog.collect(tiny_job(folder), attempts=1, recoveries=(), faults_fired=(), seconds=1.0, world_sizes=(2,))


@pytest.mark.parametrize("damage", [b"", b"{}", b"\xff\xfe"], ids=["empty", "no fields", "no text"])
def test_damaged_records_are_refused(damage: bytes, tmp_path: Path) -> None:
    """A record or table that cannot be read is no evidence, and says which file."""
    (tmp_path / "run.json").write_bytes(damage)
    (tmp_path / "ledger.parquet").write_bytes(damage)

    with pytest.raises(EvidenceError, match=r"run\.json is no record"):
        runlog.load_run(tmp_path)
    with pytest.raises(EvidenceError, match=r"ledger\.parquet cannot be read"):
        runlog.load_ledger(tmp_path)
    with pytest.raises(EvidenceError, match=r"timeline\.parquet cannot be read"):
        runlog.load_timeline(tmp_path)


def test_machine_names_no_host() -> None:
    """A machine record says what was measured on, without names or addresses."""
    here = runlog.machine()

    assert here.devices >= 1
    assert here.memory_gib > 0
    assert here.system.startswith("Linux")
    assert runlog.machine(device="H200", devices=8).devices == 8


def test_reading_a_run_does_not_import_torch() -> None:
    """The process that decides reads records, plans faults and asks the order without torch."""
    modules = "runlog, merge, parts, order, lanes, faults, streams, config, world"
    code = f"import sys; from trainer import {modules}; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_checkpoint_bytes_are_those_of_the_newest(tmp_path: Path) -> None:
    """All files of the newest sealed checkpoint count; an unsealed one and an absent one do not."""
    for name, size in (("step-00000002", 3), ("step-00000010", 5), ("step-00000020.partial", 9)):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
        (tmp_path / "checkpoints" / name / "state.json").write_bytes(b"x" * size)

    assert runlog.checkpoint_bytes(tmp_path) == 5
    assert runlog.checkpoint_bytes(tmp_path / "nowhere") == 0
