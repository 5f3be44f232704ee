"""Names of images and of their labels, and the variables that every image sets."""

from __future__ import annotations

PREFIX = "envbuild/"
VERIFIED = "verified"
"""The tag of a verified image."""
ENVIRONMENT = "environment"
"""The tag of the statements about environments. `environment` is the tag of those for the lock that was pushed last. In
addition, those for each pushed lock have the tag `environment-`, followed by the short id of the lock."""
LABEL = "io.envbuild."
LOCK_LABEL = f"{LABEL}lock"
VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1"}
"""In a RUN of a child image, Python then writes no bytecode for locked modules that it imports; `verify` refuses such
bytecode."""


def repository(profile: str) -> str:
    return f"{PREFIX}{profile}"
