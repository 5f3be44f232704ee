"""Reads a log into lines and searches them. Logs may be hostile, of any size, and in any language.

A log is read as a stream, and only a limited number of bytes and lines is kept, which limits the memory. Control
sequences are removed. A pattern is tried only on lines that contain one of its required texts (required_texts.py),
because trying each pattern on each line would take minutes for ten megabytes.
"""

from __future__ import annotations

import codecs
import contextlib
import re
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, chain
from typing import BinaryIO

from envbuild.explain import (
    error_number_translation,
    localized_message_translation,
    log_decompression,
    message_normalization,
    required_texts,
)
from envbuild.explain.required_texts import DIGITS
from envbuild.facts import log_signatures
from envbuild.facts.fact_field_types import LazyPattern, SearchPattern
from envbuild.util.errors import some

HEAD, TAIL = 8 << 20, 24 << 20
"""Maximum number of bytes that are kept of the beginning of a log, which has the versions, and of its end, which has
the crash."""
HEAD_LINES, TAIL_LINES = 100_000, 300_000
"""Maximum number of lines that are kept of the beginning and of the end. This limits the memory, which
tests/attacks/test_explain.py measures."""
LONGEST = 2000
"""Maximum number of characters that are searched at once; longer lines are split."""
TRIED = 400
"""Maximum number of lines on which a pattern is tried in each of the three forms that Log.find searches. Together with
the bounded gaps in patterns, this limits the time."""

