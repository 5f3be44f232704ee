"""Limits HTTP requests by a deadline and a minimum transfer rate.

The time-outs of requests and urllib3 limit each wait for the next bytes, so a server that sends one byte per second can
block its client indefinitely. Here each request has a budget of waiting time, at first `deadline` seconds. Each wait
reduces the budget; each byte transferred adds 1/`rate` seconds to it, up to `deadline` seconds. So a response of n
bytes ends within `deadline` + n/`rate` seconds of waiting. Time in which the caller processes data does not count.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import requests
import urllib3
from requests.adapters import HTTPAdapter
from urllib3 import PoolManager
from urllib3.connection import HTTPConnection
from urllib3.connectionpool import HTTPConnectionPool

from envbuild.util import network_settings, url_redaction
from envbuild.util.errors import NetworkError
from envbuild.util.network_settings import Network

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_LOG = logging.getLogger(__name__)
_MOST_LINES = 300  # in a row; http.client accepts 100 headers
_SLICE = 1 << 16  # bytes sent at a time: a time-out of Python's sendall applies to all bytes of one call
_REDIRECT_BODY = 1 << 16  # bytes


class TooSlow(NetworkError):
    """A host sends or receives more slowly than the limits allow."""


class _Transfers:
    """The sockets of a session that are sending or receiving, so that another thread can end these transfers."""

    def __init__(self) -> None:
        self._lock, self._sockets, self._aborted = threading.Lock(), set[socket.socket](), False

    @contextlib.contextmanager
    def running(self, sock: socket.socket) -> Iterator[None]:
        """Register a transfer. Raises ConnectionAbortedError after `abort`."""
        with self._lock:
            if self._aborted:
                raise ConnectionAbortedError
            self._sockets.add(sock)
        try:
            yield
        finally:
            with self._lock:
                self._sockets.discard(sock)

    def abort(self) -> None:
        """End every transfer with an error, and each later one."""
        with self._lock:
            self._aborted = True
            for sock in self._sockets:
                with contextlib.suppress(OSError):
                    # SSLSocket.shutdown would let the other thread continue without encryption
                    socket.socket.shutdown(sock, socket.SHUT_RDWR)


class _Budget:
    """The seconds that one request may still wait for the network."""

    def __init__(self, host: str, network: Network, transfers: _Transfers | None = None) -> None:
        self._host, self._network, self._transfers = host, network, transfers or _Transfers()
        self._left: float = network.deadline

    def spend(self, sock: socket.socket, transfer: Callable[[], int]) -> int:
        """Run one transfer and return the number of bytes. Raises TooSlow when the budget is used up; urllib3 retries
        its own errors, but not TooSlow. Raises TimeoutError after the socket's own time-out if that is shorter."""
        patience = sock.gettimeout()
        whole = patience is None or patience >= self._left
        sock.settimeout(self._left if whole else patience)
        begin = time.monotonic()
        try:
            with self._transfers.running(sock):
                count = transfer()
        except TimeoutError:
            if whole:
                raise self._slow() from None
            raise
        finally:
            sock.settimeout(patience)
        waited = time.monotonic() - begin
        self._left = min(self._left - waited + count / self._network.rate, self._network.deadline)
        if self._left <= 0:
            raise self._slow()
        return count

    def _slow(self) -> TooSlow:
        limits = f"deadline {self._network.deadline} s, minimum rate {self._network.rate} bytes/s"
        return TooSlow(
            f"{self._host} answers too slowly ({limits})",
            hint="for a slow network raise network.deadline or lower network.rate in config.yaml",
        )


class _Stream(io.RawIOBase):
    """Reads from a socket within the request's budget."""

    def __init__(self, sock: socket.socket, budget: _Budget) -> None:
        self._sock, self._budget = sock, budget
        self._raw = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer) -> int:
        return self._budget.spend(self._sock, lambda: self._raw.readinto(buffer) or 0)

    def close(self) -> None:
        self._raw.close()
        super().close()


class _Reader(io.BufferedReader):
    """Reads a response, and refuses what neither http.client nor urllib3 refuses: a negative chunk size, of which -1
    would read to the end of the connection, and more lines in a row than a head may have. http.client limits the number
    of headers, but not of trailers and interim responses (1xx)."""

    _lines = 0

    def readline(self, size: int | None = -1) -> bytes:
        self._lines += 1
        if self._lines > _MOST_LINES:
            raise http.client.HTTPException("too many trailers or interim responses")
        return super().readline(size)

    def read(self, size: int | None = None) -> bytes:
        if size is not None and size < 0:
            raise http.client.HTTPException("negative chunk size")
        self._lines = 0
        return super().read(size)


