"""JSON from elsewhere: bounded in size and depth, no key twice (two readers would take two different ones), no NaN."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from envbuild.proof.reasons import Malformed

MAX_BYTES = 16 << 20
MAX_DEPTH = 64


def parse(raw: bytes, what: str, limit: int = MAX_BYTES) -> dict[str, Any]:
    """The JSON object in `raw`. Raises Malformed, naming `what`, for anything else."""
    if len(raw) > limit:
        raise Malformed(f"{what} is larger than {limit} bytes")
    try:
        found = json.loads(raw.decode("utf-8"), object_pairs_hook=_once, parse_constant=_refuse)
    except RecursionError:
        raise Malformed(f"{what} is nested too deep") from None
    except ValueError as error:
        raise Malformed(f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(found, dict):
        raise Malformed(f"{what} is not a JSON object")
    if _deeper(found, MAX_DEPTH):
        raise Malformed(f"{what} is nested deeper than {MAX_DEPTH}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key stands twice in one object")
    return found


def _refuse(text: str) -> float:
    raise ValueError(f"{text} is not JSON")


def _deeper(value: Any, depth: int) -> bool:
    """Level by level, so that no nesting can exhaust the stack."""
    level = [value]
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
