"""The folders with profiles. Imports little: `install` reads these folders before anything else."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from envbuild.util import package_data

_LINE = r"(.+)-(cu[0-9]{2})"  # the name of a profile for a different CUDA major version, as in h20-cu12


def profile_folders() -> Iterator[Path]:
    """Folders with profiles; a user's own profiles take precedence."""
    for root in dict.fromkeys((Path.cwd() / "profiles", package_data.PROFILES)):
        yield root
        yield root / "projects"


def is_path(name: str) -> bool:
    return "/" in name or name.endswith((".yaml", ".yml"))


def split_line(name: str) -> tuple[str, str] | None:
    """Split a name at the label of a CUDA line: h20-cu12 into h20 and cu12. None if the name does not have this
    form."""
    found = re.fullmatch(_LINE, name)
    return (found[1], found[2]) if found else None
