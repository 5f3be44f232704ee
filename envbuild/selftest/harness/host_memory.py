"""Reads how much host memory is available to this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # the limit of the container's control group: bytes, or "max" for none


def available_bytes(meminfo: Path = _MEMINFO, limit: Path = _LIMIT) -> int:
    """Return the available memory of the host in bytes; 0 if unknown.

    If the control group's memory limit is smaller, the limit is returned instead.
    """
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):  # control groups of version 1, or no limit
        found = min(found, int(limit.read_text(encoding="ascii")))
    return found
