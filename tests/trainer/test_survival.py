"""What a run survives beyond the death of one rank: stops, lost launchers, crash loops, a second call. Real processes, real signals."""

import json
import os
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from helpers_ranks import alive, job, noted, run, state, wait_until

from trainer import history, ranks
from trainer.children import Pid, pid_of, wait_gone
from trainer.config import Fault, TrainJob
from trainer.deaths import Death, fruitless
from trainer.group import CRASH_LOOP
from trainer.watch import LOOK_S, STOPPED_S
from trainer.wires import Loss, Pulse
from trainer.world import Event, Progress, World
from validation.errors import ConfigError, DataError, RankError
from validation.records import RunRecord

STOP = Fault(kind="stop", rank=1, step=1)
LAUNCHER = Fault(kind="launcher", rank=1, step=1)


def pids(folder: Path) -> list[int]:
    """Every rank process that the history names."""
    return [line["pid"] for line in history.read_lines(folder) if line["kind"] == "rank"]


def attempts(folder: Path) -> list[tuple[int, int]]:
    """(attempt, world size) as the history has them."""
    return [(line["attempt"], line["world_size"]) for line in history.read_lines(folder) if line["kind"] == "attempt"]


def all_gone(folder: Path) -> bool:
    return all(state(pid) in ("", "Z") for pid in [*pids(folder), *noted(folder)])


@pytest.mark.parametrize("world_size", [1, 2])
def test_stopped_rank_is_noticed_and_replaced(tmp_path: Path, world_size: int) -> None:
    """A rank that a signal stopped counts as dead after two seconds, long before its peers' time-out, also when it has no peer."""
    fault = replace(STOP, rank=world_size - 1)
    record = run("train", job(tmp_path, world_size=world_size, faults=(fault,), max_restarts=1))

    [recovery] = record.recoveries
    assert (recovery.fault, recovery.resumed_from_step, record.attempts) == (str(fault), 1, 2)
    assert STOPPED_S <= recovery.detect_s <= STOPPED_S + 2 * LOOK_S + 1.0
    assert all_gone(tmp_path)


def test_stopped_rank_without_a_restart_is_named(tmp_path: Path) -> None:
    """The error says that the rank was stopped, not that it was killed, which came after."""
    with pytest.raises(RankError, match="rank 1 of 2 was stopped by a signal and did not go on after step 1 in attempt 0"):
        run("train", job(tmp_path, faults=(STOP,)))
    assert all_gone(tmp_path)


def test_short_stop_does_no_harm(tmp_path: Path) -> None:
    """A rank that is continued within a second is left alone."""

    def blink() -> None:
        assert wait_until(lambda: any(state(pid) == "T" for pid in pids(tmp_path)), 20)
        time.sleep(0.8)
        for pid in pids(tmp_path):
            os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=blink)
    thread.start()
    record = run("blink", job(tmp_path))
    thread.join()

    assert (record.attempts, record.recoveries) == (1, ())


def test_second_call_goes_on_after_the_attempts_that_stand(tmp_path: Path) -> None:
    """Attempts are numbered through the folder's life; faults and world sizes of a call count from its own first attempt."""
    run("train", job(tmp_path, faults=(Fault(kind="kill", rank=1, step=1),), max_restarts=1, resume_world_sizes=(3,)))
    fault = Fault(kind="kill", rank=0, step=4)
    record = run("train", job(tmp_path, steps=6, faults=(fault,), max_restarts=1))

    [recovery] = record.recoveries
    assert attempts(tmp_path) == [(0, 2), (1, 3), (2, 2), (3, 2)]
    assert (record.attempts, record.faults_fired, recovery.fault, recovery.resumed_from_step) == (4, (str(fault),), str(fault), 4)


def test_world_sizes_of_a_folder_without_a_history(tmp_path: Path) -> None:
    """Folders that ranks have left tell how many there were."""
    for part in ("attempt-0/rank-0", "attempt-0/rank-1", "attempt-1/rank-0"):
        (tmp_path / "parts" / part).mkdir(parents=True)
    record = run("train", job(tmp_path))

    assert (record.attempts, attempts(tmp_path)) == (3, [(2, 2)])


