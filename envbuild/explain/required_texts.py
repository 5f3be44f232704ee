"""Finds the texts that a pattern requires: a line that contains none of them cannot match, so the pattern is not tried.

Parsing a pattern takes longer than looking for its texts. Therefore the texts of the shipped patterns are in
data/required_texts.json, which `python -m unit.explain.shipped_texts` in tests/ writes. The texts of other patterns are
computed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # no public function parses a pattern
from typing import Any

from envbuild.facts.fact_field_types import SearchPattern

SHIPPED = Path(__file__).parent / "data" / "required_texts.json"
DIGITS = bytes.maketrans(b"123456789", b"000000000")
"""Replaces each digit with 0, as in the shapes of lines."""


@cache
def required_texts(pattern: SearchPattern) -> tuple[bytes, ...]:
    """Returns texts in the form of a shape (lower case, digits as 0). Each line that the pattern matches contains at
    least one of these texts. Empty if the pattern requires no text."""
    shipped = _shipped().get(key_of(pattern))
    return computed_texts(pattern) if shipped is None else tuple(text.encode() for text in shipped)


_LEAST, _SHARE, _POSSIBLE = 12, 0.55, 6
"""The rest of a text is known if the line ends in at least _LEAST bytes and the share _SHARE of the text. A text with a
different rest prevents the completion if the line ends in at least _POSSIBLE bytes of it."""
_LETTERS, _SHARE_WITHOUT_LETTERS = 3, 0.8
"""If the line has fewer letters of the unfinished word than the first number, or the rest begins with "_", the second
replaces _SHARE."""
_UNFINISHED_WORD = re.compile(rb"(?:[a-z]{%d}|[^\x00-\x7f])\Z" % _LETTERS)
_SIGNAL = re.compile(rb"\bsig(?!nal)[a-z]")
"""The beginning of a signal's name. Names of several signals begin like this."""
_TWO_WORDS = re.compile(rb"[a-z0](?=[^a-z0]+[a-z0])|[^\x00-\x7f]")


def rest_of_text(beginning: str) -> str:
    """If `beginning` ends in the first part of a required text of a shipped pattern, within a word or after a space,
    returns the rest of this text. "" if no such text fits, or if several texts with different rests are
    possible."""
    shape = beginning.encode().lower().translate(DIGITS)
    rests: dict[bytes, bool] = {}
    for text in _texts_of_words():
        known = text.find(shape[-_POSSIBLE:]) + _POSSIBLE
        if known >= _POSSIBLE and shape.endswith(text[:known]):
            rests[text[known:]] = _sure(text[:known], text[known:]) or rests.get(text[known:], False)
    longest = max((rest for rest, sure in rests.items() if sure), key=len, default=b"")
    if not all(longest.startswith(rest) or rest.startswith(longest) for rest in rests):
        return ""
    rest = longest.decode("utf-8", "ignore")
    return "" if not rest or (_in_word(beginning[-1]) and not _in_word(rest[0])) else rest


def _sure(known: bytes, rest: bytes) -> bool:
    """Whether the rest of a text follows from its known beginning."""
    in_word = _UNFINISHED_WORD.search(known) is not None and not rest.startswith(b"_")
    share = _SHARE if in_word else _SHARE_WITHOUT_LETTERS
    names = _SIGNAL.finditer(known + rest)
    return (
        len(known) >= max(_LEAST, share * (len(known) + len(rest)))
        and _TWO_WORDS.search(known) is not None
        and b"0" not in rest  # in shapes, 0 is any digit
        and all(name.end() < len(known) for name in names)
    )


def _in_word(letter: str) -> bool:
    return letter.isalnum() or letter == "_"


@cache
def _texts_of_words() -> tuple[bytes, ...]:
    """Returns the shipped texts of more than _LEAST bytes that do not consist of ASCII letters and digits alone."""
    texts = {text.encode() for found in _shipped().values() for text in found}
    return tuple(text for text in texts if len(text) > _LEAST and not text.isalnum())


def key_of(pattern: SearchPattern) -> str:
    """Returns the key of a pattern in the shipped file."""
    return hashlib.sha256(f"{int(pattern.flags)} {pattern.pattern}".encode()).hexdigest()[:20]


@cache
def _shipped() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return found


@cache
def computed_texts(pattern: SearchPattern) -> tuple[bytes, ...]:
    """Returns the required texts of a pattern, found by parsing the pattern."""
    return tuple(
        text.encode().lower().translate(DIGITS) for text in _needed(_parser.parse(pattern.pattern, pattern.flags))
    )


def _needed(parsed: Any) -> tuple[str, ...]:
    """Returns texts such that every match of the pattern contains at least one of them. Each item of the parsed pattern
    may require some texts. The texts are those of one item: the item whose shortest text is the longest, because its
    texts rule out the most lines."""
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
