"""Taking evidence of a job from outside of its ranks: what they recorded, torch's own records, their stacks, the state of their processes.

Torch-free and in one thread, for a leader. All ranks are asked together: one that is dead or stopped is not asked, and one that does not
answer costs ANSWER_S, however many they are.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.children import pid_of, state_of
from trainer.recorded_merge import document
from trainer.recorded_reading import RingReader
from validation.errors import EvidenceError

ANSWER_S = 0.3  # without a word: a rank that can answer takes a few ms, 60 ms when its records are full
LIMIT_S = 2.0  # of a rank that goes on answering
SETTLED_S = 0.02  # stacks are written frame by frame: nothing more for so long is the end
GONE = "X"
STILL = frozenset({"T", "t", "Z", "X", ""})  # states that answer nothing
REQUEST = b"POST /handler/fr_trace_json HTTP/1.0\r\nContent-Length: 0\r\n\r\n"


class Watched(NamedTuple):
    """A rank to take evidence of."""

    rank: int
    pid: int
    ring: Path  # see trainer.recording.ring_path; it may not be there (yet)
    log: Path | None = None  # of a process that answers SIGUSR1 with a stack in its log (trainer/warm.py)


class Taken(NamedTuple):
    """What one snapshot brought."""

    taken_ns: int
    states: dict[int, str]  # rank -> letter of /proc; "X" = gone
    recorded: tuple[int, ...]  # ranks whose ring could be read
    answered: tuple[int, ...]  # ranks whose torch told its own records, too
    stacks: tuple[int, ...]  # ranks that wrote their stacks


def take(ranks: Sequence[Watched], into: Path, *, number: int) -> Taken:
    """Write one snapshot of all ranks into a folder: rankN.hang.json, rankN.stack.txt, states.json; from the second on hang2, stack2, ...

    Args: number, of the snapshot, from 1. Ranks may be dead, stopped, or hold their interpreter.
    Raises: OSError when the folder cannot be written.
    """
    into.mkdir(parents=True, exist_ok=True)
    asked = [_Asked(watched) for watched in ranks]
    try:
        _ask(asked)
        taken_ns = time.time_ns()
        suffix = "" if number == 1 else str(number)
        for rank in asked:
            rank.write(into, suffix, taken_ns)
        states = {rank.watched.rank: rank.state for rank in asked}
        _keep_states(into, number, states)
    finally:
        for rank in asked:
            rank.close()
    return Taken(
        taken_ns,
        states,
        tuple(rank.watched.rank for rank in asked if rank.reader is not None),
        tuple(rank.watched.rank for rank in asked if rank.torchs is not None),
        tuple(rank.watched.rank for rank in asked if rank.stack),
    )


def finish(into: Path, *, exit_codes: Mapping[int, int], results: Mapping[int, str] | None = None) -> None:
    """Add how the ranks ended: exitcodes.json (negative = signal), and rankN.result.txt of those that said ("ok", or what was raised)."""
    (into / "exitcodes.json").write_text(json.dumps({str(rank): code for rank, code in sorted(exit_codes.items())}))
    for rank, text in (results or {}).items():
        (into / f"rank{rank}.result.txt").write_text(text)


@dataclass(slots=True)
class _Asked:
    """One rank while it is asked."""

    watched: Watched
    state: str = GONE
    reader: RingReader | None = None
    link: socket.socket | None = None
    answer: bytearray = field(default_factory=bytearray)
    torchs: dict[str, Any] | None = None  # its own records, once they are whole
    heard: float = 0.0  # when it last said something
    stack_file: Path | None = None
    stack_from: int = 0  # bytes of the file before it was asked
    stack: str = ""
    stack_heard: float = 0.0

    def __post_init__(self) -> None:
        with contextlib.suppress(OSError, EvidenceError):
            self.reader = RingReader(self.watched.ring)
        self.state = self._state()

    def _state(self) -> str:
        """The process's state; that of a later one with the same number does not count."""
        pid = self.watched.pid
        started = self.reader.owner().started if self.reader is not None and self.reader.owner().pid == pid else 0
        try:
            return GONE if started and pid_of(pid).started != started else state_of(pid) or GONE
        except (FileNotFoundError, ProcessLookupError):
            return GONE

    def ask(self) -> None:
        """Send the signal for its stacks and the request for torch's records; wait for nothing."""
        if self.state in STILL:
            return
        self.heard = self.stack_heard = time.monotonic()
        owner = self.reader.owner() if self.reader is not None else None
        signum = owner.stack_signal if owner is not None else 0
        self.stack_file = self.watched.ring.with_suffix(".stack") if signum else self.watched.log
        if self.stack_file is not None:
            self.stack_from = self.stack_file.stat().st_size if self.stack_file.exists() else 0
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.watched.pid, signum or signal.SIGUSR1)
        if owner is not None and owner.address:
            self.link = _call(owner.address)

    def hear(self) -> None:
        """Take in what torch's server has sent."""
        assert self.link is not None  # only links are waited for
        try:
            body = self.link.recv(1 << 20)
        except BlockingIOError:
            return
        except OSError:
            body = b""
        self.answer += body
        self.heard = time.monotonic()
        self.torchs = _records(bytes(self.answer))
        if not body or self.torchs is not None:
            self.hang_up()

    def hang_up(self) -> None:
        if self.link is not None:
            self.link.close()
            self.link = None

    def look(self) -> bool:
        """Take in the stacks; True when they are there, or not to be had."""
        if self.stack_file is None:
            return True
        now = time.monotonic()
        with contextlib.suppress(OSError):
            text = self.stack_file.read_bytes()[self.stack_from :].decode(errors="replace")
            if text != self.stack:
                self.stack, self.stack_heard = text, now
        return now - self.stack_heard > (SETTLED_S if self.stack else ANSWER_S)

    def write(self, into: Path, suffix: str, taken_ns: int) -> None:
        """Leave this rank's files of the snapshot."""
        if self.reader is not None:
            dump = document(self.reader, self.torchs, taken_ns=taken_ns)
            (into / f"rank{self.watched.rank}.hang{suffix}.json").write_text(json.dumps(dump, separators=(",", ":")))
        if self.stack:
            (into / f"rank{self.watched.rank}.stack{suffix}.txt").write_text(self.stack)

    def close(self) -> None:
        self.hang_up()
        if self.reader is not None:
            self.reader.close()


