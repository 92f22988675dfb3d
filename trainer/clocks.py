"""How far each rank's monotonic clock is from rank 0's, so that times of ranks on different machines can be compared.

On one machine all processes read one clock and nothing is measured. Otherwise every rank plays ping-pong with rank 0 (NTP's four
time stamps, Mills 1985); the round with the shortest way there and back counts, and the truth is within half of it.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from trainer.world import World

ROUNDS = 8
IDENTITY_BYTES = 64  # of the text that names a clock, padded or cut
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
TIME_NAMESPACE = Path("/proc/self/ns/time")  # processes of one machine in different ones read shifted clocks


@dataclass(frozen=True, slots=True, kw_only=True)
class ClockOffset:
    """`offset_ns` added to a rank's monotonic time gives rank 0's, to within `uncertainty_ns`."""

    offset_ns: int = 0
    uncertainty_ns: int = 0


def clock_identity() -> bytes:
    """The same for processes that read the same monotonic clock; unlike any other where the system does not tell."""
    try:
        return f"{BOOT_ID.read_text().strip()} {TIME_NAMESPACE.readlink()}".encode()
    except OSError:
        return os.urandom(IDENTITY_BYTES)


def estimate(
    world: World,
    *,
    timeout_s: float = 120.0,
    now_ns: Callable[[], int] = time.monotonic_ns,
    identity: Callable[[], bytes] = clock_identity,
) -> ClockOffset:
    """Measure this rank's clock against rank 0's. Collective: all ranks, after joining, with no other collective on its way.

    Args: timeout_s, of the host group that is made beside nccl for the ping-pong. Costs nothing under one leader, one small collective on
        one machine, else about ROUNDS round trips a rank, one rank after the other.
    Raises: torch's own error when a peer dies or a wait takes longer than the group allows.
    """
    if world.world_size == 1 or world.one_machine or _share_clock(world, identity()):
        return ClockOffset()
    if dist.get_backend() != "nccl":
        return _ping_pong(world, now_ns, None)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))  # a GPU's queue would blur the stamps
    try:
        return _ping_pong(world, now_ns, group)
    finally:
        dist.destroy_process_group(group)


def _share_clock(world: World, identity: bytes) -> bool:
    """True on every rank when all gave the same identity. Collective."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    own = torch.frombuffer(bytearray(identity[:IDENTITY_BYTES].ljust(IDENTITY_BYTES)), dtype=torch.uint8).to(device)
    every = own.new_empty((world.world_size, IDENTITY_BYTES))
    dist.all_gather(list(every.unbind()), own)
    return bool((every == every[0]).all())


def _ping_pong(world: World, now_ns: Callable[[], int], group: dist.ProcessGroup | None) -> ClockOffset:
    """Rank 0 answers one rank after the other. Collective."""
    if world.rank > 0:
        return min((_ask(now_ns, group) for _ in range(ROUNDS)), key=lambda found: found.uncertainty_ns)
    for peer in range(1, world.world_size):
        for _ in range(ROUNDS):
            _answer(peer, now_ns, group)
    return ClockOffset()


def _ask(now_ns: Callable[[], int], group: dist.ProcessGroup | None) -> ClockOffset:
    """One round with rank 0: it was asked at `came` and answered at `left` of its own clock."""
    stamps = torch.zeros(2, dtype=torch.int64)
    asked = now_ns()
    dist.send(stamps, 0, group=group)
    dist.recv(stamps, 0, group=group)
    answered = now_ns()
    came, left = stamps.tolist()
    way_ns = (answered - asked) - (left - came)  # there and back
    return ClockOffset(offset_ns=((came - asked) + (left - answered)) // 2, uncertainty_ns=max(0, -(-way_ns // 2)))


def _answer(peer: int, now_ns: Callable[[], int], group: dist.ProcessGroup | None) -> None:
    stamps = torch.zeros(2, dtype=torch.int64)
    dist.recv(stamps, peer, group=group)
    came = now_ns()
    stamps[0], stamps[1] = came, now_ns()
    dist.send(stamps, peer, group=group)
