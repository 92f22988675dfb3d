"""Rank groups and single calls on the warm server, with real processes and real gloo."""

import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import helpers_ranks
import pytest
from helpers_ranks import job, run

from trainer import ranks
from trainer.meter import Meter
from trainer.world import Event, Progress
from validation.errors import ConfigError, DataError, EvidenceError, RankError


def where(variable: str = "SEATRIAL_TEST") -> dict[str, object]:
    """The surroundings of a warm process."""
    return json.loads(ranks.call("helpers_ranks:surroundings", variable, deadline_s=60))


def test_two_ranks_all_reduce(tmp_path):
    """Every rank of a group ends with the sum over the group."""
    record = run("train", job(tmp_path))

    assert record.state_sha256_by_rank == ("2.0", "2.0")
    assert (record.attempts, record.recoveries, record.faults_fired) == (1, (), ())


def test_this_process_stays_free_of_torch():
    """Importing and using the door to the ranks loads torch in warm processes only."""
    code = """if True:
        import sys, helpers_ranks
        from trainer import ranks
        print(ranks.call("helpers_ranks:add", 1, b=2, deadline_s=60), "torch" in sys.modules)
    """
    environ = os.environ | {"PYTHONPATH": str(Path(helpers_ranks.__file__).parent)}

    assert subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout == "3 False\n"


def test_second_request_finds_everything_imported():
    """Requests are forks of one server that has torch, its compiler and pandas loaded, each in a session of its own."""
    first, second = where(), where()

    assert first["server"] == second["server"]
    assert first["pid"] != second["pid"]
    assert first["sid"] == first["leader"] != second["sid"]
    assert all(second[name] for name in ("torch", "dynamo", "pandas"))


def test_an_early_call_does_not_wait_for_imports_it_has_no_use_for():
    """A call that asks for it is answered once torch is there; whoever comes later finds the trainer imported, too."""
    code = """if True:
        import helpers_ranks
        from trainer import ranks
        names = ("torch", "trainer.loop")
        print(*(ranks.call("helpers_ranks:imported", names, early=early, deadline_s=60) for early in (True, False)))
    """
    environ = os.environ | {"PYTHONPATH": str(Path(helpers_ranks.__file__).parent)}
    words = subprocess.run([sys.executable, "-c", code], env=environ, capture_output=True, text=True, check=True).stdout

    assert words == "[True, False] [True, True]\n"


def test_server_that_forks_has_one_thread():
    """A fork copies one thread only, so the process that forks must not have others."""
    server = where()["server"]

    assert len(list(Path(f"/proc/{server}/task").iterdir())) == 1


def test_request_brings_its_surroundings(tmp_path, monkeypatch):
    """A process forked from the server sees the variables and the folder of the moment it was asked for."""
    where()
    monkeypatch.setenv("SEATRIAL_TEST", "set after the server started")
    monkeypatch.chdir(tmp_path)

    found = where()
    assert (found["value"], found["cwd"]) == ("set after the server started", str(tmp_path))


def test_ranks_write_to_their_logs(tmp_path, capfd):
    """What ranks print is kept in the job's folder and never reaches this process's streams."""
    run("chat", job(tmp_path))

    assert (tmp_path / "logs/attempt-0-rank-1.log").read_text() == "spoken by rank 1\nand an error\n"
    assert capfd.readouterr() == ("", "")


def test_nothing_but_logs_and_history_is_added_to_the_folder(tmp_path):
    """The rendezvous file of an attempt is gone when the run is over."""
    run("train", job(tmp_path))

    assert {path.name for path in tmp_path.iterdir()} == {"group.jsonl", "logs", "saved", "sum-0", "sum-1"}


def test_two_groups_at_once(tmp_path):
    """Threads may run groups side by side."""
    folders = [tmp_path / name for name in ("a", "b")]
    for folder in folders:
        folder.mkdir()
    with ThreadPoolExecutor(2) as pool:
        records = list(pool.map(lambda folder: run("train", job(folder)), folders))

    assert [record.state_sha256_by_rank for record in records] == [("2.0", "2.0")] * 2


def test_first_requests_of_many_threads_share_one_server():
    """Whoever comes first starts the server, the others wait for it."""
    ranks.shut_down()
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: where()["server"], range(4)))

    assert len(set(found)) == 1


