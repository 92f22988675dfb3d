"""A folder of evidence: what is read of it, what is said of the rest, and when there is nothing."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from helpers_dumps import START_NS, document, entries, job, write

from infra import dump_pool
from infra.dumps import read_evidence, read_folder, without_cut
from infra.stack_files import parse_stack
from validation.errors import DataError
from validation.hang_stacks import COLLECTING
from validation.records import TIMELINE_COLUMNS

STACK = """Current thread 0x00007fd3761256c0 (most recent call first):
  File "final.py", line 52 in wd
  File "python3.11/threading.py", line 982 in run
  File "python3.11/threading.py", line 1002 in _bootstrap

Thread 0x00007fd39788cb80 (most recent call first):
  File "torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "final.py", line 12 in body
  File "<string>", line 1 in <module>
"""


def test_a_folder_of_one_hung_job_is_read_whole(tmp_path: Path) -> None:
    """Dumps, late dumps, stacks, exit codes, results and states, rank by rank."""
    job(tmp_path)
    job(tmp_path, (8, 8, 8, 8), name="rank{}.after.json")
    (tmp_path / "rank2.stack.txt").write_text(STACK)
    (tmp_path / "rank2.result.txt").write_text("RuntimeError: timed out\n")
    write(tmp_path / "exitcodes.json", {"0": 0, "1": -6, "2": None, "3": -9})
    write(tmp_path / "states.json", {"1": {"0": "S"}, "2": {"0": "T"}})
    (tmp_path / "README.md").write_text("not evidence")

    evidence = read_evidence(tmp_path)

    assert (evidence.world_size, evidence.problems) == (4, ())
    assert [one.exit_code for one in evidence.ranks.values()] == [0, -6, None, -9]
    assert [len(one.dumps) for one in evidence.ranks.values()] == [len(one.late_dumps) for one in evidence.ranks.values()] == [1] * 4
    assert (evidence.ranks[0].state, evidence.ranks[2].result) == ("T", "RuntimeError: timed out")
    assert [thread.is_main for thread in evidence.ranks[2].stacks[0]] == [False, True]
    assert evidence.ranks[2].stacks[0][1].frames[1] == ("final.py", 12, "body")


@pytest.mark.parametrize(
    "names",
    [
        ("rank{}.hang.json", "rank{}.hang2.json"),
        ("rank{}.hang.1.json", "rank{}.hang.2.json"),
        ("rank{}.snapshot1.json", "rank{}.snapshot2.json"),
        ("snapshot-1/rank{}.json", "snapshot-2/rank{}.json"),
        ("rank{}.hang2.json", "rank{}.hang.json"),
    ],
    ids=["hang2", "hang.2", "snapshot2", "folders", "wrong way round"],
)
def test_snapshots_stand_in_the_order_in_which_they_were_taken(tmp_path: Path, names: tuple[str, str]) -> None:
    """By their newest operation, whatever they are called."""
    for name, count in zip(names, (5, 8), strict=True):
        job(tmp_path, (count,) * 4, name=name)

    assert [[len(dump.seq) for dump in one.dumps] for one in read_evidence(tmp_path).ranks.values()] == [[5, 8]] * 4


def test_what_a_gone_process_left_after_it_raised_is_late(tmp_path: Path) -> None:
    """What it was in is over for it, so its last snapshot says nothing of what was finished."""
    job(tmp_path)
    write(tmp_path / "states.json", {"1": {"0": "X", "1": "X"}})
    (tmp_path / "rank1.result.txt").write_text("ValueError: nan")

    ranks = read_evidence(tmp_path).ranks

    assert [(len(ranks[rank].dumps), len(ranks[rank].late_dumps)) for rank in (0, 1)] == [(1, 0), (0, 1)]


def test_torchs_pickles_are_read_as_its_json_is(tmp_path: Path) -> None:
    """The same values, whatever the form."""
    job(tmp_path / "json")
    (tmp_path / "pickle").mkdir()
    for rank in range(4):
        value = json.loads((tmp_path / "json" / f"rank{rank}.hang.json").read_text())
        (tmp_path / "pickle" / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(value, 2))

    one, other = (read_evidence(tmp_path / name).ranks[2].dumps[0] for name in ("json", "pickle"))

    assert np.array_equal(one.created_ns, other.created_ns)
    assert (one.groups, one.signatures) == (other.groups, other.signatures)


def test_dumps_of_several_machines_in_their_own_folders_are_one_job(tmp_path: Path) -> None:
    """Each rank occurs once."""
    for rank in range(4):
        write(tmp_path / f"worker-{'ab'[rank // 2]}" / f"nccl_trace_rank_{rank}.json", document(entries(8)))

    assert sorted(read_evidence(tmp_path).ranks) == [0, 1, 2, 3]


def test_a_folder_of_several_jobs_asks_for_one(tmp_path: Path) -> None:
    """It names them."""
    job(tmp_path / "first")
    job(tmp_path / "second")

    with pytest.raises(DataError, match=r"2 jobs: first, second.*seatrial diagnose .*first"):
        read_evidence(tmp_path)


@pytest.mark.parametrize(("make", "words"), [(False, "does not exist"), (True, "no flight-recorder dumps")])
def test_nothing_to_read_is_an_error_that_says_what_to_give(tmp_path: Path, make: bool, words: str) -> None:
    """An absent folder, and one without evidence."""
    folder = tmp_path / "evidence"
    if make:
        folder.mkdir()
        (folder / "notes.txt").write_text("hello")

    with pytest.raises(DataError, match=f"{words}.*Give"):
        read_evidence(folder)


def test_what_cannot_be_used_is_said_and_the_rest_is_read(tmp_path: Path) -> None:
    """Rubbish, an empty file, a pickle that would run code, links that lead nowhere or outside, a pipe that would never end."""
    job(tmp_path / "job", (8,) * 8)
    folder = tmp_path / "job"
    (folder / "rank1.hang.json").write_bytes(os.urandom(3000))
    (folder / "rank2.hang.json").write_bytes(b"")
    (folder / "rank3.hang.json").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    for rank, target in ((4, "/nowhere"), (5, write(tmp_path / "elsewhere.json", document(entries(8), world_size=8)))):
        (folder / f"rank{rank}.hang.json").unlink()
        (folder / f"rank{rank}.hang.json").symlink_to(target)
    (folder / "rank6.hang.json").unlink()
    os.mkfifo(folder / "rank6.hang.json")
    (folder / "again").symlink_to(folder)

    evidence = read_evidence(folder)

    assert sorted(evidence.ranks) == [0, 5, 7]
    for words in (
        "rank1.hang.json is neither JSON nor a pickle", "rank2.hang.json is empty", "rank3.hang.json is a pickle that asks for 'os.system'",
        "rank4.hang.json is a link that leads nowhere", "rank5.hang.json is a link to a file outside", "rank6.hang.json is no regular file",
        "again is a link to a folder",
    ):  # fmt: skip
        assert any(problem.startswith(words) for problem in evidence.problems), words


def test_a_rank_whose_file_is_cut_is_known_and_can_be_left_out(tmp_path: Path) -> None:
    """That it is behind says nothing, since newer operations are lost."""
    job(tmp_path)
    path = tmp_path / "rank1.hang.json"
    path.write_bytes(path.read_bytes()[:1500])

    reading = read_folder(tmp_path)

    assert reading.cut == {1}
    assert 0 < len(reading.evidence.ranks[1].dumps[0].seq) < 8
    assert without_cut(reading).ranks[1].dumps == ()
    assert "rank1.hang.json is cut off" in reading.evidence.problems[0]


def test_a_file_that_is_too_large_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without reading it."""
    job(tmp_path)
    monkeypatch.setattr(dump_pool, "MAX_BYTES", 3000)

    write(tmp_path / "exitcodes.json", {"0": 0, "1": -9})
    evidence = read_evidence(tmp_path)

    assert not any(one.dumps for one in evidence.ranks.values())
    assert "more than the" in evidence.problems[0]


