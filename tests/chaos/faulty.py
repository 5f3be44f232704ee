"""A package index (PEP 503, PEP 658) that serves the wheels of a folder, and fails in the ways that a campaign sets."""

from __future__ import annotations

import contextlib
import hashlib
import re
import socket
import struct
import threading
import time
import urllib.parse
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packaging.utils import parse_wheel_filename
from unit.served import served

MODES = ("slow", "truncated", "500", "wrong bytes", "reset")
_HALF, _PIECES = 2, 8


@dataclass
class Fault:
    """`times`: the number of answers of this `kind` that are wrong; later answers are right. `seconds`: the delay of a
    slow answer."""

    mode: str
    kind: str
    times: int
    seconds: float = 2.0


@dataclass
class Index:
    folder: Path
    fault: Fault | None = None
    struck: int = 0
    port: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _digests: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}/simple"

    def set(self, fault: Fault | None) -> None:
        with self._lock:
            self.fault, self.struck = fault, 0

    def mode(self, kind: str) -> str | None:
        """Return the fault to inject into this answer."""
        with self._lock:
            if self.fault is None or self.fault.kind != kind or self.struck >= self.fault.times:
                return None
            self.struck += 1
            return self.fault.mode

    def page(self, name: str) -> bytes | None:
        lines = []
        for file in sorted(self.folder.glob("*.whl")):
            if parse_wheel_filename(file.name)[0] == name:
                address = f"/files/{urllib.parse.quote(file.name)}#sha256={self.digest(file)}"
                about = f'data-core-metadata="sha256={hashlib.sha256(metadata(file)).hexdigest()}"'
                lines.append(f'<a href="{address}" {about}>{file.name}</a>')
        return "\n".join(["<!DOCTYPE html><html><body>", *lines, "</body></html>"]).encode() if lines else None

    def digest(self, file: Path) -> str:
        if file.name not in self._digests:
            with file.open("rb") as stream:
                self._digests[file.name] = hashlib.file_digest(stream, "sha256").hexdigest()
        return self._digests[file.name]


def metadata(file: Path) -> bytes:
    with zipfile.ZipFile(file) as archive:
        (name,) = (name for name in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", name))
        return archive.read(name)


class _Handler(BaseHTTPRequestHandler):
    index: Index
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *arguments: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        kind, body = self._found(urllib.parse.unquote(urllib.parse.urlsplit(self.path).path))
        if body is None:
            self._send(404, b"", "text/plain")
            return
        mode = self.index.mode(kind)
        shown = "text/html" if kind == "page" else "application/octet-stream"
        if mode == "500":
            self._send(500, b"not now", "text/plain")
        elif mode == "wrong bytes":
            self._send(200, _wrong(kind, body), shown)
        else:
            with contextlib.suppress(OSError):  # the client gave up, which is allowed
                self._send(200, body, shown, mode)

    def _found(self, path: str) -> tuple[str, bytes | None]:
        parts = path.strip("/").split("/")
        if parts[0] == "simple" and len(parts) == 2:
            return "page", self.index.page(parts[1])
        name = parts[-1]
        file = self.index.folder / name.removesuffix(".metadata")
        if parts[0] != "files" or len(parts) != 2 or not file.is_file():
            return "page", None
        return ("metadata", metadata(file)) if name.endswith(".metadata") else ("file", file.read_bytes())

    def _send(self, status: int, body: bytes, shown: str, mode: str | None = None) -> None:
        if mode == "slow":
            fault = self.index.fault
            pause = (fault.seconds if fault else 0) / _PIECES
            time.sleep(pause)
        self.send_response(status)
        self.send_header("Content-Type", shown)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if mode in ("truncated", "reset"):
            self.wfile.write(body[: len(body) // _HALF])
            self.wfile.flush()
            self.close_connection = True
            if mode == "reset":
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.connection.close()
            return
        step = -(-len(body) // _PIECES) or 1
        for begin in range(0, len(body), step if mode == "slow" else len(body) or 1):
            if mode == "slow":
                time.sleep(pause)
            self.wfile.write(body[begin : begin + (step if mode == "slow" else len(body))])


def _wrong(kind: str, body: bytes) -> bytes:
    """Return the wrong content for an answer: instead of a page, the login page of a hotel's network; instead of a
    file, a file of the same size with some changed bytes."""
    if kind == "page":
        return b"<!DOCTYPE html><html><body><a href='/login'>Welcome! Log in to go on.</a></body></html>"
    middle = len(body) // 2
    return body[:middle] + bytes(byte ^ 0x55 for byte in body[middle : middle + 64]) + body[middle + 64 :]


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Index]:
    index = Index(folder)

    class Server(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore interrupted connections: the interruptions are intended."""

    server = Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"index": index}))
    index.port = server.server_port
    with served(server):
        yield index
