"""What a killed flow process leaves running is found and ended, and nothing else is."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from flows.orphans import MARK, end_orphans, find_orphans, mark_process
from infra.settings import HomeSettings
from trainer.children import pid_of

SLEEP = [sys.executable, "-c", "import time; time.sleep(120)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(120)",
]
CHILD = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(120)"], start_new_session=True).pid, flush=True)
time.sleep(120)
"""
# a flow process: marks itself, starts a child in a session of its own, which starts one, too
FLOW = f"""
import subprocess, sys, time
from flows.orphans import mark_process
mark_process()
child = subprocess.Popen([sys.executable, "-c", {CHILD!r}], start_new_session=True, stdout=subprocess.PIPE, text=True)
print(child.pid, child.stdout.readline(), flush=True)
time.sleep(120)
"""
CLEAN = """
from flows.orphans import end_orphans
from infra.settings import HomeSettings
end_orphans(HomeSettings(), print)
print("done")
"""
PREFECT = """
import time
from flows.surroundings import make_quiet_place
make_quiet_place()
from prefect import flow

@flow
def small():
    print("running", flush=True)
    time.sleep(300)

small()
"""


@contextmanager
def flow_process(home: Path, code: str = FLOW) -> Iterator["subprocess.Popen[str]"]:
    """A flow-like process; whatever of this home is left at the end is killed."""
    process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment(home))
    try:
        yield process
    finally:
        process.kill()
        process.communicate()
        for orphan in find_orphans(HomeSettings(home=home)):
            orphan.process.kill()


def environment(home: Path, **more: str) -> dict[str, str]:
    return {**{name: value for name, value in os.environ.items() if name != MARK}, "SEATRIAL_HOME": str(home), **more}


def first_line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()


@contextmanager
def started(home: Path, mark: str | None, command: list[str] = SLEEP) -> Iterator["subprocess.Popen[str]"]:
    """A process with a given mark."""
    more = {} if mark is None else {MARK: mark}
    process = subprocess.Popen(command, env=environment(home, **more), stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def gone_mark() -> str:
    """The mark of a process that was and is not."""
    process = subprocess.Popen(SLEEP)
    mark = f"{process.pid}:{pid_of(process.pid).started}"
    process.kill()
    process.wait()
    return mark


def test_children_of_a_killed_flow_process_are_found_and_ended(tmp_path: Path) -> None:
    """While it lives nothing is an orphan; after SIGKILL its child and grandchild are, and are ended, though it is a zombie still."""
    settings = HomeSettings(home=tmp_path)
    with flow_process(tmp_path) as process:
        children = {int(word) for word in first_line(process).split()}
        assert find_orphans(settings) == ()
        os.kill(process.pid, signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        said: list[str] = []

        assert {orphan.pid for orphan in end_orphans(settings, said.append)} == children
        assert len(children) == 2
        assert all(f"left behind by flow process {process.pid}: {sys.executable}" in text for text in said)
        assert not [pid for pid in children if psutil.pid_exists(pid)]
        assert find_orphans(settings) == ()


@pytest.mark.parametrize(
    "mark",
    [None, "", "nonsense", "1:", ":7", f"{os.getpid()}:{pid_of(os.getpid()).started}"],
    ids=["none", "empty", "nonsense", "no time", "no number", "a living process"],
)
def test_others_are_left_alone(mark: str | None, tmp_path: Path) -> None:
    """Without a mark, with one that says nothing, or with that of a living process, nobody is an orphan."""
    with started(tmp_path, mark) as process:
        assert end_orphans(HomeSettings(home=tmp_path), print) == ()
        assert process.poll() is None


def test_a_reused_number_is_no_parent(tmp_path: Path) -> None:
    """A mark whose number belongs to another process by now, started at another time, names a process that is gone."""
    with started(tmp_path, f"{os.getpid()}:{pid_of(os.getpid()).started - 1}") as process:
        assert [orphan.pid for orphan in find_orphans(HomeSettings(home=tmp_path))] == [process.pid]


def test_another_homes_orphans_are_its_own(tmp_path: Path) -> None:
    """Only what was started for this home is looked at."""
    with started(tmp_path / "theirs", gone_mark()) as process:
        assert find_orphans(HomeSettings(home=tmp_path)) == ()
        assert [orphan.pid for orphan in find_orphans(HomeSettings(home=tmp_path / "theirs"))] == [process.pid]


def test_a_flow_process_outlives_the_one_that_started_it(tmp_path: Path) -> None:
    """A marked process whose own children name it works on by itself: it is no orphan, and neither are they."""
    with started(tmp_path, gone_mark()) as flow, started(tmp_path, f"{flow.pid}:{pid_of(flow.pid).started}") as child:
        assert end_orphans(HomeSettings(home=tmp_path), print) == ()
        assert (flow.poll(), child.poll()) == (None, None)


def test_this_process_and_its_parents_are_never_ended(tmp_path: Path) -> None:
    """A command started below an orphan can clean up without ending itself."""
    with started(tmp_path, gone_mark(), [sys.executable, "-c", CLEAN]) as process:
        assert first_line(process) == "done\n"
        assert process.wait(10) == 0


def test_who_does_not_listen_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM first, SIGKILL for those that ignore it."""
    monkeypatch.setattr("flows.orphans.END_S", 0.5)
    with started(tmp_path, gone_mark(), STUBBORN) as process:
        assert first_line(process) == "deaf\n"
        assert [orphan.pid for orphan in end_orphans(HomeSettings(home=tmp_path), print)] == [process.pid]
        assert not psutil.pid_exists(process.pid)


def test_marking_replaces_an_inherited_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    """A flow process that was started by another names itself to its children."""
    monkeypatch.setenv(MARK, "1:1")
    mark_process()

    assert os.environ[MARK] == f"{os.getpid()}:{pid_of(os.getpid()).started}"


@pytest.mark.slow
def test_prefects_temporary_server_is_found_and_ended(tmp_path: Path) -> None:
    """After kill -9 of a flow the server that Prefect started beside it lives on, until it is ended."""
    with flow_process(tmp_path, PREFECT) as process:
        assert first_line(process) == "running\n"
        assert find_orphans(HomeSettings(home=tmp_path)) == ()
        os.kill(process.pid, signal.SIGKILL)
        process.wait(10)
        ended = end_orphans(HomeSettings(home=tmp_path), print)

        assert [orphan.command for orphan in ended if "prefect.server.api.server:create_app" in orphan.command]
        assert not [orphan.pid for orphan in ended if psutil.pid_exists(orphan.pid)]
