"""What `install` needs from a profile and its lock, and the cache of these plans.

Reading and resolving a profile takes longer than all other steps of `install` together, except the linking of the
files. The cache therefore keeps the plan of each name that was installed. A cached plan is used only if nothing that it
was made from has changed: envbuild's own files, the names of the files in the profile folders, and the content of every
file that was read. Imports little, because a cached plan needs no more.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.profile.profile_folders import is_path, profile_folders
from envbuild.util import atomic_files, user_folders

_FORMAT = 1


@dataclass(frozen=True)
class InstallPlan:
    """A lock as `install` puts it into an environment. `known`: the words by which commands find the profile; `glibc`:
    the one for which the wheels were chosen; `overrides`: the version of each distribution that overrides another
    requirement; `constraints`: the text of the constraints file; `variables`: the profile's environment variables;
    `left_out`: extensions, which are compiled only in images."""

    profile: str
    known: str
    lock: str
    python: str
    glibc: str
    wheels: tuple[LockedWheel, ...]
    overrides: Mapping[str, str]
    constraints: str
    variables: Mapping[str, str]
    left_out: tuple[str, ...]


def cached(name: str) -> InstallPlan | None:
    """The plan for a profile's name, if one is cached and nothing that it was made from has changed."""
    try:
        document = json.loads(_file(name).read_bytes())
        if document["made_from"] != _made_from(name) or any(
            _digest(file) != digest for file, digest in document["files"].items()
        ):
            return None
        return _plan(document["plan"])
    except (OSError, ValueError, KeyError, TypeError):  # missing, or not a file of this envbuild
        return None


def store(name: str, plan: InstallPlan, files: Mapping[Path, os.stat_result]) -> None:
    """Cache the plan for a name, unless a file has changed since it was read. `files`: every file that was read for the
    plan, except envbuild's own, with its state at that time.

    A profile named by its path is not cached: where its lock is found depends on more folders than `_made_from` lists.
    """
    if is_path(name):
        return
    digests = {str(file): _digest(str(file)) for file in files}
    if all(_state(file.stat()) == _state(before) for file, before in files.items()):
        document = {"made_from": _made_from(name), "files": digests, "plan": asdict(plan)}
        atomic_files.write_atomically(_file(name), json.dumps(document))


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _file(name: str) -> Path:
    key = hashlib.sha256(f"{Path.cwd()}\0{name}".encode()).hexdigest()
    return user_folders.cache_folder("install-plans") / f"{key}.json"


def _plan(found: dict[str, object]) -> InstallPlan:
    wheels, left_out = found.pop("wheels"), found.pop("left_out")
    assert isinstance(wheels, list) and isinstance(left_out, list)
    rows = tuple(LockedWheel(Wheel(**row["wheel"]), row["bytes"], row["layer"]) for row in wheels)
    return InstallPlan(**found, wheels=rows, left_out=tuple(left_out))  # type: ignore[arg-type]


def _digest(file: str) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _made_from(name: str) -> str:
    """A digest of envbuild's own files (by size and time of change) and of the names in the profile folders, which
    decide what a profile's name stands for."""
    seen = hashlib.sha256(repr((_FORMAT, name, str(Path.cwd()), sys.version)).encode())
    for row in _own_files(str(Path(__file__).parent.parent)):
        seen.update(repr(row).encode())
    for folder in profile_folders():
        seen.update(repr((str(folder), sorted(_names(folder)))).encode())
    return seen.hexdigest()


def _own_files(folder: str) -> Iterator[tuple[str, int, int]]:
    with os.scandir(folder) as entries:
        rows = sorted((entry.name, entry.path, entry.stat()) for entry in entries if entry.name != "__pycache__")
    for _, path, found in rows:
        if stat.S_ISDIR(found.st_mode):
            yield from _own_files(path)
        else:
            yield path, found.st_size, found.st_mtime_ns


def _names(folder: Path) -> Iterator[tuple[str, bool]]:
    if folder.is_dir():
        with os.scandir(folder) as entries:
            yield from ((entry.name, entry.is_symlink()) for entry in entries)
