"""The paths of the user's cache folder, state folder and settings file."""

from __future__ import annotations

from pathlib import Path

import platformdirs

from envbuild.util.errors import SystemFault

_APP = "envbuild"


def config_file() -> Path:
    return _absolute(platformdirs.user_config_dir(_APP)) / "config.yaml"


def cache_folder(kind: str, make: bool = True) -> Path:
    """Return a folder for files that can be created or downloaded again, such as wheels. `make`: create the folder if
    it is missing."""
    return _made(_absolute(platformdirs.user_cache_dir(_APP)) / kind, make)


def state_folder(kind: str, make: bool = True) -> Path:
    """Return a folder for files that cannot be created again, such as evidence and build records."""
    return _made(_absolute(platformdirs.user_state_dir(_APP)) / kind, make)


def _absolute(folder: str) -> Path:
    """The path. Raises SystemFault if it is relative: it would name a folder in the working folder, which another user
    may have made. Without HOME, and for a user id that has no name, it is "~/.cache"."""
    path = Path(folder)
    if not path.is_absolute():
        hint = "set HOME to the absolute path of your own folder"
        raise SystemFault(f"the path of the user's folder is relative: {folder}", hint=hint)
    return path


def _made(folder: Path, make: bool) -> Path:
    """Return the folder. Create it only if `make` is set, because callers that only read must work on a full disk."""
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder
