"""Reduces stacks to the frames that help the author of a profile's script: those of the script and of the functions
that the script called.

The temporary path of the script is replaced by its file name. Python's tracebacks list the outermost frame first;
faulthandler's dumps list the innermost frame first. All functions are pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

FOLDER = "envbuild-script-"  # prefix of the temporary folder that contains the script

_SCRIPT = re.compile(rf"[^\s\"']{{0,300}}/{FOLDER}[^\s\"'/]{{1,100}}/")
_OURS = re.compile(r'  File "(<frozen runpy>|.*/runpy\.py|.*envbuild/selftest/.*)", line ')
_TRACEBACK = "Traceback (most recent call last):"
_STACK = re.compile(r"(Current thread|Thread|Stack) .*\(most recent call first\):")
# This list of all loaded C extensions is the last line of faulthandler's dump of a fatal error.
_MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)


def without_modules(dump: str) -> str:
    """Remove the list of loaded C extensions from a dump. The list does not explain the fault and takes kilobytes."""
    return _MODULES.sub("", dump)


def renamed(text: str) -> str:
    """Replace the temporary path of the script by its file name."""
    return _SCRIPT.sub("", text) if FOLDER in text else text


def script_stacks(text: str) -> str:
    """Reduce every stack in a text to the frames of the script and of the functions that it called.

    The rest of the text is unchanged, except for the script's path, which `renamed` replaces.
    """
    lines, kept = text.splitlines(), []
    while lines:
        line = lines.pop(0)
        kept.append(line)
        if line == _TRACEBACK or _STACK.fullmatch(line):
            stack = list(takewhile(lambda inner: inner.startswith("  "), lines))
            del lines[: len(stack)]
            kept += _outermost_first(stack) if line == _TRACEBACK else _innermost_first(stack)
    return renamed("\n".join(kept))


def _outermost_first(stack: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a traceback that are kept. A frame may be followed by lines of its source code."""
    starts = [number for number, line in enumerate(stack) if line.startswith('  File "')]
    inside = [number for number in starts if _SCRIPT.search(stack[number])]
    foreign = [number for number in starts if not _OURS.match(stack[number])]
    first = next(iter(inside or foreign), len(stack))
    end = next((number for number in starts if foreign and number > foreign[-1]), len(stack))
    yield from stack[first:end]


def _innermost_first(stack: Sequence[str]) -> Iterator[str]:
    inside = [number for number, line in enumerate(stack) if _SCRIPT.search(line)]
    ours = [number for number, line in enumerate(stack) if _OURS.match(line)]
    end = inside[-1] + 1 if inside else next(iter(ours), len(stack))
    yield from stack[:end]
