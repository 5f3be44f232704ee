"""Where the locks lie that images were built from: a profile given by its path is in no folder that is looked at."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from envbuild.profile.profile_name_lookup import LOCK
from envbuild.util import user_folders
from envbuild.util.atomic_files import write_atomically

_KIND = "built"


def note_lock(lock_file: Path) -> None:
    """Nothing for a lock that is no file, as of what is made again for a comparison: it would wait for ever."""
    file = _file(lock_file.absolute())
    if lock_file.is_file() and not file.is_file():
        write_atomically(file, os.fsencode(lock_file.absolute()))


def all_locks() -> Iterator[Path]:
    """The locks that were noted, whether they are still there or not."""
    for file in sorted(user_folders.cache_folder(_KIND, make=False).glob("*.txt")):
        with contextlib.suppress(FileNotFoundError):  # another prune forgot it meanwhile
            path = Path(os.fsdecode(file.read_bytes()))
            if _file(path) == file:
                yield path


def forget_lock(lock_file: Path) -> None:
    _file(lock_file).unlink(missing_ok=True)


def name(lock_file: Path) -> str:
    """Of the profile, and so of its images."""
    return lock_file.name.removesuffix(LOCK)


def _file(lock_file: Path) -> Path:
    mark = hashlib.sha256(os.fsencode(lock_file)).hexdigest()[:24]
    return user_folders.cache_folder(_KIND, make=False) / f"{mark}.txt"
