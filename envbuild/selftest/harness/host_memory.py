"""The host memory available to this process."""

from __future__ import annotations

import contextlib
from pathlib import Path

_MEMINFO = Path("/proc/meminfo")
_LIMIT = Path("/sys/fs/cgroup/memory.max")  # bytes or "max", of the container's own control group


def available_bytes(meminfo: Path = _MEMINFO, limit: Path = _LIMIT) -> int:
    """Free and reclaimable memory in bytes, or the control group's limit if that is smaller; 0 if unknown."""
    found = 0
    with contextlib.suppress(OSError, ValueError):
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                found = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):  # another version of control groups, or no limit
        found = min(found, int(limit.read_text(encoding="ascii")))
    return found
