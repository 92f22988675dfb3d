"""Stacks as text -> threads and frames: what `faulthandler.dump_traceback`, a traceback or py-spy writes."""

import re

from validation.flight import StackFrame, ThreadStack
from validation.hang_stacks import COLLECTING

_HEAD = re.compile(r'^(Current thread|Thread) (\S+)[^\n]*?(?:\[([^\]]*)\])? ?\(most recent call first\):?')  # fmt: skip
_SPY_HEAD = re.compile(r'^Thread (\S+) \([^)]*\)(?:: "([^"]*)")?')
_FRAME = re.compile(r'^\s+File "([^"]*)", line (\d+)(?: in (.*))?$')
_SPY_FRAME = re.compile(r"^\s+(\S.*) \(([^()]*):(\d+)\)$")
_COLLECTING = re.compile(r"^\s+Garbage-collecting$")  # in place of the innermost frame; its name is validation.hang_stacks.COLLECTING
_MAIN_ENDS = ("<module>", "_bootstrap", "_fork", "main", "spawn_main")


def parse_stack(text: str) -> tuple[ThreadStack, ...]:
    """Threads in the order of the file; innermost frame first.

    faulthandler does not say which thread is the main one, and "Current thread" is whoever dumped: it is the one that ends in the
    program itself and not in `threading`; the last such one, for faulthandler lists the oldest thread last.
    """
    threads: list[tuple[str, list[StackFrame]]] = []
    is_backwards = False
    for line in text.splitlines():
        if line.startswith("Traceback (most recent call last)"):
            threads.append(("", []))
            is_backwards = True
        elif head := _HEAD.match(line):
            threads.append((head[3] or "", []))
        elif head := _SPY_HEAD.match(line):
            threads.append((head[2] or "", []))
        elif frame := _frame(line):
            if not threads:
                threads.append(("", []))
            threads[-1][1].append(frame)
    if is_backwards and len(threads) == 1:
        threads[0][1].reverse()
    main = _main_of(threads)
    return tuple(ThreadStack(name, place == main, tuple(frames)) for place, (name, frames) in enumerate(threads) if frames)


def _frame(line: str) -> StackFrame | None:
    if match := _FRAME.match(line):
        return StackFrame(match[1], int(match[2]), (match[3] or "").strip())
    if match := _SPY_FRAME.match(line):
        return StackFrame(match[2], int(match[3]), match[1])
    if _COLLECTING.match(line):
        return StackFrame("<gc>", 0, COLLECTING)
    return None


def _main_of(threads: list[tuple[str, list[StackFrame]]]) -> int:
    named = [place for place, (name, frames) in enumerate(threads) if name == "MainThread" and frames]
    own = [place for place, (_, frames) in enumerate(threads) if frames and not _is_side_thread(frames)]
    return (named or own or [-1])[-1]


def _is_side_thread(frames: list[StackFrame]) -> bool:
    return frames[-1].path.endswith("threading.py") or frames[-1].function in ("_bootstrap", "_bootstrap_inner")