_BLOCK = 1 << 16
_SNIFFED = 4096
_MOST_OF_ONE_SHAPE = 40
_WORD, _MOST_WORDS = 3, 1 << 18
_ESCAPES = re.compile(rb"\x1b(?:\[[0-9;:?]{0,64}[ -/]?[@-~]|\][^\x07\x1b\n]{0,512}(?:\x07|\x1b\\)|[@-Z\\-_])")
_WRITTEN_ESCAPES = re.compile(
    rb"(?i:\^\[|\\{1,2}(?:x1b|u001b|033|e)|#(?:033|x1b)|\xe2\x90\x9b|\xef\xbf\xbd)"
    rb"\[(?:[0-9;?]{1,30}[A-Za-z]|[AHJKm](?!-))"
)
_WRITTEN_STARTS = (b"^[[", b"1b[", b"1B[", b"033[", b"\\e[", b"\x9b[", b"\xbd[")
"""Control sequences whose escape character a program wrote in another form, such as ^[, \\x1b, \\u001b, or #033
(syslog); and texts for finding them fast: each such sequence contains one of these texts."""
_COLOURS = re.compile(rb"\[[0-9]{1,3}(?:;[0-9]{1,3}){0,5}m")
_COLOUR_ENDS = (b"[0m", b"[00m", b"[39m", b"[0;0m")
"""Colours whose escape character is missing, as in text that was copied from a web page; and the sequences that end a
colour: in a line without one of them, such text is not a colour."""
_CONTROLS = bytes({*range(32), 127} - {*b"\t\n\r"})
_WIDE = {code + 0xFEE0: code for code in range(0x21, 0x7F)}  # full-width punctuation, digits and letters -> ASCII
_PATH_OR_ESCAPED_BREAK = re.compile(
    rf"{message_normalization.WINDOWS_PATH.pattern}|(?P<end>\\n(?=[\s\"'\\(\[#A-Z0-9_]|$))"
)
"""`end`: an escaped line break, as in a JSON string. Before a small letter, the two characters may be part of a
relative Windows path."""
_HAN = {1: re.compile("[\u4e00-\u9fff]"), 2: re.compile("[\u4e00-\u9fff]{2}")}
"""One Chinese character, and two adjacent ones."""
_ASCII_LETTERS = re.compile("[A-Za-z]")
_NO_LETTERS = bytes(code for code in range(256) if not chr(code).isalpha() or code >= 128)
_LETTERS = bytes(code if chr(code).isalpha() and code < 128 else 32 for code in range(256))


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a log. `number` counts from 1, as in editors. `text`: the line, or one piece of a long line. `file`:
    the name of the file; "" if the log has only one file."""

    number: int
    text: str
    file: str = ""


@dataclass(frozen=True)
class LogPart:
    """The size of a part of a log."""

    lines: int
    size: int

    def __str__(self) -> str:
        return f"{some(self.lines, 'line')}, {self.size / 1e6:.1f} MB"


@dataclass(frozen=True)
class Cut:
    """The parts of a log that was too large: the beginning and the end were read, the middle was not."""

    begin: LogPart
    skipped: LogPart
    end: LogPart

    def __str__(self) -> str:
        return (
            f"too large: its beginning ({self.begin}) and end ({self.end}) were read, not the middle ({self.skipped})"
        )


class Log:
    """The lines of one or several files. `foreign`: the kind of the file, if it is not text. `note`: why the end of the
    file was not read; else None. `cut`: the parts that were not kept because the log is too large. `unfinished`: the
    last line of each file that does not end with a line break."""

    def __init__(self, raw: bytes | Iterable[bytes] = b"", logs: int = 1, file: str = "") -> None:
        """`logs`: the number of logs read together; each log gets 1/`logs` of the limits."""
        self.foreign: str | None = None
        self.note: str | None = None
        self.files: tuple[str, ...] = (file,)
        blocks = _slices(raw) if isinstance(raw, bytes) else raw
        self.lines, self.cut, unfinished = _kept(_utf8(blocks), logs, file)
        self.unfinished: tuple[Line, ...] = (self.lines[-1],) if unfinished and self.lines else ()

    @property
    def empty(self) -> bool:
        return not any(line.text.strip() for line in self.lines)

    def find(
        self,
        pattern: SearchPattern,
        most: int = 5,
        never: Sequence[SearchPattern] = (),
        before: Sequence[SearchPattern] = (),
        skipped: Callable[[re.Match[str]], bool] | None = None,
    ) -> list[tuple[Line, re.Match[str]]]:
        """Finds the first lines, at most `most`, that match `pattern`. Skips lines that match one of `never`, lines in
        which one of `before` matches the text before the match, and matches for which `skipped` is true. Each line is
        searched as it is, then as changed by `plain_form`, then joined with the next line if the message may continue
        there. Of very many similar lines, only a part is searched (TRIED, _MOST_OF_ONE_SHAPE)."""
        found: list[tuple[Line, re.Match[str]]] = []
        if self._words is not None and self._words.lacks(pattern):
            return found
        texts, rewritten = self._rewritten
        breaks, joined = self._joined
        for index in sorted(
            {*self._index.candidates(pattern), *rewritten.candidates(pattern), *joined.candidates(pattern)}
        ):
            line = self.lines[index]
            match = pattern.search(line.text) or pattern.search(texts.get(index, ""))
            if match is None:
                match = next(filter(None, (_across(pattern, *broken) for broken in breaks.get(index, ()))), None)
            if match is None or any(other.search(match.string) for other in never):
                continue
            if any(other.search(match.string, 0, match.start()) for other in before):
                continue
            if skipped is None or not skipped(match):
                found.append((line, match))
                if len(found) == most:
                    break
        return found

    def has(
        self,
        patterns: Iterable[SearchPattern],
        before: Sequence[SearchPattern] = (),
        never: Sequence[SearchPattern] = (),
    ) -> bool:
        return any(self.find(pattern, 1, never, before) for pattern in patterns)

    @cached_property
    def _index(self) -> _Index:
        return _Index(enumerate(line.text for line in self.lines))

    @cached_property
    def _words(self) -> _Words | None:
        """The words of all texts in which `find` searches. They exclude most patterns with one look-up instead of one
        in each index."""
        indexes = (self._index, self._rewritten[1], self._joined[1])
        words: set[bytes] = set()
        for index in indexes:
            if index.words is None:
                return None
            words |= index.words
        return _Words(words, _NonAsciiLines.of(index.foreign for index in indexes))

    @cached_property
    def of_gpu(self) -> bool:
        """Whether a line mentions a program that uses GPUs."""
        return any(
            pattern.search(self.lines[index].text)
            for pattern in log_signatures.gpu_context()
            for index in self._index.candidates(pattern)
        )

    @cached_property
    def _rewritten(self) -> tuple[dict[int, str], _Index]:
        """Most of the lines that `plain_form` changes: index -> changed text, and an index for searching them. See
        message_normalization.form_patterns for the other lines."""
        texts: dict[int, str] = {}
        for index in {
            index
            for pattern in chain(
                localized_message_translation.patterns(),
                message_normalization.form_patterns(),
                error_number_translation.number_patterns(self.of_gpu),
            )
            for index in self._index.candidates(pattern)
        }:
            text = self.lines[index].text
            if (form := plain_form(text, self.of_gpu)) != text:
                texts[index] = form
        return texts, _Index(sorted(texts.items()))

    @cached_property
    def _joined(self) -> tuple[dict[int, list[tuple[int, str]]], _Index]:
        """The lines that are joined with the next line, or with the rest of the message in which the log ends: index ->
        (position of the break, joined text), and an index for searching them."""
        breaks: dict[int, list[tuple[int, str]]] = {}
        for index, place, text in message_normalization.joined([(line.file, line.text) for line in self.lines]):
            breaks.setdefault(index, []).append((place, text))
        for line in self.unfinished:
            if rest := required_texts.rest_of_text(line.text):
                index = next(place for place, other in enumerate(self.lines) if other is line)
                breaks.setdefault(index, []).append((len(line.text), f"{line.text}{rest}"))
        return breaks, _Index((index, text) for index, found in breaks.items() for _, text in found)


def plain_form(text: str, of_gpu: bool) -> str:
    """Returns a line in English, without quoting and prefixes, and with the names of error numbers. `of_gpu`: whether
    the log mentions a program that uses GPUs."""
    plain = localized_message_translation.rewritten(message_normalization.normalized(text))
    return error_number_translation.named(plain, of_gpu)


def _across(pattern: SearchPattern, place: int, text: str) -> re.Match[str] | None:
    """Returns the first match in `text` that begins before the line break at `place` and ends after it."""
    return next((match for match in pattern.finditer(text) if match.start() < place < match.end()), None)


def join_logs(parts: Iterable[Log]) -> Log:
    """Returns one log with the lines of several logs, in this order."""
    whole, whole.files = Log(), ()
    for log in parts:
        whole.lines += log.lines
        whole.unfinished += log.unfinished
        whole.files += log.files
    return whole


class _Index:
    """An index of lines by their shape: the line in lower case, with each digit replaced with 0. A million lines of a
    progress bar have only a few shapes."""

    def __init__(self, lines: Iterable[tuple[int, str]]) -> None:
        """`lines`: indexes and texts."""
        shapes: dict[bytes, list[int]] = {}
        characters: set[str] = set()
        for index, text in lines:
            lower = text
            if not text.isascii():
                lower = text.lower()
                characters.update(lower)
            same_shape = shapes.setdefault(lower.encode().lower().translate(DIGITS), [])
            if len(same_shape) < _MOST_OF_ONE_SHAPE:
                same_shape.append(index)
        self._joined = b"\n".join(shapes)
        self.foreign = _NonAsciiLines(b"\n".join(shape for shape in shapes if not shape.isascii()), characters)
        self._starts = list(accumulate((len(shape) + 1 for shape in shapes), initial=0))
        self._where = list(shapes.values())
        words: set[bytes] = set()
        self.words: set[bytes] | None = None
        for shape in shapes:
            words.update(word for word in shape.translate(_LETTERS).split() if len(word) >= _WORD)
            if len(words) > _MOST_WORDS:  # random text: its words exclude no pattern, and would need too much memory
                break
        else:
            self.words = words
        self._words = None if self.words is None else _Words(self.words, self.foreign)
        # cache of text -> shapes, because many patterns search for the same text
        self._held: dict[bytes, tuple[int, ...]] = {}

    def candidates(self, pattern: SearchPattern) -> list[int]:
        """Returns the indexes of lines that the pattern may match, at most TRIED."""
        if not self._where or (self._words is not None and self._words.lacks(pattern)):
            return []
        wanted = required_texts.required_texts(pattern)
        shapes = {shape for text in wanted for shape in self._shapes(text)} if wanted else range(len(self._where))
        found = sorted(index for shape in shapes for index in self._where[shape])
        return found if len(found) <= TRIED else found[: TRIED // 2] + found[-TRIED // 2 :]

    def _shapes(self, text: bytes) -> tuple[int, ...]:
        if text not in self._held:
            self._held[text] = tuple(self._holding(text))
        return self._held[text]

    def _holding(self, text: bytes) -> Iterator[int]:
        """Yields the first and the last shapes that contain a text, at most TRIED. For most texts, a look-up of the
        text's longest word shows that no shape contains the text."""
        if self._words is not None:
            if not self._words[_word_of(text)]:
                return
        elif not text.isascii() and text not in self.foreign:
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


