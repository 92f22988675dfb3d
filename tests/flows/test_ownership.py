"""One process works on a release; of a dead one the next takes over; what cannot be seen is left to a person."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest

from flows.ownership import Owner, check_owner, flow_run_release, is_alive, own, owner_of, owning, release_owner, remember_flow_run
from infra.store import MemoryStore, ObjectStore
from infra.store_folder import FolderStore
from validation.canonical import canonical_json
from validation.errors import ConflictError, EvidenceError

RELEASE = "flights-20260131-181542-3f9c"
ASK = """
import sys, time
from flows.ownership import own
from infra.store_folder import FolderStore
from validation.errors import ConflictError
print("ready", flush=True)
sys.stdin.readline()
try:
    own(FolderStore(sys.argv[1]), sys.argv[2])
    print("owns", flush=True)
    time.sleep(60)
except ConflictError as error:
    print(error, flush=True)
"""


@contextmanager
def asking(store: Path, count: int = 1) -> Iterator[list["subprocess.Popen[str]"]]:
    """Processes that ask for the release once they are told to; killed at the end."""
    started = [
        subprocess.Popen([sys.executable, "-c", ASK, str(store), RELEASE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(count)
    ]  # fmt: skip
    try:
        for process in started:
            assert answer(process) == "ready"
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def answer(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(processes: list["subprocess.Popen[str]"]) -> list[str]:
    """Let all of them ask at once; what each says."""
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    return [answer(process) for process in processes]


def test_of_sixteen_processes_one_owns_and_the_others_read_which(tmp_path: Path) -> None:
    """In a race exactly one process gets the release; the losers name it and say what to do."""
    with asking(tmp_path, 16) as processes:
        said = tell(processes)
        (winner,) = [process for process, word in zip(processes, said, strict=True) if word == "owns"]
        losers = [word for word in said if word != "owns"]

    assert len(losers) == 15
    assert all(f"process {winner.pid} on " in word and f"end that process (kill {winner.pid})" in word for word in losers)


def test_after_kill_9_the_next_takes_over(tmp_path: Path) -> None:
    """A killed owner needs no person, not even while it is a zombie; the next one in is alone again."""
    with asking(tmp_path, 3) as processes:
        assert tell(processes[:1]) == ["owns"]
        processes[0].kill()
        wait_until_dead(FolderStore(tmp_path))
        said = sorted(word == "owns" for word in tell(processes[1:]))

    assert said == [False, True]


def wait_until_dead(store: ObjectStore) -> None:
    owner = owner_of(store, RELEASE)
    assert owner is not None
    for _ in range(500):
        if is_alive(owner) is False:
            return
        time.sleep(0.01)
    raise AssertionError("the killed owner still seems alive")


def test_owning_again_and_giving_back() -> None:
    """The same process at the same flow run owns it already (Prefect's retry); once given back anybody may have it."""
    store = MemoryStore()
    first = own(store, RELEASE, flow_run_id="run-1")

    assert own(store, RELEASE, flow_run_id="run-1").pid == first.pid
    with pytest.raises(ConflictError, match=r"flow run run-1\), since .* Wait for its end"):
        own(store, RELEASE, flow_run_id="run-2")
    assert release_owner(store, first)
    assert owner_of(store, RELEASE) is None
    assert own(store, RELEASE, flow_run_id="run-2").flow_run_id == "run-2"


def test_a_block_gives_back_whatever_happens() -> None:
    """An error inside leaves nobody in the way of the next."""
    store = MemoryStore()
    with pytest.raises(ConflictError, match="Wait for its end"), owning(store, RELEASE, root="acts"):
        own(store, RELEASE, flow_run_id="another", root="acts")

    assert owner_of(store, RELEASE, root="acts") is None


def left_by(store: ObjectStore, **changes: object) -> Owner:
    """A record that another process left behind."""
    owner = replace(own(store, RELEASE), **changes)  # type: ignore[arg-type]
    store.replace(f"releases/{RELEASE}/owner", canonical_json(owner), store.get_with_etag(f"releases/{RELEASE}/owner")[1])
    return owner


@pytest.mark.parametrize(
    ("changes", "alive"),
    [
        ({}, True),
        ({"flow_run_id": "other"}, True),
        ({"started": 1}, False),  # the number was reused
        ({"pid": 2**22 + 1}, False),  # no such process
        ({"boot_id": "another"}, False),  # the machine was started anew
        ({"host": "elsewhere"}, None),
        ({"machine_id": "cloned", "boot_id": "another"}, None),  # a container elsewhere may have the same name
        ({"pid_space": "pid:[1]", "pid": 7}, None),  # another container on this host
        ({"uid": 12345, "pid": 2**22 + 1}, False),  # another user's: seen, since /proc hides nobody here
    ],
)  # fmt: skip
def test_who_is_dead(changes: dict[str, object], alive: bool | None) -> None:
    """Dead is what the kernel of the same boot does not know any more; what cannot be seen is neither dead nor alive."""
    assert is_alive(left_by(MemoryStore(), **changes)) is alive


def test_an_owner_who_cannot_be_seen_is_left_to_a_person() -> None:
    """From another host a release is refused with the next step, until a person says that its owner is gone; the old owner then stops."""
    store = MemoryStore()
    gone = left_by(store, host="elsewhere", pid=7)

    with pytest.raises(ConflictError, match=rf"process 7 on elsewhere, .*`seatrial finish {RELEASE} --take-over`"):
        own(store, RELEASE)
    check_owner(store, gone)
    mine = own(store, RELEASE, take_over=True)
    check_owner(store, mine)
    with pytest.raises(ConflictError, match=f"was taken over by process {mine.pid} on .* so it stops here"):
        check_owner(store, gone)
    assert not release_owner(store, gone)
    assert owner_of(store, RELEASE) == mine


def test_one_who_is_seen_alive_is_never_taken_over(tmp_path: Path) -> None:
    """--take-over ends nobody's work on this machine."""
    with asking(tmp_path) as processes:
        assert tell(processes) == ["owns"]

        with pytest.raises(ConflictError, match=f"kill {processes[0].pid}"):
            own(FolderStore(tmp_path), RELEASE, take_over=True)


def test_a_release_that_never_rests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losing every write ends with a next step, not with a loop."""
    store = MemoryStore()
    monkeypatch.setattr(store, "replace", Mock(side_effect=ConflictError("somebody else wrote first")))

    with pytest.raises(ConflictError, match="Let the others end"):
        own(store, RELEASE)


@pytest.mark.parametrize("body", [b"", b"{}", b"[1]", b'{"pid": "7"}', canonical_json({"release_id": RELEASE})])
def test_a_record_that_was_damaged_is_refused(body: bytes) -> None:
    """What does not say who works on the release lets nobody in silently."""
    store = MemoryStore()
    store.put_new(f"releases/{RELEASE}/owner", body)

    with pytest.raises(EvidenceError, match="remove that object from the store"):
        own(store, RELEASE)


def test_a_flow_run_keeps_its_release() -> None:
    """The first release that a flow run was given stands, also when two threads of a retry ask at once."""
    store = MemoryStore()
    said: list[str] = []
    asked = [
        threading.Thread(target=lambda n=n: said.append(remember_flow_run(store, "run-1", f"flights-20260131-18154{n}-3f9c")))
        for n in range(8)
    ]
    for thread in asked:
        thread.start()
    for thread in asked:
        thread.join()

    assert flow_run_release(store, "run-2") == ""
    assert {*said} == {flow_run_release(store, "run-1")}


def test_a_damaged_flow_run_is_refused() -> None:
    """A record of another flow run names no release for this one."""
    store = MemoryStore()
    store.put_new("flow-runs/run-1", canonical_json({"flow_run_id": "run-2", "release_id": RELEASE}))

    with pytest.raises(EvidenceError, match="it is of flow run run-2"):
        flow_run_release(store, "run-1")
