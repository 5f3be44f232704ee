"""The limit on the total waiting time of one request."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any, BinaryIO

import pytest
import requests
from urllib3.util.retry import Retry

from envbuild.util import http_deadlines
from envbuild.util.errors import NetworkError
from envbuild.util.http_deadlines import Adapter, TooSlow, _Budget, _Stream
from envbuild.util.network_settings import Network


@pytest.fixture
def ends() -> Iterator[tuple[socket.socket, socket.socket]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield ours, theirs


@pytest.mark.parametrize("patience", [None, 30.0])
@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError, KeyboardInterrupt])
def test_a_transfer_that_fails_leaves_the_sockets_own_time_out(
    ends: tuple[socket.socket, socket.socket], patience: float | None, error: type[BaseException]
) -> None:
    def transfer() -> int:
        assert ends[0].gettimeout() == 5.0
        raise error

    ends[0].settimeout(patience)
    with pytest.raises(NetworkError if error is TimeoutError else error):
        _Budget("a.example", Network(deadline=5)).spend(ends[0], transfer)
    assert ends[0].gettimeout() == patience


def test_a_transfer_that_ends_leaves_the_sockets_own_time_out(ends: tuple[socket.socket, socket.socket]) -> None:
    ours, theirs = ends
    theirs.sendall(b"abc")
    assert _Budget("a.example", Network(deadline=5)).spend(ours, lambda: len(ours.recv(9))) == 3
    assert ours.gettimeout() is None


class SlowReader:
    """A server that reads the body of each request slowly, and then answers."""

    def __init__(self, size: int, rate: int) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        self.thread = threading.Thread(target=self._read, args=(size, rate), daemon=True)
        self.thread.start()

    def _read(self, size: int, rate: int) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection, connection.makefile("rb") as stream:
                    self._read_request(stream, size, rate)
                    connection.sendall(b"HTTP/1.1 201 Created\r\nContent-Length: 0\r\n\r\n")

    def _read_request(self, stream: BinaryIO, size: int, rate: int) -> None:
        while stream.readline().strip():
            pass
        while size and (block := stream.read(min(size, 1 << 16))):
            size -= len(block)
            time.sleep(len(block) / rate)


def session(network: Network, **options: Any) -> requests.Session:
    made = requests.Session()
    made.mount("http://", Adapter(network, **options))
    return made


@pytest.mark.parametrize(("least", "passes"), [(10_000, True), (100_000_000, False)])
def test_a_large_body_may_take_longer_than_the_deadline(least: int, passes: bool) -> None:
    """The rate decides. The deadline applies to 64 KiB, and not to a whole body."""
    size, rate = 12_000_000, 2_000_000
    slow, http = SlowReader(size, rate), session(Network(deadline=3, rate=least))
    if passes:
        assert http.patch(slow.url, data=b"x" * size).status_code == 201
    else:
        with pytest.raises(TooSlow):
            http.patch(slow.url, data=b"x" * size)
    slow.socket.close()


@pytest.mark.parametrize("size", [0, 1 << 24])
def test_a_session_is_aborted_while_another_thread_waits(size: int) -> None:
    slow, ready = SlowReader(size + 1, 1), SlowReader(0, 1)
    http, errors = session(Network()), list[object]()

    def send() -> None:
        try:
            http.patch(slow.url, data=b"x" * (size + 1) if size else None)
        except requests.RequestException as error:
            errors.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    time.sleep(0.5)
    http_deadlines.abort(http)
    thread.join(20)
    assert not thread.is_alive() and len(errors) == 1
    with pytest.raises(requests.ConnectionError):
        http.get(ready.url)
    assert session(Network()).get(ready.url).status_code == 201
    for server in (slow, ready):
        server.socket.close()


class Talkative:
    """A server that sends a head and then many pieces, and counts the bytes that were taken from it."""

    def __init__(self, head: bytes, piece: bytes, count: int, end: bytes = b"") -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/"
        self.sent = self.requests = 0
        self._pieces = (head, *[piece * 1000] * (count // 1000), end)
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection, contextlib.suppress(OSError):
                    while connection.recv(1 << 16)[-4:] != b"\r\n\r\n":
                        pass
                    self.requests += 1
                    for piece in self._pieces:
                        connection.sendall(piece)
                        self.sent += len(piece)


@contextlib.contextmanager
def talking(head: bytes, piece: bytes, count: int, end: bytes = b"") -> Iterator[Talkative]:
    server = Talkative(head, piece, count, end)
    with server.socket:
        yield server


OK = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_the_number_of_trailers_is_limited() -> None:
    with talking(OK + b"1\r\nx\r\n0\r\n", b"a: b\r\n", 100_000, b"\r\n") as server:
        answer = session(Network()).get(server.url, stream=True)
        with pytest.raises(requests.RequestException, match="trailers"):
            http_deadlines.body(answer, 9)


@pytest.mark.parametrize("count", [0, 1000])
def test_some_trailers_and_many_chunks_are_accepted(count: int) -> None:
    trailers = b"0\r\n" + b"a: b\r\n" * 100 + b"\r\n"
    with talking(OK, b"1\r\nx\r\n", count, trailers) as server:
        found = http_deadlines.body(session(Network()).get(server.url, stream=True), 9999)
        assert found == b"x" * count


MORE = 4_000_000  # bytes, many more than any limit here
LITTLE = 1 << 19  # bytes: the limits here, and what is read in advance


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of bytes of each read from a socket."""
    counts, read = list[int](), _Stream.readinto

    def counted(self: _Stream, buffer: bytearray) -> int:
        counts.append(read(self, buffer))
        return counts[-1]

    monkeypatch.setattr(_Stream, "readinto", counted)
    return counts


