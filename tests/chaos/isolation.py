"""A network of this process' own, with nothing in it but loopback: engine, registry, index and envbuild share it."""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import socket
import struct
import subprocess
from pathlib import Path

_CLONE_NEWNET = 0x40000000  # linux/sched.h
_GET_FLAGS, _SET_FLAGS, _UP = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
_TREE = Path(os.environ.get("ENVBUILD_ENGINE_ROOT", "/var/lib/envbuild-engine")) / "tree" / "usr"


def lacking() -> str | None:
    """Why no engine of one's own can be started here; None where it can."""
    if os.getuid():
        return "an engine of its own needs root"
    if dockerd() is None:
        return "no dockerd is installed, nor unpacked by scripts/engine"
    if not shutil.which("unshare") or subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode:
        return "no network namespace can be made here"
    return None


def dockerd() -> Path | None:
    """The one that scripts/engine unpacked, else the machine's."""
    unpacked = _TREE / "sbin" / "dockerd"
    installed = shutil.which("dockerd")
    return unpacked if unpacked.is_file() else Path(installed) if installed else None


def leave_network() -> None:
    """This process and those it starts from now on see no network but their own loopback. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "no network namespace of its own")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        asked = struct.pack("16sH14x", b"lo", 0)
        flags = struct.unpack("16sH14x", fcntl.ioctl(any_socket, _GET_FLAGS, asked))[1]
        fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sH14x", b"lo", flags | _UP))


def die_with_parent() -> None:
    """For a child that is just starting: it is told to end where the campaign is killed."""
    ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
