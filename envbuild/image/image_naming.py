"""Names of images and of their labels."""

from __future__ import annotations

PREFIX = "envbuild/"
VERIFIED = "verified"
"""The tag of a verified image."""
LABEL = "io.envbuild."
LOCK_LABEL = f"{LABEL}lock"


def repository(profile: str) -> str:
    return f"{PREFIX}{profile}"
