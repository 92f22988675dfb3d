"""Stores that fail on purpose: a server before moto's that refuses, resets, hangs, lies or loses answers; a disk that fills up."""

import errno
import http.client
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

from infra.store import ObjectStore
from infra.store_folder import FolderStore

Plan = Callable[[str, str, int], str]  # method, path, number of the request -> what happens to it: "" or one of FAULTS
FAULTS = ("500", "503", "reset", "hang", "rubbish", "half", "lost")  # lost: it is done, and its answer never arrives

_ERROR = b"<?xml version='1.0'?><Error><Code>%s</Code><Message>planned</Message></Error>"


class FaultyS3:
    """Loopback endpoint that passes requests on to another one, except those that the plan spoils."""

    def __init__(self, behind: str) -> None:
        self.plan: Plan = lambda _method, _path, _number: ""
        self.requests: list[tuple[str, str]] = []  # every one that came, e.g. ("PUT", "/trial/x/probe/conditional-writes")
        self.over = threading.Event()
        self._behind = urlsplit(behind).netloc
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    @property
    def endpoint(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def end(self) -> None:
        """Let hanging requests go and stop listening."""
        self.over.set()
        self._server.shutdown()
        self._server.server_close()

    def forward(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        """What the endpoint behind answers."""
        link = http.client.HTTPConnection(self._behind, timeout=30)
        link.request(request.command, request.path, body=body, headers=dict(request.headers.items()))
        answer = link.getresponse()
        return answer.status, answer.getheaders(), answer.read()


def _handler(own: FaultyS3) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            own.requests.append((self.command, self.path))
            fault = own.plan(self.command, self.path, len(own.requests) - 1)
            if fault == "hang":
                own.over.wait(30)
            if fault in ("", "half", "lost"):
                status, headers, found = own.forward(self, body)
            if fault in ("reset", "hang", "lost"):
                self._cut()
                return
            if fault == "rubbish":
                status, headers, found = 200, [("Content-Type", "text/html")], b"<html><body>Please sign in</body></html>"
            elif fault in ("500", "503"):
                status, headers, found = int(fault), [], _ERROR % {"500": b"InternalError", "503": b"SlowDown"}[fault]
            self._answer(status, headers, found, half=fault == "half")

        do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = handle_any

        def _answer(self, status: int, headers: list[tuple[str, str]], body: bytes, *, half: bool) -> None:
            given = {name.lower(): value for name, value in headers}
            size = given.get("content-length", str(len(body))) if self.command == "HEAD" else str(len(body))
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                    self.send_header(name, value)
            self.send_header("Content-Length", size)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(body[: len(body) // 2] if half else body)
            if half:
                self._cut()

        def _cut(self) -> None:
            self.close_connection = True
            with suppress(OSError):
                self.wfile.flush()
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing sends RST
                self.connection.close()

    return Handler


@contextmanager
def faulty_s3(behind: str) -> Iterator[FaultyS3]:
    """An endpoint that passes everything on until it is given a plan."""
    own = FaultyS3(behind)
    try:
        yield own
    finally:
        own.end()


class FillingDisk(FolderStore):
    """A folder whose disk is full after so many writes."""

    def __init__(self, root: str, *, room: int) -> None:
        super().__init__(root)
        self.room = room

    def _temporary(self, chunks: Any) -> Any:
        self.room -= 1
        if self.room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        return super()._temporary(chunks)


def contents(store: ObjectStore) -> dict[str, bytes]:
    """Everything that stands in a store."""
    return {key: store.get(key) for key in store.list("")}
