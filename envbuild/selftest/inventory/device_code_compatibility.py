"""Determines which GPUs can run device code, from the architectures for which it was compiled.

Architectures are written as in torch and nvcc: sm_90 is machine code, compute_90 is PTX. All functions are pure. The
self-test uses this module in the container, for torch's list of architectures. envbuild uses it on the host, for facts,
wheels and audit results.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

_ARCHITECTURE = re.compile(r"(sm|compute)_([0-9]{1,2})([0-9])([af]?)")


def serves(architectures: Iterable[str], capability: str) -> Literal["compiled", "ptx"] | None:
    """Return how a GPU of this compute capability (such as "9.0") can run device code of these architectures.

    The result is "compiled" if it can run machine code directly, "ptx" if only the driver can compile PTX for it, and
    None if it cannot run the code.

    Machine code runs on GPUs with the same major version and the same or a higher minor version. PTX also runs on all
    later GPUs. Architecture-specific code (sm_90a, and its PTX compute_90a) runs only on compute capability 9.0. Family
    code (sm_100f, and its PTX compute_100f) runs on GPUs with the same major version and the same or a higher minor
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
