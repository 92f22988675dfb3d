"""The stranger planned faults: each does to its rank what a real mistake does, once, and tells the leader before."""

import errno
import gc
import os
import threading
import time
from pathlib import Path

import pytest
from helpers_loop import run_attempt, run_job, tiny_job
from test_faults import plan

from trainer import ranks
from trainer.config import GENTLE_KINDS, Fault, parse_fault
from trainer.deaths import deadly
from trainer.fault_kinds import collect_slowly, hold_lock, wait_for_data
from trainer.world import Event
from validation.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "phase"),
    [
        ("starve:rank=1,step=2", "data"), ("extra:rank=1,step=2", "collective"), ("argument:rank=1,step=2", "collective"),
        ("dtype:rank=1,step=2", "collective"), ("full:rank=0,step=2", "write"), ("swallow:rank=1,step=2", "backward"),
    ],
)  # fmt: skip
def test_fault_without_a_phase_strikes_where_it_belongs(text: str, phase: str) -> None:
    """A starving loader starves while it fetches, a full disk while it writes."""
    fault = parse_fault(text)

    assert fault.phase == phase
    assert parse_fault(str(fault)) == fault


@pytest.mark.parametrize("text", ["hold:rank=1,step=2", "pause:rank=0,step=1,ms=0", "full:rank=0,step=1,phase=seal"])
def test_fault_that_would_show_nothing_is_refused(text: str) -> None:
    """A lock held for no time, or a disk that is full while nothing is written."""
    with pytest.raises(ConfigError, match="hold and pause need ms, full strikes in phase write"):
        parse_fault(text)


def test_milliseconds_survive_the_text_form() -> None:
    """`hold` and `pause` keep their length."""
    assert str(parse_fault("hold:rank=1,step=2,ms=250")) == "hold:rank=1,step=2,phase=backward,attempt=0,ms=250"


@pytest.mark.parametrize("kind", ["kill", "starve", "swallow", "extra", "argument", "hold", *GENTLE_KINDS])
def test_gentle_faults_explain_no_death(kind: str) -> None:
    """What ends no attempt may not be named as the planned fault behind a death."""
    event = Event(name="fault", rank=0, attempt=0, t_ns=0, fields={"fault": f"{kind}:rank=0,step=1,phase=data,attempt=0"})

    assert bool(deadly([event])) == (kind not in GENTLE_KINDS)


def ticking(during: object) -> tuple[float, float]:
    """How long something took, and the longest time in which another thread ran no Python (s)."""
    gaps, over = [0.0], threading.Event()

    def tick() -> None:
        last = time.monotonic()
        while not over.wait(0.002):
            now = time.monotonic()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(0.02)
    began = time.monotonic()
    during()  # type: ignore[operator]
    took = time.monotonic() - began
    over.set()
    thread.join()
    return took, max(gaps)


def test_held_lock_stops_every_thread() -> None:
    """No other thread runs Python while the lock is held in C; a sleep of the same length stops nobody."""
    took, gap = ticking(lambda: hold_lock(300))
    _, calm = ticking(lambda: time.sleep(0.3))

    assert took >= 0.3
    assert gap >= 0.25
    assert calm < 0.2


def test_signals_do_not_shorten_a_held_lock() -> None:
    """A stack that is asked for by a signal meanwhile does not end it."""
    pid = os.fork()
    if pid == 0:
        import faulthandler
        import signal

        faulthandler.register(signal.SIGUSR1, file=open(os.devnull, "w"))  # noqa: PTH123, SIM115
        began = time.monotonic()
        hold_lock(400)
        os._exit(0 if time.monotonic() - began >= 0.4 else 1)
    time.sleep(0.1)
    os.kill(pid, 10)

    assert os.waitpid(pid, 0)[1] == 0


def test_pause_looks_like_one_long_collection() -> None:
    """Whoever listens to gc.callbacks sees its start and, so much later, its end."""
    seen: list[tuple[str, float]] = []
    gc.callbacks.insert(0, lambda phase, _: seen.append((phase, time.monotonic())))
    try:
        collect_slowly(120)
    finally:
        gc.callbacks.pop(0)

    assert [phase for phase, _ in seen] == ["start", "stop"]
    assert seen[1][1] - seen[0][1] >= 0.12
    assert len(gc.callbacks) == 0 or all(callback.__name__ != "dawdle" for callback in gc.callbacks)


