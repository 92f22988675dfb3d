"""Deaths: of a rank, of the group by its deadline, of the leader, the server and the flow process. Real processes, real signals."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import helpers_ranks
import pytest
from helpers_ranks import alive, job, noted, run, wait_until

from trainer import ranks
from trainer.config import Fault
from trainer.deaths import Death, End, culprit, recoveries
from trainer.wires import Failure
from trainer.world import Event
from validation.errors import DataError, RankError
from validation.records import Recovery

KILL = Fault(kind="kill", rank=1, step=1)
SEGMENTS = ("detect_s", "teardown_s", "import_s", "rendezvous_s", "load_s", "first_step_s")


def segments(recovery: Recovery) -> list[float]:
    return [getattr(recovery, name) for name in SEGMENTS]


def test_killed_rank_is_restarted(tmp_path):
    """The group starts again from what was saved, and each part of the way back has a length; together they are the whole."""
    record = run("train", job(tmp_path, faults=(KILL,), max_restarts=1))

    [recovery] = record.recoveries
    assert (record.attempts, record.faults_fired, recovery.fault) == (2, (str(KILL),), str(KILL))
    assert (recovery.world_size, recovery.resumed_world_size, recovery.resumed_from_step) == (2, 2, 1)
    assert min(segments(recovery)) > 0
    assert sum(segments(recovery)) == pytest.approx(recovery.total_s, abs=1e-6)


def test_world_size_changes_on_restart(tmp_path):
    """Attempts after the first run on the sizes that the job names."""
    record = run(
        "train",
        job(
            tmp_path, world_size=3, resume_world_sizes=(2, 1), faults=(KILL, Fault(kind="kill", rank=0, step=2, attempt=1)), max_restarts=2
        ),
    )

    assert [(found.world_size, found.resumed_world_size) for found in record.recoveries] == [(3, 2), (2, 1)]
    assert (tmp_path / "sum-0").read_text() == "1.0"


def test_death_before_the_first_step_of_a_restart_keeps_both_recoveries(tmp_path):
    """An attempt that dies on the way back lengthens the first recovery; both deaths end with the same update."""
    record = run("train", job(tmp_path, faults=(KILL, Fault(kind="kill", rank=0, step=1, attempt=1)), max_restarts=2))

    first, second = record.recoveries
    assert record.attempts == 3
    assert first.import_s > second.total_s
    assert sum(segments(first)) == pytest.approx(first.total_s, abs=1e-6)


def test_unplanned_death_is_named_and_restarted(tmp_path):
    """Nobody knows when an unplanned death happened, so detection counts from the notice."""
    record = run("die_unplanned", job(tmp_path, max_restarts=1))

    [recovery] = record.recoveries
    assert recovery.fault == "unplanned: rank 1 ended with exit code 7 without a word"
    assert (recovery.detect_s, record.faults_fired) == (0.0, ())


def test_death_without_a_restart_names_rank_signal_and_step(tmp_path):
    """The error says who died, how, how far the group was and where to read on."""
    with pytest.raises(RankError, match=r"rank 1 of 2 was killed by signal 9 \(SIGKILL\) after step 1 in attempt 0.*attempt-0-rank-1\.log"):
        run("train", job(tmp_path, faults=(KILL,)))


def test_raised_error_names_its_rank_and_text(tmp_path):
    """The rank that raised is blamed, not the peers that lost it."""
    with pytest.raises(
        RankError, match=r"rank 1 of 4 raised RuntimeError: planned fault error:rank=1,step=1(.|\n)*after step 1(.|\n)*in fire"
    ):
        run("train", job(tmp_path, world_size=4, faults=(Fault(kind="error", rank=1, step=1),)))


def test_input_error_of_a_rank_comes_back_and_is_not_tried_again(tmp_path):
    """What a person has to mend keeps class and message, and costs no restart."""
    with pytest.raises(DataError, match=r"^flights\.csv is gone\. Put it back\.$"):
        run("refuse", job(tmp_path, max_restarts=3))
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"attempt-0-rank-0.log", "attempt-0-rank-1.log"}


def test_deadline_names_who_waits_and_who_stands_still(tmp_path):
    """A hang is explained: three ranks wait in the collective that the fourth never enters."""
    with pytest.raises(RankError) as caught:
        run("train", job(tmp_path, world_size=4, faults=(Fault(kind="skip", rank=2, step=1),), deadline_s=2.0))
    text = str(caught.value)

    assert "deadline of 2 s after step 1 in attempt 0" in text
    assert "ranks 0, 1, 3 (last event: step 1) waiting in all_reduce, called by train (helpers_ranks.py" in text
    assert "rank 2 (last event: fault skip:rank=2,step=1,phase=backward,attempt=0) in stand_still" in text


def test_stopped_rank_is_named_at_the_deadline(tmp_path):
    """A rank that a signal has stopped cannot answer; the group says so and ends it."""
    with pytest.raises(RankError, match=r"rank 1 .* stopped by a signal"):
        run("stop_oneself", job(tmp_path, deadline_s=1.0))
    assert alive(tmp_path) == []


def test_stalled_collective_blames_the_planned_fault(tmp_path):
    """A time-out on the waiting ranks is an echo: the skipped collective is the cause, and its time the death."""
    record = run("train", job(tmp_path, faults=(Fault(kind="skip", rank=1, step=1),), stall_s=1.0, max_restarts=1))

    [recovery] = record.recoveries
    assert recovery.fault.startswith("skip:rank=1")
    assert recovery.detect_s > 0.9


def test_deadline_kills_what_ranks_have_started(tmp_path):
    """Processes of a rank die with the group, also in a session of their own."""
    with pytest.raises(RankError, match="deadline"):
        run("nested", job(tmp_path, deadline_s=2.0))

    assert len(noted(tmp_path)) == 5
    assert alive(tmp_path) == []


def test_error_while_collecting_comes_back(tmp_path):
    """Records that cannot be made are an error of the run."""
    with pytest.raises(RankError, match="TypeError"):
        ranks.run_group(job(tmp_path), _entry="helpers_ranks:train", _collect="helpers_ranks:add")


@pytest.mark.parametrize("victim", ["leader", "server"])
def test_group_ends_with_the_processes_above_it(tmp_path, victim):
    """A killed leader or server takes its ranks and their processes along, and the caller learns that there will be no answer."""
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            run("nested", job(tmp_path, deadline_s=30))
        except RankError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    assert wait_until(lambda: len(noted(tmp_path)) == 5, 20)
    os.kill(ranks._current.pid if victim == "server" else leader_of(tmp_path), signal.SIGKILL)
    thread.join(10)

    assert "without a word" in str(caught[0])
    assert wait_until(lambda: alive(tmp_path) == [], 2)


def leader_of(folder: Path) -> int:
    """The one noted process whose parent is the server."""
    return next(pid for pid in noted(folder) if parent_of(pid) == ranks._current.pid)


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


FLOW = """
import sys, threading, helpers_ranks
from pathlib import Path
from trainer import ranks
folder = Path(sys.argv[1])
ranks.warm_up()
helpers_ranks.note(folder, ranks._current.pid)
if sys.argv[2] == "group":
    threading.Thread(target=lambda: helpers_ranks.run("nested", helpers_ranks.job(folder))).start()
