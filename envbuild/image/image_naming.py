"""Names of images and of their labels."""

from __future__ import annotations

PREFIX = "envbuild/"
VERIFIED = "verified"
"""The tag of a verified image."""
ENVIRONMENT = "environment"
"""The tag of the statements about the environments of the newest pushed lock; with a hyphen and a lock's short id, of
that lock."""
LABEL = "io.envbuild."
LOCK_LABEL = f"{LABEL}lock"


def repository(profile: str) -> str:
    return f"{PREFIX}{profile}"
