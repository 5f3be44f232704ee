"""Defines the types that several documents of `--json` use, and the conversion of a document to JSON. Pure.

A document is a frozen dataclass, defined next to the code that computes its data. Every key is always present: a value
that is not known is null, and a list may be empty. Only the document of a failed command may lack keys; it then has the
key `error`. `cli/document_schemas.py` lists all documents and generates their JSON Schemas.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, WithJsonSchema

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
"""The id of a lock or of an image, or the digest of a manifest."""
Measured = Annotated[
    float, WithJsonSchema({"type": ["number", "string"], "pattern": "^-?(nan|inf)$", "title": "Measured"})
]
"""A measured number. The values nan, inf and -inf become text, because JSON numbers cannot have them."""
ImageState = Literal["verified", "unverified", "stale", "failed", "missing", "tampered", "invalid"]
"""verified: the evidence fulfils the profile's requirements. unverified: the image is built, but required evidence is
missing, or the tag `verified` is missing or names another image. stale: the profile changed after the lock was written,
or there is evidence that does not fulfil the requirements, such as that of a different self-test. failed: the self-test
failed. missing: the profile is not locked or the image not built. tampered: the tag `verified` was moved by hand.
invalid: the profile or its lock cannot be read."""
LockState = Literal["current", "outdated", "missing"]
"""outdated: the profile changed after the lock was written."""


def plain(value: Any) -> Any:
    """Convert a document to dicts, lists and scalars for JSON. A float that is not finite becomes text."""
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
    """An advisory, and how it relates to the subject of the document. `state`: refused, accepted, warned or noted if
    the advisory applies to a profile; affected, possible or ruled-out if it is judged as a cause, as in `explain`."""

    id: str
    state: Literal["refused", "accepted", "warned", "noted", "affected", "possible", "ruled-out"]
    reason: str
    remedy: str