def test_server_outlives_the_thread_that_started_it():
    """The kernel takes the starting thread for the parent; its end must not end the server."""
    ranks.shut_down()
    thread = threading.Thread(target=ranks.warm_up)
    thread.start()
    thread.join()

    assert where()["server"] == where()["server"]


def test_server_that_was_killed_is_replaced():
    """A request after the server's death starts a new server."""
    server = where()["server"]
    os.kill(server, 9)
    until = time.monotonic() + 5
    while ranks._current.lives and time.monotonic() < until:
        time.sleep(0.01)

    assert where()["server"] != server


def test_progress_is_told(tmp_path):
    """The first and the last update are reported, with the loss and the number of updates in all."""
    told: list[Progress] = []
    run("train", job(tmp_path), on_progress=told.append)

    assert [(word.step, word.steps, word.loss) for word in (told[0], told[-1])] == [(1, 3, 1.0), (3, 3, 1.0)]


def test_error_in_progress_ends_the_group(tmp_path):
    """What the listener raises comes out, and the ranks are gone by then."""

    def stop(_: Progress) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("nested", job(tmp_path), on_progress=stop)
    assert helpers_ranks.noted(tmp_path)
    assert helpers_ranks.alive(tmp_path) == []


def test_throughput_is_of_the_last_two_seconds():
    """100 samples each 0.1 s are 1,000 samples/s, whatever came before the window."""
    meter, told = Meter(), []
    for tenth in [*range(5), *range(100, 130)]:
        told.append(meter.measure(step_event(t_ns=tenth * 100_000_000, samples=100), steps=None))

    assert told[-1].throughput_sps == pytest.approx(1000)


def test_progress_is_told_ten_times_a_second():
    """A thousand updates in a second give ten words."""
    meter = Meter()
    told = [meter.measure(step_event(t_ns=10**9 + ms * 1_000_000), steps=None) for ms in range(1000)]

    assert sum(word is not None for word in told) == 10


def step_event(*, t_ns: int, samples: int = 1) -> Event:
    return Event(name="step", rank=0, attempt=0, t_ns=t_ns, fields={"step": 1, "loss": 0.5, "samples": samples})


def test_call_returns_results_of_any_size():
    """A result larger than any pipe or socket buffer comes back whole."""
    assert ranks.call("helpers_ranks:add", 1, b=2, deadline_s=60) == 3
    assert len(ranks.call("helpers_ranks:big", 8, deadline_s=60)) == 8 << 20


def test_call_takes_arguments_of_any_size():
    """An argument larger than any buffer arrives whole."""
    assert ranks.call("builtins:len", bytes(8 << 20), deadline_s=60) == 8 << 20


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        pytest.param("data", DataError, "^no file$", id="input error"),
        pytest.param("evidence", EvidenceError, "^altered$", id="release error"),
        pytest.param("value", RankError, "ValueError: boom\n(.|\n)*in complain", id="any other with its traceback"),
    ],
)
def test_call_raises_what_the_function_raised(name, kind, text):
    """Errors of the release's tree keep class and message; others come as RankError with the traceback's end."""
    with pytest.raises(kind, match=text):
        ranks.call("helpers_ranks:complain", name, deadline_s=60)


@pytest.mark.parametrize("target", ["helpers_ranks", "helpers_ranks:", "helpers_ranks:absent", ":add"])
def test_call_of_no_function_says_how_to_name_one(target):
    """A target that names no function is a mistake of the caller."""
    with pytest.raises(ConfigError, match="names no function"):
        ranks.call(target, deadline_s=60)


def test_call_that_crashes_shows_its_last_words():
    """A segmentation fault is reported with its signal, what was printed, and the line it happened at."""
    with pytest.raises(RankError, match=r"SIGSEGV(.|\n)*about to crash(.|\n)*in crash"):
        ranks.call("helpers_ranks:crash", deadline_s=60)


def test_call_past_its_deadline_says_where_it_was():
    """A function that stands still is killed, and the line it stood at is named."""
    with pytest.raises(RankError, match=r"deadline of 0\.5 s and was killed while in stand_still"):
        ranks.call("helpers_ranks:stand_still", deadline_s=0.5)


def test_result_with_a_tensor_is_refused():
    """Unpacking a tensor would import torch into the flow process."""
    with pytest.raises(RankError, match="numpy arrays"):
        ranks.call("helpers_ranks:tensor", deadline_s=60)
