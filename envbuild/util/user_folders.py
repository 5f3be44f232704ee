"""The user's folders in which envbuild keeps things, and the file of settings there."""

from __future__ import annotations

from pathlib import Path

import platformdirs

_APP = "envbuild"


def config_file() -> Path:
    return Path(platformdirs.user_config_dir(_APP)) / "config.yaml"


def cache_folder(kind: str, make: bool = True) -> Path:
    """Things that can be made or fetched again: wheels, debs, bases. `make`: the folder, where it is not there."""
    return _made(Path(platformdirs.user_cache_dir(_APP)) / kind, make)


def state_folder(kind: str, make: bool = True) -> Path:
    """Things that cannot: evidence, build records. Never removed by envbuild."""
    return _made(Path(platformdirs.user_state_dir(_APP)) / kind, make)


def _made(folder: Path, make: bool) -> Path:
    """What only reads need not make it: a full disk has no room for a folder either."""
    if make:
        folder.mkdir(parents=True, exist_ok=True)
    return folder
