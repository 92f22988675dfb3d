"""What recording takes from inside torch. Its private names are used here only (and those of the audit in trainer/audit_collectives.py).

Every collective that Python asks for, by whatever name it was imported, ends in a method of `ProcessGroup`: they are what is listed here.
What C++ asks for by itself (the buckets of DDP, functional collectives) passes them by and is known to torch's flight recorder alone. A
small server of torch's, in C++, hands that out while the interpreter is held.
"""

import ctypes
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import torch
import torch.autograd
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from validation.flight import DEFAULT_GROUP, P2P

ProcessGroup: Any = dist.ProcessGroup
Work: Any = c10d.Work
SERVER_PREFIX = "seatrial-"
PING_S = 0.5  # it answers within a ms, but for the moment in which it starts


class Call(NamedTuple):
    """One method of ProcessGroup: which of its arguments say what."""

    op: str
    inputs: int = -1  # place of the tensors given; -1 = none
    outputs: int = -1
    options: int = -1  # place of the options that hold a reduce operator, a root, or both
    reduces: bool = False
    has_root: bool = False
    peer: int = -1  # place of the peer's rank in the group
    tag: int = -1

    @property
    def is_p2p(self) -> bool:
        return self.op in P2P


CALLS = {
    "allreduce": Call("all_reduce", 0, 0, 1, reduces=True),
    "allreduce_coalesced": Call("all_reduce", 0, 0, 1, reduces=True),
    "broadcast": Call("broadcast", 0, 0, 1, has_root=True),
    "reduce": Call("reduce", 0, 0, 1, reduces=True, has_root=True),
    "allgather": Call("all_gather", 1, 0),
    "_allgather_base": Call("all_gather", 1, 0),
    "all_gather_single": Call("all_gather", 1, 0),
    "allgather_coalesced": Call("all_gather", 1, 0),
    "all_gather_single_coalesced": Call("all_gather", 1, 0),
    "allgather_into_tensor_coalesced": Call("all_gather", 1, 0),
    "gather": Call("gather", 1, 0, 2, has_root=True),
    "scatter": Call("scatter", 1, 0, 2, has_root=True),
    "reduce_scatter": Call("reduce_scatter", 1, 0, 2, reduces=True),
    "_reduce_scatter_base": Call("reduce_scatter", 1, 0, 2, reduces=True),
    "reduce_scatter_single": Call("reduce_scatter", 1, 0, 2, reduces=True),
    "reduce_scatter_single_coalesced": Call("reduce_scatter", 1, 0, 2, reduces=True),
    "reduce_scatter_tensor_coalesced": Call("reduce_scatter", 1, 0, 2, reduces=True),
    "alltoall": Call("all_to_all", 1, 0),
    "alltoall_base": Call("all_to_all", 1, 0),
    "all_to_all_single": Call("all_to_all", 1, 0),
    "barrier": Call("barrier"),
    "monitored_barrier": Call("monitored_barrier"),
    "send": Call("send", 0, peer=1, tag=2),
    "recv": Call("recv", -1, 0, peer=1, tag=2),
    "recv_anysource": Call("recv", -1, 0, tag=1),
}  # fmt: skip

_TYPES = {
    torch.float16: "Half", torch.bfloat16: "BFloat16", torch.float32: "Float", torch.float64: "Double", torch.uint8: "Byte",
    torch.int8: "Char", torch.int16: "Short", torch.int32: "Int", torch.int64: "Long", torch.bool: "Bool",
    torch.complex64: "ComplexFloat", torch.complex128: "ComplexDouble",
}  # fmt: skip


def type_name(kind: torch.dtype) -> str:
    """A type as torch's flight recorder writes it."""
    return _TYPES.get(kind) or str(kind).removeprefix("torch.").title()


def methods() -> dict[str, Any]:
    """The methods of CALLS that this torch has, as they are now."""
    return {name: ProcessGroup.__dict__[name] for name in CALLS if name in ProcessGroup.__dict__}


def has_world() -> bool:
    """Whether there is a group of all ranks."""
    return dist.is_available() and dist.is_initialized()


class Members(NamedTuple):
    """A process group that this rank is in."""

    name: str
    ranks: tuple[int, ...]  # global, in the order of the group
    description: str
    backend: str  # "gloo", "nccl", "cpu:gloo,cuda:nccl"


def members(group: Any) -> Members:
    """Who is in a group, as far as torch can tell."""
    with suppress(Exception):
        ranks = tuple(c10d._world.pg_group_ranks.get(group) or range(group.size()))
        return Members(str(group.group_name or DEFAULT_GROUP), ranks, str(group.group_desc), str(c10d._world.pg_map[group][0]))
    return Members(str(getattr(group, "group_name", "") or "?"), (), "", "")


def sequence(group: Any) -> int:
    """How many operations a group has begun on this rank; -1 where its backend does not count."""
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:
        return -1


# Called by name inside torch whenever a group is made, joined to the others or dissolved, whoever asks.
GROUP_HOOKS = ("_new_process_group_helper", "_update_default_pg")


@contextmanager
def hooked(module: Any, name: str, around: Callable[..., Any]) -> Iterator[None]:
    """Inside, `module.name(...)` is `around(original, ...)`."""
    original = getattr(module, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(module, name, call)
    try:
        yield
    finally:
        setattr(module, name, original)


class Server:
    """Torch's own server of this process: it answers from C++, also while the interpreter is held. It does nothing until it is asked.

    It listens on an abstract unix socket: nothing on disk, no port, gone with the process. Who is on the same machine may ask it for what
    the flight recorder holds: sizes and times of operations.
    """

    def __init__(self) -> None:
        self.address = ""  # "" = this torch has none
        self._server: Any = None
        name = f"{SERVER_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        with suppress(Exception), _quiet():  # an older torch, a system without such sockets: the ring alone then
            self._server = torch._C._distributed_c10d._WorkerServer(f"\0{name}")
            self.address = f"@{name}"

    def close(self) -> None:
        """Stop answering. A server that does not answer yet is left to the end of the process: torch would wait for it for ever."""
        server, self._server = self._server, None
        if server is None:
            return
        if self._answers():
            with suppress(Exception), _quiet():
                server.shutdown()
        else:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(server))  # its destructor would wait, too

    def _answers(self) -> bool:
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link:
            link.settimeout(PING_S)
            link.connect("\0" + self.address.removeprefix("@"))
            link.sendall(b"POST /handler/ping HTTP/1.0\r\nContent-Length: 0\r\n\r\n")
            return link.recv(64).startswith(b"HTTP/1.1 200")
        return False


@contextmanager
def _quiet() -> Iterator[None]:
    """Torch writes a warning for every server that starts and ends, straight to descriptor 2."""
    with _QUIET:
        kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, 2)
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            os.close(nothing)


_QUIET = threading.Lock()
