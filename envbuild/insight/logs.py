"""A log as lines that can be searched: hostile, of any size, in any language around what matters.

What is read is bounded, control sequences are taken out, and a pattern is tried only on lines that hold a text it
cannot do without, so that ten megabytes take less than a second.
"""

from __future__ import annotations

import codecs
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate
from re import _parser  # type: ignore[attr-defined]  # there is no public way to ask a pattern what it needs
from typing import Any, BinaryIO

from envbuild.insight import packed

HEAD, TAIL = 8 << 20, 24 << 20
"""Bytes that are kept of a log's begin and end: versions stand in the one, the crash in the other."""
LONGEST = 2000
"""Characters of a line that are searched together; a longer one is searched in pieces."""
TRIED = 400
"""Lines that a pattern is tried on. With the bounded gaps of patterns this bounds the time."""

_BLOCK = 1 << 20
_SNIFFED = 4096
_ALIKE = 40
_WORD = 3
_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;:?]{0,64}[ -/]?[@-~]|\][^\x07\x1b]{0,512}(?:\x07|\x1b\\)|[@-Z\\-_])")
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\r"})
_WIDE = {code + 0xFEE0: code for code in range(0x21, 0x7F)}  # the colons and brackets of East Asian text
_DIGITS = bytes.maketrans(b"123456789", b"000000000")
_LETTERS = bytes(code if chr(code).isalpha() and code < 128 else 32 for code in range(256))


@dataclass(frozen=True)
class Line:
    """`number` counts from 1, as editors do; `text` is a piece of it where it is long; `file`: its name, where several
    are read as one."""

    number: int
    text: str
    file: str = ""


class Log:
    """Lines, of one file or several. `foreign`: what it is instead of text; `note`: why some of it was not read."""

    def __init__(
        self, raw: bytes, skipped: tuple[int, int] = (0, 0), foreign: str | None = None, note: str | None = None
    ) -> None:
        """`skipped`: how many bytes of `raw` come before lines that were left out, and how many those are."""
        start, self.skipped = skipped if skipped[1] else (0, 0)
        self.foreign, self.note, self.empty = foreign, note, not raw.strip()
        self.files: tuple[str, ...] = ("",)
        following = raw[:start].count(b"\n") + self.skipped + 1
        self.lines = [*_lines(_text(raw[:start]), 1)] if start else []
        self.lines += _lines(_text(raw[start:]), following)

    def find(
        self,
        pattern: re.Pattern[str],
        most: int = 5,
        never: Sequence[re.Pattern[str]] = (),
        before: Sequence[re.Pattern[str]] = (),
    ) -> list[tuple[Line, re.Match[str]]]:
        """The first lines, at most `most`, that the pattern fits and none of `never` does, nor one of `before` what
        stands before the match."""
        found: list[tuple[Line, re.Match[str]]] = []
        for index in self._index.candidates(pattern):
            line = self.lines[index]
            match = pattern.search(line.text)
            if match is None or any(other.search(line.text) for other in never):
                continue
            if not any(other.search(line.text, 0, match.start()) for other in before):
                found.append((line, match))
                if len(found) == most:
                    break
        return found

    def has(self, patterns: Iterable[re.Pattern[str]], before: Sequence[re.Pattern[str]] = ()) -> bool:
        return any(self.find(pattern, 1, before=before) for pattern in patterns)

    @cached_property
    def _index(self) -> _Index:
        return _Index(self.lines)


def joined(parts: Mapping[str, Log]) -> Log:
    """Several logs as one, in this order; their lines know their file."""
    whole = Log(b"")
    whole.lines = [replace(line, file=name) for name, log in parts.items() for line in log.lines]
    whole.files = tuple(parts)
    whole.skipped = sum(log.skipped for log in parts.values())
    whole.empty = all(log.empty for log in parts.values())
    return whole


