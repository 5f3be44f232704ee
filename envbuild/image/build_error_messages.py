"""Finds the cause in the output of a failed build (BuildKit, compilers, build tools), and what to do about it. Pure.

The known messages of compilers are data: facts/data/compilers.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from envbuild.facts import extension_compilers

_MOST = 12  # maximum number of lines
_NUMBERS = re.compile(r"(?:#[0-9]+ )?(?:[0-9]+\.[0-9]+ )?")  # BuildKit's prefix: the step's number and seconds
_MARKS = ("error:", "Error:", "error ", "fatal", "FAILED:", "install:")


def is_out_of_memory(said: str) -> bool:
    """Whether the output shows the kernel's OOM killer or a failed allocation."""
    return any(row.pattern.search(said) for row in extension_compilers.out_of_memory_messages())


def explained(said: str) -> str:
    """Return the lines that show the error, after advice if the error is known."""
    for row in extension_compilers.complaints():
        match = row.pattern.search(said)
        if match:
            return f"{row.say.format(**match.groupdict())}\n{match.group()}"
    return "\n".join(first_errors(said))


def first_errors(said: str) -> Sequence[str]:
    """Return the first lines with an error, else BuildKit's own errors, else the last lines."""
    own = builders(said)
    lines = _lines(said)
    named = [line for line in lines if line not in own and any(mark in line for mark in _MARKS)]
    return list(dict.fromkeys(named))[:_MOST] or own or lines[-_MOST:]


def builders(said: str) -> Sequence[str]:
    """Return BuildKit's own errors, without those of the programs that ran in a step."""
    return list(dict.fromkeys(line for line in _lines(said) if line.startswith("ERROR: ")))


def _lines(said: str) -> Sequence[str]:
    return [_NUMBERS.sub("", line, count=1) for line in said.splitlines() if line.strip()]
