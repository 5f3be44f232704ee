"""What `install` needs from a profile and its lock, and the cache of these plans.

Reading and resolving a profile takes longer than all other steps of `install` together, except the linking of the
files. The cache therefore keeps the plan of each name that was installed. A cached plan is used only if nothing that it
was made from has changed: envbuild's own files, the names in the profile folders and in the folder of the site's facts,
the targets of links, and the content of every file that was read. Imports little, because a cached plan needs no more.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import stat
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from envbuild.fetch.locked_wheel_types import LockedWheel, Wheel
from envbuild.profile.profile_folders import is_path, profile_folders
from envbuild.util import atomic_files, user_folders

_FORMAT = 2
_MOST = 8 << 20
_BYTECODE = "__pycache__"


@dataclass(frozen=True)
class InstallPlan:
    """A lock as `install` puts it into an environment. `known`: the words by which commands find the profile; `glibc`:
    the version of glibc for which the wheels were chosen; `overrides`: the version of each distribution that overrides
    another requirement; `constraints`: the text of the constraints file; `variables`: the profile's environment
    variables; `left_out`: extensions, which are compiled only in images."""

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
        document = json.loads(_content(_file(name)))
        files, paths, plan = document["files"], document["paths"], document["plan"]
        return _plan(plan) if document["check"] == _check(name, files, paths, plan) else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):  # missing or malformed
        return None


def store(name: str, plan: InstallPlan, files: Mapping[Path, os.stat_result], paths: Iterable[str]) -> None:
    """Cache the plan for a name, unless a file has changed since it was read. `files`: every file that was read for the
    plan, with its state at that time; `paths`: every path that was resolved for it, before links were followed. Raises
    OSError if the cache cannot be written.

    A profile named by its path is not cached: where its lock is found depends on more folders than `_check` lists.
    """
    if is_path(name):
        return
    own = Path(__file__).parent.parent  # `_check` lists these files anyway
    read = sorted(str(file) for file in files if not file.is_relative_to(own))
    document = {"files": read, "paths": sorted(paths), "plan": asdict(plan)}
    check = _check(name, *document.values())
    if all(_state(file.stat()) == _state(before) for file, before in files.items()):
        atomic_files.write_atomically(_file(name), json.dumps({**document, "check": check}))


def _state(found: os.stat_result) -> tuple[int, ...]:
    return found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _file(name: str) -> Path:
    key = hashlib.sha256(f"{Path.cwd()}\0{name}".encode()).hexdigest()
    return user_folders.cache_folder("install-plans") / f"{key}.json"


def _plan(found: dict[str, Any]) -> InstallPlan:
    wheels, left_out = found.pop("wheels"), found.pop("left_out")
    rows = tuple(LockedWheel(Wheel(**row["wheel"]), row["bytes"], row["layer"]) for row in wheels)
    return InstallPlan(**found, wheels=rows, left_out=tuple(left_out))


def _content(file: Path) -> bytes:
    """Read a regular file of at most 8 MiB. Raises OSError; for a FIFO or a device too, without blocking."""
    with open(os.open(file, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as stream:  # noqa: PTH123
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = stream.read(_MOST + 1)
    if len(content) > _MOST:
        raise OSError(errno.EFBIG, "too large")
    return content


def _check(name: str, files: Any, paths: Any, plan: Any) -> str:
    """A digest of the plan and of everything that it was made from: the working folder, the version of Python,
    envbuild's own files (by size, inode and times), the names in the folders that decide what a profile's name stands
    for and which facts apply, the targets of the `paths`, and the content of the `files`. Raises OSError if a file
    cannot be read."""
    seen = hashlib.sha256(repr((_FORMAT, name, str(Path.cwd()), sys.version)).encode())
    for row in _own_files(str(Path(__file__).parent.parent)):
        seen.update(repr(row).encode())
    for folder in (*profile_folders(), user_folders.config_file().parent / "facts.d"):
        seen.update(repr((str(folder), os.path.realpath(folder), sorted(_names(folder)))).encode())
    for path in paths:
        seen.update(repr((path, os.path.realpath(path))).encode())
    for file in files:
        digest = hashlib.sha256(_content(Path(file))).hexdigest()
        seen.update(repr((file, os.path.realpath(file), digest)).encode())
    seen.update(json.dumps(plan, sort_keys=True).encode())
    return seen.hexdigest()


def _own_files(folder: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    with os.scandir(folder) as entries:
        found = sorted((entry.path, entry.stat(follow_symlinks=False)) for entry in entries if entry.name != _BYTECODE)
    for path, state in found:
        if stat.S_ISDIR(state.st_mode):
            yield from _own_files(path)
        else:
            yield path, _state(state)


def _names(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the names in a folder, each with its target if it is a link."""
    if folder.is_dir():
        with os.scandir(folder) as entries:
            for entry in entries:
                yield entry.name, str(Path(entry.path).readlink()) if entry.is_symlink() else ""
