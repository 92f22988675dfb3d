"""The warm server: one interpreter that has imported torch and the trainer once, and forks a leader for every request.

It is started by `trainer.ranks` with a control socket on which link sockets arrive, one a request. It never reads a request, and runs no
thread and no tensor operation: what is forked from it finds torch imported and untouched. It ends when the flow process ends.
"""

import faulthandler
import gc
import importlib
import os
import pkgutil
import select
import signal
import socket
import time
import traceback
from collections.abc import Iterable, Iterator, Sequence
from typing import NoReturn

import trainer.recipes
from trainer.children import adopt_orphans, die_with_parent, kill_children
from trainer.leader import lead
from trainer.wires import EARLY, is_readable

# What a recipe's description needs; pyarrow.parquet: pandas imports it at the first table.
PRELOAD_FIRST = ("torch", "torch.distributed", "numpy.ctypeslib", "pandas", "pyarrow.parquet", "pyarrow.pandas_compat", "trainer.describe")
PRELOAD = ("torch.distributed.checkpoint", "torch.utils.serialization.config", "safetensors.torch")  # and all of trainer
# As soon as nobody has to wait for it: the first optimizer pulls in 829 modules through torch._dynamo, a second's work.
PRELOAD_NEXT = ("torch._dynamo", "torch.profiler._cupti_monitor")
LEADERS_END_S = 2.0
IDLE_MS = 200  # nobody asked for anything for so long: time for the imports that can wait


def serve(control_fd: int, parent: int, when_idle: Sequence[str] = ()) -> NoReturn:
    """Import, then fork a leader for each link that arrives, until the flow process (`parent`, a pid) hangs up or dies.

    A link that comes with the word EARLY is served before everything is imported. Modules named in `when_idle` are imported, one at a
    time, while no leader is alive and nobody asks.
    """
    leaders: dict[int, int] = {}  # pidfd -> pid
    try:
        die_with_parent(parent, signal.SIGTERM)  # the default action until the imports are done: nobody has to be told yet
        _import_all(PRELOAD_FIRST)
        adopt_orphans()
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False)  # inherited: a rank tells in its log where it is
        signal.signal(signal.SIGTERM, _leave)
        _fork_on_request(socket.socket(fileno=control_fd), leaders, list(when_idle))
    finally:
        _end_leaders(leaders)
        os._exit(0)


def _own_modules() -> Iterator[str]:
    for package in (trainer, trainer.recipes):
        yield from (found.name for found in pkgutil.iter_modules(package.__path__, f"{package.__name__}."))


def _import_all(names: Iterable[str]) -> None:
    """Import, or leave the error for the rank that needs the module: it can say so to somebody."""
    gc.disable()  # imports leave next to no garbage, and looking for it takes a fifth of their time
    for name in names:
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
    gc.freeze()  # the children share these pages until they write on them
    gc.enable()


def _leave(*_: object) -> NoReturn:
    raise SystemExit(0)


def _fork_on_request(control: socket.socket, leaders: dict[int, int], when_idle: list[str]) -> None:
    """Args: when_idle, modules to import while nobody is at work; all others are imported between two requests, whoever is."""
    first, soon = [*PRELOAD, *_own_modules()], list(PRELOAD_NEXT)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    while True:
        heard = poller.poll(0 if first or soon else IDLE_MS if when_idle and not leaders else None)
        if not heard:
            _import_all([(first or soon or when_idle).pop(0)])
        for fd, _ in sorted(heard, key=lambda found: found[0] not in leaders):  # what a dead leader left ends before the next one starts
            if fd in leaders:
                poller.unregister(fd)
                _bury(leaders, fd)
                continue
            word, links, _, _ = socket.recv_fds(control, 1, 1, socket.MSG_CMSG_CLOEXEC)
            if not word:
                return
            if word != EARLY:
                _import_all(first)
                first.clear()
            if links:  # none when this process is out of descriptors: the asker sees its link closed
                poller.register(_fork_leader(control, socket.socket(fileno=links[0]), leaders), select.POLLIN)


def _fork_leader(control: socket.socket, link: socket.socket, leaders: dict[int, int]) -> int:
    server = os.getpid()
    pid = os.fork()
    if pid == 0:
        control.close()
        for fd in leaders:
            os.close(fd)
        lead(link, server)
    link.close()
    pidfd = os.pidfd_open(pid)
    leaders[pidfd] = pid
    return pidfd


def _bury(leaders: dict[int, int], pidfd: int) -> None:
    """Reap a leader, and end whatever it could not end itself because it was killed."""
    os.waitpid(leaders.pop(pidfd), 0)
    os.close(pidfd)
    kill_children(spare=leaders.values())


def _end_leaders(leaders: dict[int, int]) -> None:
    """Ask every leader to end its group, wait a little, then leave no child behind in any case."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # it is being done
    for pid in leaders.values():
        os.kill(pid, signal.SIGTERM)
    until = time.monotonic() + LEADERS_END_S
    for pidfd in leaders:
        is_readable(pidfd, until - time.monotonic())
    kill_children()
