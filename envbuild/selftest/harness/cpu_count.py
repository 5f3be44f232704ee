"""The number of processors available to this process."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "<microseconds or max> <period>", of the container's own control group


def processors(quota: Path = _QUOTA) -> int:
    """Number of processors in this process's CPU affinity, or the control group's CPU quota if that is smaller."""
    allowed = len(os.sched_getaffinity(0))
    try:
        share, period = quota.read_text().split()
        return max(1, min(allowed, math.ceil(int(share) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # another version of control groups, or no quota
        return allowed
