"""The paths of the user's cache folder, state folder and settings file."""

from __future__ import annotations

from pathlib import Path

import platformdirs

_APP = "envbuild"


def config_file() -> Path:
    return Path(platformdirs.user_config_dir(_APP)) / "config.yaml"


def cache_folder(kind: str, make: bool = True) -> Path:
    """Return a folder for files that can be created or downloaded again, such as wheels. `make`: create the folder if
    it is missing."""
    return _made(Path(platformdirs.user_cache_dir(_APP)) / kind, make)


def state_folder(kind: str, make: bool = True) -> Path:
    """Return a folder for files that cannot be created again, such as evidence and build records."""
    return _made(Path(platformdirs.user_state_dir(_APP)) / kind, make)


def _made(folder: Path, make: bool) -> Path:
    """Return the folder. Create it only if `make` is set, because callers that only read must work on a full disk."""
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder
