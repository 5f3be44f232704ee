"""The limit on the total waiting time of one request."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from envbuild.util.errors import NetworkError
from envbuild.util.http_deadlines import _Budget
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
