"""Parses JSON from untrusted sources, and writes JSON that is signed or hashed.

The strict parser limits size and depth. It rejects duplicate keys (parsers differ in which of the values they take),
NaN, infinity, and integers of 20 or more characters. In canonical JSON, keys are sorted and there are no spaces,
so the same value always gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from typing import Any

from envbuild.util.untrusted_input_errors import Malformed

MAX_BYTES = 16 << 20
MAX_DEPTH = 64


class NotStrict(ValueError):
    """Invalid JSON. The message is a predicate, such as "is nested too deep"; the caller puts the document's name
    before it. `line`: the faulty line, if known."""

    def __init__(self, text: str, line: int | None = None) -> None:
        super().__init__(text)
        self.line = line


def parse(raw: bytes, what: str, limit: int = MAX_BYTES) -> dict[str, Any]:
    """Parse `raw` as a JSON object. Raises Malformed for anything else. `what`: the document's name in the error."""
    try:
        found = strict(raw, limit)
    except NotStrict as error:
        raise Malformed(f"{what} {error}") from None
    if not isinstance(found, dict):
        raise Malformed(f"{what} is not a JSON object")
    return found


def strict(raw: bytes, limit: int) -> Any:
    """Parse `raw` strictly. Raises NotStrict if it is invalid JSON or has more than `limit` bytes."""
    if len(raw) > limit:
        raise NotStrict(f"is larger than {limit} bytes")
    try:
        found = json.loads(
            raw.decode("utf-8"),
            object_pairs_hook=_once,
            parse_constant=_refuse,
            parse_float=_finite,
            parse_int=_bounded,
        )
    except RecursionError:
        raise NotStrict("is nested too deep") from None
    except ValueError as error:
        line = error.lineno if isinstance(error, json.JSONDecodeError) else None
        raise NotStrict(f"is not JSON: {str(error)[:200]}", line) from None
    if _deeper(found, MAX_DEPTH):
        raise NotStrict(f"is nested deeper than {MAX_DEPTH}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object contains a key twice")
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"{text[:30]} is not JSON")


def _bounded(text: str) -> int:
    return int(text) if len(text) < 20 else int(_refuse(text))


def _finite(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _refuse(text)


def _deeper(value: Any, depth: int) -> bool:
    """Whether a value is nested deeper than `depth`. The function iterates level by level, so that deep nesting cannot
    exhaust the stack."""
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(depth):
        level = [
            inner
            for outer in level
            for inner in (outer.values() if isinstance(outer, Mapping) else outer)
            if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


def encode(value: Any, *, ascii_only: bool = False) -> bytes:
    """Encode a value as canonical JSON in UTF-8. `ascii_only`: escape non-ASCII characters, as in the documents for
    registries."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=ascii_only).encode()


def require_unicode(value: Any, message: str) -> None:
    """Raise Malformed with this message if a text in the value cannot be written as UTF-8. JSON can contain half a
    surrogate pair, and the name of a file any bytes."""
    try:
        encode(value)
    except UnicodeEncodeError:
        raise Malformed(message) from None


def canonical_digest(value: Any) -> str:
    """The hex sha256 of the value's canonical JSON."""
    return hashlib.sha256(encode(value)).hexdigest()