def test_planned_launcher_kill_is_survived(tmp_path: Path) -> None:
    """The leader is killed by one of its ranks: a new one goes on, and the way back is measured from the announced kill."""
    record = run("train", job(tmp_path, faults=(LAUNCHER,), max_restarts=1, resume_world_sizes=(1,)))

    [recovery] = record.recoveries
    assert (record.attempts, record.faults_fired, recovery.fault) == (2, (str(LAUNCHER),), str(LAUNCHER))
    assert (recovery.world_size, recovery.resumed_world_size, recovery.resumed_from_step) == (2, 1, 1)
    assert 0 < recovery.detect_s < recovery.total_s < 10
    assert all_gone(tmp_path)


def test_launcher_loss_keeps_what_was_known(tmp_path: Path) -> None:
    """A death before the launcher's, in an attempt of its own, is still in the record; both cost a restart."""
    faults = (Fault(kind="kill", rank=0, step=1), Fault(kind="launcher", rank=0, step=2, attempt=1))
    record = run("train", job(tmp_path, steps=4, faults=faults, max_restarts=2))

    assert [recovery.fault for recovery in record.recoveries] == list(map(str, faults)) == list(record.faults_fired)
    with pytest.raises(RankError, match="without a word"):
        run("train", job(tmp_path, steps=8, faults=(replace(faults[0], step=5), replace(faults[1], step=6)), max_restarts=1))


@pytest.mark.parametrize("victim", ["leader", "server"])
def test_lost_launcher_is_replaced(tmp_path: Path, victim: str) -> None:
    """kill -9 from outside: nobody of the lost group, grandchildren included, is alive when the next one starts, and the run ends."""
    found: list[RunRecord] = []
    thread = threading.Thread(target=lambda: found.append(run("nested_once", job(tmp_path, max_restarts=1))))
    thread.start()
    assert wait_until(lambda: len(noted(tmp_path)) == 5, 60)
    server = ranks._current.pid
    leader = next(pid for pid in noted(tmp_path) if parent_of(pid) == server)
    os.kill(server if victim == "server" else leader, signal.SIGKILL)
    thread.join(60)

    [recovery] = found[0].recoveries
    assert recovery.fault == history.LEADER_LOST
    assert (tmp_path / "alive-at-start").read_text() == "[]"
    assert (found[0].attempts, alive(tmp_path)) == (2, [])


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_shut_down_is_not_survived(tmp_path: Path) -> None:
    """A server that was ended on purpose is not started again behind its owner's back."""
    caught: list[BaseException] = []

    def attempt() -> None:
        try:
            run("nested", job(tmp_path, max_restarts=3))
        except RankError as error:
            caught.append(error)

    thread = threading.Thread(target=attempt)
    thread.start()
    assert wait_until(lambda: len(noted(tmp_path)) == 5, 60)
    ranks.shut_down()
    thread.join(10)

    assert (len(caught), ranks._current, alive(tmp_path)) == (1, None, [])


def test_crash_loop_ends_before_its_restarts(tmp_path: Path) -> None:
    """Three attempts that die at the same place end the run, and the error says where, what it means and what to do."""
    with pytest.raises(RankError) as caught:
        run("die_at_two", job(tmp_path, steps=6, max_restarts=50))
    text = str(caught.value)

    assert f"crash loop: {CRASH_LOOP} attempts in a row ended without an update beyond step 2, the last one in attempt 3" in text
    assert "rank 1 of 2 raised ValueError: always here" in text
    assert "with 47 of 50 restarts left; checkpoint 2 is the newest" in text
    assert "start the run on the same folder" in text
    assert attempts(tmp_path) == [(attempt, 2) for attempt in range(4)]


def test_crash_loop_of_launchers_ends_too(tmp_path: Path) -> None:
    """A launcher that dies each time at the same place is a crash loop, counted over leaders."""
    faults = tuple(replace(LAUNCHER, attempt=attempt) for attempt in range(9))
    with pytest.raises(RankError, match=r"crash loop: 3 attempts in a row(.|\n)*leader went away without a word in attempt 3"):
        run("train", job(tmp_path, faults=faults, max_restarts=20))
    assert all_gone(tmp_path)


def test_input_error_stops_at_once(tmp_path: Path) -> None:
    """What a person has to mend is no crash loop: one attempt shows it."""
    with pytest.raises(DataError, match=r"flights\.csv is gone"):
        run("refuse", job(tmp_path, max_restarts=9))
    assert attempts(tmp_path) == [(0, 2)]


