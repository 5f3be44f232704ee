"""Runs a server for a test in a thread of this process."""

from __future__ import annotations

import contextlib
import socketserver
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def served(server: socketserver.BaseServer) -> Iterator[None]:
    """Run the server inside the context."""
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()
