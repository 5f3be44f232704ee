"""Counts the processors that this process may use."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "<quota in microseconds, or max> <period>" of the container's control group


def processors(quota: Path = _QUOTA) -> int:
    """Return the number of processors in this process's CPU affinity.

    If the control group's CPU quota, rounded up to whole processors, is smaller, the quota is returned instead.
    """
    allowed = len(os.sched_getaffinity(0))
    try:
        share, period = quota.read_text().split()
        return max(1, min(allowed, math.ceil(int(share) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # control groups of version 1, or no quota
        return allowed
