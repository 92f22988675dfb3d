"""What a flow process that was killed has left running: found by a mark in its environment, and ended.

Ranks and warm servers die with their flow process; the temporary server that Prefect starts beside a flow, and whatever a library starts,
do not. Everything started from a flow process inherits SEATRIAL_FLOW_PROCESS=<pid>:<clock ticks after boot>; when the kernel does not
know that process any more, what carries its mark is an orphan. The kernel shows the environment that a program was started with: the mark
of a flow process on itself is seen on its children only.
"""

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass

import psutil

from infra.settings import HomeSettings
from trainer.children import pid_of, state_of

MARK = "SEATRIAL_FLOW_PROCESS"
END_S = 10.0  # to end by itself, before SIGKILL


@dataclass(frozen=True, slots=True, kw_only=True)
class Orphan:
    """A process whose flow process is gone."""

    pid: int
    command: str
    flow_process: int  # the number that its flow process had
    process: psutil.Process  # knows it from a later process with the same number


def mark_process() -> None:
    """Mark all that this process starts from now on as its own; a mark that was inherited is replaced."""
    me = pid_of(os.getpid())
    os.environ[MARK] = f"{me.pid}:{me.started}"


def find_orphans(settings: HomeSettings) -> tuple[Orphan, ...]:
    """This user's processes of this home whose flow process is gone.

    Left out: processes without a mark, of another home, and any that others name as their living flow process: it works on by itself.
    """
    marked = {process: found for process in psutil.process_iter() if (found := _mark_of(process, str(settings.home)))}
    living = {mark for mark in set(marked.values()) if _lives(mark)}
    spared = {int(mark.partition(":")[0]) for mark in living} | _own_line()
    return tuple(
        Orphan(pid=process.pid, command=_command(process), flow_process=int(mark.partition(":")[0]), process=process)
        for process, mark in marked.items()
        if mark not in living and process.pid not in spared
    )


def end_orphans(settings: HomeSettings, say: Callable[[str], None]) -> tuple[Orphan, ...]:
    """End what `find_orphans` finds, and nothing else: asked first, killed after 10 s. Returns those that are gone."""
    found = find_orphans(settings)
    for orphan in found:
        say(f"ending process {orphan.pid}, left behind by flow process {orphan.flow_process}: {orphan.command}")
    _signal(found, psutil.Process.terminate)
    _, alive = psutil.wait_procs([orphan.process for orphan in found], timeout=END_S)
    _signal([orphan for orphan in found if orphan.process in alive], psutil.Process.kill)
    _, alive = psutil.wait_procs(alive, timeout=END_S)
    for process in alive:
        say(f"process {process.pid} survived SIGKILL for {END_S:g} s. Look for a hung disk or driver (state D in ps).")
    return tuple(orphan for orphan in found if orphan.process not in alive)


def _signal(orphans: Collection[Orphan], how: Callable[[psutil.Process], None]) -> None:
    for orphan in orphans:
        try:
            how(orphan.process)
        except psutil.NoSuchProcess:  # just now
            continue


def _mark_of(process: psutil.Process, home: str) -> str:
    """The mark that a process of this user and home carries; "" = none."""
    try:
        if process.uids().real != os.getuid() or process.status() == psutil.STATUS_ZOMBIE:
            return ""
        environment = process.environ()
    except (psutil.Error, OSError):
        return ""
    mark = environment.get(MARK, "")
    return mark if environment.get("SEATRIAL_HOME") == home and _is_mark(mark) else ""


def _is_mark(text: str) -> bool:
    pid, colon, started = text.partition(":")
    return bool(colon) and pid.isdecimal() and started.isdecimal()


def _lives(mark: str) -> bool:
    pid, _, started = mark.partition(":")
    try:
        return pid_of(int(pid)).started == int(started) and state_of(int(pid)) not in ("", "Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def _own_line() -> set[int]:
    """This process and those that it was started by."""
    me = psutil.Process()
    return {me.pid, *(parent.pid for parent in me.parents())}


def _command(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())[:200]
    except psutil.Error:
        return ""
