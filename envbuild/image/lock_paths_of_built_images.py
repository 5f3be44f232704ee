"""Remembers the paths of locks that images were built from. `prune` needs them, because it does not search the folder
of a profile that was given by path."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from envbuild.profile.profile_and_lock_name_lookup import LOCK
from envbuild.util import user_folders
from envbuild.util.atomic_files import write_atomically

_KIND = "built"


def note_lock(lock_file: Path) -> None:
    """Note the path of a lock. Does nothing if the file does not exist, as in a trial of pins before the first lock."""
    file = _file(lock_file.absolute())
    if lock_file.is_file() and not file.is_file():
        write_atomically(file, os.fsencode(lock_file.absolute()))


def all_locks() -> Iterator[Path]:
    """Yield the noted locks, whether they still exist or not."""
    for file in sorted(user_folders.cache_folder(_KIND, make=False).glob("*.txt")):
        with contextlib.suppress(FileNotFoundError):  # another prune removed it in the meantime
            path = Path(os.fsdecode(file.read_bytes()))
            if _file(path) == file:
                yield path


def forget_lock(lock_file: Path) -> None:
    _file(lock_file).unlink(missing_ok=True)


def name(lock_file: Path) -> str:
    """Return the name of the lock's profile, which is also the name of its images."""
    return lock_file.name.removesuffix(LOCK)


def _file(lock_file: Path) -> Path:
    mark = hashlib.sha256(os.fsencode(lock_file)).hexdigest()[:24]
    return user_folders.cache_folder(_KIND, make=False) / f"{mark}.txt"
