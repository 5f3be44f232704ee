"""Which cards device code serves: architectures as torch and nvcc write them, sm_90 and compute_90. Pure.

In the container it judges torch's own list; on the host the facts, wheels and what an audit found.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

_ARCHITECTURE = re.compile(r"(sm|compute)_([0-9]{1,2})([0-9])([af]?)")


def serves(architectures: Iterable[str], capability: str) -> Literal["compiled", "ptx"] | None:
    """How such code serves a card of this compute capability, as "9.0": as it is, compiled by the driver, or not.

    Machine code runs on cards of its major version from its minor on, PTX on all later ones; sm_90a and its PTX on 9.0
    alone, the family's sm_100f and its PTX on its major version (NVIDIA, "CUDA C++ Programming Guide", compatibility).
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
