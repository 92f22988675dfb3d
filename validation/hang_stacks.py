"""Where a rank's main thread stands, read from its stack."""

import re
from typing import NamedTuple

from validation.flight import RankEvidence, StackFrame, ThreadStack

_LIBRARY = re.compile(
    r"(^|/)python3(\.\d+)?/|(site|dist)-packages/|^<|(^|/)torch/(distributed|nn|autograd|utils|optim|cuda|_)|(^|/)trainer/record(ed|ing)"
)
_TORCH_DISTRIBUTED = re.compile(r"(^|/)torch/distributed/")
_CLEANUP = re.compile(
    r"clean_?up|tear_?down|shut_?down|finali[sz]e|destroy|^__exit__$|^__del__$|^close$|^_?abort|atexit|_run_exitfuncs", re.I
)
_LOADER_FILES = re.compile(r"torch/utils/data/|(^|/)queue\.py$|multiprocessing/(queues|connection|pool)\.py$")
_LOADER_CALLS = frozenset({"get", "_try_get_data", "_get_data", "_next_data", "poll", "_poll", "recv", "recv_bytes", "_recv", "wait"})
_OPERATIONS = (
    "all_reduce", "all_reduce_coalesced", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_coalesced",
    "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single", "broadcast", "broadcast_object_list", "reduce", "gather",
    "gather_object", "scatter", "scatter_object_list", "barrier", "monitored_barrier",
)  # fmt: skip
_POINT_TO_POINT = {
    "send": "send", "isend": "send", "send_object_list": "send", "recv": "recv", "irecv": "recv", "recv_object_list": "recv",
    "batch_isend_irecv": "",
}  # fmt: skip
COLLECTING = "Garbage-collecting"  # the function of an innermost frame of "<gc>": the thread collects garbage
_SETUP = frozenset({"new_group", "init_process_group", "_store_based_barrier", "_new_process_group_helper"})


class Standing(NamedTuple):
    """What a main thread is doing; "" and False = does not show."""

    op: str = ""  # collective it is inside
    p2p: str = ""  # "send" or "recv" it is inside
    in_loader: bool = False  # waits for data
    in_cleanup: bool = False  # inside a function that cleans up
    in_setup: bool = False  # makes a group
    in_gc: bool = False  # collects garbage; finalizers that run in it are not the program's clean-up
    where: str = ""  # innermost line of the program's own code
    frames: tuple[StackFrame, ...] = ()  # the program's own, innermost first


def main_thread(stack: tuple[ThreadStack, ...]) -> ThreadStack | None:
    """The main thread; the last one where none is marked, as Python's fault handler writes them."""
    marked = [thread for thread in stack if thread.is_main]
    return marked[0] if marked else stack[-1] if stack else None


def place_of(frame: StackFrame) -> str:
    """A frame as a call site, "file.py:12 function"."""
    return f"{frame.path.rsplit('/', 1)[-1]}:{frame.line} {frame.function}"


def standing(thread: ThreadStack | None) -> Standing | None:
    """Say what a thread is doing; None without a stack."""
    if thread is None or not thread.frames:
        return None
    own = tuple(frame for frame in thread.frames if not _LIBRARY.search(frame.path))
    inner = []  # library frames inside the innermost own one
    for frame in thread.frames:
        if own and frame == own[0]:
            break
        inner.append(frame)
    called = [frame.function for frame in inner if _TORCH_DISTRIBUTED.search(frame.path)]
    outermost = list(reversed(called))
    op = next((name for name in outermost if name in _OPERATIONS), "")
    p2p = next((_POINT_TO_POINT[name] for name in called if _POINT_TO_POINT.get(name)), "")
    loading = any(_LOADER_FILES.search(frame.path) and frame.function in _LOADER_CALLS for frame in inner)
    in_gc = thread.frames[0].function == COLLECTING
    return Standing(
        op="" if p2p else op, p2p=p2p, in_loader=loading, in_setup=any(name in _SETUP for name in called),
        in_gc=in_gc, in_cleanup=not in_gc and any(_CLEANUP.search(frame.function) for frame in (*own, *inner)),
        where=place_of(own[0] if own else thread.frames[0]), frames=own,
    )  # fmt: skip


def standings(one: RankEvidence) -> tuple[Standing, ...]:
    """What the rank's main thread did at each moment at which its stack was taken, oldest first."""
    found = (standing(main_thread(stack)) for stack in one.stacks)
    return tuple(each for each in found if each is not None)


def order_of_lines(one: Standing | None, other: Standing | None) -> int:
    """Whether `one` stands before (-1) or after (1) `other` in the innermost function that both are in; 0 = cannot be told."""
    if one is None or other is None:
        return 0
    lines = {(frame.path, frame.function): frame.line for frame in reversed(other.frames)}
    for frame in one.frames:
        line = lines.get((frame.path, frame.function))
        if line is not None:
            return (frame.line > line) - (frame.line < line)
    return 0


def order_of_places(one: str, other: str) -> int:
    """The same of two call sites "file.py:12 function"."""
    first, second = (re.match(r"(.*):(\d+)\s*(.*)$", text) for text in (one, other))
    if first is None or second is None or (first[1], first[3]) != (second[1], second[3]):
        return 0
    return (int(first[2]) > int(second[2])) - (int(first[2]) < int(second[2]))
