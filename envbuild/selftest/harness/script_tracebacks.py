"""Reduces stacks to what concerns the author of a profile's script: the script's own frames and those they called.

The script appears under its own name. Python's tracebacks list the outermost frame first, faulthandler's dumps the
innermost. Pure functions.
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
# faulthandler ends the dump of a fatal error with the names of all loaded C extensions.
_MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)


def without_modules(dump: str) -> str:
    """Remove the list of loaded extensions from a dump: it does not explain the fault and takes kilobytes."""
    return _MODULES.sub("", dump)


def renamed(text: str) -> str:
    """Replace the script's temporary path by its name."""
    return _SCRIPT.sub("", text) if FOLDER in text else text


def script_stacks(text: str) -> str:
    """Cut every stack in a text to the script's frames and those they called; the rest of the text stays."""
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
    """Yield the kept lines of a traceback. Lines of source may follow a frame."""
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
