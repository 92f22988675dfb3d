"""The machine's devices are held by one process at a time, and given back by the kernel when it dies."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra import device_lock
from infra.device_lock import devices_held, holder_of
from infra.settings import Settings, load_settings
from validation.errors import ConfigError, ConflictError

HOLD = """
import sys, time
from pathlib import Path
from infra.device_lock import devices_held
from infra.settings import load_settings
settings = load_settings(home=sys.argv[1], device_lock=sys.argv[2])
with devices_held(settings, "scaling of flights-1", print):
    with Path(sys.argv[3]).open("a") as file:
        print("in", file=file, flush=True)
        print("held", flush=True)
        time.sleep(float(sys.argv[4]))
        print("out", file=file, flush=True)
"""


def settings_in(tmp_path: Path, **given: object) -> Settings:
    return load_settings(home=tmp_path / "home", device_lock=tmp_path / "devices.lock", **given)


def hold(tmp_path: Path, seconds: float, *, home: str = "other", before: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    """A process with a home of its own that wants the devices for some seconds."""
    places = [str(tmp_path / home), str(tmp_path / "devices.lock"), str(tmp_path / "log"), str(seconds)]
    return subprocess.Popen([*before, sys.executable, "-c", HOLD, *places], stdout=subprocess.PIPE, text=True)


@contextmanager
def held_elsewhere(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """Another process has the devices for a minute, unless it is killed before."""
    process = hold(tmp_path, 60.0)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_of_many_processes_one_is_in_at_a_time(tmp_path: Path) -> None:
    """Processes of different homes get the devices one after the other, all of them in the end."""
    started = [hold(tmp_path, 0.05, home=f"home-{number}") for number in range(6)]

    assert [process.wait(60) for process in started] == [0] * 6
    assert (tmp_path / "log").read_text().split() == ["in", "out"] * 6
    for process in started:
        process.communicate()


def test_who_waits_is_told_who_has_them_and_gets_them_after_kill_9(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The holder is named at once and at every turn; its death frees the devices, and the seconds waited come out."""
    monkeypatch.setattr(device_lock, "SAY_EVERY_S", 0.3)
    said: list[str] = []
    with held_elsewhere(tmp_path) as process:

        def say(text: str) -> None:
            said.append(text)
            if len(said) == 3:
                process.kill()

        with devices_held(settings_in(tmp_path), "readiness of flights-2", say) as waited_s:
            assert holder_of(settings_in(tmp_path)).startswith(f"readiness of flights-2 (process {os.getpid()} of ")

    assert waited_s >= 0.6
    assert said[0].startswith(f"waiting for the devices of this machine, 0 s so far: scaling of flights-1 (process {process.pid} of ")
    assert holder_of(settings_in(tmp_path)) == ""


def test_waiting_ends_with_a_next_step(tmp_path: Path) -> None:
    """Devices that stay taken are an error that names the holder, and nobody else's lock is lost by it."""
    with held_elsewhere(tmp_path) as process:
        for _ in range(2):
            with (
                pytest.raises(ConflictError, match=rf"process {process.pid} of .*\n?.*SEATRIAL_DEVICE_WAIT_S"),
                devices_held(settings_in(tmp_path, device_wait_s=0.3), "scaling of flights-2", print),
            ):
                pass


def test_free_devices_cost_no_waiting(tmp_path: Path) -> None:
    """A block that finds them free waited for zero seconds and told nobody."""
    said: list[str] = []
    for _ in range(2):
        with devices_held(settings_in(tmp_path), "scaling of flights-1", said.append) as waited_s:
            assert waited_s == 0.0

    assert said == []


def test_a_process_has_them_for_all_its_threads(tmp_path: Path) -> None:
    """A block inside a block, in this thread or in another, does not wait, and the inner end gives nothing back."""
    settings, said = settings_in(tmp_path, device_wait_s=1.0), list[str]()

    def inner() -> None:
        with devices_held(settings, "inner", said.append):
            said.append(holder_of(settings))

    with devices_held(settings, "outer", said.append):
        inner()
        thread = threading.Thread(target=inner)
        thread.start()
        thread.join()
        process = hold(tmp_path, 0.0)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.0)
    assert process.wait(30) == 0
    process.communicate()
    assert [text.partition(" ")[0] for text in said] == ["outer", "outer"]


@pytest.mark.parametrize("place", ["folder", "missing/devices.lock", "file/devices.lock", "loop"])
def test_a_lock_that_cannot_be_used_is_named(place: str, tmp_path: Path) -> None:
    """Without a lock nothing is run: the error names the file and the variable."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "loop").symlink_to(tmp_path / "file")
    settings = load_settings(home=tmp_path, device_lock=tmp_path / place)
    if place.startswith("missing"):
        with devices_held(settings, "scaling", print):
            assert settings.device_lock.exists()
        return

    with pytest.raises(ConfigError, match="set SEATRIAL_DEVICE_LOCK"), devices_held(settings, "scaling", print):
        pass


@pytest.mark.parametrize("note", ["", "no json", "[]", '{"pid": 1}', '{"of": "x", "pid": "7", "user": "u", "since": "s"}'])
def test_a_note_that_says_nothing_stops_nobody(note: str, tmp_path: Path) -> None:
    """The note beside the lock is only for people."""
    (tmp_path / "devices.lock.holder").write_text(note)

    assert holder_of(settings_in(tmp_path)) == ""
    with devices_held(settings_in(tmp_path), "scaling", print):
        assert holder_of(settings_in(tmp_path)).startswith("scaling (process ")


@pytest.fixture
def open_to_all(tmp_path: Path) -> Iterator[Path]:
    """A sticky folder that every user can reach, like /tmp; pytest's own are closed again."""
    everyones = Path(tempfile.gettempdir())
    parents = [folder for folder in tmp_path.parents if folder != everyones and folder.is_relative_to(everyones)]
    modes = [folder.stat().st_mode for folder in parents]
    for folder in parents:
        folder.chmod(0o711)
    tmp_path.chmod(0o1777)
    yield tmp_path
    for folder, mode in zip(parents, modes, strict=True):
        folder.chmod(mode & 0o7777)


def is_closed_to_others() -> bool:
    """Whether another user cannot read this code: a checkout in somebody's own folder."""
    folder = Path(__file__).resolve()
    return any(not parent.stat().st_mode & 0o001 for parent in folder.parents)


@pytest.mark.skipif(os.getuid() != 0 or not shutil.which("setpriv"), reason="needs root, to become another user")
@pytest.mark.skipif(is_closed_to_others(), reason="another user cannot read this checkout")
def test_another_user_waits_for_the_same_lock(open_to_all: Path) -> None:
    """A user who did not make the lock's file can still take it, and waits for its maker."""
    with devices_held(settings_in(open_to_all), "outer", print):
        process = hold(open_to_all, 0.0, before=("setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(2.0)

    said, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert f"outer (process {os.getpid()} of " in said
