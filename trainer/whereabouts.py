"""Where ranks are: what each one said last and the line it is at, also while it is blocked inside a C call. Torch-free."""

import os
import re
import signal
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

from trainer.children import Child, state_of

ANSWER_S = 0.3  # a dump takes milliseconds; a stopped process never answers
POLL_S = 0.01
_FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line (?P<line>\d+) in (?P<function>.+)$', re.MULTILINE)
_STDLIB = sysconfig.get_path("stdlib")


def whereabouts(children: Sequence[Child]) -> str:
    """Say for each rank its last event and the line it is at, equal ones together. The ranks have to be alive."""
    found: dict[str, list[int]] = {}
    for child, place in zip(children, places(children), strict=True):
        found.setdefault(f"({last_event(child)}) {place}", []).append(child.rank)
    return "; ".join(f"{'ranks' if len(ranks) > 1 else 'rank'} {', '.join(map(str, ranks))} {place}" for place, ranks in found.items())


def places(children: Sequence[Child]) -> list[str]:
    """The line each child is at, as words. Every warm process answers SIGUSR1 with a stack in its log (see trainer.warm)."""
    sizes = [child.log.stat().st_size if child.log.exists() else 0 for child in children]
    for child in children:
        os.kill(child.pid, signal.SIGUSR1)
    until = time.monotonic() + ANSWER_S
    while time.monotonic() < until and not all(map(_said_since, children, sizes)):
        time.sleep(POLL_S)
    time.sleep(POLL_S)  # frames are written one by one: the last of them
    return [_place(child, _said_since(child, size)) for child, size in zip(children, sizes, strict=True)]


def _said_since(child: Child, size: int) -> str:
    """What a child's log holds beyond its first `size` bytes."""
    return child.log.read_bytes()[size:].decode(errors="replace") if child.log.exists() else ""


def last_event(child: Child) -> str:
    """What a child said last, in words."""
    if not child.events:
        return "no event yet"
    last = child.events[-1]
    detail = child.pulse.updates if last.name == "step" else last.fields.get("fault", last.fields.get("step", ""))
    return f"last event: {last.name} {detail}".rstrip()


def _place(child: Child, stack: str) -> str:
    if state_of(child.pid) in ("T", "t"):
        return "stopped by a signal"
    frames = [found.groupdict() for found in _FRAME.finditer(stack)]
    if not frames:
        return "not answering"
    own = next((found for found in frames if not _is_library(found["path"])), frames[0])
    at = f"{own['function']} ({Path(own['path']).name}:{own['line']})"
    waits = [found["function"] for found in frames if "/torch/distributed/" in found["path"]]
    inner = [name for name in waits if name != "wrapper"]
    return f"waiting in {inner[0]}, called by {at}" if inner else f"in {at}"


def _is_library(path: str) -> bool:
    return "/torch/" in path or "/trainer/recorded_" in path or (path.startswith(_STDLIB) and "site-packages" not in path)