class _NonAsciiLines:
    """The shapes of the lines that are not ASCII. Most texts contain a character that occurs in no line. This rules
    them out without a search in all lines: even random bytes contain only a few of each language's characters."""

    def __init__(self, lines: bytes, characters: Set[str]) -> None:
        """`characters`: the characters of the lines, in lower case."""
        self._lines, self._characters = lines, characters

    @classmethod
    def of(cls, parts: Iterable[_NonAsciiLines]) -> _NonAsciiLines:
        """Returns the lines of all parts."""
        every = tuple(parts)
        characters = frozenset[str]().union(*(part._characters for part in every))
        return cls(b"\n".join(part._lines for part in every), characters)

    def __contains__(self, text: bytes) -> bool:
        needed = {character for character in text.decode() if not character.isascii()}
        return needed <= self._characters and text in self._lines


class _Words(dict[bytes, bool]):
    """A cache of word -> whether a line may contain this word of a pattern. Each word is searched only once."""

    def __init__(self, words: Iterable[bytes], foreign: _NonAsciiLines) -> None:
        """`words`: the words of the lines; those that are not ASCII are found in `foreign`."""
        self._ascii_words, self._foreign = b" ".join(words), foreign

    def __missing__(self, word: bytes) -> bool:
        found = self[word] = word in (self._ascii_words if word.isascii() else self._foreign)
        return found

    def lacks(self, pattern: SearchPattern) -> bool:
        """Whether the pattern cannot match: it requires at least one of several words, and no line contains any of
        them. This excludes most patterns."""
        words = _words_of(pattern)
        for word in words:  # a generator would take longer than the look-ups
            if self[word]:
                return False
        return bool(words)