def _ask(ranks: Sequence[_Asked]) -> None:
    """Ask all, and wait until each has answered or has said nothing for ANSWER_S."""
    for rank in ranks:
        rank.ask()
    until = time.monotonic() + LIMIT_S
    with selectors.DefaultSelector() as waiting:
        for rank in ranks:
            if rank.link is not None:
                waiting.register(rank.link, selectors.EVENT_READ, rank)
        while time.monotonic() < until:
            for key, _ in waiting.select(SETTLED_S / 2) if waiting.get_map() else ():
                link = key.fileobj
                key.data.hear()
                if key.data.link is None:
                    waiting.unregister(link)
            for key in list(waiting.get_map().values()):
                if time.monotonic() - key.data.heard > ANSWER_S:
                    waiting.unregister(key.fileobj)
                    key.data.hang_up()
            looks = [rank.look() for rank in ranks]
            if not waiting.get_map():
                if all(looks):
                    return
                time.sleep(SETTLED_S / 2)


def _call(address: str) -> socket.socket | None:
    """A link to a rank's server, on which the request lies; None when nobody listens."""
    link = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    try:
        link.connect("\0" + address.removeprefix("@"))
        link.send(REQUEST)
    except OSError:
        link.close()
        return None
    return link


def _records(answer: bytes) -> dict[str, Any] | None:
    """Torch's own records out of its server's answer; None while they are not whole."""
    head, _, body = answer.partition(b"\r\n\r\n")
    length = next((int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")), -1)
    if not head.startswith(b"HTTP/1.1 200") or len(body) != length:
        return None
    try:
        found = json.loads(body)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _keep_states(into: Path, number: int, states: Mapping[int, str]) -> None:
    path = into / "states.json"
    known = json.loads(path.read_text()) if path.exists() else {}
    known[str(number)] = {str(rank): state for rank, state in sorted(states.items())}
    path.write_text(json.dumps(known))
