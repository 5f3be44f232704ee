"""What this process may use of the machine it is on."""

from __future__ import annotations

import math
import os
from pathlib import Path

_QUOTA = Path("/sys/fs/cgroup/cpu.max")  # "<microseconds or max> <period>", of the container's own control group


def processors(quota: Path = _QUOTA) -> int:
    """The processors this process may run on, or as many as its control group's quota pays for, if that is fewer."""
    allowed = len(os.sched_getaffinity(0))
    try:
        share, period = quota.read_text().split()
        return max(1, min(allowed, math.ceil(int(share) / int(period))))
    except (OSError, ValueError, ZeroDivisionError):  # another version of control groups, or no quota
        return allowed
