"""A network namespace of this process with only loopback: engine, registry, index and envbuild share it."""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h


def leave_network() -> None:
    """Move this process and its future children to a network with only loopback. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace of its own")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        query = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, query))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))
