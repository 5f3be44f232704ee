"""Which releases of a distribution the configured indexes have for an image."""

from __future__ import annotations

from packaging.version import Version

from envbuild.errors import ProfileError
from envbuild.plan import wheels


def releases(name: str, python: str, glibc: str, oldest: str | None = None, newest: str | None = None) -> list[str]:
    """Those with a wheel that fits, oldest first, the bounds included; no pre-releases where there are others.

    The newest below the last one is asked for until there is none: so they are what a lock would take, from the same
    indexes. Raises NetworkError if an index does not answer.
    """
    found: list[str] = []
    wanted = f"{name}<={Version(newest).public}" if newest else name
    while True:
        try:
            (version,) = wheels.offered([wanted], python, glibc).values()
        except ProfileError:
            return found
        if oldest and Version(version) < Version(oldest):
            return found
        found.insert(0, version)
        wanted = f"{name}<{Version(version).public}"
