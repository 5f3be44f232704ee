"""Finds the texts that a pattern requires: a line that contains none of them cannot match, so the pattern is not tried.

Parsing a pattern takes longer than looking for its texts. Therefore the texts of the shipped patterns are in
data/required_texts.json, which `python -m unit.explain.shipped_texts` in tests/ writes. The texts of other patterns are
computed.
"""

from __future__ import annotations

import hashlib
import json
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
    least one of them. Empty if the pattern requires no text."""
    shipped = _shipped().get(key_of(pattern))
    return computed_texts(pattern) if shipped is None else tuple(text.encode() for text in shipped)


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
    """Returns texts of which every match contains at least one. Each item of the parsed pattern may require some texts.
    Of these items, the one whose shortest text is longest is chosen, because its texts rule out most lines."""
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
