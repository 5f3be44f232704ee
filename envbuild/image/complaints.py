"""What compilers and build tools say when a source cannot be compiled, and what to make of it. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

_MEMORY = re.compile(
    r"Killed signal terminated program|died due to signal 9|virtual memory exhausted|std::bad_alloc"
    r"|out of memory allocating|Cannot allocate memory|exit code: 137"
)


def out_of_memory(said: str) -> bool:
    """The kernel's killer, or an allocation that failed, in the words of gcc, nvcc, the C library and BuildKit."""
    return _MEMORY.search(said) is not None


_KNOWN = (
    (
        re.compile(r"install: \S+ is of CUDA (?P<found>[^,]+), torch of (?P<wanted>[0-9.]+)"),
        "the nvcc at hand is of CUDA {found}, and extensions need that of torch's CUDA, {wanted}: take a base image or "
        "an archive of that toolkit (toolchain:), or a torch for CUDA {found}",
    ),
    (
        re.compile(r"unsupported GNU version.*|greater than the maximum required version by CUDA \S+"),
        "the base's g++ is newer than this nvcc takes: use a base with an older g++, or a torch of a newer CUDA",
    ),
    (
        re.compile(r"error: option (?P<flag>\S+) not recognized"),
        "this commit does not know {flag}: look at its setup.py, and correct build.settings",
    ),
)


def explained(said: str) -> str:
    """What to do, where that is known, and the lines that name the fault."""
    for pattern, advice in _KNOWN:
        match = pattern.search(said)
        if match:
            return f"{advice.format(**match.groupdict())}\n{match.group()}"
    return "\n".join(_last(said))


_STEP = re.compile(r"#[0-9]+ (?:[0-9.]+ )?")
_MARKS = ("error:", "Error:", "error ", "fatal", "FAILED:", "install:")


def _last(said: str) -> Sequence[str]:
    """The lines that name an error, else the last ones, without BuildKit's numbers."""
    lines = [_STEP.sub("", line, count=1) for line in said.splitlines() if line.strip()]
    named = [line for line in lines if any(mark in line for mark in _MARKS) and "failed to solve" not in line]
    return list(dict.fromkeys(named))[:8] or lines[-12:]
