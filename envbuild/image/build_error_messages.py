"""Finds the cause of a failed build in its output (BuildKit, compilers, build tools), and what to do about it. Pure.

The known messages of compilers are data: facts/data/compilers.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from envbuild.facts import extension_compilers

_MOST = 12  # maximum number of lines
_NUMBERS = re.compile(r"(?:#[0-9]+ )?(?:[0-9]+\.[0-9]+ )?")  # BuildKit's prefix: the step's number and seconds
_MARKS = ("error:", "Error:", "error ", "fatal", "FAILED:", "install:")


def is_out_of_memory(output: str) -> bool:
    """Whether the output shows the kernel's OOM killer or a failed allocation."""
    return any(row.pattern.search(output) for row in extension_compilers.out_of_memory_messages())


def explained(output: str) -> str:
    """Return advice and the text that shows the error, if the error is known; otherwise the result of
    `first_errors`."""
    for row in extension_compilers.complaints():
        match = row.pattern.search(output)
        if match:
            return f"{row.say.format(**match.groupdict())}\n{match.group()}"
    return "\n".join(first_errors(output))


def first_errors(output: str) -> Sequence[str]:
    """Return the first lines with an error, else BuildKit's own errors, else the last lines."""
    own = builders(output)
    lines = _lines(output)
    named = [line for line in lines if line not in own and any(mark in line for mark in _MARKS)]
    return list(dict.fromkeys(named))[:_MOST] or own or lines[-_MOST:]


def builders(output: str) -> Sequence[str]:
    """Return BuildKit's own errors, without those of the programs that ran in a step."""
    return list(dict.fromkeys(line for line in _lines(output) if line.startswith("ERROR: ")))


def _lines(output: str) -> Sequence[str]:
    return [_NUMBERS.sub("", line, count=1) for line in output.splitlines() if line.strip()]