@pytest.mark.parametrize(
    ("reached", "count"),
    [([], 0), ([0], 1), ([3], 0), ([3, 3, 2], 2), ([3, 5], 0), ([3, 0, 4, 4, 4, 4], 3)],
    ids=["nobody died", "before the first update", "first", "no further twice", "further", "further, then not"],
)
def test_fruitless_attempts_are_counted_since_the_last_progress(reached: list[int], count: int) -> None:
    """Only an update beyond the best one so far is progress."""
    deaths = [Death(fault="", attempt=n, world_size=1, died_ns=0, noticed_ns=0, reaped_ns=0, reached=far) for n, far in enumerate(reached)]

    assert fruitless(deaths) == count


def test_unsaved_checkpoints_reach_the_record(tmp_path: Path) -> None:
    """A checkpoint that could not be written does not stop the run and is named in its record, also by a later leader."""
    record = run("full_disk", job(tmp_path, steps=4, faults=(replace(LAUNCHER, rank=0, step=3),), max_restarts=1))

    assert record.unsaved == ("step 1: No space left on device", "step 2: No space left on device", "step 4: No space left on device")


def test_history_passes_over_what_is_no_record(tmp_path: Path) -> None:
    """JSON that nobody here wrote is left out like a torn line."""
    (tmp_path / "group.jsonl").write_bytes(b'[1]\n"x"\n{"a":1}\n' + line_of(kind="rank", attempt=0, rank=0, pid=1, started=0))

    assert [line["kind"] for line in history.read_lines(tmp_path)] == ["rank"]


def test_a_folder_has_one_run_at_a_time(tmp_path: Path) -> None:
    """Two runs would write over each other's checkpoints: the second is refused while the first one's ranks live."""
    (tmp_path / "group.jsonl").write_bytes(line_of(kind="rank", attempt=0, rank=0, pid=os.getpid(), started=pid_of(os.getpid()).started))
    ours = ranks.END_S
    ranks.END_S = 0.1
    try:
        with pytest.raises(ConfigError, match="train in another folder"):
            run("train", job(tmp_path))
    finally:
        ranks.END_S = ours


def line_of(**fields: object) -> bytes:
    return json.dumps(fields).encode() + b"\n"


def test_a_recycled_pid_is_not_the_old_process() -> None:
    """A number that belongs to another process by now is gone; our own is not."""
    now = pid_of(os.getpid())

    assert wait_gone([Pid(pid=now.pid, started=now.started - 1), Pid(pid=2**22 - 1, started=0)], 0.2, kill=True) == []
    assert wait_gone([now], 0.2, kill=False) == [now]


def test_some_updates_are_told_and_all_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The leader hears of an attempt's first update, of one each tenth of a second and of the last; the pulse shows every one."""
    said: list[Event] = []
    pulse, seen = Pulse(), []
    emit = history.Recorder(tmp_path, World(rank=0, world_size=1), said.append, pulse)
    emit("loaded", step=0, steps=24)
    for step in range(1, 25):
        monkeypatch.setattr(history.time, "monotonic_ns", lambda now=step * 10_000_000: now)
        emit("step", step=step, loss=0.0, samples=8)
        seen.append(pulse.updates)

    assert seen == [*range(1, 25)]
    assert [(event.fields["step"], event.fields["samples"]) for event in said[1:]] == [(1, 8), (11, 80), (21, 80), (24, 24)]


def test_history_survives_a_torn_line(tmp_path: Path) -> None:
    """A machine that went down in the middle of a line costs that line alone."""
    history.note(tmp_path, "attempt", attempt=0, world_size=2, call=1, t_ns=5)
    with (tmp_path / history.FILE).open("ab") as file:
        file.write(b'{"kind":"attempt","att')
    history.note(tmp_path, "attempt", attempt=1, world_size=3, call=2, t_ns=9)
    past = history.past_of(tmp_path, 2, [])

    assert (past.world_sizes, past.first_attempt, past.begun_ns) == ((2, 3), 1, 9)


def test_full_disk_costs_the_history_not_the_run(tmp_path: Path) -> None:
    """A line that cannot be written is lost without an error."""
    history.note(tmp_path / "absent", "attempt", attempt=0)

    assert history.read_lines(tmp_path / "absent") == []