if sys.argv[2] == "call":
    ranks.call("helpers_ranks:nested_call", str(folder), deadline_s=60)
print("up", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize(("what", "processes"), [("nothing", 1), ("call", 4), ("group", 6)])
def test_nobody_outlives_a_killed_flow_process(tmp_path, what, processes):
    """kill -9 of the flow process ends server, leader, ranks and their processes within two seconds, also during the imports."""
    environ = os.environ | {"PYTHONPATH": str(Path(helpers_ranks.__file__).parent)}
    flow = subprocess.Popen([sys.executable, "-c", FLOW, str(tmp_path), what], env=environ)
    try:
        assert wait_until(lambda: len(noted(tmp_path)) == processes, 60)
    finally:
        flow.kill()
        flow.wait()

    assert wait_until(lambda: alive(tmp_path) == [], 2)


def test_shut_down_ends_running_groups(tmp_path):
    """Whoever waits for a group is told, and nothing of the server is left, not even a zombie."""
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            run("nested", job(tmp_path))
        except RankError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    assert wait_until(lambda: len(noted(tmp_path)) == 5, 20)
    server = ranks._current.pid
    ranks.shut_down()
    thread.join(10)

    assert caught
    assert not Path(f"/proc/{server}").exists()
    assert alive(tmp_path) == []


def event(name: str, *, rank: int = 0, attempt: int = 0, at_s: float = 0.0, **fields: object) -> Event:
    return Event(name=name, rank=rank, attempt=attempt, t_ns=int(at_s * 1e9), fields=fields)


def test_shut_down_does_not_wait_for_imports():
    """A command that ends at once, on a wrong argument say, is not held up by what was warming for it."""
    code = """if True:
        from trainer import ranks
        ranks.warm_up()
        process = ranks._current._process
        ranks.shut_down()
        print(process.returncode)
    """

    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == f"{-signal.SIGTERM}\n"


def end(rank: int, *, text: str = "", kind: str = "", fault: bool = False) -> End:
    failure = Failure(kind=kind, text=text) if text else None
    return End(rank=rank, failure=failure, fault=event("fault", rank=rank, fault="kill:rank=0") if fault else None)


ECHO = "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer"
LATE = "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms for recv operation to complete"


@pytest.mark.parametrize(
    ("ends", "rank"),
    [
        pytest.param([end(0, text=ECHO), end(1)], 1, id="a death before its echo"),
        pytest.param([end(0, text=ECHO), end(1, text="ValueError: x")], 1, id="an error before its echo"),
        pytest.param([end(0), end(1, fault=True)], 1, id="the planned one before another death"),
        pytest.param([end(0, text="ValueError: x"), end(1, text="no file", kind="DataError")], 1, id="an input error before any other"),
        pytest.param([end(0, text=ECHO), end(1, text=LATE)], 1, id="a time-out before the peers that lost its rank"),
        pytest.param([end(2, text="ValueError: x"), end(1, text="ValueError: x")], 1, id="the lowest of equals"),
    ],
)
def test_cause_is_told_from_echo(ends, rank):
    """Of ranks that ended in one moment, the one to blame is the one the others did not follow."""
    assert culprit(ends).rank == rank


def death(*, attempt: int = 0, at_s: float = 10.0) -> Death:
    ns = int(at_s * 1e9)
    return Death(fault="kill", attempt=attempt, world_size=2, died_ns=ns, noticed_ns=ns + 10**9, reaped_ns=ns + 2 * 10**9)


def way_back(attempt: int, *ranks: int, start_s: float) -> list[Event]:
    """Each rank joins, loads and makes its first update; rank r is r seconds late."""
    names = (("imported", 0.5), ("joined", 1), ("loaded", 3), ("step", 6))
    return [event(name, rank=rank, attempt=attempt, at_s=start_s + after + rank, step=4) for rank in ranks for name, after in names]


def test_segments_end_with_the_last_rank():
    """Each part of a recovery ends when the slowest rank is through with it."""
    [found] = recoveries([death(at_s=10)], way_back(1, 0, 1, start_s=12), (2, 2))

    assert segments(found) == [1, 1, 1.5, 0.5, 2, 3]
    assert (found.total_s, found.resumed_from_step) == (9, 4)


def test_finished_rank_without_an_update_is_back():
    """A death after the last update leaves none to make: the way back ends when every rank has finished."""
    events = [event(name, rank=0, attempt=1, at_s=at_s) for name, at_s in (("joined", 13), ("loaded", 14), ("finished", 15))]

    assert segments(recoveries([death(at_s=10)], events, (1, 1))[0]) == [1, 1, 0, 1, 1, 1]


def test_death_without_a_way_back_has_no_recovery():
    """An attempt in which a rank never made an update closes nothing."""
    assert recoveries([death()], way_back(1, 0, start_s=12), (2, 2)) == ()
