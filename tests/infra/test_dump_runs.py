"""Files that are not of one run: said, and the largest set that belongs together is used."""

import json
import random
import shutil
from pathlib import Path

import pytest
from helpers_dumps import START_NS, STEP_NS, document, entries, entry, job, write

from infra.dumps import read_evidence

HOUR_NS = 3_600_000_000_000


def dumps_of(folder: Path) -> dict[int, list[int]]:
    """How many operations each dump of each rank holds."""
    return {rank: [len(dump.seq) for dump in one.dumps] for rank, one in read_evidence(folder).ranks.items() if one.dumps}


def test_a_clock_that_is_hours_off_is_said_and_its_dump_used(tmp_path: Path) -> None:
    """Its times are moved: the operations that ranks have in common begin together."""
    job(tmp_path)
    write(tmp_path / "rank2.hang.json", document(entries(7, apart_ns=5 * HOUR_NS)))

    evidence = read_evidence(tmp_path)

    assert dumps_of(tmp_path) == {0: [8], 1: [8], 2: [7], 3: [8]}
    assert "clocks are far apart (rank 2 by +5.0 h)" in evidence.problems[0]
    assert evidence.ranks[2].dumps[0].created_ns[0] == evidence.ranks[0].dumps[0].created_ns[0]


def test_clocks_that_all_differ_leave_every_dump_in_use(tmp_path: Path) -> None:
    """There is no majority of clocks, and no need of one."""
    for rank in range(4):
        write(tmp_path / f"rank{rank}.hang.json", document(entries(8, apart_ns=rank * 3 * HOUR_NS)))

    assert len(dumps_of(tmp_path)) == 4
    assert "clocks are far apart" in read_evidence(tmp_path).problems[0]


@pytest.mark.parametrize("apart_s", [-86_400 * 3, -40, 40, 7200])
def test_a_file_of_another_run_is_left_out(tmp_path: Path, apart_s: int) -> None:
    """The same program at another time: its operations do not follow one another at the same distances."""
    luck = random.Random(0)
    job(tmp_path, (60, 60, 59, 60))
    times = [START_NS + apart_s * 1_000_000_000 + place * 7 * STEP_NS + luck.randrange(50 * STEP_NS) for place in range(60)]
    write(tmp_path / "rank3.hang.json", document([entry(place, time_created_ns=times[place]) for place in range(60)]))

    assert sorted(dumps_of(tmp_path)) == [0, 1, 2]
    assert "files of several runs are mixed: the operations of rank3.hang.json" in read_evidence(tmp_path).problems[0]


def test_earlier_files_with_later_operations_are_of_another_run(tmp_path: Path) -> None:
    """Nothing in common, and the order of time is not that of the operations."""
    job(tmp_path)
    late = [entry(place, time_created_ns=START_NS - 90 * 1_000_000_000 + place) for place in range(500, 510)]
    write(tmp_path / "rank3.hang.json", document(late))

    assert sorted(dumps_of(tmp_path)) == [0, 1, 2]


@pytest.mark.parametrize("size", [2, 8])
def test_files_of_a_run_with_other_ranks_are_left_out(tmp_path: Path, size: int) -> None:
    """By the number of ranks that the files tell."""
    job(tmp_path)
    write(tmp_path / "rank1.hang.json", document(entries(3), world_size=size))

    assert sorted(dumps_of(tmp_path)) == [0, 2, 3]
    assert f"rank1.hang.json belong to a run of {size} ranks, the others to one of 4" in read_evidence(tmp_path).problems[0]


def test_a_rank_beyond_the_number_of_ranks_is_of_another_run(tmp_path: Path) -> None:
    """Four ranks are numbered 0 to 3."""
    job(tmp_path)
    write(tmp_path / "rank7.hang.json", document(entries(8)))

    assert sorted(dumps_of(tmp_path)) == [0, 1, 2, 3]


@pytest.mark.parametrize(("count", "word"), [(8, "holds the same as"), (5, "contradicts")])
def test_a_rank_that_is_there_twice_counts_once(tmp_path: Path, count: int, word: str) -> None:
    """The same file again, or one that says something else at the same moment."""
    job(tmp_path)
    moved = 0 if count == 8 else 3_000_000
    write(tmp_path / "rank0.hang.copy.json", document(entries(count, pending=True, apart_ns=moved)))

    assert dumps_of(tmp_path)[0] == [8]
    assert f"rank 0 is there twice: rank0.hang.copy.json {word} rank0.hang.json" in read_evidence(tmp_path).problems[0]


def test_an_earlier_moment_under_a_name_without_a_number_is_a_snapshot(tmp_path: Path) -> None:
    """It ends where the other one still goes on."""
    job(tmp_path)
    write(tmp_path / "rank0.json", document(entries(6)))

    assert dumps_of(tmp_path)[0] == [6, 8]


def test_the_result_does_not_depend_on_the_order_of_files(tmp_path: Path) -> None:
    """Files are made in another order, and the evidence says the same."""
    job(tmp_path / "a")
    write(tmp_path / "a" / "rank9.json", document(entries(8)))
    shutil.copy(tmp_path / "a" / "rank0.hang.json", tmp_path / "a" / "rank0.json")
    for name in sorted((path.name for path in (tmp_path / "a").iterdir()), reverse=True):
        write(tmp_path / "b" / name, json.loads((tmp_path / "a" / name).read_text()))

    a, b = read_evidence(tmp_path / "a"), read_evidence(tmp_path / "b")

    assert a.problems == b.problems
    assert [dump.created_ns.tolist() for one in a.ranks.values() for dump in one.dumps] == [
        dump.created_ns.tolist() for one in b.ranks.values() for dump in one.dumps
    ]
