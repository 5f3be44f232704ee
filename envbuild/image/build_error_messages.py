"""What BuildKit, compilers and build tools say when a build fails: which lines tell why, and what to make of it. Pure.

What is known of compilers is data: facts/data/compilers.yaml.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from envbuild.facts import extension_compilers

_MOST = 12  # lines
_NUMBERS = re.compile(r"(?:#[0-9]+ )?(?:[0-9]+\.[0-9]+ )?")  # BuildKit's, of the step and of its seconds
_MARKS = ("error:", "Error:", "error ", "fatal", "FAILED:", "install:")


def is_out_of_memory(said: str) -> bool:
    """The kernel's killer, or an allocation that failed."""
    return any(row.pattern.search(said) for row in extension_compilers.out_of_memory_messages())


def explained(said: str) -> str:
    """What to do, where that is known, and the lines that name the fault."""
    for row in extension_compilers.complaints():
        match = row.pattern.search(said)
        if match:
            return f"{row.say.format(**match.groupdict())}\n{match.group()}"
    return "\n".join(first_errors(said))


def first_errors(said: str) -> Sequence[str]:
    """The first lines that name an error; else what BuildKit itself says, else the last lines."""
    own = builders(said)
    lines = _lines(said)
    named = [line for line in lines if line not in own and any(mark in line for mark in _MARKS)]
    return list(dict.fromkeys(named))[:_MOST] or own or lines[-_MOST:]


def builders(said: str) -> Sequence[str]:
    """BuildKit's own errors, not those of what ran in a step."""
    return list(dict.fromkeys(line for line in _lines(said) if line.startswith("ERROR: ")))


def _lines(said: str) -> Sequence[str]:
    return [_NUMBERS.sub("", line, count=1) for line in said.splitlines() if line.strip()]
