"""Flight-recorder documents and folders, made small."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

START_NS = 1_790_000_000_000_000_000
STEP_NS = 10_000_000


def entry(place: int, **changed: Any) -> dict[str, Any]:
    """A finished all_reduce of the group of all ranks, as gloo's recorder writes it; `place` counts from 0."""
    return {
        "record_id": place, "pg_id": 0, "process_group": ["0", "default_pg"], "collective_seq_id": place + 1, "p2p_seq_id": 0,
        "op_id": place + 1, "profiling_name": "gloo:all_reduce", "time_created_ns": START_NS + place * STEP_NS,
        "input_sizes": [[4]], "input_dtypes": ["Float"], "output_sizes": [[4]], "output_dtypes": ["Float"], "state": "scheduled",
        "time_discovered_started_ns": 0, "time_discovered_completed_ns": 0, "retired": True, "timeout_ms": 8000, "is_p2p": False,
    } | changed  # fmt: skip


def entries(count: int, *, pending: bool = False, apart_ns: int = 0) -> list[dict[str, Any]]:
    """`count` of them, the last one not over if `pending`; apart_ns, by how much the clock is ahead."""
    made = [entry(place, time_created_ns=START_NS + place * STEP_NS + apart_ns) for place in range(count)]
    return [*made[:-1], made[-1] | {"retired": not pending}]


def document(made: Sequence[dict[str, Any]], *, world_size: int = 4, **changed: Any) -> dict[str, Any]:
    """A rank's whole dump; gloo names its lone group by an empty string."""
    config = {"": {"name": "", "desc": "", "ranks": str(list(range(world_size)))}}
    return {"version": "2.10", "entries": list(made), "pg_config": config, "pg_status": {}} | changed


def write(path: Path, value: Any) -> Path:
    """A JSON file, and its folder if need be."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value))
    return path


def job(folder: Path, counts: Sequence[int] = (8, 8, 7, 8), *, name: str = "rank{}.hang.json", apart_ns: int = 0) -> Path:
    """A hung job: each rank has issued so many operations, and all but the shortest wait in their last one."""
    for rank, count in enumerate(counts):
        made = entries(count, pending=count > min(counts), apart_ns=apart_ns)
        write(folder / name.format(rank), document(made, world_size=len(counts)))
    return folder
