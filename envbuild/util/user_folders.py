"""The user's folders for envbuild's files, and the settings file."""

from __future__ import annotations

from pathlib import Path

import platformdirs

_APP = "envbuild"


def config_file() -> Path:
    return Path(platformdirs.user_config_dir(_APP)) / "config.yaml"


def cache_folder(kind: str, make: bool = True) -> Path:
    """Folder for files that can be created or downloaded again: wheels, debs, base images. `make`: create it if
    missing."""
    return _made(Path(platformdirs.user_cache_dir(_APP)) / kind, make)


def state_folder(kind: str, make: bool = True) -> Path:
    """Folder for files that cannot be created again: evidence, build records. envbuild never removes them."""
    return _made(Path(platformdirs.user_state_dir(_APP)) / kind, make)


def _made(folder: Path, make: bool) -> Path:
    """Create the folder only if `make` is set: callers that only read must work on a full disk."""
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder
