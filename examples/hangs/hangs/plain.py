"""torch's own flight recorder of a rank, asked from outside as any operator could: without rings, marks or members. Torch-free."""

import http.client
import shutil
import socket
from collections.abc import Iterable
from pathlib import Path

from hangs.reading import EVIDENCE, PLAIN, ring_of
from trainer.ring import RingReader
from validation.errors import EvidenceError

ASK_S = 0.2  # a rank that is stopped does not answer


class _Link(http.client.HTTPConnection):
    """HTTP over an abstract unix socket."""

    def __init__(self, address: str) -> None:
        super().__init__("rank", timeout=ASK_S)
        self._address = address

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(ASK_S)
        self.sock.connect("\0" + self._address.removeprefix("@"))


def keep_plain(root: Path, ranks: Iterable[int], number: int) -> None:
    """Keep what these ranks' recorders say now, as snapshot 1 or 2; of a rank that does not answer, what was kept before stays."""
    for rank in ranks:
        records = _records(ring_of(root, rank))
        if b'"entries"' in records:  # none before its first operation
            (root / PLAIN / f"rank{rank}.hang{number if number > 1 else ''}.json").write_bytes(records)


def keep_late(folder: Path, ring: Path, rank: int) -> None:
    """Keep in a folder what a rank's recorder says after a failure or time-out, when its operations are over."""
    (folder / f"rank{rank}.after.json").write_bytes(_records(ring))


def complete_plain(root: Path) -> None:
    """Lay stacks, results and exit codes beside them, as a folder of dumps has them."""
    for pattern in ("rank*.stack*.txt", "rank*.result.txt", "exitcodes.json"):
        for path in (root / EVIDENCE).glob(pattern):
            shutil.copy(path, root / PLAIN)


def _records(ring: Path) -> bytes:
    try:
        with RingReader(ring) as reader:
            address = reader.owner().address
        if not address:
            return b""
        link = _Link(address)
        try:
            link.request("POST", "/handler/fr_trace_json", body=b"")
            return link.getresponse().read()
        finally:
            link.close()
    except (OSError, http.client.HTTPException, EvidenceError):
        return b""