def test_starved_loader_waits_in_a_queue() -> None:
    """Its thread stands in `get`, and nobody will feed it."""
    thread = threading.Thread(target=wait_for_data, daemon=True)
    thread.start()
    thread.join(0.1)

    assert thread.is_alive()


def test_full_disk_says_what_a_full_disk_says() -> None:
    """The error is the disk's own, told to the leader first, once."""
    said: list[str] = []
    given = plan(Fault(kind="full", rank=0, step=3, phase="write"), said=said)
    with pytest.raises(OSError, match="No space left") as caught:
        given.at("write", 5)
    given.at("write", 6)

    assert caught.value.errno == errno.ENOSPC
    assert len(said) == 1


def test_swallowed_error_leaves_out_its_step_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """It is caught; the collectives of its step are left out, those of the next are not."""
    given = plan(Fault(kind="swallow", rank=0, step=2))
    given.at("backward", 2)

    assert [given.skips(step) for step in (1, 2, 3)] == [False, True, False]
    assert "caught and skipped: RuntimeError: planned fault swallow" in capsys.readouterr().err


def test_ranks_alone_meet_nobody(tmp_path: Path) -> None:
    """With one rank there is nobody to be out of step with: extra, argument and dtype are told and change nothing."""
    faults = tuple(Fault(kind=kind, rank=0, step=1, phase="collective") for kind in ("extra", "argument", "dtype"))
    calm, run = run_job(tiny_job(tmp_path / "calm", steps=3)), run_job(tiny_job(tmp_path / "run", steps=3, faults=faults))

    assert run.state_sha256 == calm.state_sha256
    assert set(run.faults_fired) == set(map(str, faults))


@pytest.mark.proof  # the drill of a full disk shows the same
def test_full_disk_costs_one_checkpoint_and_no_bits(tmp_path: Path) -> None:
    """Under the real leader: the refused checkpoint is named, the next one is sealed, the run ends like its twin."""
    fault = Fault(kind="full", rank=1, step=0, phase="write")
    calm = ranks.run_group(tiny_job(tmp_path / "calm", world_size=2, steps=5))
    run = ranks.run_group(tiny_job(tmp_path / "run", world_size=2, steps=5, checkpoint_every=2, faults=(fault,)))

    assert (run.state_sha256, run.attempts, run.faults_fired) == (calm.state_sha256, 1, (str(fault),))
    assert run.unsaved == ("step 2: rank 1: OSError: [Errno 28] No space left on device",)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000004"]


def test_swallowed_error_puts_the_ranks_out_of_step(tmp_path: Path) -> None:
    """The next exact reduction finds it, and no update is made of gradients of two steps."""
    done = run_attempt(tiny_job(tmp_path, world_size=2, faults=(Fault(kind="swallow", rank=1, step=2),), stall_s=3.0))

    assert any("a rank left out a collective" in text and "[2, 3]" in text for text in done.errors.values())


def test_other_type_is_silent(tmp_path: Path) -> None:
    """As many bytes of another type: nobody hangs, the trained bits are the same, since the planned sum is thrown away."""
    fault = Fault(kind="dtype", rank=1, step=1, phase="collective")
    calm, run = run_job(tiny_job(tmp_path / "a", steps=3)), run_job(tiny_job(tmp_path / "b", world_size=2, steps=3, faults=(fault,)))

    assert (run.state_sha256, run.faults_fired) == (calm.state_sha256, (str(fault),))


@pytest.mark.parametrize("kind", ["extra", "argument"])
def test_other_calls_and_sizes_end_the_group(kind: str, tmp_path: Path) -> None:
    """One more all-reduce on one rank, or another size: somebody hangs or aborts, nobody finishes."""
    done = run_attempt(tiny_job(tmp_path, world_size=3, faults=(Fault(kind=kind, rank=1, step=1, phase="collective"),), stall_s=2.0))

    assert any(done.exitcodes)
    assert not done.said("finished")