def test_loss_ends_the_attempt_that_had_started(tmp_path: Path) -> None:
    """A lost leader's death is dated by the announced fault, and its progress by the last update in the history."""
    history.note(tmp_path, "attempt", attempt=0, world_size=2, call=7, t_ns=100)
    for name, t_ns, fields in (("step", 150, {"step": 4}), ("fault", 200, {"fault": str(LAUNCHER)})):
        history.note_event(tmp_path, Event(name=name, rank=1, attempt=0, t_ns=t_ns, fields=fields))
    [death] = history.past_of(tmp_path, 7, [Loss(noticed_ns=230, gone_ns=240)]).deaths

    assert (death.fault, death.died_ns, death.noticed_ns, death.reaped_ns, death.reached) == (str(LAUNCHER), 200, 230, 240, 4)


def tiny_job(folder: Path, **changes: object) -> TrainJob:
    """Nine updates of the tiny recipe on two ranks, a checkpoint every third one."""
    folder.mkdir()
    usual = {"recipe": "tiny_recipe:recipe", "folder": str(folder), "world_size": 2, "checkpoint_every": 3, "deadline_s": 60.0}
    return TrainJob(**(usual | changes))


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """The run that nobody disturbed."""
    return ranks.run_group(tiny_job(tmp_path_factory.mktemp("calm") / "twin"))


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((Fault(kind="kill", rank=1, step=5), Fault(kind="kill", rank=0, step=0, phase="load", attempt=1)), id="in recovery"),
        pytest.param((Fault(kind="kill", rank=1, step=4), Fault(kind="kill", rank=0, step=4, attempt=1)), id="twice in one epoch"),
        pytest.param((Fault(kind="launcher", rank=0, step=5), Fault(kind="launcher", rank=1, step=7, attempt=1)), id="two launchers"),
        pytest.param((Fault(kind="stop", rank=0, step=6, phase="collective"),), id="stopped in a collective"),
    ],
)
def test_survivor_ends_like_its_twin(faults: tuple[Fault, ...], twin: RunRecord, tmp_path: Path) -> None:
    """The real loop through the real launcher: state and ledger of the twin, each planned fault fired and recovered from."""
    given = tiny_job(tmp_path / "run", faults=faults, max_restarts=len(faults), resume_world_sizes=(3, 1))
    record = ranks.run_group(given)

    assert (record.state_sha256, record.ledger_sha256) == (twin.state_sha256, twin.ledger_sha256)
    assert record.faults_fired == tuple(map(str, faults)) == tuple(recovery.fault for recovery in record.recoveries)
    assert all_gone(tmp_path / "run")


def test_longer_run_on_the_same_folder_ends_like_one_run(twin: RunRecord, tmp_path: Path) -> None:
    """Four updates, then all nine on other ranks: one lineage, the twin's bits."""
    ranks.run_group(tiny_job(tmp_path / "run", steps=4))
    record = ranks.run_group(replace(tiny_job_again(tmp_path / "run"), world_size=3))

    assert (record.state_sha256, record.ledger_sha256, record.attempts) == (twin.state_sha256, twin.ledger_sha256, 2)


def tiny_job_again(folder: Path) -> TrainJob:
    folder.rename(folder.with_suffix(".kept"))
    made = tiny_job(folder)
    folder.rmdir()
    folder.with_suffix(".kept").rename(folder)
    return made


def test_a_stopped_leader_is_replaced(tmp_path: Path) -> None:
    """Somebody stops the leader: it is ended, counted as lost, and the run goes on to the twin's bits."""
    options = {"recipe": "tiny_recipe:long", "world_size": 2, "checkpoint_every": 2, "max_restarts": 2}
    for name in ("twin", "run"):
        (tmp_path / name).mkdir()
    twin = ranks.run_group(TrainJob(folder=str(tmp_path / "twin"), **options))
    stopped: list[int] = []

    def stop(progress: Progress) -> None:
        if not stopped:
            stopped.append(pids(tmp_path / "run")[0])
            os.kill(int(Path(f"/proc/{stopped[0]}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGSTOP)

    slow = Fault(kind="delay", rank=0, step=0, phase="data", ms=50)
    run = ranks.run_group(TrainJob(folder=str(tmp_path / "run"), faults=(slow,), **options), on_progress=stop)

    assert stopped
    assert set(run.state_sha256_by_rank) == {twin.state_sha256}
    assert run.ledger_sha256 == twin.ledger_sha256
    assert "the leader was lost" in run.recoveries[0].fault