@cache
def _words_of(pattern: SearchPattern) -> tuple[bytes, ...]:
    """Returns words. Each line that the pattern matches contains at least one of these words. Empty if the pattern
    requires no text."""
    return tuple({_word_of(text) for text in required_texts.required_texts(pattern)})


@cache
def _word_of(text: bytes) -> bytes:
    """Returns the longest word of a required text, or the text itself if it is not ASCII. If the longest word has fewer
    than _WORD letters, returns the empty word, which every line contains."""
    if not text.isascii():
        return text
    word = max(text.translate(_LETTERS).split(), key=len, default=b"")
    return word if len(word) >= _WORD else b""


def read(stream: BinaryIO, logs: int = 1, file: str = "") -> Log:
    """Reads a stream as a log, and decompresses gzip. If the log exceeds the limits, only its beginning and its end are
    kept. `logs`: the number of logs read together; each log gets 1/`logs` of the limits. `file`: the name of the file,
    if several files are read."""
    source = log_decompression.open_log(stream)
    begin = source.read(_SNIFFED)
    foreign = log_decompression.foreign(begin)
    log = Log(b"" if foreign else chain([begin], _blocks(source, logs)), logs, file)
    log.foreign, log.note = foreign, None if foreign else source.fault
    return log


def _blocks(source: log_decompression.LogSource, logs: int) -> Iterator[bytes]:
    """Reads a log in blocks that are so small that even a block of only line breaks does not exceed the limit on the
    lines of the end."""
    while block := source.read(min(_BLOCK, TAIL // logs, TAIL_LINES // logs)):
        yield block


def _slices(raw: bytes) -> Iterator[bytes]:
    return (raw[start : start + _BLOCK] for start in range(0, len(raw), _BLOCK))


def _utf8(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Converts UTF-16 to UTF-8: PowerShell writes UTF-16 with a byte order mark."""
    following = iter(blocks)
    begin = next(following, b"")
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be")):
        if begin.startswith(mark):
            decoder = codecs.getincrementaldecoder(encoding)("replace")
            for block in chain([begin.removeprefix(mark)], following):
                yield decoder.decode(block).encode("utf-8", "replace")
            return
    yield begin
    yield from following


def _kept(blocks: Iterator[bytes], logs: int, file: str) -> tuple[list[Line], Cut | None, bool]:
    """Returns the lines of a log's beginning and end, which part was dropped, and whether the last line does not end
    with a line break. After the beginning, a block is dropped once the blocks after it reach a limit of bytes or
    lines."""
    head: list[bytes] = []
    size = count = 0
    while size < HEAD // logs and count < HEAD_LINES // logs and (block := next(blocks, b"")):
        head.append(block)
        size, count = size + len(block), count + _breaks(block)
    begin, skipped = _part(head), LogPart(0, 0)
    tail: deque[tuple[bytes, int]] = deque()
    size = count = 0
    for block in blocks:
        tail.append((block, _breaks(block)))
        size, count = size + len(block), count + tail[-1][1]
        while size - len(tail[0][0]) >= TAIL // logs or count - tail[0][1] >= TAIL_LINES // logs:
            gone, breaks = tail.popleft()
            size, count = size - len(gone), count - breaks
            skipped = LogPart(skipped.lines + gone.count(b"\n"), skipped.size + len(gone))
    end = [block for block, _ in tail]
    unfinished = not b"".join([*head[-1:], *end[-1:]]).endswith((b"\n", b"\r"))
    if not skipped.size:
        return list(_lines(chain(head, end), 1, file)), None, unfinished
    cut = Cut(begin, skipped, _part(end))
    return [*_lines(head, 1, file), *_lines(end, begin.lines + skipped.lines + 1, file)], cut, unfinished


def _part(blocks: Sequence[bytes]) -> LogPart:
    return LogPart(sum(block.count(b"\n") for block in blocks), sum(map(len, blocks)))


def _breaks(block: bytes) -> int:
    return block.count(b"\n") + block.count(b"\r")


def _text(raw: bytes) -> str:
    raw = _without_colours(_ESCAPES.sub(b"", raw) if b"\x1b" in raw else raw)
    text = _decoded(raw.replace(b"\r\n", b"\n").translate(None, _CONTROLS))
    return text if text.isascii() else text.translate(_WIDE)


def _decoded(raw: bytes) -> str:
    """Decodes UTF-8. If bytes are invalid, each line is decoded on its own, because programs of one log may write in
    different encodings: programs on Windows in Chinese write GB18030 (GBK)."""
    with contextlib.suppress(UnicodeDecodeError):
        return raw.decode("utf-8")
    lines = raw.split(b"\n")
    least = 1 if any(_chinese(line, 2) for line in lines) else 2
    return "\n".join(_chinese(line, least) or line.decode("utf-8", "replace") for line in lines)


def _chinese(raw: bytes, least: int) -> str:
    """Decodes GB18030. "" if the text is not in this encoding: if most of its characters outside ASCII are UTF-8, if it
    does not have `least` adjacent Chinese characters, or if ASCII letters are parts of Chinese characters, as when text
    in Latin-1 is decoded."""
    if raw.isascii():
        return ""
    text = raw.decode("utf-8", "replace")
    wrong = text.count("\ufffd") - raw.count("\ufffd".encode())
    if 2 * wrong > len(text) - len(text.encode("ascii", "ignore")):
        with contextlib.suppress(UnicodeDecodeError):
            chinese = raw.decode("gb18030")
            letters = len(_ASCII_LETTERS.findall(chinese))
            if _HAN[least].search(chinese) and letters == len(raw.translate(None, _NO_LETTERS)):
                return chinese
    return ""


def _without_colours(raw: bytes) -> bytes:
    """Removes control sequences without an escape character: those in another form, and colours."""
    if any(start in raw for start in _WRITTEN_STARTS):
        raw = _WRITTEN_ESCAPES.sub(b"", raw)
    if not any(end in raw for end in _COLOUR_ENDS):
        return raw
    return b"\n".join(
        _COLOURS.sub(b"", line) if any(end in line for end in _COLOUR_ENDS) else line for line in raw.split(b"\n")
    )


def _lines(blocks: Iterable[bytes], number: int, file: str) -> Iterator[Line]:
    """Yield the lines in these blocks. `number`: the number of the first line."""
    rest = b""
    for block in blocks:
        whole, end, rest = (rest + block).rpartition(b"\n")
        for line in _text(whole).split("\n") if end else ():
            yield from _pieces(line, number, file)
            number += 1
        if len(rest) > _BLOCK:  # a very long line is cut between words
            cut = rest.rfind(b" ", -LONGEST) + 1 or len(rest)
            yield from _pieces(_text(rest[:cut]), number, file)
            rest = rest[cut:]
    if rest:
        yield from _pieces(_text(rest), number, file)


def _pieces(line: str, number: int, file: str) -> Iterator[Line]:
    if len(line) <= LONGEST and "\r" not in line and "\\n" not in line:
        yield Line(number, line, file)
        return
    for part in (piece for text in line.split("\r") for piece in _split_at_escaped_breaks(text)):
        for start in range(0, len(part), LONGEST):
            yield Line(number, part[start : start + LONGEST], file)


def _split_at_escaped_breaks(text: str) -> Iterator[str]:
    start = 0
    for match in _PATH_OR_ESCAPED_BREAK.finditer(text):
        if match["end"]:
            yield text[start : match.start()]
            start = match.end()
    yield text[start:]


@cache
def log_pattern(pattern: str) -> LazyPattern:
    """Returns a pattern like those in signatures.yaml. It ignores case, and has ASCII word boundaries, so that a word
    also ends before a character of another script, such as Chinese."""
    return LazyPattern(pattern)


@cache
def relaxed(pattern: LazyPattern) -> LazyPattern:
    """Returns a pattern that also matches other punctuation: quotes are optional and of either kind, the apostrophe of
    "can't" and full stops before spaces are optional, and a colon, comma or semicolon before a space matches any of
    these or a dash, or may be missing. Sets of characters and look-behinds are not changed."""
    return LazyPattern(_PUNCTUATION.sub(_optional, pattern.pattern), pattern.flags)


_PUNCTUATION = re.compile(
    r"(?P<stop>\\\.)(?= )|\\.|\[(?:\\.|[^\]\\])*\]|\(\?<[=!](?:[^()\\]|\\.)*\)|\(\?:|(?P<mark>[:,;])(?= )"
    r"|(?P<quote>['\"])(?![?{*+])|(?<=n)(?P<apostrophe>\.)(?=t\b)|(?P<optional>:\? \?)"
)
"""Tokens of a pattern. Those without a name are copied."""
_SEPARATOR = "(?: ?[:,;-]>?)?"


def _optional(token: re.Match[str]) -> str:
    if token["mark"]:
        return _SEPARATOR
    if token["optional"]:
        return "[ :-]{0,3}"
    if token["stop"] or token["apostrophe"]:
        return f"{token[0]}?"
    return "['\"]?" if token["quote"] else token[0]
