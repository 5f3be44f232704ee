"""Canonical JSON: the same value gives the same bytes, with sorted keys and no spaces."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def encode(value: Any, *, ascii_only: bool = False) -> bytes:
    """The value as canonical JSON in UTF-8. `ascii_only`: escape non-ASCII characters, as documents in registries
    do."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=ascii_only).encode()


def canonical_digest(value: Any) -> str:
    """sha256 of the value's canonical JSON, hex."""
    return hashlib.sha256(encode(value)).hexdigest()
