"""Determines which GPUs can run device code, from its architectures in the notation of torch and nvcc: sm_90 and
compute_90. Pure.

Used in the container for torch's own list, on the host for the facts, wheels and audit results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

_ARCHITECTURE = re.compile(r"(sm|compute)_([0-9]{1,2})([0-9])([af]?)")


def serves(architectures: Iterable[str], capability: str) -> Literal["compiled", "ptx"] | None:
    """How a GPU of this compute capability ("9.0") can run such code: directly, compiled by the driver ("ptx"), or not
    at all.

    Machine code runs on GPUs with the same major version and the same or a higher minor version; PTX runs on all later
    GPUs too. sm_90a and its PTX run only on 9.0; the family code sm_100f and its PTX run on GPUs with the same major
    version (NVIDIA, "CUDA C++ Programming Guide", compatibility).
    """
    major, minor = (int(part) for part in capability.split("."))
    found = set()
    for match in filter(None, map(_ARCHITECTURE.fullmatch, architectures)):
        at, only = (int(match[2]), int(match[3])), match[4]
        same_major = at[0] == major and at[1] <= minor and only != "a"
        later = at <= (major, minor) and match[1] == "compute" and not only
        if at == (major, minor) or same_major or later:
            found.add(match[1])
    return "compiled" if "sm" in found else "ptx" if found else None