class _Index:
    """The shapes of lines: what is left of a line without the case of letters and the value of digits. A progress bar
    of a million lines has few."""

    def __init__(self, lines: Sequence[Line]) -> None:
        shapes: dict[bytes, list[int]] = {}
        for index, line in enumerate(lines):
            shapes.setdefault(line.text.encode().lower().translate(_DIGITS), []).append(index)
        self._joined = b"\n".join(shapes)
        self._starts = list(accumulate((len(shape) + 1 for shape in shapes), initial=0))
        self._where = list(shapes.values())
        self._words = b" ".join({word for word in self._joined.translate(_LETTERS).split() if len(word) >= _WORD})

    def candidates(self, pattern: re.Pattern[str]) -> list[int]:
        """The places of lines that the pattern may fit."""
        wanted = anchors(pattern)
        shapes = {shape for text in wanted for shape in self._holding(text)} if wanted else range(len(self._where))
        found = sorted(index for shape in shapes for index in self._where[shape][:_ALIKE])
        return found if len(found) <= TRIED else found[: TRIED // 2] + found[-TRIED // 2 :]

    def _holding(self, text: bytes) -> Iterator[int]:
        """The first shapes and the last that hold a text. Most texts are ruled out by their longest word alone."""
        word = max(text.translate(_LETTERS).split(), key=len, default=b"")
        if len(word) >= _WORD and word not in self._words:
            return
        place = -1
        for _ in range(TRIED // 2):
            place = self._joined.find(text, place + 1)
            if place < 0:
                return
            shape = bisect_right(self._starts, place) - 1
            yield shape
            place = self._starts[shape + 1] - 1
        end = len(self._joined)
        for _ in range(TRIED // 2):
            end = self._joined.rfind(text, place, end)
            if end < 0:
                return
            shape = bisect_right(self._starts, end) - 1
            yield shape
            end = self._starts[shape]


def read(stream: BinaryIO, share: int = 1) -> Log:
    """All of a stream, unpacked where it is of gzip, or its begin and end where it is larger than both together.
    `share`: of that room, where so many logs are read together."""
    source = packed.opened(stream)
    begin = source.read(_SNIFFED)
    foreign = packed.foreign(begin)
    if foreign:
        return Log(b"", foreign=foreign)
    head = begin + source.read(max(0, HEAD // share - len(begin)))
    tail: deque[bytes] = deque()
    most, held, skipped = TAIL // share, 0, 0
    while block := source.read(min(_BLOCK, most)):
        tail.append(block)
        held += len(block)
        while held - len(tail[0]) >= most:
            gone = tail.popleft()
            held -= len(gone)
            skipped += gone.count(b"\n")
    return Log(head + b"".join(tail), (len(head), skipped), note=source.fault)


def _text(raw: bytes) -> str:
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if raw.startswith(mark):  # as PowerShell writes
            raw = raw[2:].decode(encoding, "replace").encode("utf-8", "replace")
    raw = _ESCAPES.sub(b"", raw) if b"\x1b" in raw else raw
    text = raw.replace(b"\r\n", b"\n").translate(None, _CONTROLS).decode("utf-8", "replace")
    return text if text.isascii() else text.translate(_WIDE)


def _lines(text: str, number: int) -> Iterator[Line]:
    for count, line in enumerate(text.removesuffix("\n").split("\n"), number):
        if len(line) <= LONGEST and "\r" not in line:
            yield Line(count, line)
            continue
        for part in line.split("\r"):
            for start in range(0, len(part), LONGEST):
                yield Line(count, part[start : start + LONGEST])


@cache
def anchors(pattern: re.Pattern[str]) -> tuple[bytes, ...]:
    """Texts, in a shape's form, of which every line that the pattern fits holds one; none where nothing is sure."""
    return tuple(
        text.encode().lower().translate(_DIGITS) for text in _needed(_parser.parse(pattern.pattern, pattern.flags))
    )


def _needed(parsed: Any) -> tuple[str, ...]:
    """Of the items that follow each other, the one whose shortest text is longest."""
    best: tuple[str, ...] = ()
    run = ""
    for operation, argument in [*parsed, ("END", None)]:
        name = str(operation)
        if name == "LITERAL":
            run += chr(argument)
            continue
        found: tuple[str, ...] = ()
        if name == "SUBPATTERN":
            found = _needed(argument[-1])
        elif name == "BRANCH":
            branches = [_needed(branch) for branch in argument[1]]
            found = tuple(text for branch in branches for text in branch) if all(branches) else ()
        elif name in ("MAX_REPEAT", "MIN_REPEAT") and argument[0] > 0:
            found = _needed(argument[2])
        best = max(best, (run,) if run else (), found, key=_worth)
        run = ""
    return best


def _worth(texts: tuple[str, ...]) -> int:
    return min(map(len, texts), default=0)


@cache
def compiled(pattern: str) -> re.Pattern[str]:
    """As patterns of signatures are: in any case of letters; a word ends where another script begins."""
    return re.compile(pattern, re.IGNORECASE | re.ASCII)