@pytest.mark.parametrize("size", [b"-1", b"-5"])
def test_a_negative_chunk_size_is_refused(size: bytes, received: list[int]) -> None:
    with talking(OK + size + b"\r\n", b"x", MORE) as server:
        answer = session(Network()).get(server.url, stream=True)
        with pytest.raises(requests.RequestException, match="negative chunk size"):
            http_deadlines.body(answer, 1000)
    assert sum(received) < LITTLE


@pytest.mark.parametrize("fails", [True, False])
def test_a_response_that_is_retried_is_not_read_to_its_end(fails: bool, received: list[int]) -> None:
    again = Retry(total=2, status_forcelist=(503,), backoff_factor=0, raise_on_status=fails)
    with talking(b"HTTP/1.1 503 Busy\r\n\r\n", b"x", MORE) as server:
        http = session(Network(), max_retries=again)
        with pytest.raises(requests.exceptions.RetryError) if fails else contextlib.nullcontext():
            assert http.get(server.url, stream=True).status_code == 503
        assert server.requests == 3
    assert sum(received) < LITTLE


REDIRECT = b"HTTP/1.1 302 Found\r\nLocation: /\r\n"


@pytest.mark.parametrize("follow", [True, False])
def test_a_redirect_is_not_read_to_its_end(follow: bool, received: list[int]) -> None:
    with talking(REDIRECT + b"\r\n", b"x", MORE) as server:
        http = session(Network())
        http.max_redirects = 1
        with pytest.raises(requests.TooManyRedirects) if follow else contextlib.nullcontext():
            assert http.get(server.url, stream=True, allow_redirects=follow).status_code == 302
    assert sum(received) < LITTLE


@pytest.mark.parametrize(
    ("head", "size", "found"),
    [
        (b"Content-Length: 1000", 1000, b"x" * 1000),
        (b"Content-Length: 1001", 1000, b""),
        (b"Content-Encoding: gzip", MORE, b""),
    ],
)
def test_the_body_of_a_redirect_is_read_if_it_is_short_and_valid(head: bytes, size: int, found: bytes) -> None:
    with talking(REDIRECT + head + b"\r\n\r\n", b"x", size) as server:
        answer = session(Network()).get(server.url, stream=True, allow_redirects=False)
        assert (answer.status_code, http_deadlines.body(answer, 1000)) == (302, found)
        assert answer.raw.closed
