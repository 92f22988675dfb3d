"""What a file is, by its name."""

from pathlib import Path

import pytest

from infra.dump_names import classify


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("rank0.hang.json", ("dump", 0, 1, False, "")),
        ("rank12.after.json", ("dump", 12, 1, True, "")),
        ("rank0.hang2.json", ("dump", 0, 2, False, "")),
        ("rank0.hang.2.json", ("dump", 0, 2, False, "")),
        ("rank0.snapshot1.json", ("dump", 0, 1, False, "")),
        ("snapshot-2/rank3.json", ("dump", 3, 2, False, "")),
        ("2/rank3.json", ("dump", 3, 2, False, "")),
        ("hang2_rank3.json", ("dump", 3, 2, False, "")),
        ("rank3/hang2.json", ("dump", 3, 2, False, "")),
        ("after/rank3.json", ("dump", 3, 1, True, "")),
        ("nccl_trace_rank_7", ("dump", 7, 1, False, "")),
        ("nccl_trace_rank_7.json", ("dump", 7, 1, False, "")),
        ("trace_0.json", ("dump", 0, 1, False, "")),
        ("nccl_trace.3", ("dump", 3, 1, False, "")),
        ("node1/nccl_trace_rank_9", ("dump", 9, 1, False, "")),
        ("rank_0_snapshot_2.pkl", ("dump", 0, 2, False, "")),
        ("job-a/rank0.hang.json", ("dump", 0, 1, False, "job-a")),
        ("incidents/001/rank3.hang2.json", ("dump", 3, 2, False, "incidents/001")),
        ("rank1.stack.txt", ("stack", 1, 1, False, "")),
        ("rank1.stack2.txt", ("stack", 1, 2, False, "")),
        ("rank1.result.txt", ("result", 1, 1, False, "")),
        ("exitcodes.json", ("exits", -1, 1, False, "")),
        ("states.json", ("states", -1, 1, False, "")),
        ("incident.json", ("incident", -1, 1, False, "")),
        ("timeline.parquet", ("timeline", -1, 1, False, "")),
        ("trace-AR.parquet", ("trace", -1, 1, False, "")),
        ("flight/attempt-0-rank-3.ring", ("ring", 3, 1, False, "")),
    ],
)
def test_evidence_is_known_by_its_name(name: str, expected: tuple[object, ...]) -> None:
    """Kind, rank, snapshot, whether it was taken too late, and the folder of its job."""
    found = classify(Path("/a"), Path("/a") / name)

    assert found is not None
    assert (found.kind, found.rank, found.number, found.is_late, found.job) == expected


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "LICENSE",
        "labels.json",
        "run.json",
        "group.jsonl",
        "ms-AR.json",
        "ledger.parquet",
        "rank0.log",
        ".rank0.json",
        "0006-one-result.md",
    ],
)
def test_other_files_are_passed_over(name: str) -> None:
    """They are no evidence."""
    assert classify(Path("/a"), Path("/a") / name) is None