def test_many_files_are_read_by_several_processes_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same dumps in the same order, with one table of signatures."""
    job(tmp_path, (8,) * 9)
    alone = read_evidence(tmp_path)
    monkeypatch.setattr(dump_pool, "MANY_BYTES", 0)

    together = read_evidence(tmp_path)

    assert list(together.ranks) == list(alone.ranks)
    assert together.ranks[5].dumps[0].created_ns.tolist() == alone.ranks[5].dumps[0].created_ns.tolist()
    assert together.ranks[5].dumps[0].signatures is together.ranks[0].dumps[0].signatures


def test_steps_of_our_own_recorder_become_a_timeline(tmp_path: Path) -> None:
    """A rank's time inside of operations beyond the least of all ranks is waiting."""
    for rank, inside in ((0, 5.0), (1, 2.0)):
        steps = [
            {"step": 3, "start_ns": START_NS, "end_ns": START_NS + 9_000_000, "phase_ms": {"data": 1.0, "backward": 7.0},
             "inside_ms": {"backward": inside}, "gc_ms": 0.5}
        ]  # fmt: skip
        write(tmp_path / f"rank{rank}.hang.json", document(entries(3), world_size=2, sea_trial={"rank": rank, "steps": steps}))

    timeline = read_evidence(tmp_path).timeline

    assert set(TIMELINE_COLUMNS) < set(timeline.columns)
    assert timeline[["rank", "step", "data_ms", "backward_ms", "wait_ms", "transfer_ms", "step_ms"]].to_numpy().tolist() == [
        [0, 3, 1.0, 2.0, 3.0, 2.0, 9.0],
        [1, 3, 1.0, 5.0, 0.0, 2.0, 9.0],
    ]


def test_a_timeline_alone_is_evidence(tmp_path: Path) -> None:
    """As `seatrial train` leaves it; one that lacks columns is not."""
    row = {name: [0, 0] for name in TIMELINE_COLUMNS} | {"rank": [1, 0]}
    pd.DataFrame(row).to_parquet(tmp_path / "timeline.parquet")

    assert read_evidence(tmp_path).timeline["rank"].tolist() == [1, 0]

    pd.DataFrame({"rank": [1]}).to_parquet(tmp_path / "timeline.parquet")
    with pytest.raises(DataError, match="lacks the columns step"):
        read_evidence(tmp_path)


def test_a_collection_of_garbage_stands_in_the_stack() -> None:
    """As Python's fault handler writes it in place of the innermost frame."""
    text = 'Current thread 0x01 (most recent call first):\n  Garbage-collecting\n  File "train.py", line 9 in step\n'
    (thread,) = parse_stack(text)

    assert [frame.function for frame in thread.frames] == [COLLECTING, "step"]


def test_a_stack_of_another_tool_is_read() -> None:
    """py-spy names the main thread and puts places in brackets."""
    text = 'Process 7: python train.py\n\nThread 7 (idle): "MainThread"\n    wait (threading.py:320)\n    <module> (train.py:9)\n'

    (thread,) = parse_stack(text)

    assert (thread.name, thread.is_main, thread.frames[1]) == ("MainThread", True, ("train.py", 9, "<module>"))
