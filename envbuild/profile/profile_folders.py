"""The folders with profiles. Imports little: `install` reads these folders before anything else."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from envbuild.util import package_data


def profile_folders() -> Iterator[Path]:
    """Folders with profiles; a user's own profiles take precedence."""
    for root in dict.fromkeys((Path.cwd() / "profiles", package_data.PROFILES)):
        yield root
        yield root / "projects"


def is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))