class _Response(http.client.HTTPResponse):
    """A response whose head and body are read within the request's budget."""

    def __init__(self, budget: _Budget, sock: socket.socket, *arguments: Any, **options: Any) -> None:
        super().__init__(sock, *arguments, **options)
        self.fp.close()
        self.fp = _Reader(_Stream(sock, budget))


class _Answer(urllib3.HTTPResponse):
    """A response of urllib3 whose connection is closed before a retry. urllib3 would read the rest of the body first,
    without a limit."""

    def drain_conn(self) -> None:
        self.close()
        self.release_conn()


class _Bounded(HTTPConnection):
    """A connection that also sends within the budget. Each request gets a new budget. The initial budget is for a
    proxy's tunnel."""

    network = Network()
    transfers: _Transfers | None = None

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._renew()

    def _renew(self) -> None:
        self._budget = _Budget(self.host, self.network, self.transfers)
        self.response_class = partial(_Response, self._budget)  # type: ignore[assignment]

    def request(self, *arguments: Any, **options: Any) -> None:
        self._renew()
        super().request(*arguments, **options)

    def getresponse(self) -> urllib3.HTTPResponse:  # type: ignore[override]
        answer = super().getresponse()
        answer.__class__ = _Answer  # urllib3 has no option for the class
        return answer

    def send(self, data: Any) -> None:
        if self.sock is None and self.auto_open:
            self.connect()
        whole, content = super().send, memoryview(data)

        def transfer(piece: memoryview) -> int:
            whole(piece)
            return len(piece)

        for start in range(0, len(content), _SLICE):
            self._budget.spend(self.sock, partial(transfer, content[start : start + _SLICE]))


def _limit(manager: PoolManager, network: Network, transfers: _Transfers) -> None:
    """Apply the limits to every connection that the manager will open, also through a proxy."""

    def limited(pool: type[HTTPConnectionPool]) -> type[HTTPConnectionPool]:
        if issubclass(pool.ConnectionCls, _Bounded):
            return pool
        members = {"network": network, "transfers": transfers}
        connection = type("Limited", (_Bounded, pool.ConnectionCls), members)
        return type("LimitedPool", (pool,), {"ConnectionCls": connection})

    manager.pool_classes_by_scheme = {key: limited(pool) for key, pool in manager.pool_classes_by_scheme.items()}


class Adapter(HTTPAdapter):
    """An adapter that applies the limits to a session of requests. `network`: the limits; None: read them from
    config.yaml, and raise SettingsError if it is invalid."""

    def __init__(self, network: Network | None = None, **options: Any) -> None:
        self._network, self._transfers = network or network_settings.configured_limits(), _Transfers()
        super().__init__(**options)

    def send(self, request: requests.PreparedRequest, *arguments: Any, **options: Any) -> requests.Response:
        address, begin = url_redaction.redact_url(request.url or ""), time.monotonic()
        try:
            answer = super().send(request, *arguments, **options)
        except Exception as error:
            _LOG.info("%s %s: %s", request.method, address, error)
            raise
        _LOG.info("%s %s: %d after %.2f s", request.method, address, answer.status_code, time.monotonic() - begin)
        if answer.is_redirect:
            _read_redirect(answer)
        return answer

    def abort(self) -> None:
        self._transfers.abort()

    def init_poolmanager(self, *arguments: Any, **options: Any) -> None:
        super().init_poolmanager(*arguments, **options)
        _limit(self.poolmanager, self._network, self._transfers)

    def proxy_manager_for(self, proxy: str, **options: Any) -> Any:
        manager = super().proxy_manager_for(proxy, **options)
        _limit(manager, self._network, self._transfers)
        return manager


def _read_redirect(answer: requests.Response) -> None:
    """Read the body of a redirect up to a limit. requests would read all of it, even if the caller does not follow
    redirects. After a short body, the connection can be used again."""
    content = b""
    with contextlib.suppress(requests.RequestException):  # the body is not needed
        content = body(answer, _REDIRECT_BODY)
    answer.close()
    answer._content = content


def abort(session: requests.Session) -> None:
    """End all transfers of a session now, so that threads that wait for them continue; the session cannot be used any
    more. An attempt to connect ends with its own time-out."""
    for adapter in session.adapters.values():
        if isinstance(adapter, Adapter):
            adapter.abort()


def body(answer: requests.Response, limit: int) -> bytes:
    """The whole body of a response. If it is longer than `limit` bytes, the result is also longer than `limit`, but may
    not be the whole body.

    Raises RequestException if the body is incomplete. (Reading `answer.raw` would raise urllib3's errors instead.)
    """
    found = bytearray()
    for block in answer.iter_content(1 << 16):
        found += block
        if len(found) > limit:
            answer.close()
            break
    return bytes(found)
