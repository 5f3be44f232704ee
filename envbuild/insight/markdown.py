"""Blocks of a Markdown file that are filled from data, between two comments. Pure.

    <!-- envbuild:table h20,a100 -->
    ... what stands here is replaced ...
    <!-- envbuild:end -->

A marker stands alone on its line; one inside a code fence is text about markers, and stays.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from envbuild.errors import Fault, near

KINDS = ("table", "minimum", "requirements", "constraints", "evidence")
_MARKER = re.compile(r"[ \t]*<!--[ \t]*envbuild:([^\s>]*)[ \t]*([^>]*?)[ \t]*-->[ \t]*")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})([^\n]*)")
_END = "end"


@dataclass(frozen=True)
class Block:
    """Lines `first` to `last` of a file, both markers included, counted from 0; `names`: the profiles it is about,
    or of evidence the folders."""

    kind: str
    names: tuple[str, ...]
    first: int
    last: int


def blocks(text: str, file: str) -> tuple[list[Block], list[Fault]]:
    """The blocks of a file, and all that is wrong with its markers."""
    found: list[Block] = []
    faults: list[Fault] = []
    begun: tuple[int, str, tuple[str, ...]] | None = None
    for number, kind, names in _markers(text):
        if kind == _END and begun is None:
            faults.append(Fault("ends a block that no marker begins", file, number + 1))
        elif kind == _END and begun:
            found.append(Block(begun[1], begun[2], begun[0], number))
            begun = None
        elif kind not in KINDS:
            hint = near(kind, KINDS) or f"known: {', '.join(KINDS)}"
            faults.append(Fault(f"there is no block {kind!r} ({hint})", file, number + 1))
        else:
            if begun:
                faults.append(Fault(_UNENDED, file, begun[0] + 1))
            begun = (number, kind, names)
            if not names:
                faults.append(Fault(f"names no profile, as in: envbuild:{kind} h20,a100", file, number + 1))
    if begun:
        faults.append(Fault(_UNENDED, file, begun[0] + 1))
    return found, faults


_UNENDED = "this block is not ended: <!-- envbuild:end -->"


def _markers(text: str) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Line, kind and names of every marker outside a code fence."""
    fence: str | None = None
    for number, line in enumerate(text.splitlines()):
        opened = _FENCE.match(line)
        if fence is not None:
            if opened and opened[1].startswith(fence) and not opened[2].strip():
                fence = None
        elif opened:
            fence = opened[1]
        elif marker := _MARKER.fullmatch(line):
            yield number, marker[1], tuple(name for name in re.split(r"[\s,]+", marker[2]) if name)


def fill(text: str, found: list[Block], content: Callable[[Block], str]) -> tuple[str, list[Block]]:
    """The text with the content of its blocks made anew, and those that changed. Line ends stay as they are."""
    lines = text.splitlines(keepends=True)
    changed = []
    for block in reversed(found):
        end = "\r\n" if lines[block.first].endswith("\r\n") else "\n"
        made = [f"{line}{end}" for line in content(block).splitlines()]
        if lines[block.first + 1 : block.last] != made:
            lines[block.first + 1 : block.last] = made
            changed.append(block)
    return "".join(lines), changed[::-1]


def table(rows: list[tuple[str, ...]]) -> str:
    """A table; the first row is its head. What the cells hold is shown as text, whoever wrote it."""
    head, *body = [[cell_text(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


# What would end the cell or the line, open a tag, a link, a picture or code, or be taken for a marker of ours.
_SPECIAL = re.compile(r"[\\`*\[\]<|~!&]|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def cell_text(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};" if match[0] in "<|&" else f"\\{match[0]}", line) or "-"
