"""A package index on this machine, which serves the wheels of a folder as in PEP 503 and 658, optionally at a limited
rate.

All compared tools download from this index, so that the speed of the network affects none of them.
"""

from __future__ import annotations

import hashlib
import html
import re
import socketserver
import sys
import threading
import time
import zipfile
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote

from packaging.utils import canonicalize_name

_BLOCK = 1 << 20
# The length of the simulated link's queue: the link stays busy for this long if the sender is late, as on a busy
# machine.
_QUEUE_SECONDS = 0.25


class Link:
    """A simulated link of `rate` bytes per second (None: unlimited), shared by all users."""

    def __init__(self, rate: float | None = None) -> None:
        self.rate = rate
        self.sent = 0
        self._free = 0.0
        self._lock = threading.Lock()

    def take(self, count: int) -> None:
        """Return when `count` bytes have passed the link."""
        with self._lock:
            self.sent += count
            if self.rate is None:
                return
            self._free = max(self._free, time.monotonic() - _QUEUE_SECONDS) + count / self.rate
            wait = self._free - time.monotonic()
        time.sleep(max(0.0, wait))


class Mirror:
    """An index that serves while used as a context manager. `address`: the URL for pip and uv."""

    def __init__(self, folder: Path) -> None:
        """`folder`: contains wheels at any depth, each in a folder that is named by the wheel's sha256."""
        self.link = Link()
        self._files = {file.name: file for file in sorted(folder.rglob("*.whl"))}
        self._hashes = {name: file.parent.name for name, file in self._files.items()}
        mirror = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                mirror._answer(self)

            def do_HEAD(self) -> None:
                mirror._answer(self)

            def log_message(self, format: str, *args: object) -> None:
                pass

        class Server(socketserver.ThreadingTCPServer):
            allow_reuse_address = True
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                if not isinstance(sys.exc_info()[1], ConnectionError):  # the client closed the connection
                    super().handle_error(request, client_address)  # type: ignore[arg-type]

        self._server = Server(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}/simple"

    def __enter__(self) -> Mirror:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    @property
    def environment(self) -> dict[str, str]:
        """The environment variables that make pip and uv use only this index, whatever their configuration."""
        nothing = dict.fromkeys(("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "UV_INDEX", "UV_FIND_LINKS"), "")
        return {**nothing, "PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": self.address,
                "UV_DEFAULT_INDEX": self.address, "UV_NO_CONFIG": "1"}  # fmt: skip

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        parts = unquote(request.path.partition("?")[0]).strip("/").split("/")
        name = parts[-1]
        if parts[0] == "simple" and len(parts) == 2:
            self._send(request, self._page(canonicalize_name(name)), "text/html")
        elif name.endswith(".whl.metadata") and name.removesuffix(".metadata") in self._files:
            self._send(request, _metadata(self._files[name.removesuffix(".metadata")]), "text/plain")
        elif name in self._files:
            self._file(request, self._files[name])
        else:
            request.send_error(404)

    def _page(self, project: str) -> bytes:
        rows = []
        for name, sha256 in self._hashes.items():
            if canonicalize_name(name.partition("-")[0]) == project:
                digest = hashlib.sha256(_metadata(self._files[name])).hexdigest()
                rows.append(
                    f'<a href="/files/{html.escape(name)}#sha256={sha256}" '
                    f'data-core-metadata="sha256={digest}">{html.escape(name)}</a>'
                )
        return f"<!DOCTYPE html><html><body>{'<br>'.join(rows)}</body></html>".encode()

    def _send(self, request: BaseHTTPRequestHandler, content: bytes, kind: str) -> None:
        request.send_response(200)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        if request.command == "GET":
            self.link.take(len(content))
            request.wfile.write(content)

    def _file(self, request: BaseHTTPRequestHandler, file: Path) -> None:
        size = file.stat().st_size
        byte_range = re.fullmatch(r"bytes=(\d*)-(\d*)", request.headers.get("Range", ""))
        first, last = 0, size - 1
        if byte_range and (byte_range[1] or byte_range[2]):
            first = int(byte_range[1]) if byte_range[1] else max(0, size - int(byte_range[2]))
            last = min(size - 1, int(byte_range[2])) if byte_range[1] and byte_range[2] else size - 1
        request.send_response(206 if byte_range else 200)
        request.send_header("Content-Type", "application/octet-stream")
        request.send_header("Accept-Ranges", "bytes")
        request.send_header("Content-Length", str(last - first + 1))
        if byte_range:
            request.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        request.end_headers()
        if request.command != "GET":
            return
        block = _BLOCK if self.link.rate is None else 1 << 16
        with file.open("rb") as stream:
            while first <= last:
                count = min(block, last - first + 1)
                self.link.take(count)
                request.wfile.flush()
                sent = request.connection.sendfile(stream, first, count)
                first += sent


def _metadata(wheel: Path) -> bytes:
    with zipfile.ZipFile(wheel) as archive:
        name = next(item for item in archive.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", item))
        return archive.read(name)
