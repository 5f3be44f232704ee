"""Fills marked blocks of a Markdown file with generated text. Pure. A block is between two comments:

    <!-- envbuild:table h20,a100 -->
    ... the text here is replaced ...
    <!-- envbuild:end -->

A marker must be alone on its line. A marker inside a code fence is ordinary text, and is not replaced.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from envbuild.util.errors import Fault, near

KINDS = ("table", "minimum", "requirements", "constraints", "evidence")
_MARKER = re.compile(r"[ \t]*<!--[ \t]*envbuild:([^\s>]*)((?:\s[^>]*)?)-->[ \t]*")
# CommonMark: if the text after the backticks contains a backtick, they begin inline code, not a fence.
_FENCE = re.compile(r" {0,3}(`{3,}(?=[^`]*$)|~{3,})([^\n]*)")
_END = "end"


@dataclass(frozen=True)
class Block:
    """The lines `first` to `last` of a file, counted from 0, with the two markers. `names`: the profiles that the block
    is about, or, for evidence, the folders."""

    kind: str
    names: tuple[str, ...]
    first: int
    last: int


def blocks(text: str, file: str) -> tuple[list[Block], list[Fault]]:
    """Return the blocks of a file, and all faults in its markers."""
    found: list[Block] = []
    faults: list[Fault] = []
    begun: tuple[int, str, tuple[str, ...]] | None = None
    markers, unclosed = _markers(text)
    for number, kind, names in markers:
        if kind == _END and begun is None:
            faults.append(Fault("this end marker has no start marker", file, number + 1))
        elif kind == _END and begun:
            found.append(Block(begun[1], begun[2], begun[0], number))
            begun = None
        elif kind not in KINDS:
            hint = near(kind, KINDS) or f"known: {', '.join(KINDS)}"
            faults.append(Fault(f"unknown block {kind!r} ({hint})", file, number + 1))
        else:
            if begun:
                faults.append(Fault(_UNENDED, file, begun[0] + 1))
            begun = (number, kind, names)
            if not names:
                what = "folders" if kind == "evidence" else "profiles"
                faults.append(Fault(f"this marker lacks {what}: write envbuild:{kind} A,B", file, number + 1))
    if begun:
        faults.append(Fault(_UNENDED, file, begun[0] + 1))
    if unclosed is not None:
        faults.append(Fault("this code fence is not closed, so the markers below it are not read", file, unclosed + 1))
    return found, faults


_UNENDED = "this block has no end marker: add <!-- envbuild:end -->"


def _markers(text: str) -> tuple[list[tuple[int, str, tuple[str, ...]]], int | None]:
    """Return the line number, kind and names of every marker outside code fences, and the line number of an unclosed
    fence that contains markers, if there is one."""
    found: list[tuple[int, str, tuple[str, ...]]] = []
    fence: str | None = None
    since, hidden = 0, False
    for number, line in enumerate(text.splitlines()):
        opened = _FENCE.match(line)
        if fence is not None:
            if opened and opened[1].startswith(fence) and not opened[2].strip():
                fence = None
            hidden = hidden or _MARKER.fullmatch(line) is not None
        elif opened:
            fence, since, hidden = opened[1], number, False
        elif marker := _MARKER.fullmatch(line):
            found.append((number, marker[1], tuple(name for name in re.split(r"[\s,]+", marker[2]) if name)))
    return found, since if fence is not None and hidden else None


def fill_blocks(text: str, found: list[Block], content: Callable[[Block], str]) -> tuple[str, list[Block]]:
    """Return the text with new content in its blocks, and the blocks that changed. Line endings are preserved."""
    lines = text.splitlines(keepends=True)
    changed = []
    for block in reversed(found):
        end = "\r\n" if lines[block.first].endswith("\r\n") else "\n"
        made = [f"{line}{end}" for line in content(block).splitlines()]
        if lines[block.first + 1 : block.last] != made:
            lines[block.first + 1 : block.last] = made
            changed.append(block)
    return "".join(lines), changed[::-1]


def markdown_table(rows: list[tuple[str, ...]]) -> str:
    """Return a table; the first row is its header. The content of cells is escaped, so that it is shown as text."""
    head, *body = [[cell_text(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


# Characters that would end the cell or the line, start a tag, an address, a link, a picture or code, or look like a
# marker of a block. A `<` that starts nothing, as in <2.11, is kept.
_SPECIAL = re.compile(r"[\\`*\[\]|~!&]|<(?=[A-Za-z/!?]|[^\s<>]*@)|(?<![A-Za-z0-9])_|_(?![A-Za-z0-9])")


def cell_text(text: str) -> str:
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return _SPECIAL.sub(lambda match: f"&#{ord(match[0])};" if match[0] in "<|&" else f"\\{match[0]}", line) or "-"
