"""What the documents of `--json` share: the types of common values, and the conversion to JSON. Pure.

A document is a frozen dataclass next to the data of its command. Every key is always present: a value that is not known
is null, and a list may be empty. Only the document of a command that failed may lack keys; it has `error` instead.
`cli/document_schemas.py` lists all documents and makes their JSON Schemas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""The id of a lock, of an image or of a manifest."""
Measured = Annotated[
    float, WithJsonSchema({"type": ["number", "string"], "pattern": "^-?(nan|inf)$", "title": "Measured"})
]
"""A measured number; nan, inf and -inf are text, because JSON has no such numbers."""
ImageState = Literal["verified", "unverified", "stale", "failed", "missing", "tampered", "invalid"]
"""verified: fulfils its profile's requirements. unverified: built, without the required evidence. stale: lock or
evidence are of an earlier profile or self-test. failed: the self-test failed. missing: not locked or not built.
tampered: the tag `verified` was moved by hand. invalid: the profile or its lock cannot be read."""
LockState = Literal["current", "outdated", "missing"]
"""outdated: the profile changed after it was locked."""


def plain(value: Any) -> Any:
    """Convert a document to values of JSON. A number that is not finite becomes text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, BaseModel):
        return plain(value.model_dump())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass(frozen=True)
class AdvisoryRow:
    """An advisory and how it relates to the subject of the document. refused, accepted, warned, noted: it applies, and
    what follows from that. affected, possible, ruled-out: in the document of `explain`."""

    id: str
    state: Literal["refused", "accepted", "warned", "noted", "affected", "possible", "ruled-out"]
    reason: str
    remedy: str
