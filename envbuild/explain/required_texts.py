"""The texts that a pattern requires: a line without any of them cannot match, so that the pattern need not be tried.

Parsing a pattern takes longer than looking for its texts. Therefore those of the shipped patterns are in
data/required_texts.json, which `python -m unit.explain.shipped_texts` in tests/ writes; others are computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]  # no public function says what a pattern needs
from typing import Any

from envbuild.facts.fact_field_types import SearchPattern

SHIPPED = Path(__file__).parent / "data" / "required_texts.json"
DIGITS = bytes.maketrans(b"123456789", b"000000000")
"""Each digit in a shape of a line is 0."""


@cache
def required_texts(pattern: SearchPattern) -> tuple[bytes, ...]:
    """Texts in the form of a shape (lower case, digits as 0): each line that the pattern matches contains at least one.
    Empty if no text is required."""
    shipped = _shipped().get(key_of(pattern))
    return computed_texts(pattern) if shipped is None else tuple(text.encode() for text in shipped)


def key_of(pattern: SearchPattern) -> str:
    """The name of a pattern in the shipped file."""
    return hashlib.sha256(f"{int(pattern.flags)} {pattern.pattern}".encode()).hexdigest()[:20]


@cache
def _shipped() -> Mapping[str, list[str]]:
    found: dict[str, list[str]] = json.loads(SHIPPED.read_text(encoding="utf-8"))
    return found


@cache
def computed_texts(pattern: SearchPattern) -> tuple[bytes, ...]:
    """The required texts of a pattern, by parsing it."""
    return tuple(
        text.encode().lower().translate(DIGITS) for text in _needed(_parser.parse(pattern.pattern, pattern.flags))
    )


def _needed(parsed: Any) -> tuple[str, ...]:
    """Returns texts of which a match contains at least one. Each item of the parsed pattern may require some texts: the
    texts of the item whose shortest text is longest are returned, because they rule out most lines."""
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
