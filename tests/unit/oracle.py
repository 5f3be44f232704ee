"""An independent reading of a Dockerfile, after BuildKit's parser: what the builder would execute.

Written from BuildKit's rules, not from envbuild's renderer: directives, comments, continuation lines, here-documents,
the JSON form, and quoting in ENV and LABEL.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

_DIRECTIVE = re.compile(r"^#\s*([a-zA-Z][a-zA-Z0-9]*)\s*=\s*(.+?)\s*$")
_CONTINUED = re.compile(r"(?:(?<=[^\\])\\|^\\)[ \t]*$")
_HEREDOC = re.compile(r"<<-?\s*['\"]?([A-Za-z_][A-Za-z0-9_]*)['\"]?")
_FLAG = re.compile(r"^--[a-z]+(=\S*)?\s+")
EXPANDED = "\N{REPLACEMENT CHARACTER}expanded"


@dataclass(frozen=True)
class Instruction:
    """An instruction. `form`: how it is written: "json", "pairs" (ENV and LABEL), "words" or "directive". `arguments`:
    the strings of the JSON form, names and values in turn of pairs, else the words."""

    keyword: str
    flags: tuple[str, ...]
    arguments: tuple[str, ...]
    form: str


def parse(text: str) -> list[Instruction]:
    """Parse a Dockerfile. Directives are returned as instructions too, so that none goes unnoticed."""
    lines = text.split("\n")
    found: list[Instruction] = []
    at = 0
    while at < len(lines) and (match := _DIRECTIVE.match(lines[at])):
        if match[1].lower() not in ("syntax", "escape", "check"):
            break
        found.append(Instruction(f"#{match[1].lower()}", (), (match[2],), "directive"))
        at += 1
    while at < len(lines):
        logical, at = _logical(lines, at)
        if not logical:
            continue
        keyword, _, rest = logical.partition(" ")
        instruction = _instruction(keyword.upper(), rest.strip())
        found.append(instruction)
        if instruction.keyword in ("RUN", "ADD", "COPY") and instruction.form == "words":
            for mark in _HEREDOC.findall(rest):
                while at < len(lines) and lines[at].strip("\t") != mark:
                    at += 1
                at += 1
    return found


def _logical(lines: list[str], at: int) -> tuple[str, int]:
    """Return one line with its continuations, and where the next line begins. Comments and blank lines between
    continuations are dropped."""
    joined = ""
    open_line = False
    while at < len(lines):
        line = lines[at].rstrip("\r")
        at += 1
        if line.lstrip().startswith("#"):
            if open_line:
                continue
            return "", at
        if open_line and not line.strip():
            continue
        piece = line if open_line else line.lstrip()
        match = _CONTINUED.search(piece)
        if not match:
            return joined + piece, at
        joined += piece[: match.start()]
        open_line = True
    return joined, at


def _instruction(keyword: str, rest: str) -> Instruction:
    flags = []
    while match := _FLAG.match(rest):
        flags.append(match[0].strip())
        rest = rest[match.end() :]
    if keyword in ("ENV", "LABEL"):
        return Instruction(keyword, tuple(flags), tuple(_pairs(rest)), "pairs")
    try:
        listed = json.loads(rest)
    except ValueError:
        return Instruction(keyword, tuple(flags), tuple(rest.split()), "words")
    if isinstance(listed, list) and all(isinstance(item, str) for item in listed):
        return Instruction(keyword, tuple(flags), tuple(listed), "json")
    return Instruction(keyword, tuple(flags), tuple(rest.split()), "words")


def _pairs(rest: str) -> list[str]:
    """Parse `A="1" B='2'` to A, 1, B, 2; text that the builder would expand becomes EXPANDED."""
    found = []
    for word in _words(rest):
        key, equals, value = word.partition("=")
        assert equals, f"the old form of ENV, or no value: {word!r}"
        found += [_decode(key), _decode(value)]
    return found


def _words(rest: str) -> list[str]:
    words, word, quote, at = [], "", "", 0
    while at < len(rest):
        char = rest[at]
        if char == "\\" and quote != "'" and at + 1 < len(rest):
            word += rest[at : at + 2]
            at += 2
            continue
        if quote:
            quote = "" if char == quote else quote
        elif char in "\"'":
            quote = char
        elif char.isspace():
            if word:
                words.append(word)
            word, at = "", at + 1
            continue
        word += char
        at += 1
    assert not quote, f"an open quote: {rest!r}"
    return [*words, word] if word else words


def _decode(word: str) -> str:
    """Remove quotes and escapes as the builder's shell lexer does."""
    result, quote, at = "", "", 0
    while at < len(word):
        char = word[at]
        if quote == "'":
            quote, result = ("", result) if char == "'" else (quote, result + char)
        elif char == "\\" and at + 1 < len(word):
            following = word[at + 1]
            keep = quote == '"' and following not in '"$\\'
            result += f"\\{following}" if keep else following
            at += 1
        elif char == "$":
            result += EXPANDED
        elif char == quote:
            quote = ""
        elif not quote and char in "\"'":
            quote = char
        else:
            result += char
        at += 1
    return result
