"""What of a stack concerns the author of a profile's script: its own frames and what they called, under its own name.

Python's tracebacks tell the outermost frame first, faulthandler's dumps the innermost. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import takewhile

FOLDER = "envbuild-script-"  # what begins the name of the temporary folder in which a script lies

_SCRIPT = re.compile(rf"[^\s\"']{{0,300}}/{FOLDER}[^\s\"'/]{{1,100}}/")
_OURS = re.compile(r'  File "(<frozen runpy>|.*/runpy\.py|.*envbuild/selftest/.*)", line ')
_TRACEBACK = "Traceback (most recent call last):"
_STACK = re.compile(r"(Current thread|Thread|Stack) .*\(most recent call first\):")
# faulthandler ends a fatal error's dump with the names of all C extensions that are loaded.
_MODULES = re.compile(r"^Extension modules: .*\n?", re.MULTILINE)


def without_modules(dump: str) -> str:
    """A dump without the list of loaded extensions, which says nothing of the fault and takes kilobytes."""
    return _MODULES.sub("", dump)


def renamed(text: str) -> str:
    """The script by its name, not by the place where it lay."""
    return _SCRIPT.sub("", text) if FOLDER in text else text


def script_stacks(text: str) -> str:
    """Every stack in a text cut to the script's frames and what they called; the rest of the text as it is."""
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
    """A frame may have lines of source below it."""
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
