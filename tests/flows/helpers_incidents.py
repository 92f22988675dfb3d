"""An incident's folder as a run leaves it, made by hand: two ranks, rank 1 never comes to the second all-reduce."""

import json
from pathlib import Path
from typing import Any

SECOND_NS = 1_767_225_600_000_000_000  # 2026-01-01 00:00 UTC


def dump(rank: int, operations: int, *, step: int, phase: str) -> dict[str, Any]:
    """A flight-recorder file whose last operation is not over unless this rank is the late one."""
    entries = [
        {
            "record_id": number, "process_group": ["0", "default_pg"], "collective_seq_id": number + 1, "p2p_seq_id": 0, "op_id": number,
            "profiling_name": "gloo:all_reduce", "time_created_ns": SECOND_NS + number * 10**9, "input_sizes": [[4]],
            "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "scheduled", "is_p2p": False,
            "retired": number + 1 < operations or rank == 1, "timeout_ms": 8000, "step": number, "where": "loop.py:88 train_step",
            "left_ns": 0,
        }
        for number in range(operations)
    ]  # fmt: skip
    marker = {"step": step, "phase": phase, "micro": 0, "since_ns": SECOND_NS, "beat_ns": SECOND_NS + 4 * 10**9, "note": ""}
    own = {
        "version": 1, "rank": rank, "world_size": 2, "taken_ns": SECOND_NS + 5 * 10**9, "wrapped": False,
        "groups": {"0": {"ranks": [0, 1], "description": "default_pg"}}, "marker": marker,
    }  # fmt: skip
    return {
        "version": "2.10", "pg_config": {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}, "entries": entries, "sea_trial": own
    }  # fmt: skip


def record(**changes: Any) -> dict[str, Any]:
    """incident.json."""
    finding = {
        "verdict": "hang", "kind": "missing_participant", "ranks": [1], "group": "0",
        "collective": {"op": "all_reduce", "seq": 2, "where": "loop.py:88 train_step"}, "phase": "backward", "slowdown": 0.0,
        "explanation": "Rank 1 never came to all_reduce 2", "action": "look at rank 1", "owner": "training", "confidence": "high",
        "waiting": [0], "evidence": ["rank 0: inside all_reduce 2", "rank 1: <left> after all_reduce 1"],
    }  # fmt: skip
    usual = {
        "version": 1, "number": 3, "attempt": 0, "world_size": 2, "threshold_s": 5.0, "stalled_s": 5.25, "detected_ns": SECOND_NS,
        "planned": "", "finding": finding, "mitigation": {"action": "restart", "text": "restarted on 2 ranks", "left_out": []},
    }  # fmt: skip
    return usual | changes


def make_incident(folder: Path, **changes: Any) -> Path:
    """The whole folder."""
    folder.mkdir(parents=True)
    (folder / "rank0.hang.json").write_text(json.dumps(dump(0, 2, step=1, phase="collective")))
    (folder / "rank1.hang.json").write_text(json.dumps(dump(1, 1, step=1, phase="backward")))
    (folder / "rank1.stack.txt").write_text('Current thread 0x01 (most recent call first):\n  File "/x/loop.py", line 7 in wait\n')
    (folder / "states.json").write_text(json.dumps({"1": {"0": "S", "1": "R"}}))
    (folder / "incident.json").write_text(json.dumps(record(**changes)))
    return folder
